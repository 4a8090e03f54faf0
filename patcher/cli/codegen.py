"""`patcher codegen`: generate, list and check patched modeling files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patcher.cli.codegen_verify import DEFAULT, WithDefault, verify
from patcher.errors import CodegenError

if TYPE_CHECKING:
    from patcher.codegen.spec import PatchSpec

# What generates is imported in functions: it takes a third of a second, which `--help` doesn't need.

app = typer.Typer(
    cls=WithDefault,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(verify)


@app.callback()
def patched_files() -> None:
    """Generate patched modeling files, check and verify them.

    `patcher codegen CONFIG --diff` is short for `patcher codegen generate CONFIG --diff`.
    """


@app.command(DEFAULT)
def codegen(
    module: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="The module of a config, or the path of its file.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", metavar="FOLDER", help="Where to write [default: generated/ beside the config]"
        ),
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option("--config-name", "-c", metavar="NAME", help="Variable that holds the config [default: config]"),
    ] = None,
    list_configs: Annotated[bool, typer.Option("--list", help="List the configs of the project.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Generate from every config of the project.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Also write a unified diff against the original.")] = False,
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 1 and a diff if a file isn't what its config says."),
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="With --check: write the files that aren't what their configs say.")
    ] = False,
    formatted: Annotated[bool, typer.Option("--format", help="Run ruff over the files.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List the patches.")] = False,
) -> None:
    """Generate modeling files with patches in them, from configs.

    With --check, compare the files with what their configs say.
    """
    from patcher.codegen.files.projects import discover, load_configs, read_settings

    given = {
        "CONFIG": module,
        "-o": output_dir,
        "-c": config_name,
        "--list": list_configs,
        "--all": every,
        "--dry-run": dry_run,
        "--diff": diff,
        "--check": check_only,
        "--fix": fix,
        "--format": formatted,
        "-v": verbose,
    }
    _refuse([name for name, value in given.items() if value])
    try:
        settings = read_settings()
        formatted = formatted or settings.formatted
        if list_configs:
            _list(discover(settings))
        elif check_only:
            from patcher.codegen.files.checker import check

            configs = [module] if module else None
            results = check(configs, fix=fix, output_dir=output_dir, formatted=formatted)
            bad = sum(not result.ok for result in results)
            typer.echo("\n".join([*map(str, results), f"{len(results)} checked, {bad} to mend"]))
            if bad:
                raise typer.Exit(1)
        else:
            how = functools.partial(
                _generate,
                output_dir=output_dir,
                diff=diff,
                dry_run=dry_run,
                formatted=formatted,
                verbose=verbose,
            )
            if every:
                _generate_all([str(path) for path in discover(settings)], how, output_dir)
            else:
                for config in load_configs(str(module), config_name):
                    how(config)
    except CodegenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


#: What can't act together, and what to do instead.
_APART = {
    "--list": (
        {"CONFIG", "-o", "-c", "--all", "--dry-run", "--diff", "--check", "--format", "-v"},
        "--list only names the configs of the project. Leave {} out.",
    ),
    "--check": (
        {"-c", "--all", "--dry-run", "--diff", "-v"},
        "--check compares what there is, of CONFIG or of all configs, and writes nothing. Leave {} out.",
    ),
    "--all": ({"CONFIG", "-c"}, "--all takes every config of the project. Leave {} out, or --all."),
}


def _refuse(given: Collection[str]) -> None:
    """Raise for options that can't act together."""
    if "--fix" in given and "--check" not in given:
        raise typer.BadParameter("--fix belongs to --check.")
    if not {"CONFIG", "--list", "--all", "--check"} & set(given):
        raise typer.BadParameter("Name a config, or use --list, --all or --check.")
    for name in (name for name in _APART if name in given):
        others, advice = _APART[name]
        for other in (other for other in given if other in others):
            raise typer.BadParameter(advice.format(other))


def _generate_all(paths: list[str], how: Callable[[PatchSpec], None], output_dir: Path | None) -> None:
    """Generate from every config; those that fail are named at the end, and don't keep the others from their files."""
    from patcher.codegen.files.projects import load_configs
    from patcher.codegen.files.writer import output_folder
    from patcher.codegen.generation.header import config_path

    failed: list[str] = []
    written: dict[Path, str] = {}
    for label, path in zip(map(config_path, paths), paths, strict=True):
        try:
            for config in load_configs(path):
                file = output_folder(config, output_dir) / config.target_file
                if file in written:
                    raise config.error(f"{file} is the file of {written[file]} already. Give one another target_file.")
                how(config)
                written[file] = label
        except CodegenError as error:
            typer.echo(f"error: {label}: {error}", err=True)
            failed.append(label)
    if failed:
        typer.echo(f"{len(failed)} of {len(paths)} configs failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


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
    dry_run: bool,
    formatted: bool,
    verbose: bool,
) -> None:
    """Write the file of a config, or say what would be written."""
    from patcher.codegen.files.checker import changed_originals
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
        write_generated(generated, folder, diff=diff, formatted=formatted)
        typer.echo(f"wrote {path}" + (f" and {diff_path(path).name}" if diff_path(path).is_file() else ""))
        for change in taken_over:
            typer.echo(f"taken over: what {change.call} at {change.where} patches has changed", err=True)
    elif diff:
        typer.echo(unified_diff(generated, final_text(generated, formatted=formatted)), nl=False)
    else:
        text = final_text(generated, formatted=formatted)
        old = path.read_text("utf-8", "replace") if path.is_file() else ""
        changes = diff_of(old, text, "on the disk", "generated", context=1)
        state = "create" if not path.is_file() else "change" if changes else "leave as it is"
        typer.echo(f"would {state} {path} ({len(text.splitlines())} lines)")
        if path.is_file():
            typer.echo(changes, nl=False)
