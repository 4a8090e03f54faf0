"""The values of options: patchers by name, and the list of presets.

All functions raise `InvalidPatcherError` for a name, a constant or a model that doesn't exist or can't be used here.
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
from patcher.cli.options import PATCHER_OPTIONS
from patcher.display.shown import pluralize
from patcher.errors import InvalidPatcherError, did_you_mean, nearest
from patcher.spec.forward_of import forward_of
from patcher.spec.patcher import Patcher
from patcher.spec.serialization import FORWARD_OF


def patchers_of(options: Mapping[str, Iterable[str]]) -> list[Patcher]:
    """Return the patchers of all options that make one.

    Args:
        options: option, with its dashes -> its values; `--fusion`, `--preset` and `--patcher` take several in one.
    """
    fusions, preset_names, constants = (
        [name for text in options.get(option, ()) for name in re.split(r"[\s,]+", text.strip(", "))]
        for option in ("--fusion", "--preset", "--patcher")
    )
    mapped = [mapping(kind, text) for kind in ("class", "module", "function") for text in options.get(f"--{kind}", ())]
    imported = [_import("--patcher", text, text, Patcher) for text in constants]
    fused = [Patcher(fusions=fusions)] if fusions else []
    return [*fused, *map(preset, preset_names), *imported, *mapped]


def preset(name: str) -> Patcher:
    """Return a preset by its name."""
    if name not in presets.NAMES:
        hint = did_you_mean(name, presets.NAMES, "`patcher presets` lists them.")
        raise InvalidPatcherError(f"there is no preset {name!r}; {hint}")
    return getattr(presets, name)  # type: ignore[no-any-return]


def mapping(kind: str, text: str) -> Patcher:
    """Return a patcher with one entry of a mapping, `key=module:name`."""
    key, _, value = text.rpartition("=")  # the key may be an expression with `=` in it
    reference = value.removeprefix(FORWARD_OF)
    expected = object if kind == "function" or value != reference else type
    replacement = _import(f"--{kind}", text, reference if key else "", expected)
    entry: Any = {f"{kind}_mapping": {key: replacement if value == reference else forward_of(replacement)}}
    return Patcher(**entry)


def _import(option: str, text: str, reference: str, expected: type) -> Any:
    """Import `module:name` for an option; the module may also be a file, or be in the current folder."""
    module, _, name = reference.partition(":")
    if not module or not name:
        form, help_text = PATCHER_OPTIONS[option]
        example = help_text.rpartition("such as ")[2]
        raise InvalidPatcherError(f"{option} takes {form}, found {text!r}; write '{example}'.")
    file = Path(module)
    folder, module = (str(file.resolve().parent), file.stem) if file.suffix == ".py" else (str(Path.cwd()), module)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that it doesn't shadow installed packages
    try:
        namespace = vars(importlib.import_module(module))
    except Exception as error:  # user code may raise anything
        raise InvalidPatcherError(
            f"{option} {text}: {module} can't be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in namespace or not isinstance(namespace[name], expected):
        known = [key for key, value in namespace.items() if isinstance(value, expected) and not key.startswith("_")]
        problem = f"{name} is a {type(namespace[name]).__name__}" if name in namespace else f"there is no {name}"
        close = nearest(name, known) or (known if expected is Patcher else ())
        other = f"{option} takes {PATCHER_OPTIONS[option][0]}" if name in namespace else f"define {name} in it"
        hint = f"nearest: {', '.join(close)}" if close else other
        raise InvalidPatcherError(f"{option} {text}: {problem} in {module}; {hint}.")
    return namespace[name]


class Listing(NamedTuple):
    """All presets, or those that fit a model with the recommended one first; the reason if none fits."""

    model: str
    presets: list[dict[str, str]]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def show(self) -> None:
        head = pluralize(len(self.presets), "preset") + (f" for {self.model}" if self.model else "")
        typer.echo(f"No preset fits {self.model}\n{self.reason}" if self.reason else head)
        for row in self.presets:
            text = f"can't be used here: {row['missing']}" if row["missing"] else row["description"].partition("\n")[0]
            typer.echo(f"  {row['name']:<34}  {row['transformers']:<12}  {text}")


def listing(model: str | None, options: Mapping[str, Any]) -> Listing:
    """List all presets, or those that fit a model."""
    fitting = presets.for_model(config_of(model, options)) if model else None
    rows = []
    for name in presets.NAMES if fitting is None else [patcher.name for patcher in fitting]:
        row = {"name": name, "description": presets.describe(name), "transformers": "", "missing": ""}
        try:
            row["transformers"] = getattr(presets, name).transformers
        except InvalidPatcherError as error:  # a package or a device that the preset needs is missing
            row["missing"] = str(error)
        rows.append(row)
    return Listing(model or "", rows, "" if fitting is None else fitting.reason)
