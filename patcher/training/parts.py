"""Which original parameters lie where in the parameters of a patched model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.layouts.conversion import Converted, ReversibleConcatenate
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.loading.state_dicts import carriers_in


@dataclass(frozen=True)
class Part:
    """One original parameter, as a slice of the parameter that holds it.

    Attributes:
        name: the parameter that transformers has.
        dim: the dimension of the slice.
        start: where it begins.
        length: how long it is.
    """

    name: str
    dim: int
    start: int
    length: int


def fused_parameters(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """What the parameters that are made of others are made of, in order.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, fused_parameters
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    >>> with Patcher(fusions="gate_up").applied():
    ...     model = LlamaForCausalLM(config)
    >>> for name, parts in fused_parameters(model).items():
    ...     print(name, *parts, sep="\\n  ")
    model.layers.0.mlp.gate_up_proj.weight
      Part(name='model.layers.0.mlp.gate_proj.weight', dim=0, start=0, length=96)
      Part(name='model.layers.0.mlp.up_proj.weight', dim=0, start=96, length=96)
    >>> parameters = dict(model.named_parameters())
    >>> part = fused_parameters(model)["model.layers.0.mlp.gate_up_proj.weight"][1]
    >>> parameters["model.layers.0.mlp.gate_up_proj.weight"].narrow(part.dim, part.start, part.length).shape
    torch.Size([96, 64])

    For optimizers that treat a matrix as a whole, as Muon does (`examples/muon.py`), or a rate for each part.

    A parameter that is all of one original, under another name or in another shape (a flattened kernel), has that as
    its one part. One that holds a piece of an original only, as each expert of a stack does, joins nothing: it isn't
    listed.

    Args:
        model: any module, also one around a patched model, as `DistributedDataParallel` is, or a layer of one.

    Returns:
        The name of each such parameter, as in `model.named_parameters()`, and its parts, named as if what is inside
        of the model were that of transformers.

    Raises:
        InvalidPatcherError: parameters are joined otherwise than one behind the other: by a conversion, or for
            processes of tensor parallelism.
    """
    known = [name for name, _ in model.named_parameters()]
    layouts = [layout for each in carriers_in(model) for layout in each.all if not {*known}.isdisjoint(layout.fused)]
    # Of one parameter that became several each holds a piece only.
    found = {each.fused[0]: _parts(each) for each in layouts if not len(each.stock) == 1 < len(each.fused)}
    return {name: found[name] for name in known if name in found}


def _parts(layout: Layout) -> tuple[Part, ...]:
    """The parts of the parameter that a layout makes."""
    joined, shapes = ", ".join(layout.stock), layout.stock_shapes
    if lies_in_blocks(layout):
        raise InvalidPatcherError(
            f"{layout.fused[0]} lies in {layout.blocks} blocks for tensor parallelism, each with rows of {joined}, so "
            "none of these is one slice of it. Load the model without tensor parallelism, or leave the fusion out."
        )
    if isinstance(layout, Rows):
        dim = 0
    elif len(layout.stock) == len(layout.fused) == 1:
        dim, shapes = 0, tuple(layout.fused_shapes())
    elif isinstance(layout, Converted) and [*map(type, layout.operations)] == [ReversibleConcatenate]:
        dim = layout.transform.operations[0].dim % len(shapes[0])
    else:
        raise InvalidPatcherError(
            f"{layout.fused[0]} is made of {joined} by {layout}, and these aren't slices of it, so their places can't "
            "be told. Join them by one Concatenate(dim=...), or take the patcher off with Patcher().apply(model)."
        )
    lengths = [shape[dim] for shape in shapes]
    starts = accumulate(lengths, initial=0)
    return tuple(Part(name, dim, *place) for name, *place in zip(layout.stock, starts, lengths, strict=False))
