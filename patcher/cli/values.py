"""What the commands work with: patchers by name, the list of presets, and pins.

All raise `InvalidPatcherError` for a name, a constant or a model that there is none of, or that can't be used here.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from patcher import presets
from patcher.checkpoints.model_classes import config_of
from patcher.cli.options import WHAT
from patcher.display.parts import Notes, Part, Table
from patcher.display.shown import Shown, numbered
from patcher.errors import InvalidPatcherError
from patcher.patterns import nearest
from patcher.spec.fingerprints import fingerprint, homes_of
from patcher.spec.forward_of import forward_of
from patcher.spec.patcher import Patcher
from patcher.spec.serialization import FORWARD_OF


def each_of(given: Mapping[str, Iterable[str]]) -> list[Patcher]:
    """All options that say what to load a model with, each as a patcher.

    Args:
        given: option, with its dashes -> what it was given, one or more times; several names in one text, too.
    """
    fusions, named_presets, constants = (
        [name for text in given.get(option, ()) for name in re.split(r"[\s,]+", text) if name]
        for option in ("--fusion", "--preset", "--patcher")
    )
    mapped = [mapping(name, text) for name in ("class", "module", "function") for text in given.get(f"--{name}", ())]
    fused = [Patcher(fusions=fusions)] if fusions else []
    return [*fused, *map(preset, named_presets), *map(constant, constants), *mapped]


def named(name: str) -> Patcher:
    """The patcher of the name of a preset, or of `module:CONSTANT`."""
    return constant(name) if ":" in name else preset(name)


def without_pins(patcher: Patcher) -> Patcher:
    """The patcher, to be tried on code that has changed."""
    return patcher.replace(fingerprints={}, transformers="")


def preset(name: str) -> Patcher:
    """A preset by its name."""
    if name not in presets.__all__:
        close = nearest(name, presets.__all__)
        hint = f"did you mean {', '.join(close)}?" if close else "`patcher presets` lists them."
        raise InvalidPatcherError(f"there is no preset {name!r}; {hint}")
    found: Patcher = getattr(presets, name)
    return found


def constant(text: str) -> Patcher:
    """A patcher of somebody's own code, `module:CONSTANT`."""
    found: Patcher = _named("--patcher", text, text, Patcher)
    return found


def mapping(name: str, text: str) -> Patcher:
    """One entry of a mapping, `key=module:name`, where the name is of somebody's own code."""
    key, _, where = text.rpartition("=")  # an expression may have one of its own
    reference = where.removeprefix(FORWARD_OF)
    found = _named(f"--{name}", text, reference if key else "", type if name != "function" else object)
    entry: Any = {f"{name}_mapping": {key: found if where == reference else forward_of(found)}}
    return Patcher(**entry)


def _named(option: str, text: str, reference: str, kind: type) -> Any:
    """What `module:name` names, in the text of an option; modules of the current folder, and files, are found too."""
    module, _, name = reference.partition(":")
    if not module or not name:
        form, words = WHAT[option]
        raise InvalidPatcherError(f"{option} takes {form}, found {text!r}; write '{words.rpartition('such as ')[2]}'.")
    file = Path(module)
    folder, module = (str(file.resolve().parent), file.stem) if file.suffix == ".py" else (str(Path.cwd()), module)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: nothing here may shadow what is installed
    try:
        home = vars(importlib.import_module(module))
    except Exception as error:  # whatever the code of others raises
        raise InvalidPatcherError(
            f"{option} {text}: {module} can't be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in home or not isinstance(home[name], kind):
        known = [key for key, value in home.items() if isinstance(value, kind) and not key.startswith("_")]
        what = f"{name} is a {type(home[name]).__name__}" if name in home else f"there is no {name}"
        close = nearest(name, known) or (known if kind is Patcher else ())
        hint = f"nearest: {', '.join(close)}" if close else f"define {name} in it"
        raise InvalidPatcherError(f"{option} {text}: {what} in {module}; {hint}.")
    return home[name]


@dataclass(frozen=True)
class Listing(Shown):
    """The presets: name, description, the transformers that it was verified on, and why it can't be used here; where
    none fits a model, the reason."""

    model: str
    presets: tuple[Mapping[str, str], ...]
    reason: str = ""

    def _headline(self) -> str:
        if self.model and not self.presets:
            return f"No preset fits {self.model}"
        text = numbered(len(self.presets), "preset") + (f" for {self.model}" if self.model else "")
        return f"{text}, the recommended first" if self.model and len(self.presets) > 1 else text

    def _parts(self) -> Iterable[Part]:
        yield Notes("Why", [self.reason] if self.reason else [], "")
        rows = [
            (row["name"], row["description"].partition("\n")[0], row["transformers"], row["missing"])
            for row in self.presets
        ]
        yield Table("Presets", ("name", "what it is", "verified on transformers"), [r[:3] for r in rows if not r[3]])
        yield Table("Can't be used here", ("name", "reason"), [(r[0], r[3]) for r in rows if r[3]])


def listing(model: str | None, options: Mapping[str, Any]) -> Listing:
    """All presets, or those that fit a model."""
    fitting = presets.for_model(config_of(model, options)) if model else None
    rows = []
    for name in presets.__all__ if fitting is None else [each.name for each in fitting]:
        row = {"name": name, "description": presets.describe(name), "transformers": "", "missing": ""}
        try:
            row["transformers"] = getattr(presets, name).transformers
        except InvalidPatcherError as error:  # a package or a device that it needs isn't there
            row["missing"] = str(error)
        rows.append(row)
    return Listing(model or "", tuple(rows), "" if fitting is None else fitting.reason)


@dataclass(frozen=True)
class Pin(Shown):
    """The fingerprints of the code that a patcher works on, as it is installed.

    Attributes:
        name: of the patcher.
        transformers: the release that is installed.
        holds: whether the code is what the patcher is pinned to, where it is pinned.
        classes: class, module, fingerprint ("" where there is none) and pinned, the fingerprints of the patcher.
    """

    name: str
    transformers: str
    holds: bool
    classes: tuple[Mapping[str, Any], ...]

    def __str__(self) -> str:
        lines = [f"# {self.name} on transformers {self.transformers}", "fingerprints={"]
        for row in self.classes:
            found, pinned = row["fingerprint"], ", ".join(row["pinned"])
            if not found:
                lines.append(f"    # {row['class']}: pinned {pinned}, and this transformers has nothing of that name")
                continue
            state = "not pinned yet" if not pinned else "as pinned" if found in row["pinned"] else f"pinned {pinned}"
            lines.append(f'    "{row["class"]}": "{found}",  # {row["module"]}: {state}')
        return "\n".join([*lines, "}"])

    def show(self, file: Any = None) -> None:
        print(self, file=file)


def pin_of(name: str) -> Pin:
    """The pin of a preset, or of `module:CONSTANT`, for the transformers that is installed."""
    patcher = named(name)
    pinned = patcher.fingerprints
    names = sorted(pinned) or sorted(
        [*filter(str.isidentifier, patcher.class_mapping), *patcher.function_mapping]  # expressions name no class
    )
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for cls, module in homes_of(names):
        own = fingerprint(getattr(importlib.import_module(module), cls.rpartition(":")[2]))
        row = {"class": cls, "module": module, "fingerprint": own, "pinned": pinned.get(cls, ())}
        found.setdefault((cls, own), row)  # the same code is in the files of several models
    # Of namesakes those that are as pinned, where any is.
    right = {cls for cls, own in found if own in pinned.get(cls, ())}
    rows = [row for (cls, own), row in found.items() if cls not in right or own in pinned[cls]]
    if not rows:
        raise InvalidPatcherError(
            f"{name} names nothing of transformers {transformers.__version__} that could be pinned: it has "
            f"{', '.join(names) or 'neither fingerprints nor names of classes'}. Pin the classes that it works on: "
            "`from patcher import fingerprint`, patcher.replace(fingerprints={'LlamaMLP': fingerprint(LlamaMLP)})."
        )
    gone = sorted(pinned.keys() - {row["class"] for row in rows})
    rows += [{"class": cls, "module": "", "fingerprint": "", "pinned": pinned[cls]} for cls in gone]
    holds = all(not row["pinned"] or row["fingerprint"] in row["pinned"] for row in rows)
    return Pin(patcher.name or name, transformers.__version__, holds, tuple(rows))
