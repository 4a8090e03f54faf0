"""The command line. Nothing here imports torch, so that `patcher --help` answers at once; commands import it late."""

from __future__ import annotations

import typer

from patcher.cli import commands
from patcher.cli.codegen import app as codegen

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest of `--help`
)
for command in (commands.presets, commands.plan, commands.verify, commands.diff, commands.fingerprint):
    app.command()(command)
app.add_typer(codegen, name="codegen")


@app.callback()
def patcher() -> None:
    """Change the module classes of a Hugging Face model for one load, and save the original checkpoint back."""


def main() -> None:
    """The entry point of the `patcher` command."""
    app(prog_name="patcher")
