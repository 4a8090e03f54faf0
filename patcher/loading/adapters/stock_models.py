"""An adapter with the names of joined layers, on a model that has none of them.

What peft saves of a fused model through the hook has the names of transformers. A file that was written in another
way, tensor by tensor, may have those of the model in memory, and doesn't say what its layers were made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from patcher.compat.adapters import inner_modules
from patcher.errors import InvalidPatcherError
from patcher.fusions.gate_up import GateUp
from patcher.fusions.kv import KV
from patcher.fusions.qkv import QKV
from patcher.loading.adapters.planning import split_key
from patcher.patterns import compress

#: What joined layers are called.
_NAMES = frozenset(f"{prefix}{family.joined_name}" for family in (QKV, KV, GateUp) for prefix in ("", "fused_"))


def check_names(model: nn.Module, keys: Iterable[str]) -> None:
    """Refuse the tensors of an adapter that are for joined layers which a model doesn't have: peft drops them.

    Raises:
        InvalidPatcherError: there are some.
    """
    owners = {path for key in keys if (path := split_key(key)[0]).rpartition(".")[2] in _NAMES}
    if lost := owners.difference(path for path, _ in inner_modules(model)) if owners else ():
        raise InvalidPatcherError(
            f"The adapter is for {', '.join(compress(sorted(lost)))}, which {type(model).__name__} doesn't have: "
            "layers of it are joined there. Load the model with the patcher of the adapter; what save_pretrained then "
            "writes of a fused model is for the layers of transformers."
        )
