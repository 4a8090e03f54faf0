"""Fusions: other layouts of the same computation, decided module by module while a model loads.

>>> from patcher import Patcher
>>> from patcher.fusions import QKV
>>> Patcher(fusions=[QKV(modules="model.layers.{0..3}.self_attn"), "gate_up"])
Patcher(fusions=[QKV(modules=('model.layers.{0..3}.self_attn',)), 'gate_up'])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from patcher.conversions.layouts import Flatten, Layout, Rows
from patcher.fusions.base import Fusion
from patcher.fusions.families import FAMILIES

if TYPE_CHECKING:
    from patcher.fusions.gate_up import GateUp as GateUp
    from patcher.fusions.patch_embeddings import PatchEmbeddings as PatchEmbeddings
    from patcher.fusions.qkv import QKV as QKV
    from patcher.fusions.sequential_experts import SequentialExperts as SequentialExperts

__all__ = ["QKV", "Flatten", "Fusion", "GateUp", "Layout", "PatchEmbeddings", "Rows", "SequentialExperts"]


def __getattr__(name: str) -> Any:
    # Late, because the families import what edits source.
    homes = {cls: home for home, _, cls in (each.partition(":") for each in FAMILIES.values())}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(homes[name]), name)
    return value
