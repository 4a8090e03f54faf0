"""The runtime layout on disk: weights that only a load which knows their layout may find.

`save_pretrained(..., save_original_format=False)` of a fused model writes its weights as the variant `patcher`, and
the names of the fusions into `config.json`:

    config.json                    {"fusion_config": {"patcher": ["qkv"]}, ...}
    model.patcher.safetensors      or model.patcher-00001-of-00002.safetensors, ..., and their index

Whoever knows nothing of that looks for `model.safetensors`, finds none, and says so; that is so for every release of
transformers, with whatever `config=`, `fusion_config=` or class. Our hook goes by the file beside the weights and by
nothing else, for a config that is given says nothing of how they lie.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patcher.checkpoints.weight_files import VARIANT, is_default, is_layout, whole_names
from patcher.compat.files import has_file
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.fusions.config import names_in_file


def fusions_of_layout(path: Any, options: Mapping[str, Any], variant: str | None = None) -> list[str]:
    """The fusions of the runtime layout that a load reads from here; none where it reads a checkpoint by other names.

    Args:
        path: a folder, a repo, or a file of weights.
        options: the keyword arguments of `from_pretrained`, some of which say where on the hub the files are.
        variant: what the load asks for.

    Raises:
        PatchedWeightsError: nobody knows what the weights are: no config names their fusions, or there are others
            beside them.
    """
    if path is None or variant not in (None, VARIANT):
        return []
    is_folder = os.path.isdir(path)  # noqa: PTH112 - quicker, and every load asks
    if is_folder and not _found(path, options, VARIANT):
        return []  # most loads, so at the cost of two looks into the folder
    if not is_folder and is_layout((file := Path(path)).name) and file.is_file():
        return _named(names_in_file(file.parent, {}), file, file.parent)
    names = names_in_file(path, options)
    if not is_folder and not names and variant is None:
        return []  # most loads from the hub, which is not asked for anything else
    ours, default = _found(path, options, VARIANT), _found(path, options, None)
    if not ours or (not names and default and variant is None):
        return []  # of a later save, by a process without this package
    names = _named(names, ours[0], path)
    if default:
        raise PatchedWeightsError(
            f"{path} holds weights twice: {ours[0]}, in the runtime layout that its config.json names, and "
            f"{default[0]}. Which of them belong to that config.json can't be known. Delete one of them; without "
            f'{ours[0]} take "fusion_config" out of config.json as well.'
        )
    return names


def _found(path: Any, options: Mapping[str, Any], variant: str | None) -> list[str]:
    names = whole_names(variant)[: 2 if variant == VARIANT else None]  # never as .bin
    return [name for name in names if has_file(path, name, options)]


def _named(names: list[str], weights: str | Path, where: Any) -> list[str]:
    if names:
        return names
    raise PatchedWeightsError(
        f"{weights} holds weights in a runtime layout, and the config.json in {where} doesn't name the fusions that "
        'made it. Give that file its "fusion_config": {"patcher": [...]} back, as save_pretrained(..., '
        "save_original_format=False) has written it, or save the model again."
    )


def check_variant(variant: str | None, *, in_layout: bool) -> None:
    """Raise for a variant that a save is asked for and can't be.

    Raises:
        InvalidPatcherError: with what to write instead.
    """
    if in_layout and variant is not None:
        raise InvalidPatcherError(
            f"variant={variant!r} was asked for together with save_original_format=False: weights in a runtime layout "
            f"are written as the variant {VARIANT!r}, by which a load finds them, and as no other. Leave variant out, "
            "or save in the original format (the default)."
        )
    if not in_layout and variant == VARIANT:
        raise InvalidPatcherError(
            f"variant={VARIANT!r} is how weights in a runtime layout are written, and these are in the original "
            "format. Give another variant, or none."
        )


def remove_others(folder: str | os.PathLike[str], written: Iterable[str]) -> None:
    """Remove what earlier saves have left of the weights in a folder, where one has just written others.

    Of a checkpoint in the original format transformers itself has removed what it removes.

    Args:
        written: the names of the files that hold the weights now.
    """
    kept = set(written)
    in_layout = any(map(is_layout, kept))
    if not in_layout and not any(name.startswith("model") for name in kept):
        return  # nothing, or adapters
    if in_layout and len(kept) > 1:
        kept.add(whole_names(VARIANT)[1])
    for file in list(Path(folder).iterdir()):
        if file.name not in kept and (is_layout(file.name) or (in_layout and is_default(file.name))):
            file.unlink()


def check_upload(written: Iterable[str], repo: str, options: Mapping[str, Any]) -> None:
    """Raise where an upload would put a runtime layout beside other weights: an upload deletes nothing.

    Args:
        written: the names of the files that hold the weights.
        options: the `token` of the upload.

    Raises:
        PatchedWeightsError: with what to do instead.
    """
    if any(map(is_layout, written)) and (default := _found(repo, options, None)):
        raise PatchedWeightsError(
            f"{repo} holds {', '.join(default)}, and weights in a runtime layout never lie beside others: which of "
            "them are meant can't be known. Push to a repo without them, or delete them first: "
            f"huggingface_hub.HfApi().delete_files({repo!r}, {default!r})."
        )
