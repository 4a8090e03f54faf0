"""The runtime layout on disk: weights in files that only a load which knows their layout finds.

`save_pretrained(..., save_original_format=False)` of a fused model writes its weights as the variant `patcher`, and
the names of the fusions into `config.json`:

    config.json                    {"fusion_config": {"patcher": ["qkv"]}, ...}
    model.patcher.safetensors      or model.patcher-00001-of-00002.safetensors, ..., and their index

Without this package, every release of transformers looks for `model.safetensors` and reports that there is none, with
whatever `config=`, `fusion_config=` or class. Our hook goes by the files alone, since a config that is passed says
nothing about their layout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patcher.checkpoints.headers import VARIANT, is_default, is_layout, whole_names
from patcher.compat.models import has_file
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.fusions.config import names_in_file


def fusions_of_layout(path: Any, options: Mapping[str, Any], variant: str | None = None) -> list[str]:
    """Return the fusions of the runtime layout that a load reads from a folder, repo or file; none for other weights.

    Raises:
        PatchedWeightsError: the layout can't be known: no config names its fusions, or there are other weights too.
    """
    if path is None or variant not in (None, VARIANT):
        return []
    is_folder = os.path.isdir(path)  # noqa: PTH112 - quicker, and every load calls this
    if is_folder and not _files(path, options, VARIANT):
        return []  # most loads, so at the cost of two look-ups in the folder
    if not is_folder and is_layout((file := Path(path)).name) and file.is_file():
        return _check_named(names_in_file(file.parent, {}), file, file.parent)
    names = names_in_file(path, options)
    if not is_folder and not names and variant is None:
        return []  # most loads from the hub, without further requests
    in_layout, default = _files(path, options, VARIANT), _files(path, options, None)
    if not in_layout or (not names and default and variant is None):
        return []  # the default files were saved later, by a process without this package
    names = _check_named(names, in_layout[0], path)
    if default:
        raise PatchedWeightsError(
            f"{path} holds weights twice: {in_layout[0]}, in the runtime layout that its config.json names, and "
            f"{default[0]}. Which of them belong to that config.json can't be known. Delete one of them; without "
            f'{in_layout[0]} take "fusion_config" out of config.json as well.'
        )
    return names


def _files(path: Any, options: Mapping[str, Any], variant: str | None) -> list[str]:
    names = whole_names(variant)[: 2 if variant == VARIANT else None]  # never as .bin
    return [name for name in names if has_file(path, name, options)]


def _check_named(names: list[str], weights: str | Path, where: Any) -> list[str]:
    if names:
        return names
    raise PatchedWeightsError(
        f"{weights} holds weights in a runtime layout, and the config.json in {where} doesn't name the fusions that "
        'made it. Restore "fusion_config": {"patcher": [...]} in that file, as save_pretrained(..., '
        "save_original_format=False) has written it, or save the model again."
    )


def check_save_options(variant: str | None, *, is_pushed: bool, in_layout: bool) -> None:
    """Raise for a variant that a save doesn't support, and for uploads of a runtime layout beside other weights."""
    if in_layout and variant is not None:
        raise InvalidPatcherError(
            f"variant={variant!r} was requested together with save_original_format=False: weights in a runtime layout "
            f"are written as the variant {VARIANT!r}, by which a load finds them, and as no other. Leave variant out, "
            "or save in the original format (the default)."
        )
    if in_layout and is_pushed:
        raise InvalidPatcherError(
            "push_to_hub=True was requested together with save_original_format=False: an upload deletes nothing, and "
            "weights in a runtime layout never lie beside others. Save them into a folder, and upload that to a repo "
            "of its own with huggingface_hub.upload_folder; or save in the original format (the default)."
        )
    if not in_layout and variant == VARIANT:
        raise InvalidPatcherError(
            f"variant={VARIANT!r} is how weights in a runtime layout are written, and these are in the original "
            "format. Give another variant, or none."
        )


def remove_stale_weights(folder: str | os.PathLike[str], *, in_layout: bool) -> None:
    """Remove weights of earlier saves in the other format; transformers has removed stale shards of the same one."""
    names = {file.name for file in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    if in_layout:
        single, index = whole_names(VARIANT)[:2]
        is_sharded = any(is_layout(name) and name not in (single, index) for name in names)
        stale = {name for name in names if is_default(name)} | {single if is_sharded else index}
    else:
        stale = {name for name in names if is_layout(name)}
    for name in stale:
        Path(folder, name).unlink(missing_ok=True)


def remove_weights(folder: str | os.PathLike[str]) -> None:
    """Remove all weights from a folder, after a save that wrote wrong ones."""
    for file in Path(folder).iterdir():
        if file.suffix in (".safetensors", ".bin") or is_layout(file.name) or is_default(file.name):
            file.unlink()
