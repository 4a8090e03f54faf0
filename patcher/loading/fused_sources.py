"""A checkpoint as a model with fused modules reads it: one source for each fused parameter, in the place of its parts.

What transformers itself does to get the parts (renaming, splitting, permuting, merging the tensors of experts) comes
first: its conversions run inside of the sources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import (
    copy_transform,
    dot_natural_key,
    key_renamer,
    stock_conversions_from_scratch,
    stock_revert,
)
from patcher.compat.models import ModelView, state_tensors
from patcher.conversions.fused_weights import FusedWeights, fused_modules
from patcher.conversions.layouts import Layout
from patcher.conversions.simulation import Route
from patcher.conversions.sources import Computation, Computed, NamedSources, dtype_of, fused_sources, shape_of
from patcher.conversions.tracing import LayerTrace, trace_of, with_trace
from patcher.conversions.transforms import describe, single
from patcher.errors import PatchedWeightsError
from patcher.fusions.experts.matrices import Matrices
from patcher.loading.expert_names import keys_of_experts
from patcher.patterns import common_prefix, compress, inside, without_numbers


@dataclass(frozen=True, eq=False)
class FusedReading:
    """A checkpoint with sources for fused parameters.

    Attributes:
        checkpoint: key -> tensor, or what is read as one.
        conversions: those to read it with.
        keys: parameter with a source -> the keys of the checkpoint that it takes, and the layout.
        missing: fused parameter -> its parts, of those that the checkpoint has no part of.
        fused_already: whether the checkpoint is in the runtime layout.
        unknown: the keys of which nobody knows the shapes.
        problem: what can't be made of the checkpoint.
    """

    checkpoint: Mapping[str, Any]
    conversions: Sequence[WeightTransform]
    keys: Mapping[str, tuple[tuple[str, ...], Layout]] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_already: bool = False
    unknown: Set[str] = frozenset()
    problem: PatchedWeightsError | None = None

    def routes(self) -> list[Route]:
        """Where the tensors go that sources take, those of one layer together."""
        together: dict[int, tuple[tuple[str, ...], Layout, list[str]]] = {}
        for target, (keys, layout) in self.keys.items():
            together.setdefault(id(keys), (keys, layout, []))[2].append(target)
        return [Route(keys, tuple(names), layout) for keys, layout, names in together.values()]


class _Trouble(NamedTuple):
    """What keeps parts from being made.

    Attributes:
        unused: the keys of which no parameter is made.
        twice: what several keys would make.
        companions: what a quantizer has put beside weights.
        failed: the conversions of transformers that raise.
        lacking: the keys that these would need.
    """

    unused: Collection[str]
    twice: list[str]
    companions: list[str]
    failed: list[str]
    lacking: list[str]


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter of the model as transformers has it, and what it is read from."""

    source: Any
    keys: tuple[str, ...]


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
        return FusedReading(checkpoint, conversions, unknown=unknown)
    own, named = state_tensors(model), NamedSources()
    keys: dict[str, tuple[tuple[str, ...], Layout]] = {}
    as_they_are = _quantized_experts(model, checkpoint, fused, own) if quantized else {}
    checkpoint = {key: source for key, source in checkpoint.items() if key not in as_they_are}
    stock = _stock_parameters(own, fused)
    wanted = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.stock}
    parts, rest, trouble = _parts(
        model,
        checkpoint,
        conversions,
        stock,
        wanted,
        unknown,
        {path for path, *_ in fused} if quantized else set(),
        simulated=simulated,
    )
    # Only of what is in no layout of transformers: some fused names are those of its checkpoints.
    rename = key_renamer(conversions, model, own)
    read = {rename(key)[0] for key in trouble.unused if key in rest}
    fused_already = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.fused} & read
    blind = set(unknown)
    missing: dict[str, tuple[str, ...]] = {}
    incomplete: list[str] = []
    misfits: list[str] = []
    for path, _, carried in fused:
        prefix = inside(path)
        for layout in carried.layouts:
            names = [f"{prefix}{name}" for name in layout.stock]
            found = [parts[name] for name in names if name in parts]
            targets = [f"{prefix}{name}" for name in layout.fused]
            if not found:
                missing |= dict.fromkeys(targets, tuple(names))
                continue
            if len(found) < len(names):
                incomplete += [name for name in names if name not in parts]
                continue
            taken = tuple(dict.fromkeys(key for part in found for key in part.keys))
            unfit = [
                f"{name}: found {shape_of(part.source)}, expected {shape}"
                for name, part, shape in zip(names, found, layout.stock_shapes, strict=True)
                if shape_of(part.source) != shape and unknown.isdisjoint(part.keys)
            ]
            if unfit:
                misfits += unfit
                continue
            sources = fused_sources(layout, [part.source for part in found])
            for target, source in zip(targets, sources, strict=True):
                key = named.key_for(target)
                rest[key] = source
                keys[target] = taken, layout
                if not unknown.isdisjoint(taken):
                    blind.add(key)
    for taken_key, (target, source, layout) in as_they_are.items():
        key = named.key_for(target)
        rest[key] = source
        keys[target] = (taken_key,), layout
        missing.pop(target, None)
    if trouble.companions:
        fused_already = set()
    if fused_already:
        missing = {}  # what such a checkpoint lacks, it lacks under its own names
    for target in sorted(fused_already & keys.keys()):
        trouble.twice.append(f"{target} twice: as it is, and as {', '.join(keys[target][0])}")
    return FusedReading(
        rest,
        [named, *conversions],
        keys,
        missing,
        bool(fused_already),
        blind,
        _problem([*incomplete, *trouble.lacking], [] if trouble.lacking else misfits, trouble),
    )


def _quantized_experts(
    model: PreTrainedModel,
    checkpoint: Mapping[str, Any],
    fused: Iterable[tuple[str, nn.Module, FusedWeights]],
    own: Mapping[str, torch.Tensor],
) -> dict[str, tuple[str, Any, Layout]]:
    """Key -> (parameter, source, layout), of experts that are quantized as the layers that they are here.

    A quantizer has given these layers parameters of its own, and the checkpoint has them under its names of experts.
    """
    found: dict[str, tuple[str, Any, Layout]] = {}
    conversions = stock_conversions_from_scratch(model)
    by_layer: dict[str, list[str]] = {}
    for key in checkpoint:
        by_layer.setdefault(key.rpartition(".")[0], []).append(key)
    for path, _, carried in fused:
        prefix = inside(path)
        for layout in carried.layouts:
            if not isinstance(layout, Matrices) or f"{prefix}{layout.fused[0]}" in own:
                continue
            view = ModelView(model, get_parameter={}.__getitem__)
            names = keys_of_experts(prefix, layout, lambda stacks, view=view: stock_revert(view, stacks, conversions))  # type: ignore[misc]
            for name, known in names.items():
                for key in by_layer.get(known.removesuffix(".weight"), ()):
                    target = f"{prefix}{name.removesuffix('weight')}{key.rpartition('.')[2]}"
                    if target in own:
                        found[key] = target, checkpoint[key], layout
    return found


def _stock_parameters(
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


def _parts(
    model: PreTrainedModel,
    checkpoint: Mapping[str, Any],
    conversions: Sequence[WeightTransform],
    stock: dict[str, torch.Tensor],
    wanted: set[str],
    unknown: Set[str],
    quantized: Set[str],
    *,
    simulated: bool,
) -> tuple[dict[str, _Part], dict[str, Any], _Trouble]:
    """The wanted parameters, the rest of the checkpoint, and what is wrong with it.

    Args:
        quantized: the paths of fused modules, if the checkpoint is quantized.
    """
    parts: dict[str, _Part] = {}
    unused: dict[str, str] = {}
    twice: list[str] = []
    failed: list[str] = []
    lacking: list[str] = []
    rest = dict(checkpoint)
    view = ModelView(model, get_parameter=stock.__getitem__, state_dict=lambda: stock)
    groups: dict[str, _Group] = {}
    rename = key_renamer(conversions, model, stock)
    for key in sorted(checkpoint, key=dot_natural_key):
        renamed, taker, pattern = rename(key)
        if isinstance(taker, WeightConverter):
            if renamed not in groups:
                groups[renamed] = _Group(taker, renamed, view)
            groups[renamed].add(key, pattern or "", checkpoint[key])
        elif renamed in wanted:
            if renamed in parts:
                twice.append(f"{renamed} twice: as {parts[renamed].keys[0]}, and as {key}")
            parts[renamed] = _Part(rest.pop(key), (key,))
        if renamed not in stock:
            unused[key] = renamed
    #: what converters have made of the same shapes
    known: dict[Any, tuple[str, dict[str, tuple[int, ...]]]] = {}
    for group in groups.values():
        if group.first not in stock:
            continue
        is_wanted = bool(wanted.intersection(group.named()))
        try:
            # In the trace of the load too, if it has one: transformers will not run it.
            made = group.like(*known[group.kind]) if simulated and is_wanted and group.kind in known else {}
            made = made or (group.recorded(stock, unknown) if is_wanted else group.made())
            known[group.kind] = group.first, made
        except Exception as error:  # an operation of a quantizer, which looks at layers that are fused
            if is_wanted:
                absent = group.lacking(stock, conversions)
                lacking += absent
                if not absent:
                    failed.append(f"{describe(group.converter)} raises {type(error).__name__}: {error}")
            continue
        if not wanted.intersection(made):
            continue
        if any(shape != tuple(stock[name].shape) for name, shape in made.items() if name in wanted):
            lacking += group.lacking(stock, conversions)
        sources = {key: rest.pop(key) for key, _ in group.taken}
        computation = Computation(partial(group.run, sources))
        dtype = dtype_of(next(iter(sources.values())))
        for name, shape in made.items():
            source = Computed(computation, name, shape, dtype)
            if name in wanted:
                if name in parts:
                    twice.append(f"{name} twice: as {parts[name].keys[0]}, and as {', '.join(sources)}")
                parts[name] = _Part(source, tuple(sources))
            else:
                rest[name] = source
    layers = {key.rpartition(".")[0] for part in parts.values() for key in part.keys}
    companions = [
        key
        for key, renamed in unused.items()
        if key in rest
        and (
            _is_below(renamed, quantized)
            # What is called weight or bias transformers ignores, where the model has no place for it.
            or (_is_below(key, layers) and not key.endswith((".weight", ".bias")))
        )
    ]
    return parts, rest, _Trouble(unused, twice, companions, failed, lacking)


def _is_below(key: str, paths: Set[str]) -> bool:
    while key:
        key = key.rpartition(".")[0]
        if key in paths:
            return True
    return False


class _Group:
    """What one converter takes at once.

    transformers looks at its parameters while it converts, so it is shown the model as it would have it.
    """

    def __init__(self, converter: WeightConverter, first: str, view: Any) -> None:
        self.converter = converter
        self.first = first
        #: (key, source pattern) of all that it takes
        self.taken: list[tuple[str, str]] = []
        self._view = view
        self._plain = trace.transform if (trace := trace_of(converter)) else converter
        self._unused = with_trace(self._plain) if trace else copy_transform(converter)
        # With the trace of the load, if it has one: that knows the key that was renamed last, so it is told at once.
        self._recording = deepcopy(converter)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, key: str, pattern: str, source: Any) -> None:
        self.taken.append((key, pattern))
        self._shapes[key] = shape_of(source)
        self._recording.add_tensor(self.first, key, pattern, torch.empty(self._shapes[key], device="meta"))  # type: ignore[arg-type]

    def named(self) -> list[str]:
        """What it makes, by its patterns alone."""
        target, *targets = self._unused.target_patterns
        return [self.first, *(self.first.replace(target, other) for other in targets)]

    def lacking(self, stock: Mapping[str, torch.Tensor], conversions: Iterable[WeightTransform]) -> list[str]:
        """The keys that the checkpoint should have besides, as far as the reverse of the converter tells."""
        between = key_renamer(each for each in conversions if not isinstance(each, WeightConverter))
        #: the name that the converter meets -> the key
        renamed = {between(key)[0]: key for key, _ in self.taken}
        try:
            whole = {name: stock[name] for name in self.named()}
            expected = stock_revert(self._view, whole, [copy_transform(self._plain)])
        except Exception:  # it may have none, and then there is nothing to tell
            return []
        # In the names that the converter meets; the checkpoint's own may begin otherwise.
        named, key = next(iter(renamed.items()))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(named), reversed(key), strict=False))
        end = sum(1 for _ in alike)
        head, own = named[: len(named) - end], key[: len(key) - end]
        absent = sorted(expected.keys() - renamed.keys(), key=dot_natural_key)
        return [own + name.removeprefix(head) if name.startswith(head) else name for name in absent]

    def made(self) -> dict[str, tuple[int, ...]]:
        """What it makes, and of which shapes."""
        tensors = {key: torch.empty(shape, device="meta") for key, shape in self._shapes.items()}
        return {name: tuple(tensor.shape) for name, tensor in self.run(tensors).items()}

    @property
    def kind(self) -> Any:
        """What groups have in common that make the same shapes: layers that are alike."""
        taken = tuple((pattern, self._shapes[key]) for key, pattern in self.taken)
        return id(self.converter), without_numbers(self.first), taken

    def like(self, first: str, made: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """What it makes, from what another of its kind has made; {} if that is not known. The trace has it too."""
        head = common_prefix([first, *made])
        tail = first.removeprefix(head)
        if not self.first.endswith(tail):
            return {}
        if trace := trace_of(self._recording):
            trace.entries.append(LayerTrace(self.first, {"": [(key, torch.Size()) for key, _ in self.taken]}, {}, []))
        return {self.first.removesuffix(tail) + name.removeprefix(head): shape for name, shape in made.items()}

    def recorded(self, stock: Mapping[str, torch.Tensor], unknown: Set[str]) -> dict[str, tuple[int, ...]]:
        """The same, once, with the trace of the load."""
        if not unknown.isdisjoint(self._shapes):
            return {name: tuple(stock[name].shape) for name in self.named() if name in stock}
        return {name: tuple(tensor.shape) for name, tensor in self._converted(self._recording).items()}

    def run(self, sources: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What it makes of these sources."""
        copy = deepcopy(self._unused)
        for key, pattern in self.taken:
            copy.add_tensor(self.first, key, pattern, sources[key][...])
        return self._converted(copy)

    @torch.no_grad()
    def _converted(self, converter: Any) -> dict[str, torch.Tensor]:
        made = converter.convert(self.first, model=self._view, config=self._view.config)
        return {name: single(tensor) for name, tensor in made.items()}


def _problem(lacking: Sequence[str], misfits: Sequence[str], trouble: _Trouble) -> PatchedWeightsError | None:
    lines = [f"The checkpoint holds {text}. Take one of them out." for text in trouble.twice[:3]]
    if trouble.companions:
        lines.append("The checkpoint is quantized: it has more than the weights that a fusion takes:")
        lines += [f"  {key}" for key in compress(trouble.companions)[:5]]
        lines.append("Fuse the full-precision checkpoint, and quantize that while it loads.")
    if trouble.failed:
        lines.append("Conversions of this load fail for weights that a fusion takes:")
        lines += [f"  {reason}" for reason in dict.fromkeys(trouble.failed)][:5]
        lines.append("If the checkpoint is quantized, fuse the full-precision one, and quantize that while it loads.")
    if lacking:
        lines.append("Fused parameters are made of several tensors, of which the checkpoint has only some. It lacks:")
        lines += [f"  {key}" for key in compress(sorted(dict.fromkeys(lacking), key=dot_natural_key))]
    if misfits:
        lines.append("Parts of fused parameters don't have the shapes that the model has for them:")
        lines += [f"  {line}" for line in misfits[:5]]
    if lacking or misfits:
        lines.append("Load without the fusion, or leave these modules out of it with modules=...")
    return PatchedWeightsError("\n".join(lines)) if lines else None
