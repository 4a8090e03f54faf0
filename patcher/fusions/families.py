"""The families that have a name, and what a fusion config or a Patcher means by it.

A package registers one of its own under the entry point group `patcher.fusions`, by the name that the family has:

```toml
[project.entry-points."patcher.fusions"]
stacked = "acme_fusions:Stacked"
```

It is imported when its name is used. In a `config.json` its package comes before it: `acme-fusions/stacked`.
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

#: Families that a Patcher finds by name, and where they live: imported when they are used.
FAMILIES: dict[str, str] = {
    "gate_up": "patcher.fusions.gate_up:GateUp",
    "kv": "patcher.fusions.kv:KV",
    "patch_embeddings": "patcher.fusions.patch_embeddings:PatchEmbeddings",
    "qkv": "patcher.fusions.qkv:QKV",
    "sequential_experts": "patcher.fusions.sequential_experts:SequentialExperts",
    "siblings": "patcher.fusions.siblings:Siblings",
    "split": "patcher.fusions.split:Split",
}
#: Where packages register theirs.
GROUP = "patcher.fusions"
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def fusion_named(name: Any) -> Fusion:
    """The fusion called `name`, or the fusion itself.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    return name if isinstance(name, Fusion) else _family(name)()


def shortest(fusion: Any) -> str | Fusion:
    """The name of a fusion, where that says all there is to say of it; otherwise the object.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    if isinstance(fusion, str) and fusion in FAMILIES and fusion not in _registered():
        return fusion
    found = fusion_named(fusion)
    if found.name not in FAMILIES and found.name not in _registered():
        return found
    try:
        return found.name if found == _family(found.name)() else found
    except PatcherError:  # the name isn't that of one family
        return found


def is_our_own(fusion: Any) -> bool:
    """Whether a fusion, named or an object, is of a family of ours, of which none builds a module again."""
    if isinstance(fusion, str):
        return fusion in FAMILIES
    return f"{type(fusion).__module__}:{type(fusion).__qualname__}" in FAMILIES.values()


def name_in_config(name: str) -> str:
    """The name of a family as a `config.json` has it: with the package that registers it, if that isn't this one."""
    entry = _entry(name) if name not in FAMILIES else None
    return f"{_package_of(entry)}/{name}" if entry is not None else name


def named_in_config(text: str) -> str:
    """The name of the family that a `config.json` means.

    Raises:
        InvalidPatcherError: the package that has it isn't installed, or there is no such family.
        PatchConflictError: several packages register the name.
    """
    package, _, name = text.rpartition("/")
    if not _PACKAGE.fullmatch(package) or not _PACKAGE.fullmatch(name) or name in FAMILIES:
        _family(text)  # without a package, or no such name
        return text
    if (entry := _entry(name)) is None:
        raise InvalidPatcherError(
            f"fusions: {name!r} is a family of fusions of the package {package!r}, which is not installed here: it "
            f"registers nothing of that name under the entry point group {GROUP!r}. Install it: pip install {package}"
        )
    if canonicalize_name(found := _package_of(entry)) != canonicalize_name(package):
        raise InvalidPatcherError(
            f"fusions: {name!r} is a family of the package {package!r} there, and here it is one of {found!r}. "
            f"Uninstall {found}, and install {package}."
        )
    _loaded(entry)
    return name


def fusions_configured(name: Any, value: Any) -> list[str | Fusion]:
    """What one entry of a fusion config asks for.

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
        return _loaded(entry)
    known = ", ".join(repr(known) for known in (*FAMILIES, *sorted(_registered().keys() - FAMILIES.keys())))
    if isinstance(name, type) and issubclass(name, Fusion):
        hint = f"write an object of it, {name.__name__}()"
    elif not isinstance(name, str):
        hint = f"write a name ({known}) or an object of a Fusion subclass"
    elif len(names := re.split(r"[\s,|+]+", name.strip())) > 1:
        hint = f"write fusions={names!r}"
    elif close := nearest(name, (*FAMILIES, *_registered())):
        hint = f"did you mean {close[0]!r}? Known names: {known}"
    else:
        hint = (
            f"known names: {known}; a family of your own is passed as an object of a Fusion subclass, and one of a "
            "package has its name once that is installed"
        )
    raise InvalidPatcherError(f"fusions: {name!r} isn't a fusion; {hint}.")


# --- of packages -----------------------------------------------------------------------------------------------------


def _registered() -> Mapping[str, tuple[EntryPoint, ...]]:
    """What packages register: name -> by which. Nothing of it is imported."""
    return _registered_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _registered_on(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {}).setdefault((_package_of(entry), entry.value), entry)
    return {name: tuple(entries.values()) for name, entries in found.items()}


def _entry(name: str) -> EntryPoint | None:
    """The entry of a name, if there is one; it isn't imported."""
    ours = (EntryPoint(name, FAMILIES[name], GROUP),) if name in FAMILIES else ()
    if not ours and name not in _registered():
        _registered_on.cache_clear()  # a package may just have been installed
    entries = (*ours, *_registered().get(name, ()))
    if len(entries) > 1:
        raise PatchConflictError(
            f"fusions: {name!r} is registered by several packages, {' and '.join(map(_told, entries))}. "
            "Uninstall all but one of them, or pass an object of the family that is meant."
        )
    return entries[0] if entries else None


def _loaded(entry: EntryPoint) -> type[Fusion]:
    name = entry.name
    try:
        family = entry.load()
    except Exception as error:
        raise InvalidPatcherError(
            f"fusions: {name!r} is registered by {_told(entry)}, and importing that failed with "
            f"{type(error).__name__}: {error}. Update the package or what it lacks, or uninstall it."
        ) from error
    if not (isinstance(family, type) and issubclass(family, Fusion) and family.name == name):
        raise InvalidPatcherError(
            f"fusions: {name!r} is registered by {_told(entry)}, which isn't a subclass of patcher.fusions.Fusion "
            f"called {name!r} but {family!r}. Its package has to register the class of a family under its name."
        )
    return family


def _package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(".")[0].partition(":")[0]


def _told(entry: EntryPoint) -> str:
    return f"{_package_of(entry)} ({entry.value})"
