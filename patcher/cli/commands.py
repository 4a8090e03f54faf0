"""The commands around a patcher: `presets`, `plan`, `verify`, `bench`, `diff`, `export`.

Each exits with 0 when all is right, with 1 when what it checks fails, and with 2 when its arguments are invalid. The
answer is all that goes to stdout. What they call is imported then: it takes seconds, which `--help` doesn't need.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

import patcher as library
from patcher.cli.options import WHAT, parameter_of, with_options
from patcher.errors import InvalidPatcherError, PatchConflictError, PatcherError

#: what a command prints, and whether it is right
Answer = tuple[Any, bool]
_ALL_OF_WHAT = (*map(parameter_of, WHAT), "unpinned")
#: parameters in whose place a command has several options
_SEVERAL = {"patcher": _ALL_OF_WHAT, "patchers": _ALL_OF_WHAT, "options": ("revision", "remote")}


def command(answer: Callable[..., Answer]) -> Callable[..., None]:
    """Print what a function answers, a value or a list of them, and exit with whether that is right.

    Errors of ours, and those of a place that isn't there, are one paragraph.
    """
    own = inspect.signature(answer).parameters
    names = [each for name in own for each in _SEVERAL.get(name, (name,))]
    defaults = {name: each.default for name, each in own.items() if each.default is not inspect.Parameter.empty}

    @functools.wraps(answer)
    def run(as_json: bool, **given: Any) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                value, right = answer(**_joined(answer.__name__, own, given))
        except (PatcherError, OSError) as error:  # OSError: of files that aren't there
            wrong = isinstance(error, InvalidPatcherError | PatchConflictError | OSError)
            typer.echo(f"error: {' '.join(str(error).split()) if isinstance(error, OSError) else error}", err=True)
            raise typer.Exit(2 if wrong else 1) from error
        values = value if isinstance(value, list) else [value]
        if as_json:
            found = [each.to_dict() for each in values]
            typer.echo(json.dumps(found if values is value else found[0], indent=2))
        else:
            for each in values:
                each.show()  # in colours, where that is a terminal
        raise typer.Exit(0 if right else 1)

    return with_options(run, [*names, "as_json"], **defaults)


def _joined(name: str, own: Iterable[str], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command, in which what several options say together is one."""
    if "options" in own:
        revision = given.pop("revision")
        # Given in any case: transformers prompts at the terminal where it isn't.
        given["options"] = {"trust_remote_code": given.pop("remote")} | ({"revision": revision} if revision else {})
    for parameter in {*own} & {"patcher", "patchers"}:
        texts = {option: found for option in WHAT if (found := given.pop(parameter_of(option)))}
        if not texts:
            forms = ", ".join(f"{option} {metavar}" for option, (metavar, _) in WHAT.items())
            raise typer.BadParameter(
                f"{name} needs to know what to load the model with, by one or more of {forms}. "
                "`patcher presets MODEL` lists the presets that fit."
            )
        from patcher.cli.values import each_of

        patchers = each_of(texts)
        if given.pop("unpinned"):
            patchers = [each.replace(fingerprints={}, transformers="") for each in patchers]
        given[parameter] = patchers if parameter == "patchers" else functools.reduce(operator.or_, patchers)
    return given


@command
def presets(options: Any, model: str | None = None) -> Answer:
    """List presets (verified patchers), or those that fit a model.

    With MODEL those that fit it, the recommended first; where none fits, the reason.
    """
    from patcher.cli.values import listing

    return listing(model, options), True


@command
def plan(model: str, patcher: Any, options: Any) -> Answer:
    """Show what a load would do, without reading a weight.

    The config and the headers of the checkpoint are read. Exits with 1 if the load would fail.
    """
    planned = library.plan(model, patcher, **options)
    return planned, planned.ok


@command
def verify(model: str, patcher: Any, dtype: str | None, stage: Any, quick: bool, options: Any) -> Answer:
    """Check that a patched model computes and saves as stock.

    The model is loaded with the patcher and without it (stock, as transformers has it), and both are compared. Exits
    with 1 if they differ.
    """
    import torch

    chosen = getattr(torch, dtype or "float32")
    verified = library.verify(model, patcher, stages=stage, quick=quick, dtype=chosen, **options)
    return verified, verified.passed


@command
def bench(model: str, patchers: Any, seconds: Any, measure: Any, dtype: Any, unverified: bool, options: Any) -> Answer:
    """Measure whether patchers make a model faster on this machine.

    Each of them, and each subset of their members, takes turns with stock; without --no-verify those that don't
    compute the same as stock are left out. Exits with 1 if nothing could be measured.
    """
    options |= {"seconds": 60.0 if seconds is None else seconds, "dtype": dtype or "auto"}
    found = library.benchmark(model, *patchers, measures=measure, verify=not unverified, **options)
    return found, bool(found.measured)


@command
def export(model: str, folder: Path, patcher: Any, push: Any, quick: bool, unverified: bool, options: Any) -> Answer:
    """Write a folder that anyone loads without this package.

    With trust_remote_code=True: in it are a modeling file, the config, the weights and all files beside them as they
    are, and a model card. It is compared with the original; exits with 1, and writes nothing, if they differ.
    """
    options |= {"quick": quick, "verify": not unverified, "push_to_hub": push or ""}
    return library.export(model, patcher, folder, **options), True


@command
def diff(model: str, patcher: Any, options: Any) -> Answer:
    """Show how the modeling code changes.

    A diff for each class that is replaced or fused, and each function.
    """
    return library.diff(model, patcher, **options), True
