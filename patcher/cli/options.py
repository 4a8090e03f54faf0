"""The arguments and options of all commands, in one table from which a command takes those it needs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

#: option that makes a patcher -> its metavar and help
PATCHER_OPTIONS = {
    "--preset": ("NAME", "A preset, by its name in `patcher presets`"),
    "--fusion": ("NAME", "A fusion: qkv, kv, gate_up, siblings, sequential_experts, patch_embeddings or split"),
    "--patcher": ("MODULE:CONSTANT", "A Patcher of your own, such as my_patches:PATCHER"),
    "--class": (
        "NAME=MODULE:CLASS",
        "Your class for one of the model, or of like:LlamaRMSNorm for all that compute the same, such as "
        "LlamaMLP=my_patches:MyMLP",
    ),
    "--module": (
        "PATH=MODULE:CLASS",
        "Your class for modules, such as model.layers.{0..3}.mlp=my_patches:MyMLP",
    ),
    "--function": (
        "NAME=MODULE:FUNCTION",
        "Your function for one that modeling code calls, such as apply_rotary_pos_emb=my_patches:rotary",
    ),
}


def parameter_of(option: str) -> str:
    """Return the name of the parameter for an option of `PATCHER_OPTIONS`."""
    return f"{option.strip('-')}_"


class Parameter(NamedTuple):
    """A parameter of a command: its annotation and default for typer, and its label in messages."""

    annotation: Any
    default: Any
    label: str


def _argument(metavar: str, text: str, kind: Any = str) -> Parameter:
    return Parameter(Annotated[kind, typer.Argument(metavar=metavar, help=text)], inspect.Parameter.empty, metavar)


def _option(names: str, metavar: str | None, text: str, kind: Any = str, **limits: float) -> Parameter:
    option: Any = typer.Option(*names.split(), metavar=metavar, help=text, **limits)  # type: ignore[arg-type]
    return Parameter(Annotated[kind | None, option], None, names.split()[-1])


def _repeated(name: str, metavar: str, text: str) -> Parameter:
    return _option(name, metavar, f"{text}; may be repeated.", list[str])


def _flag(names: str, text: str) -> Parameter:
    return Parameter(Annotated[bool, typer.Option(*names.split(), help=text)], False, names.split()[-1])


_DTYPE = Literal["float32", "bfloat16", "float16"]
OPTIONS = {
    "model": _argument("MODEL", "A repo on the hub, or a folder."),
    "folder": _argument("FOLDER", "Where to write: a new or an empty folder.", Path),
    **{parameter_of(option): _repeated(option, *texts) for option, texts in PATCHER_OPTIONS.items()},
    "unpinned": _flag("--unpinned", "Ignore the pins of a preset, to try it on code that has changed."),
    "dtype": _option("--dtype", None, "The dtype of the model [default: float32, of bench the checkpoint's].", _DTYPE),
    "stage": _repeated("--stage", "NAME", "Run only this stage, such as training or save"),
    "quick": _flag("--quick", "Take a tenth of the time: find wrong weights, but not what only some inputs show."),
    "seconds": _option(
        "--seconds", "FLOAT", "How long to measure; more resolves smaller differences.", float, min=0.1
    ),
    "measure": _repeated("--measure", "NAME", "Measure only this, such as decode or memory"),
    "unverified": _flag("--no-verify", "Don't compare the patched model with stock."),
    "push": _option("--push", "REPO", "Push it to this repo on the hub, which is created if needed."),
    "revision": _option("--revision", "REVISION", "A branch, tag or commit of the repo."),
    "remote": _flag("--trust-remote-code", "Run code from the repo."),
    "as_json": _flag("--json", "Write JSON to stdout, and nothing else."),
    # Options of code generation.
    "module": _argument("CONFIG", "The module of a config, or the path of its file."),
    "output_dir": _option("--output-dir -o", "FOLDER", "Where to write [default: generated/ beside it].", Path),
    "config_name": _option("--config-name -c", "NAME", "The variable of the config [default: config]."),
    "list_configs": _flag("--list", "List the configs of the project."),
    "every": _flag("--all", "Generate from every config of the project."),
    "dry_run": _flag("--dry-run", "Show what would change; write nothing."),
    "diff": _flag("--diff", "Also write a unified diff against the original."),
    "check_only": _flag("--check", "Write nothing; exit with 1 and a diff if a file isn't up to date."),
    "fix": _flag("--fix", "With --check: write the files that aren't up to date."),
    "formatted": _flag("--format", "Format the files with ruff."),
    "verbose": _flag("--verbose -v", "List the patches."),
    "model_name": _option("--model", "CLASS", "The model to run [default: until all patches ran]."),
    "model_config": _option("--model-config", "FOLDER", "A small config of it [default: generated]."),
    "tolerance": _option("--tolerance", "FLOAT", "The allowed relative difference of outputs from stock's.", float),
    "partly": _flag("--partly", "Don't fail for patches that no model runs."),
}


def with_options(function: Callable[..., Any], names: Iterable[str], **defaults: Any) -> Callable[..., Any]:
    """Return the function with a signature that typer reads; defaults override those of the table."""
    parameters = []
    for name in names:
        annotation, default, _ = OPTIONS[name]
        default, kind = defaults.get(name, default), inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {}
    return function
