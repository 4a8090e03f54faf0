"""Which original parameters lie where in the parameters of a patched model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.layouts.conversion import Converted
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.layouts.operations import ReversibleConcatenate
from patcher.loading.stock_view import carriers_in
from patcher.patterns import inside


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
    by_module = {id(module): (path, carried.all) for path, module, carried in reversed(carriers_in(model))}
    known = {name for name, _ in model.named_parameters()}
    found: dict[str, tuple[Part, ...]] = {}
    for path, layouts in by_module.values():
        prefix = inside(path)
        for layout in layouts:
            if any(f"{prefix}{name}" in known for name in layout.fused):
                found |= _parts(layout, prefix)
    return {name: found[name] for name, _ in model.named_parameters() if name in found}


def _parts(layout: Layout, prefix: str) -> dict[str, tuple[Part, ...]]:
    """Parameter -> its parts, of one layout.

    Raises:
        InvalidPatcherError: they aren't slices of it.
    """
    if len(layout.stock) == 1 < len(layout.fused):
        return {}  # pieces of one
    if lies_in_blocks(layout):
        raise InvalidPatcherError(
            f"{prefix}{layout.fused[0]} lies in {layout.blocks} blocks for tensor parallelism, each with rows of "
            f"{', '.join(f'{prefix}{name}' for name in layout.stock)}, so none of these is one slice of it. Load the "
            "model without tensor parallelism, or leave the fusion out."
        )
    if isinstance(layout, Rows):
        dim, order = 0, tuple(zip(layout.stock, layout.sizes, strict=True))
    elif len(layout.stock) == len(layout.fused) == 1:
        dim, order = 0, ((layout.stock[0], layout.fused_shapes()[0][0]),)
    elif (joined := _concatenated(layout)) is not None:
        dim, order = joined
    else:
        raise InvalidPatcherError(
            f"{prefix}{layout.fused[0]} is made of {', '.join(f'{prefix}{name}' for name in layout.stock)} by "
            f"{layout}, and these aren't slices of it, so their places can't be told. Join them by one "
            "Concatenate(dim=...), or take the patcher off with Patcher().apply(model)."
        )
    parts, start = [], 0
    for name, length in order:
        parts.append(Part(f"{prefix}{name}", dim, start, length))
        start += length
    return {f"{prefix}{layout.fused[0]}": tuple(parts)}


def _concatenated(layout: Layout) -> tuple[int, tuple[tuple[str, int], ...]] | None:
    """The dimension in which a conversion has joined parameters, and (name, length) in their order there."""
    if not isinstance(layout, Converted) or len(layout.fused) != 1 or len(layout.operations) != 1:
        return None
    (operation,) = layout.operations
    if not isinstance(operation, ReversibleConcatenate):
        return None
    lengths = [length for _, length in operation.sizes]
    return operation.dim % len(layout.stock_shapes[0]), tuple(zip(layout.stock, lengths, strict=True))
