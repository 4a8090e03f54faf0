"""Checkpoints compared as files, to the byte."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PreTrainedModel

__all__ = ["assert_saved_alike", "files", "same_checkpoint", "saved", "tensors"]


def files(folder: Path) -> dict[str, bytes]:
    """The files of a saved model, but for the generation config, in which some classes have none."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "generation_config.json"}


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> dict[str, bytes]:
    """The files that a model saves."""
    model.save_pretrained(folder, **options)
    return files(folder)


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether two folders hold the same safetensors files, byte for byte, and there are some."""
    names, others = ({path.name for path in folder.glob("*.safetensors")} for folder in (one, other))
    return names == others != set() and not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


def assert_saved_alike(patched: PreTrainedModel, stock: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Two models save the same files."""
    one, other = saved(patched, folder / "patched", **options), saved(stock, folder / "stock", **options)
    assert one.keys() == other.keys()
    for name in other:
        assert one[name] == other[name], name


def tensors(folder: Path) -> dict[str, bytes]:
    """Name -> type, shape and bytes of what a folder holds, whichever file it is in; the index says the same."""
    found: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found
            found[name] = repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text("utf-8"))["weight_map"]
        assert listed.keys() == found.keys()
        assert all(name in load_file(folder / file) for name, file in listed.items())
    return found
