"""Fusions: other layouts of the same computation, decided module by module while a model loads.

>>> from patcher import Patcher
>>> from patcher.fusions import QKV
>>> Patcher(fusions=[QKV(modules="model.layers.{0..3}.self_attn"), "gate_up"])
Patcher(fusions=[QKV(modules=('model.layers.{0..3}.self_attn',)), 'gate_up'])

A fused model trains as stock with an optimizer that works elementwise, as AdamW does. One with statistics of whole
matrices, such as Adafactor or Muon, takes a joined weight for one matrix, so its steps differ from those of stock.

To write another family, subclass `Fusion`. The families here use nothing but the same public names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patcher.errors import no_such_name, public_name
from patcher.fusions.base import Decision, Fusion, more_than_a_weight_and_bias
from patcher.fusions.families import FAMILIES
from patcher.layouts.layouts import Cut, Flatten, Layout, Rows

if TYPE_CHECKING:
    from patcher.fusions.finding import Surroundings as Surroundings
    from patcher.fusions.fused_module import (
        FusedModule as FusedModule,
        fused_class_of as fused_class_of,
    )
    from patcher.fusions.gate_up import GateUp as GateUp
    from patcher.fusions.kv import KV as KV
    from patcher.fusions.methods import NotUnderstoodError as NotUnderstoodError
    from patcher.fusions.old_names import Moved as Moved, OldNames as OldNames, view_of as view_of
    from patcher.fusions.packed import PackedRows as PackedRows, packed_rows as packed_rows
    from patcher.fusions.patch_embeddings import PatchEmbeddings as PatchEmbeddings
    from patcher.fusions.projections import Projections as Projections
    from patcher.fusions.qkv import QKV as QKV
    from patcher.fusions.rewrite import compile_subclass as compile_subclass
    from patcher.fusions.sequential_experts import SequentialExperts as SequentialExperts
    from patcher.fusions.sharing import called_with as called_with
    from patcher.fusions.siblings import Siblings as Siblings
    from patcher.fusions.split import Split as Split

__all__ = [
    "KV",
    "QKV",
    "Cut",
    "Decision",
    "Flatten",
    "FusedModule",
    "Fusion",
    "GateUp",
    "Layout",
    "Moved",
    "NotUnderstoodError",
    "OldNames",
    "PackedRows",
    "PatchEmbeddings",
    "Projections",
    "Rows",
    "SequentialExperts",
    "Siblings",
    "Split",
    "Surroundings",
    "called_with",
    "compile_subclass",
    "fused_class_of",
    "more_than_a_weight_and_bias",
    "packed_rows",
    "view_of",
]

#: Name -> the module to import it from on first use: the families import the code that edits source.
_LATE = {cls: module for module, _, cls in (entry.partition(":") for entry in FAMILIES.values())} | {
    "FusedModule": "patcher.fusions.fused_module",
    "Moved": "patcher.fusions.old_names",
    "NotUnderstoodError": "patcher.fusions.methods",
    "OldNames": "patcher.fusions.old_names",
    "PackedRows": "patcher.fusions.packed",
    "Projections": "patcher.fusions.projections",
    "Surroundings": "patcher.fusions.finding",
    "called_with": "patcher.fusions.sharing",
    "compile_subclass": "patcher.fusions.rewrite",
    "fused_class_of": "patcher.fusions.fused_module",
    "packed_rows": "patcher.fusions.packed",
    "view_of": "patcher.fusions.old_names",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise no_such_name(__name__, name, __all__)
    value = globals()[name] = public_name(_LATE[name], name)
    return value
