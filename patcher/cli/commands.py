"""The commands around a patcher: `presets`, `plan`, `verify`, `diff`, `fingerprint`.

Each exits with 0 when all is right, with 1 when what it checks fails, and with 2 when its arguments are invalid. The
answer is all that goes to stdout.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A repo on the hub, or a folder.")]
Preset = Annotated[list[str] | None, typer.Option("--preset", metavar="NAME", help="A preset; may be repeated.")]
Fusion = Annotated[
    list[str] | None,
    typer.Option("--fusion", metavar="NAME", help="A fusion, such as qkv or gate_up; may be repeated."),
]
Constant = Annotated[
    list[str] | None,
    typer.Option("--patcher", metavar="MODULE:CONSTANT", help="A Patcher of your own code; may be repeated."),
]
Module = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="PATH=MODULE:CLASS", help="A class for the modules at a path; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Unpinned = Annotated[
    bool, typer.Option("--unpinned", help="Leave out the pins: to see how a preset does on code that has changed.")
]
Revision = Annotated[str | None, typer.Option("--revision", help="The branch, tag or commit of the repo.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the repo brings with it.")]


def _command(answer: Callable[..., tuple[Any, bool]]) -> Callable[..., None]:
    """Print what a function answers, and exit with whether it is right: (value, right).

    Errors of ours, and those of a place that isn't there, are one paragraph; stdout is kept for the answer.
    """

    @functools.wraps(answer)
    def command(as_json: bool, **arguments: Any) -> None:
        from patcher.errors import InvalidPatcherError, PatchConflictError, PatcherError

        try:
            with contextlib.redirect_stdout(sys.stderr):
                value, right = answer(as_json=as_json, **arguments)
        except (PatcherError, OSError) as error:  # OSError: of files that aren't there
            wrong = isinstance(error, InvalidPatcherError | PatchConflictError | OSError)
            typer.echo(f"error: {' '.join(str(error).split()) if isinstance(error, OSError) else error}", err=True)
            raise typer.Exit(2 if wrong else 1) from error
        if as_json:
            typer.echo(json.dumps(value.to_dict(), indent=2))
        elif hasattr(value, "show"):  # in colours, where that is a terminal
            value.show()
        else:
            typer.echo(str(value))
        raise typer.Exit(0 if right else 1)

    return command


@_command
def presets(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Only those that fit this repo or folder, the best first.")
    ] = None,
    revision: Revision = None,
    remote: Remote = False,
    as_json: Json = False,
) -> tuple[Any, bool]:
    """List the presets, or those that fit a model."""
    from patcher.cli.values import listing

    return listing(model, _options(revision, remote)), True


@_command
def plan(
    model: Model,
    preset: Preset = None,
    fusion: Fusion = None,
    constant: Constant = None,
    module: Module = None,
    unpinned: Unpinned = False,
    revision: Revision = None,
    remote: Remote = False,
    as_json: Json = False,
) -> tuple[Any, bool]:
    """Say what a load would do, without reading a weight. Exits with 1 if it would fail."""
    asked, options = _asked("plan", model, preset, fusion, constant, module, revision, remote, unpinned)
    from patcher.inspection.plan import plan

    planned = plan(model, asked, **options)
    return planned, planned.ok


@_command
def verify(
    model: Model,
    preset: Preset = None,
    fusion: Fusion = None,
    constant: Constant = None,
    module: Module = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="What to compute in.")
    ] = "float32",
    stage: Annotated[
        list[str] | None, typer.Option("--stage", metavar="NAME", help="Run only this stage; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the time: a wrong weight or layer, not a hidden condition.")
    ] = False,
    unpinned: Unpinned = False,
    revision: Revision = None,
    remote: Remote = False,
    as_json: Json = False,
) -> tuple[Any, bool]:
    """Compare stock and patched.

    Both are loaded; what they compute and what they save is compared. Exits with 1 if they differ.
    """
    asked, options = _asked("verify", model, preset, fusion, constant, module, revision, remote, unpinned)
    import torch

    from patcher.verification.verify import verify

    verified = verify(model, asked, stages=stage, quick=quick, dtype=getattr(torch, dtype), **options)
    return verified, verified.passed


@_command
def diff(
    model: Model,
    preset: Preset = None,
    fusion: Fusion = None,
    constant: Constant = None,
    module: Module = None,
    revision: Revision = None,
    remote: Remote = False,
    as_json: Json = False,
) -> tuple[Any, bool]:
    """Show what changes in the code.

    For each class that is replaced or fused, as patched against as shipped.
    """
    asked, options = _asked("diff", model, preset, fusion, constant, module, revision, remote)
    from patcher.inspection.diff import diff

    return diff(model, asked, **options), True


@_command
def fingerprint(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="The name of a preset, or MODULE:CONSTANT.")],
    model: Annotated[
        str, typer.Option("--verify", metavar="MODEL", help="Verify it on this model first; no pin if that fails.")
    ] = "",
    revision: Revision = None,
    remote: Remote = False,
    as_json: Json = False,
) -> tuple[Any, bool]:
    """Print the pin of a preset.

    For the transformers that is installed. Exits with 1 if the preset is pinned to other code; with --verify, if what
    is verified on this code is not the same as stock.
    """
    from patcher.checkpoints.model_classes import config_of
    from patcher.cli.values import named, pin_of, without_pins

    pin = pin_of(preset)
    if model:
        from patcher.verification.verify import verify

        options = _options(revision, remote)
        config_of(model, options)
        verified = verify(model, without_pins(named(preset)), **options)
        verified.show(sys.stderr)
        if not verified.passed:
            raise typer.Exit(1)
    return pin, bool(model) or pin.holds


def _options(revision: str | None, remote: bool) -> dict[str, Any]:
    # Said in any case: transformers asks at the terminal where it isn't.
    return {"trust_remote_code": remote} | ({"revision": revision} if revision else {})


def _asked(
    command: str,
    model: str,
    preset: list[str] | None,
    fusion: list[str] | None,
    constant: list[str] | None,
    module: list[str] | None,
    revision: str | None,
    remote: bool,
    unpinned: bool = False,
) -> tuple[Patcher, dict[str, Any]]:
    """The patcher that was asked for, and the options of a model that is there."""
    if not (preset or fusion or constant or module):
        raise typer.BadParameter(
            f"{command} needs to know what to load the model with: --preset NAME, --fusion NAME, "
            "--patcher MODULE:CONSTANT or --module PATH=MODULE:CLASS. `patcher presets MODEL` lists the presets that "
            "fit."
        )
    from patcher.checkpoints.model_classes import config_of
    from patcher.cli.values import combined, without_pins

    patcher = combined(preset or (), fusion or (), constant or (), module or ())
    options = _options(revision, remote)
    config_of(model, options)
    return without_pins(patcher) if unpinned else patcher, options
