"""A checkpoint as a model with fused modules reads it: a source for each fused parameter, not its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key, key_renamer
from patcher.compat.models import state_tensors
from patcher.errors import PatchedWeightsError
from patcher.layouts.fused_weights import FusedWeights, fused_modules, is_shared
from patcher.layouts.layouts import Layout, lies_in_blocks
from patcher.layouts.simulation import Route
from patcher.layouts.sources import fused_sources, in_blocks, named_sources, shape_of
from patcher.loading.expert_names import quantized_experts
from patcher.loading.reading.stock_parameters import Parts, StockParameters
from patcher.patterns import compress, inside


@dataclass(frozen=True, eq=False)
class FusedReading:
    """A checkpoint with sources for fused parameters.

    Attributes:
        rest: what is read besides: key -> tensor, or what is read as one.
        shapes: fused parameter -> its shape, of those that are read.
        sources: fused parameter -> what it is read from; nothing where nothing will be read.
        keys: fused parameter -> the keys of the checkpoint that it takes, and the layout.
        missing: fused parameter -> its parts, of those that the checkpoint has no part of.
        fused_already: whether the checkpoint is in the runtime layout.
        problem: what can't be made of the checkpoint.
    """

    rest: Mapping[str, Any]
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    sources: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, tuple[tuple[str, ...], Layout]] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_already: bool = False
    problem: PatchedWeightsError | None = None

    def for_load(self, conversions: Sequence[WeightTransform]) -> tuple[dict[str, Any], list[WeightTransform]]:
        """What transformers reads as the checkpoint, and the conversions to read it with."""
        if not self.sources:
            return dict(self.rest), list(conversions)
        named, conversion = named_sources(self.sources)
        return {**self.rest, **named}, [conversion, *conversions]

    def routes(self) -> list[Route]:
        """Where the tensors go that sources take, those of one layer together."""
        together: dict[int, tuple[tuple[str, ...], Layout, list[str]]] = {}
        for target, (keys, layout) in self.keys.items():
            together.setdefault(id(keys), (keys, layout, []))[2].append(target)
        return [Route(keys, tuple(names), layout) for keys, layout, names in together.values()]


def with_fused_sources(
    model: PreTrainedModel,
    checkpoint: Mapping[str, Any],
    conversions: Sequence[WeightTransform],
    unknown: Set[str] = frozenset(),
    *,
    quantized: bool = False,
    simulated: bool = False,
) -> FusedReading:
    """Put sources of fused parameters in the place of what they are made of.

    Args:
        conversions: those of the load, in their order.
        unknown: the keys whose shapes nobody knows: they fit.
        quantized: whether a quantizer has written the checkpoint.
        simulated: whether nothing will be read: of layers that are alike one is converted.
    """
    fused = fused_modules(model)
    if not fused:
        return FusedReading(checkpoint)
    own = state_tensors(model)
    as_they_are = quantized_experts(model, checkpoint, fused, own) if quantized else {}
    wanted = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.stock}
    stock = StockParameters(model, stock_tensors(own, fused), wanted, conversions, unknown, simulated)
    parts = stock.parts({key: source for key, source in checkpoint.items() if key not in as_they_are})
    companions = _companions(parts, {path for path, *_ in fused} if quantized else set())
    # Only of what is in no layout of transformers: some fused names are those of its checkpoints.
    rename = key_renamer(conversions, model, own)
    read = {rename(key)[0]: key for key in parts.unused if key in parts.rest}
    fused_already = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.fused} & read.keys()
    _share(parts.rest, read, fused)
    keys: dict[str, tuple[tuple[str, ...], Layout]] = {}
    shapes: dict[str, torch.Size] = {}
    sources: dict[str, Any] = {}
    missing: dict[str, tuple[str, ...]] = {}
    incomplete: list[str] = []
    misfits: list[str] = []
    for path, _, carried in fused:
        prefix = inside(path)
        for layout in carried.layouts:
            names = [f"{prefix}{name}" for name in layout.stock]
            found = [parts.found[name] for name in names if name in parts.found]
            targets = [f"{prefix}{name}" for name in layout.fused]
            if not found:
                missing |= dict.fromkeys(targets, tuple(names))
                continue
            if len(found) < len(names):
                incomplete += [name for name in names if name not in parts.found]
                continue
            unfit = [
                f"{name}: found {shape_of(part.source)}, expected {shape}"
                for name, part, shape in zip(names, found, layout.stock_shapes, strict=True)
                if shape_of(part.source) != shape and unknown.isdisjoint(part.keys)
            ]
            if unfit:
                misfits += unfit
                continue
            taken = tuple(dict.fromkeys(key for part in found for key in part.keys))
            keys |= dict.fromkeys(targets, (taken, layout))
            shapes |= zip(targets, layout.fused_shapes(), strict=True)
            if not simulated:
                sources |= zip(targets, fused_sources(layout, [part.source for part in found]), strict=True)
    for key, (target, layout) in as_they_are.items():
        keys[target] = (key,), layout
        shapes[target] = torch.Size(shape_of(checkpoint[key]))
        sources[target] = checkpoint[key]
    if fused_already:
        missing = {}  # what such a checkpoint lacks, it lacks under its own names
    for target in sorted(fused_already & keys.keys()):
        parts.twice.append(f"{target} twice: as it is, and as {', '.join(keys[target][0])}")
    problem = _problem(
        [*incomplete, *parts.lacking], [] if parts.lacking else misfits, companions, parts.twice, parts.failed
    )
    return FusedReading(parts.rest, shapes, sources, keys, missing, bool(fused_already), problem)


def in_runtime_layout(
    model: PreTrainedModel, checkpoint: Mapping[str, Any], conversions: Sequence[WeightTransform]
) -> FusedReading:
    """A checkpoint that has the parameters of the model as they are."""
    rest, fused = dict(checkpoint), fused_modules(model)
    if any(is_shared(carried) for *_, carried in fused):
        own = state_tensors(model)
        rename = key_renamer(conversions, model, own)
        _share(rest, {rename(key)[0]: key for key in checkpoint}, fused)
    return FusedReading(rest, fused_already=True)


def _share(
    rest: dict[str, Any],
    read: Mapping[str, str],
    fused: Iterable[tuple[str, nn.Module, FusedWeights]],
) -> None:
    """Have the rows of a checkpoint in the runtime layout lie in the blocks that processes share.

    Args:
        rest: the checkpoint, which is changed.
        read: parameter -> its key in the checkpoint.
    """
    for path, _, carried in fused:
        for layout in filter(lies_in_blocks, carried.layouts):
            for target in (f"{inside(path)}{name}" for name in layout.fused):
                if target in read:
                    rest[read[target]] = in_blocks(layout, rest[read[target]])


def stock_tensors(
    own: Mapping[str, torch.Tensor], fused: Iterable[tuple[str, nn.Module, FusedWeights]]
) -> dict[str, torch.Tensor]:
    """The state dict of the model as transformers has it, on the meta device."""
    stock = dict(own)
    for path, _, carried in fused:
        prefix = inside(path)
        for layout in carried.layouts:
            for name in layout.fused:
                stock.pop(f"{prefix}{name}", None)
            for name, shape in zip(layout.stock, layout.stock_shapes, strict=True):
                stock[f"{prefix}{name}"] = torch.empty(shape, device="meta")
    return stock


def _companions(parts: Parts, quantized: Set[str]) -> list[str]:
    """The keys of what a quantizer has put beside weights that are fused.

    Args:
        quantized: the paths of fused modules, if the checkpoint is quantized.
    """
    layers = {key.rpartition(".")[0] for part in parts.found.values() for key in part.keys}
    return [
        key
        for key, renamed in parts.unused.items()
        if key in parts.rest
        and (
            _is_below(renamed, quantized)
            # What is called weight or bias transformers ignores, where the model has no place for it.
            or (_is_below(key, layers) and not key.endswith((".weight", ".bias")))
        )
    ]


def _is_below(key: str, paths: Set[str]) -> bool:
    while key:
        key = key.rpartition(".")[0]
        if key in paths:
            return True
    return False


def _problem(
    lacking: Sequence[str],
    misfits: Sequence[str],
    companions: Sequence[str],
    twice: Sequence[str],
    failed: Sequence[str],
) -> PatchedWeightsError | None:
    lines = [f"The checkpoint holds {text}. Take one of them out." for text in twice[:3]]
    if companions:
        lines.append("The checkpoint is quantized: it has more than the weights that a fusion takes:")
        lines += [f"  {key}" for key in compress(companions)[:5]]
        lines.append("Fuse the full-precision checkpoint, and quantize that while it loads.")
    if failed:
        lines.append("Conversions of this load fail for weights that a fusion takes:")
        lines += [f"  {reason}" for reason in dict.fromkeys(failed)][:5]
        lines.append("If the checkpoint is quantized, fuse the full-precision one, and quantize that while it loads.")
    if lacking:
        lines.append("Fused parameters are made of several tensors, of which the checkpoint has only some. It lacks:")
        lines += [f"  {key}" for key in compress(sorted(dict.fromkeys(lacking), key=dot_natural_key))]
        lines.append("Take a checkpoint that has them.")
    if misfits:
        lines.append("Parts of fused parameters don't have the shapes that the model has for them:")
        lines += [f"  {line}" for line in misfits[:5]]
        lines.append(
            "Take a checkpoint that fits the config, or have these initialised: ignore_mismatched_sizes=True."
        )
    return PatchedWeightsError("\n".join(lines)) if lines else None
