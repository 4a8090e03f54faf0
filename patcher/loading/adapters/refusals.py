"""What an adapter can't be on a fused model, said before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from patcher.compat.adapters import is_lora, is_targeted, kind_of, unusual_setting
from patcher.errors import InvalidPatcherError
from patcher.expressions import search
from patcher.loading.adapters.layers import Layers
from patcher.loading.adapters.lora import JoinedAdapter
from patcher.patterns import compress

_UNFUSED = "load the model without the fusion"


def check_training(layers: Layers, adapters: Mapping[str, JoinedAdapter], shared: list[str]) -> None:
    if shared:
        raise InvalidPatcherError(
            f"The adapter has one input matrix for both layers of each expert in {_listed(shared)}, and the model has "
            "layers of their own in its place: is_trainable=True would train another adapter. To go on with it "
            f"{_UNFUSED} of the experts."
        )
    if refused := [path for path, adapter in adapters.items() if not adapter.is_trainable]:
        parts = [part.path for path in refused for part in layers.joined[path].parts]
        raise InvalidPatcherError(
            f"The adapter has matrices of its own for {_listed(parts)}, which are rows of {_listed(refused)} here. "
            "Joined they compute the same, but training would fill the zeros between them, so is_trainable=True would "
            f"train another adapter. To go on with it {_UNFUSED} of these layers; or train a new adapter, with "
            f"target_modules={_names(refused)}."
        )


def check_kind(config: Any, layers: Layers, asked: list[str], lost: list[str]) -> None:
    if lost:
        made = "; ".join(dict.fromkeys(layers.others[name] for name in lost[:2]))
        raise InvalidPatcherError(
            f"The adapter is for {_listed(lost)}, and the model has other layers in their place ({made}). What an "
            "adapter of the first is for these isn't known: load the model without the patcher."
        )
    joined = _listed(sorted({layers.parts[name][0].path for name in asked}))
    if not is_lora(config):
        raise InvalidPatcherError(
            f"The adapter is a {kind_of(config)} for {_listed(asked)}, which are rows of {joined} here. Only LoRA and "
            f"DoRA are the same on joined layers: {_UNFUSED} of these layers."
        )
    if setting := unusual_setting(config):
        raise InvalidPatcherError(
            f"The adapter has {setting}, and is for {_listed(asked)}, which are rows of {joined} here. With that "
            f"setting joined layers aren't known to compute the same: {_UNFUSED} of these layers."
        )


def check_saved_modules(config: Any, layers: Layers) -> None:
    saved = list(getattr(config, "modules_to_save", None) or ())
    inner = [*layers.gone, *layers.joined]
    if found := [name for name in inner if any(search(rf"^(|.*\.){module}($|\.)", name) for module in saved)]:
        raise InvalidPatcherError(
            f"modules_to_save={saved!r} means {_listed(found)}, of which the model has joined layers. A copy of a "
            f"part of one can't be trained: {_UNFUSED} of these layers, or leave them out of modules_to_save."
        )


def check_biases(config: Any, layers: Layers, targeted: Collection[str]) -> None:
    """Refuse to train the biases of adapted layers where peft doesn't know them for such.

    Raises:
        InvalidPatcherError: there are some.
    """
    kinds = getattr(config, "bias", "none")
    meant = [joined for joined in layers.joined.values() if kinds == "all" or joined.path in targeted]
    lost = [key for joined in meant for key, _ in joined.biases if not key.startswith(f"{joined.path}.")]
    if kinds != "none" and lost:
        raise InvalidPatcherError(
            f"bias={kinds!r} would not train {_listed(lost)}: only some parts of the joined layers have a bias, and "
            f"peft doesn't know these for theirs. Write bias='none', or {_UNFUSED} of these layers."
        )


def new_text(config: Any, layers: Layers, asked: list[str]) -> str:
    joined = sorted({layers.parts[name][0].path for name in asked})
    others = [name for name in layers.here if name not in layers.joined and is_targeted(config, name)]
    return (
        f"A new adapter is asked for {_listed(asked)}, which are rows of {_listed(joined)} in this model: they have "
        f"no layers of their own to be adapted. Write target_modules={_names([*joined, *others])}; saved, the adapter "
        f"is one of the layers of transformers. Or {_UNFUSED} of these layers."
    )


def _names(paths: list[str]) -> list[str]:
    """The ends of paths by which peft finds them, with what a layer without a name of its own is in."""
    return sorted({".".join(path.split(".")[-2 if path.endswith(".linear") else -1 :]) for path in paths})


def _listed(paths: list[str]) -> str:
    found = compress(paths)
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
