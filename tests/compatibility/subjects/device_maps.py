"""Models of which parts are on the disk: several devices, as far as a CPU alone has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.compatibility.columns import column
from tests.compatibility.outcomes import compared, same_models
from tests.compatibility.rows import Row
from tests.support.checkpoints import saved, tensors
from tests.support.offloaded import places

SUBJECT = "Device maps"


@column(SUBJECT, "a layer on the disk")
def a_layer(row: Row, folder: Path) -> str:
    patched, stock = offloaded(row, folder, is_second)
    assert patched.hf_device_map == stock.hf_device_map
    return same_models(patched, stock)


@column(SUBJECT, "a layer on the disk: `generate`")
def generated(row: Row, folder: Path) -> str:
    patched, stock = offloaded(row, folder, is_second)
    inputs = row.inputs() | {"max_new_tokens": 3, "do_sample": False}
    with warnings.catch_warnings():  # said of a model whose first parameter is on the disk
        warnings.filterwarnings("ignore", "You are calling .generate.. with the `input_ids` being on a device type")
        return compared(patched.generate(**inputs), stock.generate(**inputs), rounding=0)


@column(SUBJECT, "a layer on the disk: saved")
def saves(row: Row, folder: Path) -> str:
    patched, stock = offloaded(row, folder, is_second)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        whole = saved(stock, folder / "stock")
        assert saved(patched, folder / "once") == whole
        assert saved(patched, folder / "twice") == whole
        for size in ("30KB", "100KB"):
            small = {"max_shard_size": size}
            patched.save_pretrained(folder / size, **small)
            stock.save_pretrained(folder / f"stock {size}", **small)
            assert tensors(folder / size) == tensors(folder / f"stock {size}")  # the shards may be cut elsewhere
    return compared({}, {})


@column(SUBJECT, '`"auto"`, `max_memory`')
def automatic(row: Row, folder: Path) -> str:
    memory = int(0.75 * row.stock().get_memory_footprint())
    options: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": memory}, "offload_buffers": True}
    patched = row.patched(offload_folder=folder / "patched", **options)
    stock = row.stock(offload_folder=folder / "stock", **options)
    assert patched.hf_device_map == stock.hf_device_map
    assert set(stock.hf_device_map.values()) == {"cpu", "disk"}
    return same_models(patched, stock)


@column(SUBJECT, "stock's layers by name")
def by_name(row: Row, folder: Path) -> str:
    """Each of the layers that stock has, what is joined together."""
    stock = row.stock()
    chosen = ("layers.1.", "patch_embed", "experts.")
    device_map = places(stock, lambda path: any(part in path for part in chosen))
    patched = row.patched(device_map=device_map, offload_folder=folder)
    assert any(parameter.is_meta for parameter in patched.parameters())
    return same_models(patched, stock)


@column(SUBJECT, "stock's layers by name: parts of a joined one")
def torn(row: Row, folder: Path) -> str:
    stock = row.stock()
    chosen = ("self_attn.q_proj", "mlp.gate_proj", "patch_embed", "experts.gate_up_proj")
    device_map = places(stock, lambda path: any(part in path for part in chosen))
    patched = row.patched(device_map=device_map, offload_folder=folder)
    return same_models(patched, stock)


def is_second(path: str) -> bool:
    """Whether a part of the model goes to the disk: a decoder layer, and all of a patch embedding."""
    return ".layers.1." in f"{path}." or "patch_embed" in path


def offloaded(row: Row, folder: Path, on_disk: Callable[[str], bool]) -> tuple[Any, Any]:
    """The patched and the stock model, with the same parts on the disk."""
    device_map = places(row.stock(), on_disk, whole=True)
    return (
        row.patched(device_map=device_map, offload_folder=folder / "patched disk"),
        row.stock(device_map=device_map, offload_folder=folder / "stock disk"),
    )
