"""`patcher codegen`: generate, list, check and verify patched modeling files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from patcher.cli.commands import Result, command
from patcher.cli.options import OPTIONS, with_options
from patcher.errors import CodegenError

if TYPE_CHECKING:
    from patcher.codegen.spec import PatchSpec

# The generator is imported in functions: it takes a third of a second, which `--help` doesn't need.


class _WithDefault(TyperGroup):
    """A group whose default command is `generate`: `patcher codegen CONFIG --diff`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        first_words = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if args and args[0] in first_words else ["generate", *args])


app = typer.Typer(cls=_WithDefault, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def patched_files() -> None:
    """Generate patched modeling files, check and verify them.

    `patcher codegen CONFIG --diff` is short for `patcher codegen generate CONFIG --diff`.
    """


@app.command()
@command
def verify(module: str, config_name: Any, model_name: Any, model_config: Any, tolerance: Any, partly: bool) -> Result:
    """Check that the models of a file are what its config says.

    Small models are compared with the runtime patch, from which they may not differ, and with stock, from which they
    may, unless --tolerance is given. Exits with 1 if they are wrong, or a patch never ran.
    """
    from patcher.checkpoints.model_classes import config_of
    from patcher.codegen import verify
    from patcher.codegen.files.projects import load_configs

    small = None if model_config is None else config_of(model_config, {})
    results = [
        verify(config, model_class=model_name, model_config=small, tolerance=tolerance, partly=partly)
        for config in load_configs(module, config_name)
    ]
    return results, all(result.passed for result in results)


def codegen(**options: Any) -> None:
    """Generate patched modeling files from configs.

    With --check, report files that aren't up to date.
    """
    from patcher.codegen.files.projects import discover, load_configs, read_settings

    _check_combination([OPTIONS[name].label for name, value in options.items() if value])
    module, output_dir = options["module"], options["output_dir"]
    try:
        settings = read_settings()
        options["formatted"] = options["formatted"] or settings.formatted
        if options["check_only"]:
            from patcher.codegen.files.output import check

            configs = [module] if module else None
            results = check(configs, fix=options["fix"], output_dir=output_dir, formatted=options["formatted"])
            failed = sum(not result.ok for result in results)
            total = f"{len(results)} checked" + (f", {failed} not up to date" if failed else "")
            typer.echo("\n".join([*map(str, results), total]))
            if failed:
                raise typer.Exit(1)
        elif options["list_configs"] or options["every"]:
            if not (paths := discover(settings)):
                typer.echo(
                    "no *_patch_gen_config.py here; set search_root in [tool.patcher.codegen] of pyproject.toml"
                )
            written: dict[Path, str] = {}
            write = partial(_generate, options=options, written=written)
            _for_every_config(paths, _list if options["list_configs"] else write)
        else:
            for config in load_configs(str(module), options["config_name"]):
                _generate(str(module), config, options, {})
    except CodegenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


_NAMES = "module output_dir config_name list_configs every dry_run diff check_only fix formatted verbose".split()
app.command("generate")(with_options(codegen, _NAMES, module=None))

#: mode of the command -> the options that it can be combined with; the first mode that is given counts
_MODES = {
    "--list": (),
    "--check": ("CONFIG", "-o", "--fix", "--format"),
    "--all": ("-o", "--dry-run", "--diff", "--format", "-v"),
    "CONFIG": ("-o", "-c", "--dry-run", "--diff", "--format", "-v"),
}


def _check_combination(labels: Collection[str]) -> None:
    """Raise for options that can't be combined."""
    mode = next((mode for mode in _MODES if mode in labels), None)
    if mode is None:
        raise typer.BadParameter("Name a config, or use --list, --all or --check.")
    for other in (label for label in labels if label not in (mode, *_MODES[mode])):
        allowed = f"goes with {', '.join(_MODES[mode])} only" if _MODES[mode] else "goes with no other option"
        raise typer.BadParameter(f"{mode} {allowed}. Leave {other} out.")


def _for_every_config(paths: list[Path], function: Callable[[str, PatchSpec], None]) -> None:
    """Call a function for every config, and report those that failed after the last one."""
    from patcher.codegen.files.projects import load_configs
    from patcher.codegen.generation.header import config_path

    failed = []
    for path in map(str, paths):
        label = config_path(path)
        try:
            for config in load_configs(path):
                function(label, config)
        except CodegenError as error:
            typer.echo(f"error: {label}: {error}", err=True)
            failed.append(label)
    if failed:
        typer.echo(f"{len(failed)} of {len(paths)} configs failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _list(label: str, config: PatchSpec) -> None:
    typer.echo(f"{label}: {config.source_module} -> {config.target_file}, {config.number_of_patches}")


def _generate(label: str, config: PatchSpec, options: dict[str, Any], written: dict[Path, str]) -> None:
    """Write the file of a config, or print what would be written.

    Args:
        label: the name of the config in messages.
        written: file -> the label of its config, to detect two configs with one file.
    """
    from patcher.codegen.files.output import (
        build_formatted,
        changed_originals,
        diff_path,
        output_folder,
        unified_diff,
        write_generated,
    )
    from patcher.source.texts import diff_of

    folder = output_folder(config, options["output_dir"])
    path = folder / config.target_file
    if label != written.setdefault(path, label):
        raise config.error(f"{path} is the file of {written[path]} already. Give one another target_file.")
    generated = build_formatted(config, options["formatted"])
    if options["verbose"]:
        typer.echo(f"{generated.source.name} ({generated.source.version or 'no version'})")
        for patch in generated.patches:
            description = f": {patch.description}" if patch.description else ""
            typer.echo(f"  {patch.kind.value} {patch.target}{description}")
        for helper in config.helpers:
            typer.echo(f"  add helper {helper.source.name}")
    if not options["dry_run"]:
        changed = changed_originals(config, path)
        write_generated(generated, folder, diff=options["diff"])
        typer.echo(f"wrote {path}" + (f" and {diff_path(path).name}" if diff_path(path).is_file() else ""))
        for change in changed:
            typer.echo(f"taken over: what {change.call} at {change.where} patches has changed", err=True)
        return
    if options["diff"]:
        typer.echo(unified_diff(generated), nl=False)
        return
    old = path.read_text("utf-8", "replace") if path.is_file() else ""
    changes = diff_of(old, generated.text, "on the disk", "generated", context=1)
    state = "create" if not path.is_file() else "change" if changes else "leave as it is"
    typer.echo(f"would {state} {path} ({len(generated.text.splitlines())} lines)")
    if path.is_file():
        typer.echo(changes, nl=False)
