"""What the commands work with: patchers by name, the list of presets, and pins."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from patcher.errors import InvalidPatcherError, PatcherError
from patcher.fingerprints import fingerprint, homes_of
from patcher.matching import nearest
from patcher.patcher import Patcher
from patcher.tables import Shown, Table

__all__ = ["Listing", "Pin", "checked", "combined", "listing", "named", "pin_of", "without_pins"]


def checked(model: str, options: dict[str, Any]) -> str:
    """A repo or a folder that has a config which transformers knows.

    Raises:
        InvalidPatcherError: it hasn't, or it needs code that may not be run.
    """
    from patcher.model_classes import config_of

    try:
        config_of(model, options)
    except (OSError, ValueError) as error:
        raise InvalidPatcherError(
            f"{model!r} is no model that can be used here: {' '.join(str(error).split())}"
        ) from error
    return model


def combined(presets: Iterable[str], fusions: Iterable[str], constants: Iterable[str]) -> Patcher:
    """All that was asked for, as one patcher.

    Raises:
        InvalidPatcherError: a name that means nothing.
        PatchConflictError: they want different things of one class.
    """
    named = list(fusions)
    parts = [Patcher(fusions=named)] if named else []
    parts += [preset(name) for name in presets]
    parts += [constant(text) for text in constants]
    result = parts[0]
    for part in parts[1:]:
        result |= part
    return result


def preset(name: str) -> Patcher:
    """A preset by its name.

    Raises:
        InvalidPatcherError: there is none of that name, or the package that it needs isn't installed.
    """
    home = importlib.import_module("patcher.presets")
    known = list(home.__all__)
    try:
        found = getattr(home, name) if name in known else None
    except ImportError as error:
        raise InvalidPatcherError(f"the preset {name!r} can't be used: {error}") from error
    if not isinstance(found, Patcher):
        close = nearest(name, known)
        hint = f"did you mean {', '.join(close)}?" if close else "`patcher presets` lists them."
        raise InvalidPatcherError(f"there is no preset {name!r}; {hint}")
    return found


def constant(text: str) -> Patcher:
    """A patcher of somebody's own code, `module:CONSTANT`; modules of the current folder are found too.

    Raises:
        InvalidPatcherError: it can't be imported, or is no patcher.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise InvalidPatcherError(f"--patcher takes MODULE:CONSTANT, found {text!r}; write my_patches:PATCHER.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end: nothing here may stand in for what is installed
    try:
        home = importlib.import_module(module)
    except Exception as error:  # whatever the code of others raises
        raise InvalidPatcherError(
            f"--patcher {text}: {module} can't be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(home, name, None)
    if not isinstance(found, Patcher):
        listed = ", ".join(key for key, value in vars(home).items() if isinstance(value, Patcher))
        what = f"{name} is a {type(found).__name__}" if hasattr(home, name) else f"there is no {name}"
        hint = f"its patchers are {listed}" if listed else f"write {name} = Patcher(...) in it"
        raise InvalidPatcherError(f"--patcher {text}: {what} in {module}; {hint}.")
    return found


# --- the list of presets -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing(Shown):
    """The presets: (name, what it is, the transformers that it was verified on, why it can't be used)."""

    presets: tuple[tuple[str, str, str, str], ...]
    model: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists and texts, for JSON."""
        heads = ("name", "description", "transformers", "missing")
        return {"model": self.model, "presets": [dict(zip(heads, row, strict=True)) for row in self.presets]}

    def _headline(self) -> str:
        count = len(self.presets)
        text = f"{count} preset{'' if count == 1 else 's'}"
        if not self.model:
            return text
        return f"{text} for {self.model}, the recommended first" if count > 1 else f"{text} for {self.model}"

    def _tables(self) -> Iterable[Table]:
        usable = [(row[0], row[1].partition("\n")[0], row[2]) for row in self.presets if not row[3]]
        yield Table("Presets", ("name", "what it is", "verified on transformers"), list(usable))
        yield Table("Can't be used here", ("name", "reason"), [(row[0], row[3]) for row in self.presets if row[3]])


def listing(model: str | None, **options: Any) -> Listing:
    """All presets, or those that fit a model.

    Raises:
        InvalidPatcherError: the model has no config that transformers knows.
    """
    home = importlib.import_module("patcher.presets")
    rows = [row for name in sorted(home.__all__) if (row := _row(home, name))]
    if model is None:
        return Listing(tuple(row for row, _ in rows))
    from patcher.model_classes import config_of

    checked(model, options)
    fitting = home.for_model(config_of(model, options))
    by_value = {found: row for row, found in rows if found is not None}
    return Listing(tuple(by_value[found] for found in fitting), model)


def _row(home: Any, name: str) -> tuple[tuple[str, str, str, str], Patcher | None] | None:
    try:
        found = getattr(home, name)
    except (ImportError, PatcherError) as error:  # a package that it needs isn't there
        return (name, home.describe(name), "", str(error)), None
    if not isinstance(found, Patcher):
        return None
    return (name, home.describe(name), found.transformers, ""), found


# --- pins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin(Shown):
    """The fingerprints of the code that a patcher works on, as it is installed.

    Attributes:
        name: of the patcher.
        transformers: the release that is installed.
        classes: (class, its module, its fingerprint, those that the patcher is pinned to).
    """

    name: str
    transformers: str
    classes: tuple[tuple[str, str, str, tuple[str, ...]], ...]

    @property
    def holds(self) -> bool:
        """Whether the code is what the patcher is pinned to, where it is pinned."""
        return all(not pinned or found in pinned for _, _, found, pinned in self.classes)

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists and texts, for JSON."""
        heads = ("class", "module", "fingerprint", "pinned")
        rows = [dict(zip(heads, (*row[:3], list(row[3])), strict=True)) for row in self.classes]
        return {"name": self.name, "transformers": self.transformers, "holds": self.holds, "classes": rows}

    def __str__(self) -> str:
        lines = [f"# {self.name} on transformers {self.transformers}", "fingerprints={"]
        for name, module, found, pinned in self.classes:
            if not found:
                lines.append(f"    # {name}: pinned {', '.join(pinned)}, and this transformers has no such class")
                continue
            state = (
                "not pinned yet" if not pinned else "as pinned" if found in pinned else f"pinned {', '.join(pinned)}"
            )
            lines.append(f'    "{name}": "{found}",  # {module}: {state}')
        return "\n".join([*lines, "}"])


def named(name: str) -> Patcher:
    """The patcher of the name of a preset, or of `module:CONSTANT`."""
    return constant(name) if ":" in name else preset(name)


def without_pins(patcher: Patcher) -> Patcher:
    """The patcher, to be tried on code that has changed."""
    return patcher.replace(fingerprints={}, transformers="")


def pin_of(name: str) -> Pin:
    """The pin of a preset, or of `module:CONSTANT`, for the transformers that is installed.

    Raises:
        InvalidPatcherError: there is no such patcher, or it names no class of transformers.
    """
    patcher = named(name)
    pinned = dict(patcher.fingerprints)
    names = sorted(pinned) or sorted(key for key in patcher.class_mapping if key.isidentifier())
    homes = _meant(patcher, homes_of(names))
    if not homes:
        raise InvalidPatcherError(
            f"{name} names no class of transformers {transformers.__version__} that could be pinned: it has "
            f"{', '.join(names) or 'neither fingerprints nor names of classes'}. Pin the classes that it works on: "
            "`from patcher import fingerprint`, patcher.replace(fingerprints={'LlamaMLP': fingerprint(LlamaMLP)})."
        )
    rows = []
    for cls, module in homes:
        found = fingerprint(getattr(importlib.import_module(module), cls))
        rows.append((cls, module, found, tuple(pinned.get(cls, ()))))
    gone = set(pinned) - {cls for cls, _ in homes}
    rows += [(cls, "", "", tuple(pinned[cls])) for cls in sorted(gone)]
    return Pin(patcher.name or name, transformers.__version__, tuple(rows))


def _meant(patcher: Patcher, homes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of namesakes in several files those in the file of a model that the preset is for; all where none is."""
    times = Counter(cls for cls, _ in homes)
    meant = [(cls, module) for cls, module in homes if times[cls] == 1 or _is_for(patcher, module.split(".")[-2])]
    return meant + [(cls, module) for cls, module in homes if cls not in dict(meant)]


def _is_for(patcher: Patcher, model_type: str) -> bool:
    try:
        config = transformers.AutoConfig.for_model(model_type)
    except ValueError:  # a folder that is named otherwise
        return False
    return patcher in importlib.import_module("patcher.presets").for_model(config)
