"""What the commands work with: patchers by name, the list of presets, and pins.

All raise `InvalidPatcherError` for a name, a constant or a model that there is none of, or that can't be used here.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from patcher.checkpoints.model_classes import config_of
from patcher.display.parts import Notes, Part, Table
from patcher.display.shown import Shown
from patcher.errors import InvalidPatcherError, PatcherError, nearest
from patcher.spec.fingerprints import fingerprint, homes_of
from patcher.spec.forward_of import forward_of
from patcher.spec.patcher import Patcher
from patcher.spec.serialization import FORWARD_OF

#: option of a mapping -> the field, what it takes, an example
MAPPINGS = {
    "--class": ("class_mapping", "NAME=MODULE:CLASS", "LlamaMLP=my_patches:MyMLP"),
    "--module": ("module_mapping", "PATH=MODULE:CLASS", "model.layers.{0..3}.mlp=my_patches:MyMLP"),
    "--function": ("function_mapping", "NAME=MODULE:FUNCTION", "apply_rotary_pos_emb=my_patches:rotary"),
}


def combined(given: Mapping[str, Iterable[str]]) -> Patcher:
    """All options that say what to load a model with, as one patcher; see `each_of`."""
    return functools.reduce(operator.or_, each_of(given))


def each_of(given: Mapping[str, Iterable[str]]) -> list[Patcher]:
    """All options that say what to load a model with, each as a patcher.

    Args:
        given: option, with its dashes -> what it was given, one or more times.
    """
    presets, fusions, constants = (list(given.get(name, ())) for name in ("--preset", "--fusion", "--patcher"))
    for option, texts in (("--preset", presets), ("--fusion", fusions), ("--patcher", constants)):
        for text in texts:
            if "," in text:
                single = " ".join(f"{option} {each}" for each in re.split(r"[\s,]+", text) if each)
                raise InvalidPatcherError(f"{option} takes one name, and may be repeated; for {text!r} write {single}")
    mapped = [mapping(option, text) for option in MAPPINGS for text in given.get(option, ())]
    named = [Patcher(fusions=fusions)] if fusions else []
    return [*named, *map(preset, presets), *map(constant, constants), *mapped]


def preset(name: str) -> Patcher:
    """A preset by its name."""
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
    """A patcher of somebody's own code, `module:CONSTANT`."""
    found, name, home = _named("--patcher", text, "MODULE:CONSTANT", "my_patches:PATCHER")
    if not isinstance(found, Patcher):
        listed = ", ".join(key for key, value in home.items() if isinstance(value, Patcher))
        what = f"{name} is a {type(found).__name__}" if name in home else f"there is no {name}"
        hint = f"its patchers are {listed}" if listed else f"write {name} = Patcher(...) in it"
        raise InvalidPatcherError(f"--patcher {text}: {what} in {home['__name__']}; {hint}.")
    return found


def mapping(option: str, text: str) -> Patcher:
    """One entry of a mapping, `key=module:name`, where the name is of somebody's own code."""
    field, form, example = MAPPINGS[option]
    key, equals, where = text.rpartition("=")  # an expression may have one of its own
    if not equals:
        raise InvalidPatcherError(f"{option} takes {form}, found {text!r}; write '{example}'.")
    reference = where.removeprefix(FORWARD_OF)
    found, name, home = _named(option, reference, form, f"'{example}'", f"{key}={where.removesuffix(reference)}")
    if name not in home:
        close = nearest(name, [other for other, value in home.items() if callable(value)])
        hint = f"nearest: {', '.join(close)}" if close else f"define {name} in it"
        raise InvalidPatcherError(f"{option} {text}: there is no {name} in {home['__name__']}; {hint}.")
    return Patcher(**{field: {key: found if where == reference else forward_of(found)}})  # type: ignore[arg-type]


def _named(option: str, text: str, form: str, example: str, before: str = "") -> tuple[Any, str, Mapping[str, Any]]:
    """What `module:name` names, the name, and what its module has; modules of the current folder are found too."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise InvalidPatcherError(f"{option} takes {form}, found {text!r}; write {example}.")
    if module.endswith(".py"):
        raise InvalidPatcherError(
            f"{option} takes {form}, found the file {module!r}; write {option} {before}{_as_module(module, name)}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end: nothing here may shadow what is installed
    try:
        home = vars(importlib.import_module(module))
    except Exception as error:  # whatever the code of others raises
        raise InvalidPatcherError(
            f"{option} {text}: {module} can't be imported: {type(error).__name__}: {error}"
        ) from error
    return home.get(name), name, home


def _as_module(file: str, name: str) -> str:
    """How a constant in a file is named, and from where, if not from the current folder."""
    path = Path(file)
    inner = path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path
    parts = inner.with_suffix("").parts
    if not inner.is_absolute() and all(part.isidentifier() for part in parts):
        return f"{'.'.join(parts)}:{name}"
    return f"{path.stem}:{name}, in the folder {str(path.parent)!r}"


@dataclass(frozen=True)
class Listing(Shown):
    """The presets: name, description, the transformers that it was verified on, and why it can't be used here; where
    none fits a model, the reason."""

    model: str
    presets: tuple[Mapping[str, str], ...]
    reason: str = ""

    def _headline(self) -> str:
        count = len(self.presets)
        if self.model and not count:
            return f"No preset fits {self.model}"
        text = f"{count} preset{'' if count == 1 else 's'}{f' for {self.model}' if self.model else ''}"
        return f"{text}, the recommended first" if self.model and count > 1 else text

    def _parts(self) -> Iterable[Part]:
        yield Notes("Why", [self.reason] if self.reason else [], "")
        rows = [
            (row["name"], row["description"].partition("\n")[0], _from_lowest(row["transformers"]), row["missing"])
            for row in self.presets
        ]
        yield Table("Presets", ("name", "what it is", "verified on transformers"), [r[:3] for r in rows if not r[3]])
        yield Table("Can't be used here", ("name", "reason"), [(r[0], r[3]) for r in rows if r[3]])


def _from_lowest(specifier: str) -> str:
    return ",".join(sorted(specifier.split(","), reverse=True))  # ">=5.17,<5.24"


def listing(model: str | None, options: Mapping[str, Any]) -> Listing:
    """All presets, or those that fit a model."""
    home = importlib.import_module("patcher.presets")
    rows: dict[Any, dict[str, str]] = {}
    for name in sorted(home.__all__):
        row = {"name": name, "description": "", "transformers": "", "missing": ""}
        try:
            found = getattr(home, name)
        except (ImportError, PatcherError) as error:  # a package that it needs isn't there
            found, row["missing"] = name, str(error)
        else:
            if not isinstance(found, Patcher):
                continue
            row["transformers"] = found.transformers
        rows[found] = row | {"description": home.describe(name)}
    if model is None:
        return Listing("", tuple(rows.values()))
    fitting = home.for_model(config_of(model, options))
    return Listing(model, tuple(rows[found] for found in fitting), getattr(fitting, "reason", ""))


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


def named(name: str) -> Patcher:
    """The patcher of the name of a preset, or of `module:CONSTANT`."""
    return constant(name) if ":" in name else preset(name)


def without_pins(patcher: Patcher) -> Patcher:
    """The patcher, to be tried on code that has changed."""
    return patcher.replace(fingerprints={}, transformers="")


def pin_of(name: str) -> Pin:
    """The pin of a preset, or of `module:CONSTANT`, for the transformers that is installed."""
    patcher = named(name)
    pinned = dict(patcher.fingerprints)
    names = sorted(pinned) or sorted(
        [*filter(str.isidentifier, patcher.class_mapping), *patcher.function_mapping]  # expressions name no class
    )
    homes = _meant(patcher, homes_of(names))
    if not homes:
        raise InvalidPatcherError(
            f"{name} names nothing of transformers {transformers.__version__} that could be pinned: it has "
            f"{', '.join(names) or 'neither fingerprints nor names of classes'}. Pin the classes that it works on: "
            "`from patcher import fingerprint`, patcher.replace(fingerprints={'LlamaMLP': fingerprint(LlamaMLP)})."
        )
    found = [
        (name, module, fingerprint(getattr(importlib.import_module(module), name.rpartition(":")[2])))
        for name, module in homes
    ]
    found += [(cls, "", "") for cls in sorted(set(pinned) - {cls for cls, _ in homes})]
    heads = ("class", "module", "fingerprint", "pinned")
    rows = [dict(zip(heads, (*row, pinned.get(row[0], ())), strict=True)) for row in found]
    holds = all(not row["pinned"] or row["fingerprint"] in row["pinned"] for row in rows)
    return Pin(patcher.name or name, transformers.__version__, holds, tuple(rows))


def _meant(patcher: Patcher, homes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of namesakes in several files those in the file of a model that the preset is for; all where none is."""
    times = Counter(cls for cls, _ in homes)
    meant = [(cls, module) for cls, module in homes if times[cls] == 1 or _is_for(patcher, module)]
    return meant + [(cls, module) for cls, module in homes if cls not in dict(meant)]


def _is_for(patcher: Patcher, module: str) -> bool:
    config = transformers.PretrainedConfig()
    config.model_type = module.split(".")[-2]  # type: ignore[misc]  # the folder of a model is named as its type
    return patcher in importlib.import_module("patcher.presets").for_model(config)
