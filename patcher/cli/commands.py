"""The commands around a patcher: `presets`, `plan`, `verify`, `bench`, `diff`, `export`.

Exit codes: 0 on success, 1 if the check fails, 2 if the arguments are invalid. Only the result goes to stdout. Modules
that take seconds to import are imported in the commands, so that `--help` is fast.
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
from patcher.cli.options import PATCHER_OPTIONS, parameter_of, with_options
from patcher.errors import InvalidPatcherError, PatchConflictError, PatcherError

#: the value that a command prints, and whether it succeeded
Result = tuple[Any, bool]
_OF_USAGE = InvalidPatcherError, PatchConflictError
_PATCHER_PARAMETERS = (*map(parameter_of, PATCHER_OPTIONS), "unpinned")
#: parameter of a command -> the several options that it is made from
_COMBINED = {"patcher": _PATCHER_PARAMETERS, "patchers": _PATCHER_PARAMETERS, "options": ("revision", "remote")}


def _expected() -> tuple[type[Exception], ...]:
    """Return the errors that are printed in a line: of this package, of files, and of weights that were cut off."""
    safetensors = sys.modules.get("safetensors")  # which code generation doesn't need
    return (PatcherError, OSError, *([safetensors.SafetensorError] if safetensors is not None else []))


def command(function: Callable[..., Result]) -> Callable[..., None]:
    """Print the result of a function, a value or a list of values, and exit with its status.

    Errors of this package and of missing files are printed without a traceback.
    """
    parameters = inspect.signature(function).parameters
    names = [option for name in parameters for option in _COMBINED.get(name, (name,))]
    defaults = {name: param.default for name, param in parameters.items() if param.default is not param.empty}

    @functools.wraps(function)
    def run(as_json: bool, **arguments: Any) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                value, succeeded = function(**_combine(function.__name__, parameters, arguments))
        except _expected() as error:
            is_usage = isinstance(error, _OF_USAGE) or not isinstance(error, PatcherError)
            typer.echo(f"error: {' '.join(str(error).split()) if isinstance(error, OSError) else error}", err=True)
            raise typer.Exit(2 if is_usage else 1) from error
        values = value if isinstance(value, list) else [value]
        if as_json:
            dicts = [item.to_dict() for item in values]
            typer.echo(json.dumps(dicts if values is value else dicts[0], indent=2))
        else:
            for item in values:
                item.show()
        raise typer.Exit(0 if succeeded else 1)

    return with_options(run, [*names, "as_json"], **defaults)


def _combine(name: str, parameters: Iterable[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command, with those that are made from several options."""
    if "options" in parameters:
        revision, trust = arguments.pop("revision"), arguments.pop("remote")
        # Always passed, since transformers prompts for it in a terminal otherwise.
        arguments["options"] = {"trust_remote_code": trust} | ({"revision": revision} if revision else {})
    for parameter in {*parameters} & {"patcher", "patchers"}:
        texts = {option: values for option in PATCHER_OPTIONS if (values := arguments.pop(parameter_of(option)))}
        if not texts:
            forms = ", ".join(f"{option} {metavar}" for option, (metavar, _) in PATCHER_OPTIONS.items())
            raise typer.BadParameter(
                f"{name} needs a patcher, by one or more of {forms}. "
                "`patcher presets MODEL` lists the presets that fit."
            )
        from patcher.cli.values import patchers_of

        patchers = patchers_of(texts)
        if arguments.pop("unpinned"):
            patchers = [patcher.replace(fingerprints={}, transformers="") for patcher in patchers]
        arguments[parameter] = patchers if parameter == "patchers" else functools.reduce(operator.or_, patchers)
    return arguments


@command
def presets(options: Any, model: str | None = None) -> Result:
    """List presets (verified patchers), or those that fit a model.

    With MODEL, list those that fit it, the recommended one first; if none fits, print the reason.
    """
    from patcher.cli.values import listing

    return listing(model, options), True


@command
def plan(model: str, patcher: Any, options: Any) -> Result:
    """Show what a load would do, without reading a weight.

    Only the config and the headers of the checkpoint are read. Exits with 1 if a problem was found: if the
    load would fail, or a call of a replacement in modeling code would.
    """
    planned = library.plan(model, patcher, **options)
    return planned, planned.ok


@command
def verify(model: str, patcher: Any, dtype: str | None, stage: Any, quick: bool, options: Any) -> Result:
    """Check that a patched model computes and saves the same as stock.

    The model is loaded with the patcher and without it (stock, as in transformers), and both are compared. Exits with
    1 if they differ.
    """
    import torch

    torch_dtype = getattr(torch, dtype or "float32")
    verified = library.verify(model, patcher, stages=stage, quick=quick, dtype=torch_dtype, **options)
    return verified, verified.passed


@command
def bench(model: str, patchers: Any, seconds: Any, measure: Any, dtype: Any, unverified: bool, options: Any) -> Result:
    """Measure whether patchers make a model faster on this machine.

    The patchers, their members alone, and the faster ones together run in turns with stock; unless --no-verify is
    given, those that don't compute the same as stock are left out. Exits with 1 if nothing could be measured.
    """
    options |= {"seconds": 60.0 if seconds is None else seconds, "dtype": dtype or "auto"}
    benchmark = library.benchmark(model, *patchers, measures=measure, verify=not unverified, **options)
    return benchmark, bool(benchmark.measured)


@command
def export(model: str, folder: Path, patcher: Any, push: Any, quick: bool, unverified: bool, options: Any) -> Result:
    """Write a folder that anyone can load without this package.

    It is loaded with trust_remote_code=True, and has a modeling file, the config, the unchanged weights and other
    files, and a model card. It is compared with the original; exits with 1, and writes nothing, if they differ.
    """
    options |= {"quick": quick, "verify": not unverified, "push_to_hub": push or ""}
    return library.export(model, patcher, folder, **options), True


@command
def diff(model: str, patcher: Any, options: Any) -> Result:
    """Show how the modeling code changes.

    Prints a diff for every class that is replaced or fused, and every function. Exits with 1 if a load would fail.
    """
    changes = library.diff(model, patcher, **options)
    return changes, not changes.problems
