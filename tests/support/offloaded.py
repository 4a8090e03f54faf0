"""Loads with parts on the disk: several devices, as far as a CPU alone has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
from packaging.version import Version
from torch import nn
from transformers import LlamaForCausalLM

DEVICE_MAPS: dict[str, Any] = {
    "a layer on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "an mlp on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0.self_attn": "disk",
        "model.layers.0.mlp": "disk",
        "model.layers.0.input_layernorm": "cpu",
        "model.layers.0.post_attention_layernorm": "cpu",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "auto": "auto",
}
if Version(accelerate.__version__) >= Version("1.11"):  # older ones refuse to
    DEVICE_MAPS["all on disk"] = {"": "disk"}


def offloaded(folder: Path, name: str, where: Path, **options: Any) -> Any:
    if name == "auto":
        options["max_memory"] = {"cpu": 300_000}
    return LlamaForCausalLM.from_pretrained(folder, device_map=DEVICE_MAPS[name], offload_folder=where, **options)


def places(model: Any, on_disk: Callable[[str], bool], *, whole: bool = False) -> dict[str, str]:
    """A device map that names every layer of a model, or with `whole` those that must not be split as one.

    Parameters that a module with parts has of its own are named themselves.
    """
    found: dict[str, str] = {}

    def add(path: str, module: nn.Module) -> None:
        children = [
            (name, child) for name, child in module.named_children() if [*child.parameters(), *child.buffers()]
        ]
        if not list(module.children()) or (whole and type(module).__name__ in (model._no_split_modules or ())):
            own = [path]
        else:
            for name, child in children:
                add(f"{path}.{name}".lstrip("."), child)
            held = {**module._parameters, **module._buffers}
            own = [f"{path}.{name}".lstrip(".") for name, value in held.items() if value is not None]
        found.update((each, "disk" if on_disk(each) else "cpu") for each in own)

    add("", model)
    return found
