"""`patcher codegen verify CONFIG`: small models of a file beside stock and the runtime patch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from patcher.errors import PatcherError

#: What `patcher codegen` does with arguments that name no command.
DEFAULT = "generate"


class WithDefault(TyperGroup):
    """`patcher codegen CONFIG --diff` generates; only a first word that is a command is one."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        own = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if args and args[0] in own else [DEFAULT, *args])


def verify(
    module: Annotated[str, typer.Argument(metavar="CONFIG", help="The module of a config, or the path of its file.")],
    config_name: Annotated[
        str | None,
        typer.Option("--config-name", "-c", metavar="NAME", help="Variable that holds the config [default: config]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="CLASS", help="The model to run [default: until all patches ran]")
    ] = None,
    folder: Annotated[
        str | None, typer.Option("--model-config", metavar="FOLDER", help="A small config of it [default: made]")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="FLOAT", help="How far outputs may be from stock's, relative to their size."
        ),
    ] = None,
    partly: Annotated[bool, typer.Option("--partly", help="Don't fail for patches that no model runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")] = False,
) -> None:
    """Check that the models of a file compute as stock.

    Small ones run beside stock and beside the runtime patch. Exits with 1 if they differ, or a patch never ran.
    """
    from patcher.codegen import verify
    from patcher.codegen.files.projects import load_configs

    try:
        right, results = True, []
        for config in load_configs(module, config_name):
            found = verify(
                config,
                model_class=model,
                model_config=_read(folder),
                tolerance=tolerance,
                partly=partly,
            )
            right = right and found.passed
            results.append(found.to_dict() if as_json else found)
        typer.echo(json.dumps(results, indent=2) if as_json else "\n".join(map(str, results)))
    except (PatcherError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if not right:
        raise typer.Exit(1)


def _read(folder: str | None) -> Any:
    """The config in a folder."""
    if folder is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)
