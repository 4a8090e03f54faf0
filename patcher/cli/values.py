"""What the commands work with: patchers by name, and the list of presets.

All raise `InvalidPatcherError` for a name, a constant or a model that there is none of, or that can't be used here.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from patcher import presets
from patcher.checkpoints.model_classes import config_of
from patcher.cli.options import WHAT
from patcher.display.shown import pluralize
from patcher.errors import InvalidPatcherError, nearest
from patcher.spec.forward_of import forward_of
from patcher.spec.patcher import Patcher
from patcher.spec.serialization import FORWARD_OF


def each_of(given: Mapping[str, Iterable[str]]) -> list[Patcher]:
    """All options that say what to load a model with, each as a patcher.

    Args:
        given: option, with its dashes -> what it was given, one or more times; several names in one text, too.
    """
    fusions, chosen, constants = (
        [name for text in given.get(option, ()) for name in re.split(r"[\s,]+", text) if name]
        for option in ("--fusion", "--preset", "--patcher")
    )
    mapped = [mapping(name, text) for name in ("class", "module", "function") for text in given.get(f"--{name}", ())]
    own = [_named("--patcher", text, text, Patcher) for text in constants]
    fused = [Patcher(fusions=fusions)] if fusions else []
    return [*fused, *map(preset, chosen), *own, *mapped]


def preset(name: str) -> Patcher:
    """A preset by its name."""
    if name not in presets.__all__:
        close = nearest(name, presets.__all__)
        hint = f"did you mean {', '.join(close)}?" if close else "`patcher presets` lists them."
        raise InvalidPatcherError(f"there is no preset {name!r}; {hint}")
    return getattr(presets, name)  # type: ignore[no-any-return]


def mapping(name: str, text: str) -> Patcher:
    """One entry of a mapping, `key=module:name`, where the name is of somebody's own code."""
    key, _, where = text.rpartition("=")  # an expression may have one of its own
    reference = where.removeprefix(FORWARD_OF)
    kind = object if name == "function" or where != reference else type
    found = _named(f"--{name}", text, reference if key else "", kind)
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


class Listing(NamedTuple):
    """The presets, or those that fit a model, the recommended first; where none fits, the reason."""

    model: str
    presets: list[dict[str, str]]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def show(self) -> None:
        head = pluralize(len(self.presets), "preset") + (f" for {self.model}" if self.model else "")
        typer.echo(f"No preset fits {self.model}\n{self.reason}" if self.reason else head)
        for row in self.presets:
            what = f"can't be used here: {row['missing']}" if row["missing"] else row["description"].partition("\n")[0]
            typer.echo(f"  {row['name']:<34}  {row['transformers']:<12}  {what}")


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
    return Listing(model or "", rows, "" if fitting is None else fitting.reason)
