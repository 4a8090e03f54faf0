"""`patcher codegen`: generate, list and check patched modeling files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patcher.errors import CodegenError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def codegen(
    module: Annotated[str | None, typer.Argument(help="The module of a config, or the path of its file.")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder to write to [default: generated/ beside the config]"),
    ] = None,
    config_name: Annotated[
        str | None, typer.Option("--config-name", "-c", help="Variable that holds the config [default: config]")
    ] = None,
    list_configs: Annotated[bool, typer.Option("--list", help="List the configs of the project.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Generate from every config of the project.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write a unified diff against the original beside it.")] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Exit with 1 and a diff if a file is not what its config says.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="With --check: write what drifted.")] = False,
    formatted: Annotated[bool, typer.Option("--format", help="Run ruff over what is generated.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name every patch.")] = False,
) -> None:
    """Generate patched modeling files.

    From configs, and check them for drift.
    """
    from patcher.codegen import commands  # takes a third of a second, which `--help` doesn't need

    try:
        settings = commands.read_settings()
        formatted = formatted or settings.formatted
        if fix and not check_only:
            raise typer.BadParameter("--fix belongs to --check.")
        if list_configs:
            commands.list_configs(commands.discover(settings))
        elif check_only:
            commands.check_files([module] if module else None, fix, output_dir, formatted)
        elif every or module:
            modules = [str(path) for path in commands.discover(settings)] if every else [str(module)]
            for entry in modules:
                for config in commands.load_configs(entry, config_name if not every else None):
                    commands.generate_file(config, output_dir, diff, dry_run, formatted, verbose)
        else:
            raise typer.BadParameter("Name a config, or use --list, --all or --check.")
    except CodegenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
