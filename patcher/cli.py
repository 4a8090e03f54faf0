"""The command line: `patcher codegen ...`. Nothing here imports torch, so that `patcher --help` answers at once."""

from __future__ import annotations

import typer

from patcher.codegen.cli import app as codegen

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(codegen, name="codegen")


@app.callback()
def patcher() -> None:
    """Change the module classes of a Hugging Face model for one load, and save the original checkpoint back."""


def main() -> None:
    """The entry point of the `patcher` command."""
    app(prog_name="patcher")


if __name__ == "__main__":
    main()
