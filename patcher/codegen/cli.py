"""`patcher codegen`: generate, list and check patched modeling files."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from patcher.codegen.calls import check_calls
from patcher.codegen.checker import check, discover, load_configs, read_settings
from patcher.codegen.config import PatchConfig
from patcher.codegen.generator import Generated, build
from patcher.codegen.header import config_path
from patcher.codegen.writer import diff_path, final_text, output_folder, unified_diff, write_generated
from patcher.errors import CodegenError

app = typer.Typer(
    help="Generate patched modeling files from configs, and check them for drift.",
    context_settings={"allow_interspersed_args": True},
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
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
    """Generate the modeling file of a config."""
    try:
        settings = read_settings()
        formatted = formatted or settings.formatted
        if fix and not check_only:
            raise typer.BadParameter("--fix belongs to --check.")
        if list_configs:
            _list(discover(settings))
        elif check_only:
            _check([module] if module else None, fix, output_dir, formatted)
        elif every or module:
            modules = [str(path) for path in discover(settings)] if every else [str(module)]
            for entry in modules:
                for config in load_configs(entry, config_name if not every else None):
                    _generate(config, output_dir, diff, dry_run, formatted, verbose)
        else:
            raise typer.BadParameter("Name a config, or use --list, --all or --check.")
    except CodegenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _list(paths: list[Path]) -> None:
    failed = False
    for path in paths:
        try:
            for config in load_configs(str(path)):
                count = len(config.patches)
                typer.echo(
                    f"{config_path(str(path))}: {config.source_module} -> {config.target_file}, {count} patches"
                )
        except CodegenError as error:
            failed = True
            typer.echo(f"{config_path(str(path))}: can't be imported\n{error}")
    if not paths:
        typer.echo("no *_patch_gen_config.py here; set search_root in [tool.patcher.codegen] of pyproject.toml")
    if failed:
        raise typer.Exit(1)


def _check(modules: list[str] | None, fix: bool, output_dir: Path | None, formatted: bool) -> None:
    results = check(modules, fix=fix, output_dir=output_dir, formatted=formatted)
    for result in results:
        typer.echo(str(result))
    bad = sum(not result.ok for result in results)
    typer.echo(f"{len(results)} checked, {bad} to mend")
    if bad:
        raise typer.Exit(1)


def _generate(
    config: PatchConfig, output_dir: Path | None, diff: bool, dry_run: bool, formatted: bool, verbose: bool
) -> None:
    generated = build(config)
    folder = output_folder(config, output_dir)
    path = folder / config.target_file
    if verbose:
        _explain(generated)
    if dry_run:
        _preview(generated, path, diff, formatted)
    else:
        write_generated(generated, folder, diff=diff, formatted=formatted)
        typer.echo(f"wrote {path}" + (f" and {diff_path(path).name}" if diff else ""))
    for mismatch in check_calls(generated):
        typer.echo(f"warning: {path}, {mismatch}", err=True)


def _explain(generated: Generated) -> None:
    typer.echo(f"{generated.source.name} ({generated.source.version or 'no version'})")
    for patch in generated.patches:
        text = f"  {patch.kind.value} {patch.target}"
        typer.echo(text + (f": {patch.description}" if patch.description else ""))
    for helper in generated.config.helpers:
        typer.echo(f"  add helper {helper.source.name}")


def _preview(generated: Generated, path: Path, diff: bool, formatted: bool) -> None:
    """What a run would do: the diff against the original, or how the file on the disk would change."""
    text = final_text(generated, formatted=formatted)
    if diff:
        typer.echo(unified_diff(generated, text), nl=False)
        return
    old = path.read_text(generated.source.encoding) if path.is_file() else ""
    lines = list(
        difflib.unified_diff(old.splitlines(), text.splitlines(), "on the disk", "generated", lineterm="", n=1)
    )
    state = "create" if not path.is_file() else "change" if lines else "leave as it is"
    typer.echo(f"would {state} {path} ({len(text.splitlines())} lines)")
    if path.is_file() and lines:
        typer.echo("\n".join(lines))
