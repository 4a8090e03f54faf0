"""What the options of `patcher codegen` do."""

from __future__ import annotations

from pathlib import Path

import typer

from patcher.codegen.builder import PatchConfig
from patcher.codegen.call_mismatches import check_calls
from patcher.codegen.checker import check, discover, load_configs, read_settings
from patcher.codegen.generator import Generated, build
from patcher.codegen.header import config_path
from patcher.codegen.writer import diff_of, diff_path, final_text, output_folder, unified_diff, write_generated
from patcher.errors import CodegenError

__all__ = ["check_files", "discover", "generate_file", "list_configs", "load_configs", "read_settings"]


def list_configs(paths: list[Path]) -> None:
    """Print each config, its source and its file; exit with 1 if one can't be imported."""
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


def check_files(modules: list[str] | None, fix: bool, output_dir: Path | None, formatted: bool) -> None:
    """Print what drifted, and exit with 1 if something did."""
    results = check(modules, fix=fix, output_dir=output_dir, formatted=formatted)
    for result in results:
        typer.echo(str(result))
    bad = sum(not result.ok for result in results)
    typer.echo(f"{len(results)} checked, {bad} to mend")
    if bad:
        raise typer.Exit(1)


def generate_file(
    config: PatchConfig, output_dir: Path | None, diff: bool, dry_run: bool, formatted: bool, verbose: bool
) -> None:
    """Write the file of a config, or say what would be written."""
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
    changes = diff_of(old, text, "on the disk", "generated", context=1)
    state = "create" if not path.is_file() else "change" if changes else "leave as it is"
    typer.echo(f"would {state} {path} ({len(text.splitlines())} lines)")
    if path.is_file():
        typer.echo(changes, nl=False)
