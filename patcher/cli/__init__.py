"""The command line. Nothing here imports torch, so that it answers at once; what needs torch imports it late."""

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

#: What `patcher` alone says: commands to copy.
FIRST_SCREEN = """\
Change the module classes of a Hugging Face model for one load, and save the original checkpoint back.

# the patchers that were verified on a model, the best first
  patcher presets HuggingFaceTB/SmolLM2-135M-Instruct
# what a load would do: config and headers are read, no weight
  patcher plan HuggingFaceTB/SmolLM2-135M-Instruct --fusion qkv --fusion gate_up
# the code as patched against as shipped
  patcher diff HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# whether it computes, trains and saves as without; exits with 1 if not
  patcher verify HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# whether it pays on this machine, and which part of it
  patcher bench HuggingFaceTB/SmolLM2-135M-Instruct --preset LLAMA_FUSED_PROJECTIONS
# the same commands for a class of your own my_patches.py, or for a patcher: --patcher my_patches:PATCHER
  patcher plan HuggingFaceTB/SmolLM2-135M-Instruct --class "like:LlamaRMSNorm=my_patches:MyNorm"
# a folder that anyone loads with trust_remote_code=True, without this package
  patcher export HuggingFaceTB/SmolLM2-135M-Instruct smollm2-fused --preset LLAMA_FUSED_PROJECTIONS
# a modeling file of your config with its patches in it, and whether it still is what the config says
  patcher codegen my_patch_gen_config.py --diff
  patcher codegen --check

A folder does in place of a repo. All commands: patcher --help; all options of one: patcher plan --help."""

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest of `--help`
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
    hear_nothing_of_imports()
    with imported_from_text(Path.cwd()):  # what options name, and the modules that configs patch
        app(prog_name="patcher")


def hear_nothing_of_imports() -> None:
    """From here on warnings are shown and logged where nothing is being imported, errors always.

    What libraries warn of while they are imported is about packages that a command doesn't use.
    """
    show, is_enabled = warnings.showwarning, logging.Logger.isEnabledFor

    def shown(*arguments: Any, **more: Any) -> None:
        if not _importing():
            show(*arguments, **more)

    warnings.showwarning = shown
    logging.Logger.isEnabledFor = lambda logger, level: (  # type: ignore[method-assign, assignment]
        is_enabled(logger, level) and (level >= logging.ERROR or not _importing())
    )


def _importing() -> bool:
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)
