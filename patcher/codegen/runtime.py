"""What generated files use while they run. Files are shipped and kept, so these names stay.

>>> from torch import nn
>>> mlp = nn.Module()
>>> mlp.gate, mlp.up = nn.Linear(4, 6), nn.Linear(4, 6)
>>> join_projections(mlp, ["gate", "up"], "gate_up")
>>> mlp
Module(
  (gate_up): Linear(in_features=4, out_features=12, bias=True)
)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from patcher.compat.models import is_initialized, mark_initialized
from patcher.construction.construction import under_construction
from patcher.conversions.transforms import single
from patcher.fusions.joined import Joined, join, part_property
from patcher.fusions.joining import JoinRows
from patcher.fusions.patch_embeddings import FlattenPatches, LinearPatchEmbedding
from patcher.fusions.weight_layout import Step
from patcher.loading import record_of
from patcher.spec.patcher import Patcher

__all__ = [
    "CONVERSIONS",
    "ORIGINAL",
    "FlattenPatches",
    "JoinRows",
    "LinearPatchEmbedding",
    "StackAgain",
    "Step",
    "Unstack",
    "from_config",
    "from_pretrained",
    "is_custom_code",
    "join_projections",
    "joined_part",
    "list_stack",
    "save_pretrained",
    "under_construction",
]

#: What a generated file calls the Patcher that holds its weight conversions, and the module that it was made from.
CONVERSIONS = "CONVERSIONS"
ORIGINAL = "original"


def _home(cls: type) -> tuple[type, dict[str, Any]]:
    """The class of a generated file that a class is or inherits from, and the names of that file."""
    for base in cls.__mro__:
        names = vars(sys.modules[base.__module__])
        if isinstance(names.get(CONVERSIONS), Patcher) and ORIGINAL in names:
            return base, names
    raise TypeError(f"{cls.__qualname__} inherits from no class of a generated file.")


def _as_original(cls: type, patcher: Patcher | None) -> tuple[Any, Patcher]:
    """The class of transformers whose checkpoints a class reads, and what makes a load of it one of the class."""
    base, names = _home(cls)
    own: Patcher = names[CONVERSIONS].replace(class_mapping={base.__name__: cls})
    return getattr(names[ORIGINAL], base.__name__), own if patcher is None else own | patcher


def _inherited(cls: type) -> Any:
    """What these methods stand in front of: the class of the file that has them takes no part in `super()` here."""
    return next(base for base in cls.__mro__ if vars(base).get("is_custom_code") is is_custom_code)


@classmethod  # type: ignore[misc]
def is_custom_code(cls: type) -> bool:
    """No: what transformers does to checkpoints of the original classes, by name, holds for those here."""
    return False


@classmethod  # type: ignore[misc]
def from_pretrained(cls: type, *args: Any, patcher: Patcher | None = None, **kwargs: Any) -> Any:
    """Read a checkpoint of the original model."""
    original, own = _as_original(cls, patcher)
    return original.from_pretrained(*args, patcher=own, **kwargs)


@classmethod  # type: ignore[misc]
def from_config(cls: type, config: Any, *args: Any, patcher: Patcher | None = None, **kwargs: Any) -> Any:
    """Build a model that saves as the original one does."""
    if patcher is None and under_construction():  # a part of a model that has the conversions itself
        return super(_inherited(cls), cls)._from_config(config, *args, **kwargs)
    original, own = _as_original(cls, patcher)
    return original._from_config(config, *args, patcher=own, **kwargs)


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a checkpoint of the original model."""
    record = record_of(self)
    if record is not None and record.patchers:
        return super(_inherited(type(self)), self).save_pretrained(*args, **kwargs)
    # Made by a call of the class, which knows nothing of conversions: a model that does, with the same weights.
    with torch.device("meta"):
        model = self._from_config(self.config)
    model.load_state_dict(self.state_dict(), assign=True)
    return model.save_pretrained(*args, **kwargs)


def join_projections(module: nn.Module, names: Sequence[str], joined: str) -> None:
    """Put one `nn.Linear` in the place of several with the same input: its rows are theirs, in the order of the names.

    The module keeps how many rows each had as `<joined>_sizes`. Where only some have a bias, it has `<name>_bias`.
    """
    biased = tuple(name for name in names if getattr(module, name).bias is not None)
    join(module, Joined(tuple(names), joined, () if len(biased) == len(names) else biased))


def joined_part(module: nn.Module, name: str, names: Sequence[str], joined: str) -> Any:
    """One of several projections that were joined, for code that looks at it; itself until they are."""
    return part_property(Joined(tuple(names), joined), names.index(name)).__get__(module)


def list_stack(module: nn.Module, name: str, bias: str = "", transposed: bool = False) -> None:
    """Put a list of linear layers in the place of parameters that stack their weights and biases.

    Args:
        module: the experts.
        name: the weights, (experts, out, in), or (experts, in, out) where they are transposed.
        bias: the biases, (experts, out), if there are any.
        transposed: whether the input stands on the left of the matrices.
    """
    weight = module._parameters.pop(name)
    assert weight is not None
    setattr(module, name, _listed(weight, module._parameters.pop(bias) if bias else None, transposed))
    mark_initialized(module)  # _init_weights looks for stacks here; layers have their turn


def _listed(weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> nn.ModuleList:
    """One layer for each matrix of a stack.

    Args:
        weight: (experts, out, in), or (experts, in, out) where it is transposed.
        bias: (experts, out).
        transposed: whether the input stands on the left of the matrices.
    """
    experts = nn.ModuleList()
    for number, matrix in enumerate(weight.detach().unbind()):
        linear = nn.Linear.__new__(nn.Linear)  # its `__init__` gives values: seconds in vain for 30,000 experts
        nn.Module.__init__(linear)
        linear.weight = _parameter(matrix.t() if transposed else matrix, weight)
        linear.out_features, linear.in_features = linear.weight.shape
        linear.register_parameter("bias", None if bias is None else _parameter(bias.detach()[number], bias))
        experts.append(linear)
    mark_initialized(experts)  # where the module around it initialises what has this name
    return experts


def _parameter(values: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)
    if is_initialized(like):
        mark_initialized(new)
    return new


class Unstack(ConversionOps):
    """Take a stack apart, one matrix for each expert.

    The target pattern names the first, `experts.up_proj.0.weight`; the others get their number in the place of the 0.

    Args:
        transposed: the matrices are (in, out), and those of the experts are to be (out, in).
    """

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        whole = single(*input_dict.values())
        head, _, tail = (kwargs.get("full_layer_name") or target_patterns[0]).rpartition(".0.")
        return {
            f"{head}.{number}.{tail}": matrix.t().contiguous() if self.transposed else matrix
            for number, matrix in enumerate(whole.unbind())
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return StackAgain(self.transposed)


class StackAgain(ConversionOps):
    """The reverse of `Unstack`."""

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        names = sorted(input_dict, key=lambda name: [int(number) for number in re.findall(r"\.(\d+)\.", name)])
        stack = torch.stack([single(input_dict.pop(name)) for name in names])
        name = target_patterns[0] if len(target_patterns) == 1 else names[0]
        return {name: stack.transpose(1, 2).contiguous() if self.transposed else stack}

    @property
    def reverse_op(self) -> ConversionOps:
        return Unstack(self.transposed)
