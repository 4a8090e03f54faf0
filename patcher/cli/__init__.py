"""The command line. Modules that need torch are imported in the commands, so that `--help` is fast."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from patcher.cli import commands
from patcher.cli.codegen import app as codegen
from patcher.source.importing import imported_from_text

__all__ = ["app", "main"]

#: The output of `patcher` without arguments: commands to copy.
FIRST_SCREEN = """\
Change the module classes of a Hugging Face model for one load, and save the original checkpoint back.

# the patchers that were verified on a model, the best first
  patcher presets HuggingFaceTB/SmolLM2-135M-Instruct
# what a load would do: reads the config and the headers, no weights
  patcher plan HuggingFaceTB/SmolLM2-135M-Instruct --fusion qkv --fusion gate_up
# the changes to the modeling code, as a diff
  patcher diff HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# whether it computes, trains and saves as the stock model does; exits with 1 if not
  patcher verify HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# whether it is faster on this machine, and which part of it
  patcher bench HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# the same commands with a class in your own my_patches.py, or with a patcher: --patcher my_patches:PATCHER
  patcher plan HuggingFaceTB/SmolLM2-135M-Instruct --class "like:LlamaRMSNorm=my_patches:MyNorm"
# a folder that anyone can load with trust_remote_code=True, without this package
  patcher export HuggingFaceTB/SmolLM2-135M-Instruct smollm2-fused --preset LLAMA_FUSED_PROJECTIONS
# a patched modeling file from your config, and whether it is up to date
  patcher codegen my_patch_gen_config.py --diff
  patcher codegen --check

A folder can be passed instead of a repo. All commands: patcher --help; all options of one: patcher plan --help."""

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes as long as the rest of `--help`
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name in ("presets", "plan", "verify", "bench", "diff", "export"):
    app.command()(getattr(commands, name))
app.add_typer(codegen, name="codegen")


@app.callback(invoke_without_command=True)
def patcher(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version of this package.")] = False,
) -> None:
    """Change the module classes of a Hugging Face model for one load, and save the original checkpoint back."""
    if version:
        typer.echo(f"patcher {importlib.metadata.version('patcher')}")
    elif context.invoked_subcommand is None:
        typer.echo(FIRST_SCREEN)


def main() -> None:
    """The entry point of the `patcher` command."""
    silence_imports()
    with imported_from_text(Path.cwd()):  # the modules that options name, and those that configs patch
        app(prog_name="patcher")


def silence_imports() -> None:
    """Suppress warnings, but not errors, while modules are being imported.

    Libraries warn there about packages that a command doesn't use.
    """
    show, is_enabled = warnings.showwarning, logging.Logger.isEnabledFor

    def show_unless_importing(*args: Any, **kwargs: Any) -> None:
        if not _is_importing():
            show(*args, **kwargs)

    warnings.showwarning = show_unless_importing
    logging.Logger.isEnabledFor = lambda logger, level: (  # type: ignore[method-assign, assignment]
        is_enabled(logger, level) and (level >= logging.ERROR or not _is_importing())
    )


def _is_importing() -> bool:
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)
