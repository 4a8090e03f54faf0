"""The commands around a patcher: `presets`, `plan`, `verify`, `bench`, `diff`, `export`, `fingerprint`.

Each exits with 0 when all is right, with 1 when what it checks fails, and with 2 when its arguments are invalid. The
answer is all that goes to stdout.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A repo on the hub, or a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REVISION", help="A branch, tag or commit of the repo.")
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the repo brings with it.")]


def _repeated(option: str, metavar: str, what: str) -> Any:
    return Annotated[list[str] | None, typer.Option(option, metavar=metavar, help=f"{what}; may be repeated.")]


#: What to load a model with: the parameters of `plan`, `verify`, `bench`, `diff` and `export`.
_WHAT = {
    "preset": _repeated("--preset", "NAME", "A preset, by its name in `patcher presets`"),
    "fusion": _repeated(
        "--fusion", "NAME", "A fusion: qkv, kv, gate_up, siblings, sequential_experts, patch_embeddings or split"
    ),
    "patcher": _repeated("--patcher", "MODULE:CONSTANT", "A Patcher of your own, such as my_patches:PATCHER"),
    "class_": _repeated(
        "--class",
        "NAME=MODULE:CLASS",
        "A class of yours for one of the model, such as LlamaMLP=my_patches:MyMLP; like:LlamaRMSNorm for all that "
        "compute the same",
    ),
    "module": _repeated(
        "--module",
        "PATH=MODULE:CLASS",
        "A class of yours for modules, such as model.layers.{0..3}.mlp=my_patches:MyMLP",
    ),
    "function": _repeated(
        "--function",
        "NAME=MODULE:FUNCTION",
        "A function of yours for one that modeling code calls, such as apply_rotary_pos_emb=my_patches:rotary",
    ),
}
Unpinned = Annotated[
    bool, typer.Option("--unpinned", help="Ignore the pins of a preset, to try it on code that has changed.")
]


def _command(answer: Callable[..., tuple[Any, bool]]) -> Callable[..., None]:
    """Print what a function answers, and exit with whether it is right: (value, right).

    Errors of ours, and those of a place that isn't there, are one paragraph; stdout is kept for the answer.
    """

    @functools.wraps(answer)
    def command(as_json: bool, **arguments: Any) -> None:
        from patcher.errors import InvalidPatcherError, PatchConflictError, PatcherError

        try:
            with contextlib.redirect_stdout(sys.stderr):
                value, right = answer(**arguments)
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

    own = inspect.signature(answer, eval_str=True)
    command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), _parameter("as_json", Json, False)]
    )
    command.__annotations__ = {}
    return command


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@_command
def presets(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A repo on the hub, or a folder.")] = None,
    revision: Revision = None,
    remote: Remote = False,
) -> tuple[Any, bool]:
    """List presets (verified patchers), or those that fit a model.

    With MODEL those that fit it, the recommended first; where none fits, the reason.
    """
    from patcher.cli.values import listing

    return listing(model, _options(revision, remote)), True


def _with_patcher(answer: Callable[..., tuple[Any, bool]], *, several: bool = False) -> Callable[..., None]:
    """Give a command of (model, patcher, options) the parameters that say what to load which model with: as one
    patcher, or as several.
    """

    @functools.wraps(answer)
    def command(model: str, revision: str | None, remote: bool, unpinned: bool, **arguments: Any) -> tuple[Any, bool]:
        given = {f"--{name.rstrip('_')}": texts for name in _WHAT if (texts := arguments.pop(name))}
        if not given:
            raise typer.BadParameter(
                f"{answer.__name__} needs to know what to load the model with: --preset NAME, --fusion NAME, "
                "--patcher MODULE:CONSTANT, --class NAME=MODULE:CLASS, --module PATH=MODULE:CLASS or "
                "--function NAME=MODULE:FUNCTION. `patcher presets MODEL` lists the presets that fit."
            )
        from patcher.checkpoints.model_classes import config_of
        from patcher.cli.values import combined, each_of, without_pins

        patchers, options = each_of(given) if several else [combined(given)], _options(revision, remote)
        patchers = [without_pins(each) for each in patchers] if unpinned else patchers
        config_of(model, options)
        return answer(model, patchers if several else patchers[0], options, **arguments)

    own = list(inspect.signature(answer, eval_str=True).parameters.values())[3:]
    parameters = [
        _parameter("model", Model, inspect.Parameter.empty),
        *(_parameter(name, annotation) for name, annotation in _WHAT.items()),
        *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
        _parameter("unpinned", Unpinned, False),
        _parameter("revision", Revision),
        _parameter("remote", Remote, False),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return _command(command)


@_with_patcher
def plan(model: str, patcher: Any, options: Any) -> tuple[Any, bool]:
    """Show what a load would do, without reading a weight.

    The config and the headers of the checkpoint are read. Exits with 1 if the load would fail.
    """
    from patcher.inspection.plan import plan

    planned = plan(model, patcher, **options)
    return planned, planned.ok


@_with_patcher
def verify(
    model: str,
    patcher: Any,
    options: Any,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="The dtype to compute in.")
    ] = "float32",
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage", metavar="NAME", help="Run only this stage, such as training or save; may be repeated."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Take a tenth of the time: see wrong weights and layers, but not what only some inputs show.",
        ),
    ] = False,
) -> tuple[Any, bool]:
    """Check that a patched model computes and saves as stock.

    The model is loaded with the patcher and without it (stock, as transformers has it), and both are compared. Exits
    with 1 if they differ.
    """
    import torch

    from patcher.verification.verify import verify

    verified = verify(model, patcher, stages=stage, quick=quick, dtype=getattr(torch, dtype), **options)
    return verified, verified.passed


@functools.partial(_with_patcher, several=True)
def bench(
    model: str,
    patchers: Any,
    options: Any,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How many seconds to measure; more tell smaller differences.")
    ] = 60.0,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            "--measure", metavar="NAME", help="Measure only this, such as decode or memory; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option("--dtype", help="The dtype to compute in.")
    ] = "auto",
    unverified: Annotated[
        bool, typer.Option("--no-verify", help="Measure patchers that don't compute the same as stock, too.")
    ] = False,
) -> tuple[Any, bool]:
    """Measure whether patchers make a model faster on this machine.

    Each of them, and each subset of their members, takes turns with stock. Exits with 1 if nothing could be measured.
    """
    from patcher.verification.benchmark import benchmark

    found = benchmark(
        model, *patchers, seconds=seconds, measures=measure, verify=not unverified, dtype=dtype, **options
    )
    return found, bool(found.measured)


@_with_patcher
def export(
    model: str,
    patcher: Any,
    options: Any,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write: a new or an empty folder.")],
    push: Annotated[
        str, typer.Option("--push", metavar="REPO", help="Put it into this repo on the hub, which is made if needed.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Verify it in a tenth of the time.")] = False,
    unverified: Annotated[bool, typer.Option("--no-verify", help="Don't compare it with the original.")] = False,
) -> tuple[Any, bool]:
    """Write a folder that anyone loads without this package.

    With trust_remote_code=True: in it are a modeling file, the config, the weights and all files beside them as they
    are, and a model card. It is compared with the original; exits with 1, and writes nothing, if they differ.
    """
    from patcher.publishing import export

    written = export(model, patcher, folder, quick=quick, verify=not unverified, push_to_hub=push, **options)
    return written, True


@_with_patcher
def diff(model: str, patcher: Any, options: Any) -> tuple[Any, bool]:
    """Show how the modeling code changes.

    A diff for each class that is replaced or fused, and each function.
    """
    from patcher.inspection.diff import diff

    return diff(model, patcher, **options), True


@_command
def fingerprint(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="The name of a preset, or MODULE:CONSTANT.")],
    model: Annotated[
        str,
        typer.Option(
            "--verify", metavar="MODEL", help="Verify the preset on this model first; print nothing if that fails."
        ),
    ] = "",
    revision: Revision = None,
    remote: Remote = False,
) -> tuple[Any, bool]:
    """Print fingerprints of the code that a preset is pinned to.

    They are those of the transformers that is installed. Exits with 1 if the preset is pinned to other code; with
    --verify, if on this code a patched model isn't the same as stock.
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
    # Given in any case: transformers prompts at the terminal where it isn't.
    return {"trust_remote_code": remote} | ({"revision": revision} if revision else {})
