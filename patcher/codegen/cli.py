"""`patcher codegen`: generate, list and check patched modeling files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patcher.errors import CodegenError

if TYPE_CHECKING:
    from patcher.codegen.spec import PatchSpec

# What generates is imported in functions: it takes a third of a second, which `--help` doesn't need.

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
    with_manifest: Annotated[
        bool, typer.Option("--manifest", help="Write what it was made of beside it, as JSON.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Exit with 1 and a diff if a file is not what its config says.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="With --check: write what drifted.")] = False,
    rebase: Annotated[
        bool, typer.Option("--rebase", help="With --check: merge patches with changes of their originals, beside.")
    ] = False,
    formatted: Annotated[bool, typer.Option("--format", help="Run ruff over what is generated.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name every patch.")] = False,
) -> None:
    """Generate patched modeling files.

    From configs, and check them for drift.
    """
    from patcher.codegen.files.checker import check
    from patcher.codegen.files.projects import discover, load_configs, read_settings

    try:
        settings = read_settings()
        formatted = formatted or settings.formatted
        if fix and not check_only:
            raise typer.BadParameter("--fix belongs to --check.")
        if rebase and not check_only:
            raise typer.BadParameter("--rebase belongs to --check.")
        if list_configs:
            _list(discover(settings))
        elif check_only:
            configs = [module] if module else None
            results = check(configs, fix=fix, rebase=rebase, output_dir=output_dir, formatted=formatted)
            bad = sum(not result.ok for result in results)
            typer.echo("\n".join([*map(str, results), f"{len(results)} checked, {bad} to mend"]))
            if bad:
                raise typer.Exit(1)
        elif every or module:
            for entry in map(str, discover(settings) if every else [module]):
                for config in load_configs(entry, config_name if not every else None):
                    _generate(config, output_dir, diff, with_manifest, dry_run, formatted, verbose)
        else:
            raise typer.BadParameter("Name a config, or use --list, --all or --check.")
    except CodegenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _list(paths: list[Path]) -> None:
    """Print each config, its source and its file; exit with 1 if one can't be imported."""
    from patcher.codegen.files.projects import load_configs
    from patcher.codegen.generation.header import config_path

    failed = False
    for path in map(str, paths):
        try:
            for config in load_configs(path):
                what = f"{config.source_module} -> {config.target_file}, {len(config.patches)} patches"
                typer.echo(f"{config_path(path)}: {what}")
        except CodegenError as error:
            failed = True
            typer.echo(f"{config_path(path)}: can't be imported\n{error}")
    if not paths:
        typer.echo("no *_patch_gen_config.py here; set search_root in [tool.patcher.codegen] of pyproject.toml")
    if failed:
        raise typer.Exit(1)


def _generate(
    config: PatchSpec,
    output_dir: Path | None,
    diff: bool,
    with_manifest: bool,
    dry_run: bool,
    formatted: bool,
    verbose: bool,
) -> None:
    """Write the file of a config, or say what would be written."""
    from patcher.codegen.files.checker import check_calls
    from patcher.codegen.files.manifest import manifest_path
    from patcher.codegen.files.rebase import changed_originals
    from patcher.codegen.files.writer import (
        diff_path,
        final_text,
        output_folder,
        unified_diff,
        write_generated,
    )
    from patcher.codegen.generation.generator import build
    from patcher.source.differences import diff_of

    generated = build(config)
    folder = output_folder(config, output_dir)
    path = folder / config.target_file
    if verbose:
        typer.echo(f"{generated.source.name} ({generated.source.version or 'no version'})")
        for patch in generated.patches:
            text = f"  {patch.kind.value} {patch.target}"
            typer.echo(text + (f": {patch.description}" if patch.description else ""))
        for helper in config.helpers:
            typer.echo(f"  add helper {helper.source.name}")
    if not dry_run:
        taken_over = changed_originals(config, path)
        write_generated(generated, folder, diff=diff, with_manifest=with_manifest, formatted=formatted)
        beside = [each.name for each in (diff_path(path), manifest_path(path)) if each.is_file()]
        typer.echo(" and ".join([f"wrote {path}", *beside]))
        for change in taken_over:
            typer.echo(f"taken over: what {change.asked} at {change.where} patches has changed", err=True)
    elif diff:
        typer.echo(unified_diff(generated, final_text(generated, formatted=formatted)), nl=False)
    else:
        text = final_text(generated, formatted=formatted)
        old = path.read_text(generated.source.encoding) if path.is_file() else ""
        changes = diff_of(old, text, "on the disk", "generated", context=1)
        state = "create" if not path.is_file() else "change" if changes else "leave as it is"
        typer.echo(f"would {state} {path} ({len(text.splitlines())} lines)")
        if path.is_file():
            typer.echo(changes, nl=False)
    for mismatch in check_calls(generated):
        typer.echo(f"warning: {path}, {mismatch}", err=True)
