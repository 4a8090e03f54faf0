"""The matrices of LoRA adapters of several layers as those of one layer whose rows they are, and back.

Each layer has `B @ A`, times a scaling. Joined, the `A` lie one under the other and the `B` on a diagonal of blocks,
so that the rank is the sum: that computes the same, but training it would fill the zeros between the blocks. Where all
layers have the very same `A`, as those of an adapter that was trained on the joined layer, it is taken once and the
`B` lie one under the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from patcher.errors import PatchedWeightsError
from patcher.loading.adapters.layers import JoinedLayer

#: The tensors of one layer in the file of an adapter, behind the path of the layer.
A, B, BIAS, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
NAMES = (A, B, BIAS, MAGNITUDE)


@dataclass(frozen=True)
class AdaptedPart:
    """The adapter of one layer of transformers.

    Attributes:
        number: which part of the joined layer it is.
        factor: what its `B` is multiplied with, so that one scaling is right for all parts.
        kept: its tensors as they were, where a division doesn't give them back.
    """

    number: int
    rank: int
    alpha: float
    factor: float = 1.0
    kept: tuple[tuple[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, eq=False)
class JoinedAdapter:
    """How the adapter of a joined layer was made of those of its parts: kept on the layer, and saved by.

    Attributes:
        rank: of the joined adapter.
        alpha: of the joined adapter.
        has_one_input: whether the parts have one `A`, which is taken once.
    """

    parts: tuple[AdaptedPart, ...]
    rank: int
    alpha: float
    has_one_input: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedAdapter:
        return self

    @classmethod
    def of(
        cls, layer: JoinedLayer, settings: Mapping[int, tuple[int, float]], by_root: bool, has_one_input: bool
    ) -> JoinedAdapter:
        """The adapter for a layer, from the rank and alpha of the parts that have one.

        Args:
            by_root: whether the scaling is alpha by the root of the rank, as with `use_rslora`.
            has_one_input: whether the `A` of all parts are the same.
        """
        scalings = {number: scaling_of(rank, alpha, by_root) for number, (rank, alpha) in settings.items()}
        has_one_input = has_one_input and len(settings) == len(layer.parts) and len(set(settings.values())) == 1
        if has_one_input or len(settings) == 1:
            (rank, alpha), *_ = settings.values()
            parts = tuple(AdaptedPart(number, rank, alpha) for number in settings)
            return cls(parts, rank, alpha, has_one_input)
        one = next((scaling for scaling in scalings.values() if scaling), 1.0)
        parts = tuple(
            AdaptedPart(number, *settings[number], 1.0 if scaling == one else scaling / one)
            for number, scaling in scalings.items()
        )
        rank = sum(part.rank for part in parts)
        return cls(parts, rank, alpha_for(one, rank, by_root))

    @classmethod
    def whole(cls, layer: JoinedLayer, rank: int, alpha: float) -> JoinedAdapter:
        """An adapter that was made for the joined layer: each part has its `A`, and rows of its `B`."""
        parts = tuple(AdaptedPart(number, rank, alpha) for number in range(len(layer.parts)))
        return cls(parts, rank, alpha, has_one_input=True)

    @property
    def is_trainable(self) -> bool:
        """Whether training it is training the adapters that it is made of."""
        return self.has_one_input

    def columns(self) -> list[slice]:
        """Where the `A` of each part lies."""
        if self.has_one_input:
            return [slice(0, self.rank)] * len(self.parts)
        ends = [sum(part.rank for part in self.parts[: number + 1]) for number in range(len(self.parts))]
        return [slice(end - part.rank, end) for part, end in zip(self.parts, ends, strict=True)]


def scaling_of(rank: int, alpha: float, by_root: bool) -> float:
    """As peft computes it."""
    return alpha / math.sqrt(rank) if by_root else alpha / rank


def alpha_for(scaling: float, rank: int, by_root: bool) -> float:
    """The alpha with which a rank has a scaling."""
    alpha = scaling * (math.sqrt(rank) if by_root else rank)
    for near in (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf)):
        if scaling_of(rank, near, by_root) == scaling:
            return int(near) if near == int(near) else near
    return alpha


def have_one_input(found: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    """Whether the `A` of adapters are the same, bit by bit."""
    first = found[0].get(A)
    return first is not None and all(
        (other := each.get(A)) is not None
        and other.dtype == first.dtype
        and other.shape == first.shape
        and torch.equal(other, first)
        for each in found[1:]
    )


@torch.no_grad()
def join(
    layer: JoinedLayer,
    adapter: JoinedAdapter,
    found: Mapping[int, Mapping[str, torch.Tensor]],
    magnitudes: Callable[[], torch.Tensor],
) -> tuple[JoinedAdapter, dict[str, torch.Tensor]]:
    """The tensors of a joined layer from those of its parts, and what to remember of them.

    Args:
        found: part -> name -> tensor.
        magnitudes: gives the magnitude of each row that no adapter has changed.

    Raises:
        PatchedWeightsError: a part has other tensors or ranks than the adapter.
    """
    _check(layer, adapter, found)
    tensors = {part.number: _flat(layer, found[part.number]) for part in adapter.parts}
    first = tensors[adapter.parts[0].number]
    is_exact = all(_is_exact(part.factor, first[B]) for part in adapter.parts)
    wide = first[B].dtype if is_exact else torch.promote_types(first[B].dtype, torch.float32)
    inputs = [tensors[part.number][A] for part in adapter.parts]
    result = {A: (inputs[0] if adapter.has_one_input else torch.cat(inputs)).to(wide)}
    result[B] = first[B].new_zeros((layer.rows, adapter.rank), dtype=wide)
    if BIAS in first:
        result[BIAS] = first[BIAS].new_zeros(layer.rows, dtype=wide)
    if MAGNITUDE in first:
        all_of_them = len(adapter.parts) == len(layer.parts)
        result[MAGNITUDE] = first[MAGNITUDE].new_zeros(layer.rows) if all_of_them else magnitudes().clone()
    parts = []
    for part, columns in zip(adapter.parts, adapter.columns(), strict=True):
        rows, own = layer.parts[part.number].rows, tensors[part.number]
        result[B][rows, columns] = _scaled(own[B], part.factor)
        kept = {B: own[B]}
        if BIAS in first:
            result[BIAS][rows] = _scaled(own[BIAS], part.factor)
            kept[BIAS] = own[BIAS]
        if MAGNITUDE in first:
            result[MAGNITUDE][rows] = own[MAGNITUDE].to(result[MAGNITUDE].dtype)
        if not _is_exact(part.factor, own[B]):
            part = replace(part, kept=tuple((kind, value.detach().cpu().clone()) for kind, value in kept.items()))
        parts.append(part)
    return replace(adapter, parts=tuple(parts)), result


@torch.no_grad()
def separate(
    layer: JoinedLayer, adapter: JoinedAdapter | None, tensors: Mapping[str, torch.Tensor], rank: int, alpha: float
) -> dict[int, tuple[int, float, dict[str, torch.Tensor]]]:
    """Part -> rank, alpha and tensors: the reverse of `join`.

    Of an adapter that was not made of several, or is no longer, each part has the same `A` and its rows of `B`.

    Args:
        adapter: how the tensors were made, None if the adapter was made for the joined layer.
        rank: that of the joined layer.
        alpha: that of the joined layer.
    """
    if adapter is None or not _is_in_blocks(layer, adapter, tensors):
        adapter = JoinedAdapter.whole(layer, rank, alpha)
    result = {}
    for part, columns in zip(adapter.parts, adapter.columns(), strict=True):
        rows, kept = layer.parts[part.number].rows, dict(part.kept)
        own = {A: tensors[A][columns], B: _unscaled(tensors[B][rows, columns], part.factor, kept.get(B))}
        if BIAS in tensors:
            own[BIAS] = _unscaled(tensors[BIAS][rows], part.factor, kept.get(BIAS))
        if MAGNITUDE in tensors:
            own[MAGNITUDE] = tensors[MAGNITUDE][rows]
        shaped = _as_convolution(layer, own) if layer.kernel else own
        # Each in memory of its own: what shares some, tools that save take for tied.
        tensors_of_part = {name: value.contiguous().clone() for name, value in shaped.items()}
        result[part.number] = part.rank, part.alpha, tensors_of_part
    return result


def _check(layer: JoinedLayer, adapter: JoinedAdapter, found: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    names = found[adapter.parts[0].number].keys()
    for part in adapter.parts:
        path, own = layer.parts[part.number].path, found.get(part.number, {})
        if own.keys() != names or not {A, B} <= own.keys():
            raise PatchedWeightsError(
                f"The adapter has {', '.join(sorted(own)) or 'nothing'} for {path}, and {', '.join(sorted(names))} "
                f"for another part of {layer.path}."
            )
        if own[A].shape[0] != part.rank or own[B].shape[:2] != (layer.parts[part.number].size, part.rank):
            raise PatchedWeightsError(
                f"The adapter has {tuple(own[A].shape)} and {tuple(own[B].shape)} for {path}, and its config says "
                f"that the rank is {part.rank}, of a layer of {layer.parts[part.number].size} rows."
            )


def _flat(layer: JoinedLayer, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not layer.kernel:
        return dict(own)
    return {name: value.flatten() if name in (BIAS, MAGNITUDE) else value.flatten(1) for name, value in own.items()}


def _as_convolution(layer: JoinedLayer, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ones = (1,) * (len(layer.kernel) - 1)
    shapes = {A: (-1, *layer.kernel), B: (*own[B].shape, *ones), BIAS: (-1,), MAGNITUDE: (1, -1, *ones)}
    return {name: value.reshape(shapes[name]) for name, value in own.items()}


def _is_exact(factor: float, tensor: torch.Tensor) -> bool:
    """Whether a multiplication only changes exponents, of which float16 has few."""
    return factor == 1 or (math.frexp(abs(factor))[0] == 0.5 and tensor.dtype != torch.float16)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1:
        return tensor
    if not _is_exact(factor, tensor):
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor * factor


def _unscaled(tensor: torch.Tensor, factor: float, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and torch.equal(_scaled(kept, factor).to(tensor.dtype), tensor.cpu()):
        return kept.to(tensor)
    return tensor if factor in (0, 1) else tensor / factor


def _is_in_blocks(layer: JoinedLayer, adapter: JoinedAdapter, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all outside of the blocks is zero: what was trained or added up may have filled it."""
    if tensors[A].shape[0] != adapter.rank:
        return False
    if adapter.has_one_input:
        return True
    outside = tensors[B].detach().clone()
    for part, columns in zip(adapter.parts, adapter.columns(), strict=True):
        outside[layer.parts[part.number].rows, columns] = 0
    if BIAS in tensors:
        rows = torch.ones(layer.rows, dtype=torch.bool, device=outside.device)
        for part in adapter.parts:
            rows[layer.parts[part.number].rows] = False
        if tensors[BIAS][rows].any():
            return False
    return not outside.any()
