"""Where the original parameters are in the parameters of a patched model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.layouts.carried import is_quantized
from patcher.layouts.conversion import Converted, ReversibleConcatenate
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.layouts.sharded import check_not_flat
from patcher.loading.state_dicts import carriers_in
from patcher.patterns import in_state_dict


@dataclass(frozen=True)
class Part:
    """One original parameter as a slice of a fused one.

    Attributes:
        name: the parameter of the stock model.
        dim, start, length: the arguments of `torch.Tensor.narrow`.
    """

    name: str
    dim: int
    start: int
    length: int


def fused_parameters(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each fused parameter, in order.

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

    Useful for optimizers that treat a matrix as a whole, as Muon does (`examples/muon.py`), and for learning rates of
    parts. A renamed or reshaped parameter (a flattened kernel) has its original as the one part. A parameter that
    holds a piece of an original, as an expert of a stack does, isn't listed.

    An optimizer updates a fused parameter as a whole. Rows of a part that gets no gradient have one of zeros, so they
    decay and follow their momentum, where the optimizer of a stock model skips a parameter without a gradient: those
    of the last layer's queries, if the loss depends on nothing but the key-value cache. An adapter of PEFT that names
    a part makes new parameters of the layers that it un-fuses: create the optimizer after it.

    Args:
        model: any module, also a wrapper of a patched model such as `DistributedDataParallel`, or a layer of one.

    Returns:
        Name of the fused parameter, as in `model.named_parameters()` -> its parts, by their names in transformers.

    Raises:
        InvalidPatcherError: if a part isn't one slice, because of a conversion, of a quantizer that packs
            values, of tensor parallelism or of `FullyShardedDataParallel`.
    """
    check_not_flat(model)
    named = dict(model.named_parameters())
    names = {in_state_dict(name): name for name in named}
    parts = {
        layout.fused[0]: _parts(layout, [named[names[name]] for name in layout.fused if name in names])
        for carrier in carriers_in(model)
        for layout in carrier.all
        if not (len(layout.stock) == 1 < len(layout.fused) or names.keys().isdisjoint(layout.fused))
    }
    return {name: parts[key] for key, name in names.items() if key in parts}


def _parts(layout: Layout, parameters: Sequence[nn.Parameter]) -> tuple[Part, ...]:
    """Return the parts of a layout's fused parameter."""
    joined, shapes = ", ".join(layout.stock), layout.stock_shapes
    is_packed = any(map(is_quantized, parameters)) and parameters[0].shape not in layout.fused_shapes()
    if is_packed or lies_in_blocks(layout):
        how = "quantized and packed" if is_packed else "in blocks for tensor parallelism, each with rows of every part"
        raise InvalidPatcherError(
            f"{layout.fused[0]} is {how}, so none of {joined} is one slice of it. Load the model without tensor "
            "parallelism or a quantizer, or leave the fusion out."
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
    return tuple(Part(name, dim, *span) for name, *span in zip(layout.stock, starts, lengths, strict=False))
