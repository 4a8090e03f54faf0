"""The named families: lookup for a Patcher, a fusion config and a `config.json`.

A package registers a family under the entry point group `patcher.fusions`, by the `name` of the family:

```toml
[project.entry-points."patcher.fusions"]
stacked = "acme_fusions:Stacked"
```

It is imported when the name is used. In a `config.json` the name is prefixed by the package: `acme-fusions/stacked`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packaging.utils import canonicalize_name

from patcher.errors import InvalidPatcherError, PatchConflictError, PatcherError, nearest
from patcher.fusions.base import Fusion

#: The families of patcher: name -> module and class, which are imported when they are used.
FAMILIES: dict[str, str] = {
    "gate_up": "patcher.fusions.gate_up:GateUp",
    "kv": "patcher.fusions.kv:KV",
    "patch_embeddings": "patcher.fusions.patch_embeddings:PatchEmbeddings",
    "qkv": "patcher.fusions.qkv:QKV",
    "sequential_experts": "patcher.fusions.sequential_experts:SequentialExperts",
    "siblings": "patcher.fusions.siblings:Siblings",
    "split": "patcher.fusions.split:Split",
}
#: The entry point group of other packages' families.
GROUP = "patcher.fusions"
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def fusion_named(name: Any) -> Fusion:
    """Return the fusion called `name`; a fusion is returned as it is.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    return name if isinstance(name, Fusion) else _family(name)()


def name_or_fusion(fusion: Any) -> str | Fusion:
    """Return the name of a fusion if the fusion has no options, and the fusion otherwise.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    if isinstance(fusion, str) and fusion in FAMILIES and fusion not in _registered():
        return fusion
    instance = fusion_named(fusion)
    if instance.name not in FAMILIES and instance.name not in _registered():
        return instance
    try:
        return instance.name if instance == _family(instance.name)() else instance
    except PatcherError:  # the name isn't the name of one family
        return instance


def is_builtin(fusion: Any) -> bool:
    """Whether a fusion, by name or as an object, is of a family of patcher; none of these reconstructs a module."""
    if isinstance(fusion, str):
        return fusion in FAMILIES
    return f"{type(fusion).__module__}:{type(fusion).__qualname__}" in FAMILIES.values()


def to_config_name(name: str) -> str:
    """Return the name of a family in a `config.json`: prefixed by the package if another one registers it."""
    entry = _entry(name) if name not in FAMILIES else None
    return f"{_package_of(entry)}/{name}" if entry is not None else name


def from_config_name(text: str) -> str:
    """Return the name of the family that a `config.json` names.

    Raises:
        InvalidPatcherError: its package isn't installed, or there is no such family.
        PatchConflictError: several packages register the name.
    """
    package, _, name = text.rpartition("/")
    if not _PACKAGE.fullmatch(package) or not _PACKAGE.fullmatch(name) or name in FAMILIES:
        _family(text)  # raises, unless it is a name without a package
        return text
    if (entry := _entry(name)) is None:
        raise InvalidPatcherError(
            f"fusions: {name!r} is a family of fusions of the package {package!r}, which is not installed here: it "
            f"registers nothing of that name under the entry point group {GROUP!r}. Install it: pip install {package}"
        )
    if canonicalize_name(registering := _package_of(entry)) != canonicalize_name(package):
        raise InvalidPatcherError(
            f"fusions: {name!r} is a family of the package {package!r} there, and here it is one of {registering!r}. "
            f"Uninstall {registering}, and install {package}."
        )
    _load(entry)
    return name


def fusions_configured(name: Any, value: Any) -> list[str | Fusion]:
    """Return the fusions that one entry of a fusion config requests.

    Raises:
        InvalidPatcherError: there is no such family, or it has no such option.
    """
    family = _family(name)
    if value is False:
        return []
    if value is True or (isinstance(value, Mapping) and not value):
        return [name]
    if not isinstance(value, Mapping):
        raise InvalidPatcherError(f"fusions: {name!r} takes True, False or a mapping of options, found {value!r}.")
    try:
        return [family(**value)]
    except TypeError as error:
        raise InvalidPatcherError(f"fusions: {name!r} doesn't take the options {dict(value)!r}: {error}.") from error


def _family(name: Any) -> type[Fusion]:
    if isinstance(name, str) and (entry := _entry(name)) is not None:
        return _load(entry)
    names = ", ".join(repr(known) for known in (*FAMILIES, *sorted(_registered().keys() - FAMILIES.keys())))
    if isinstance(name, type) and issubclass(name, Fusion):
        hint = f"write an object of it, {name.__name__}()"
    elif not isinstance(name, str):
        hint = f"write a name ({names}) or an object of a Fusion subclass"
    elif len(parts := re.split(r"[\s,|+]+", name.strip())) > 1:
        hint = f"write fusions={parts!r}"
    elif close := nearest(name, (*FAMILIES, *_registered())):
        hint = f"did you mean {close[0]!r}? Known names: {names}"
    else:
        hint = (
            f"known names: {names}; a family of your own is passed as an object of a Fusion subclass, and one of a "
            "package has its name once that is installed"
        )
    raise InvalidPatcherError(f"fusions: {name!r} isn't a fusion; {hint}.")


# --- entry points ----------------------------------------------------------------------------------------------------


def _registered() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The families that packages register: name -> entry points, which aren't imported."""
    return _registered_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _registered_on(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    by_name: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        by_name.setdefault(entry.name, {}).setdefault((_package_of(entry), entry.value), entry)
    return {name: tuple(entries.values()) for name, entries in by_name.items()}


def _entry(name: str) -> EntryPoint | None:
    """The entry point of a family, if there is one; it isn't imported."""
    ours = (EntryPoint(name, FAMILIES[name], GROUP),) if name in FAMILIES else ()
    if not ours and name not in _registered():
        _registered_on.cache_clear()  # a package may just have been installed
    entries = (*ours, *_registered().get(name, ()))
    if len(entries) > 1:
        raise PatchConflictError(
            f"fusions: {name!r} is registered by several packages, {' and '.join(map(_describe, entries))}. "
            "Uninstall all but one of them, or pass an object of the family that is meant."
        )
    return entries[0] if entries else None


def _load(entry: EntryPoint) -> type[Fusion]:
    name = entry.name
    try:
        family = entry.load()
    except Exception as error:
        raise InvalidPatcherError(
            f"fusions: {name!r} is registered by {_describe(entry)}, and importing that failed with "
            f"{type(error).__name__}: {error}. Update the package or what it lacks, or uninstall it."
        ) from error
    if not (isinstance(family, type) and issubclass(family, Fusion) and family.name == name):
        raise InvalidPatcherError(
            f"fusions: {name!r} is registered by {_describe(entry)}, which isn't a subclass of patcher.fusions.Fusion "
            f"called {name!r} but {family!r}. Its package has to register the class of a family under its name."
        )
    return family


def _package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(".")[0].partition(":")[0]


def _describe(entry: EntryPoint) -> str:
    return f"{_package_of(entry)} ({entry.value})"
