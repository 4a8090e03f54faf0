"""Route the keys of a checkpoint, once, by names and shapes, before a weight is read.

Parameters that a fusion or a patcher's conversion makes are read through one lazy source each, under their own names,
so that transformers casts, quantizes and shards them like any other tensor. What only transformers converts, it
converts itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import (
    dot_natural_key,
    is_prequantized,
    is_transposed_by_quantizer,
    keeps_quantized,
    source_patterns,
)
from patcher.compat.models import ModelView, state_tensors
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.carried import fused_modules, is_quantized as is_quantized_tensor
from patcher.layouts.conversion import Converted, Group, convert, endings, only_moves, target_names
from patcher.layouts.layouts import Layout, Rows, is_alone, lies_in_blocks
from patcher.layouts.sources import Computation, Computed, dtype_of, fused_sources, in_blocks, shape_of
from patcher.layouts.transforms import Added, KeyResolver, ResolvedKey, describe, has_known_operations
from patcher.loading.experts import Revert, default_revert, expert_keys, group_by_layer, quantized_experts
from patcher.loading.routes import Route, Routing, conversion_error, partial_match_error, unfit_error
from patcher.patterns import compress, inside

#: The prefixes of safetensors' names for types of one byte.
_BYTES = ("I8", "U8", "F8")


def stock_state(state: Mapping[str, torch.Tensor], layouts: Iterable[Layout]) -> dict[str, torch.Tensor]:
    """Return a state dict with the stock parameters of layouts, on the meta device, in place of the fused ones."""
    stock = dict(state)
    for layout in layouts:
        fused = [stock.pop(name) for name in layout.fused if name in stock]
        stock |= {
            name: torch.empty(shape, dtype=fused[0].dtype if fused else None, device="meta")
            for name, shape in zip(layout.stock, layout.stock_shapes, strict=True)
        }
    return stock


def stock_parameters(
    model: PreTrainedModel,
    stock: dict[str, torch.Tensor],
    names: AbstractSet[str],
    conversions: Sequence[WeightTransform],
    checkpoint: Mapping[str, Any],
) -> dict[str, torch.Tensor] | None:
    """Convert a checkpoint to named parameters of the stock model with this state dict; None if some can't be made."""
    router = Router(model, checkpoint, conversions, stock=(stock, names))
    router.route_keys(sorted(checkpoint, key=dot_natural_key))
    if any(router.problems.values()):
        return None
    return {name: part.source[...] for name, part in router.parts.items()}


@dataclass(frozen=True, eq=False)
class _Part:
    """A stock parameter that is a part of a fused one: the source that it is read from, and its keys."""

    source: Any
    keys: tuple[str, ...]
    #: the tensors of the checkpoint for these keys, if transformers only moves their values
    stacked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Router:
    """Routes the keys of a checkpoint, by `run`.

    Args:
        checkpoint: tensors, or objects with their shapes.
        mapping: the conversions of transformers, as adapted by a quantizer.
        added: those of patchers.
        num_key_mapping: how many of `mapping`, the first ones, are those of a `key_mapping`.
        replaced: the paths of the modules that mappings have replaced.
        quantizer: that of the load; weights that it has written are read unchanged, or refused.
        dtype: returns the dtype that a parameter will have; None if nothing will be read.
        stock: the state dict of the model without its fusions, and which names of it are parts of fused parameters.
    """

    model: PreTrainedModel
    checkpoint: Mapping[str, Any]
    mapping: Sequence[WeightTransform] = ()
    added: Sequence[Added] = ()
    num_key_mapping: int = 0
    replaced: tuple[str, ...] = ()
    quantizer: Any = None
    dtype: Callable[[str], torch.dtype] | None = None
    stock: tuple[dict[str, torch.Tensor], AbstractSet[str]] | None = None

    def __post_init__(self) -> None:
        self.state = state_tensors(self.model)
        self.carriers = fused_modules(self.model)
        #: the layouts by the names in their modules, each with the prefix of these; and by the names in the model
        self.placed = [(carrier.prefix, layout) for carrier in self.carriers for layout in carrier.carried.layouts]
        self.layouts = [layout.named(prefix.__add__) for prefix, layout in self.placed]
        self.stock_state, self.part_names = self.stock or (
            stock_state(self.state, self.layouts),
            {name for layout in self.layouts for name in layout.stock},
        )
        get_parameter, state_dict = self.stock_state.__getitem__, lambda: self.stock_state
        self.view: Any = ModelView(
            self.model, get_parameter=get_parameter, state_dict=state_dict, get_submodule=self._layer
        )
        self.routing = Routing(rest=dict(self.checkpoint), missing_keys=set(self.state))
        self.parts: dict[str, _Part] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: parameter -> the keys that it comes from, and whether a patcher's conversion makes it
        self.origins: dict[str, tuple[tuple[str, ...], bool]] = {}
        self.problems: dict[str, list[str]] = defaultdict(list)
        #: key -> name, of tensors that the stock model has no place for
        self.unplaced: dict[str, str] = {}

    def _layer(self, path: str) -> Any:
        """Return a layer for conversions that look up its dtype: of parts, which no module has, their tensors."""
        parts = self._layers_of_parts.get(path)
        return self.model.get_submodule(path) if parts is None else SimpleNamespace(**parts)

    @cached_property
    def _layers_of_parts(self) -> dict[str, dict[str, torch.Tensor]]:
        layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name in self.part_names & self.stock_state.keys():
            path, _, kind = name.rpartition(".")
            layers[path][kind] = self.stock_state[name]
        return layers

    @cached_property
    def revert(self) -> Revert:
        return default_revert(self.model)

    def run(self) -> Routing:
        """Return the routing.

        Raises:
            PatchedWeightsError: a conversion has targets in modules that are replaced and in others, where the tensors
                of the checkpoint don't fit unchanged.
        """
        is_quantized = is_prequantized(self.quantizer)
        experts = quantized_experts(self.model, self.checkpoint, self.carriers, self.state) if is_quantized else {}
        self.route_keys(sorted((key for key in self.checkpoint if key not in experts), key=dot_natural_key))
        for key, (target, layout) in experts.items():
            self.shapes[target] = tuple(self.state[target].shape)
            self.routing.sources[target] = self.routing.rest.pop(key)
            self.routing.routes.append(Route((key,), (target,), layout))
        self._join_parts()
        self._check_quantized(experts)
        routing = self.routing
        routing.problem = unfit_error(self.problems)
        routing.missing_keys -= self.shapes.keys()
        routing.unexpected_keys |= self.shapes.keys() - self.state.keys()
        for name in self.shapes.keys() & self.state.keys():
            shape, expected = self.shapes[name], self.state[name].shape
            if tuple(shape) == tuple(expected):
                continue
            if tuple(shape)[::-1] != tuple(expected) or not is_transposed_by_quantizer(self.model, name):
                routing.mismatched_keys.add((name, torch.Size(shape), expected))
        return routing

    def route_keys(self, keys: Iterable[str]) -> None:
        """Route these keys, each alone or with those that are converted together."""
        self.resolved = self._resolve(list(keys))
        for group in self._group():
            self._convert(group)
        self.routing.used = self.resolver.used

    # --- names ---------------------------------------------------------------------------------------------------

    def _resolve(self, keys: list[str]) -> dict[str, ResolvedKey]:
        """Resolve keys; a conversion of a patcher applies to what the patcher has replaced, if that is enough."""
        resolver = KeyResolver(self.model, self.stock_state, self.mapping, self.added, self.num_key_mapping)
        self.resolver, self.routing.resolve = resolver, resolver.resolve
        resolved = {key: resolver.resolve(key) for key in keys}
        paths = tuple(map(inside, self.replaced))
        if not paths or "" in self.replaced:
            return resolved
        excluded: dict[str, frozenset[Added]] = {}
        for added in self.added:
            if added.modules is not None or added.names_modules:
                continue
            taken = {key: entry for key, entry in resolved.items() if added in entry.added}
            outside = [key for key, entry in taken.items() if not entry.name.startswith(paths)]
            if len(outside) in (0, len(taken)):
                continue
            misfits = []
            for key in outside:
                without = excluded[key] = excluded.get(key, frozenset()) | {added}
                other = resolver.resolve(key, without)
                if other.name not in self.stock_state:
                    continue  # no other tensor goes there
                expected, shape = tuple(self.stock_state[other.name].shape), shape_of(self.checkpoint[key])
                if other.converter is not None or shape == expected:
                    resolved[key] = other
                else:
                    misfits.append(f"{other.name}: found {shape}, expected {expected}")
            if misfits:
                within = compress([entry.name for key, entry in taken.items() if key not in outside])
                raise partial_match_error(added.transform, within, misfits)
        return resolved

    def _group(self) -> list[Group]:
        """Return what converters take together; route the other keys."""
        groups: dict[tuple[str, int], Group] = {}
        shapes = {key: shape_of(self.checkpoint[key]) for key in self.resolved}
        for key, resolved in self.resolved.items():
            name, shape, added = resolved.name, shapes[key], resolved.added
            if resolved.converter is not None:
                if name in self.stock_state or "*" in name:
                    group = groups.setdefault((name, id(resolved.converter)), Group(resolved.converter, name))
                    group.add(key, resolved.pattern or key, shape)
                else:
                    self.routing.unexpected_keys.update(target_names(resolved.converter, name))
                    self.unplaced[key] = name
                continue
            if name not in self.stock_state:
                self.unplaced[key] = name
                if name not in self.state:
                    self.routing.unexpected_keys.add(name)
                    continue
            self._note_origin(name, (key,), bool(added))
            layout = Rows((key,), (name,), (shape,)) if added else None
            if name in self.part_names:
                self.parts[name] = _Part(self.routing.rest.pop(key), (key,))
            else:
                self.shapes.setdefault(name, shape)
                if added:
                    self.routing.sources[name] = self.routing.rest.pop(key)
            if added or name not in self.part_names:
                self.routing.routes.append(Route((key,), (name,), layout, added, (resolved.stock,), bool(added)))
        return list(groups.values())

    # --- conversions -----------------------------------------------------------------------------------------------

    def _convert(self, group: Group) -> None:
        """Find what a converter makes of a group, and have it read from that if transformers can't do it alone."""
        added = tuple(dict.fromkeys(item for key in group.taken for item in self.resolved[key].added))
        is_of_quantizer = any(getattr(item, "hf_quantizer", None) is not None for item in group.transform.operations)
        names = target_names(group.transform, group.first)
        makes_parts = not self.part_names.isdisjoint(names)
        if is_of_quantizer and not (added or makes_parts):
            # It makes what its patterns say, and running it would write to the parameters of the model.
            self._add_route(Route(group.keys, tuple(names), None, added), {})
            return
        try:
            layout = self._find_layout(group, bool(added))
            # An operation names a tensor by its source until another one joins them.
            others = {*source_patterns(group.transform)}.difference(names)
            if apart := others.intersection(layout.fused):
                left = ", ".join(sorted(apart))
                if len(others) == 1:
                    raise ValueError(f"its operations return {left}, which is not in target_patterns")
                raise ValueError(f"its operations don't join {left}: end with Concatenate(dim=0)")
            if several := [name for name in layout.fused if "*" in name]:
                raise ValueError(f"{several[0]} stands for several parameters, and its operations make one tensor")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.routing.conversion_errors[group.first] = reason
            if makes_parts:
                self.problems["failed"].append(f"{describe(group.transform)} raises {reason}")
            if added:
                self.routing.failed.setdefault(added[-1].transform, ([], reason))[0].append(group.first)
                self.routing.routes.append(Route(group.keys, (), None, added))
            return
        makes_parts = not self.part_names.isdisjoint(layout.fused)  # patterns don't show all names
        shapes = dict(zip(layout.fused, layout.fused_shapes(), strict=True))
        is_carried = bool(added) or (not makes_parts and layout.joins_unequal())
        stock = tuple(self.resolver.stock_name(key, self.resolved[key]) for key in group.keys) if is_carried else ()
        self._add_route(Route(group.keys, tuple(layout.fused), layout, added, stock, is_carried), shapes)
        if not (is_carried or makes_parts):
            return
        sources = {key: self.routing.rest.pop(key) for key in group.keys}
        computation = Computation(partial(self._run, layout, is_carried), sources)
        is_stacked = only_moves(group.transform) and not (added or self.num_key_mapping)
        dtype = dtype_of(next(iter(sources.values()))) if sources else ""
        for name, shape in shapes.items():
            source = Computed(computation, name, shape, dtype)
            if name in self.part_names:
                self.parts[name] = _Part(source, group.keys, sources if is_stacked else {})
            else:
                self.routing.sources[name] = source

    def _find_layout(self, group: Group, is_added: bool) -> Converted:
        try:
            return group.layout(self.view)
        except Exception:
            if has_known_operations(group.transform) or not is_added:
                raise
        if self.dtype is not None:  # it may need values
            values = {key: self.checkpoint[key][...] for key in group.keys}
            return group.layout(self.view, self._cast(values, group.first))
        names = [name for name in target_names(group.transform, group.first) if name in self.stock_state]
        targets = dict(zip(names, endings(group.transform), strict=False))
        return group.make_layout(targets=targets, shapes=[self.stock_state[name].shape for name in names])

    def _add_route(self, route: Route, shapes: Mapping[str, torch.Size]) -> None:
        """Add the route of a group."""
        for name in route.parameters:
            if name not in self.stock_state:
                self.routing.unexpected_keys.add(name)
            elif name not in self.part_names:
                self.shapes[name] = tuple(shapes.get(name, self.stock_state[name].shape))
            self._note_origin(name, route.keys, bool(route.added))
        self.routing.routes.append(route)

    @torch.no_grad()
    def _run(self, layout: Converted, is_carried: bool, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the conversion of a layer."""
        values = self._cast(tensors, layout.target) if is_carried else tensors
        try:
            return convert(layout, [values[key] for key in layout.stock], self.view)
        except Exception as error:  # in a thread of the load, which doesn't say where
            if not is_carried:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise conversion_error(layout.transform, [layout.target], reason) from error

    def _cast(self, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """Cast tensors to the dtype that a parameter will have, as transformers does before a conversion."""
        if self.dtype is None or name not in self.stock_state:
            return dict(tensors)
        dtype = self.dtype(name)
        return {key: tensor.to(dtype) for key, tensor in tensors.items()}

    # --- fused parameters --------------------------------------------------------------------------------------------

    def _note_origin(self, name: str, keys: tuple[str, ...], is_added: bool) -> None:
        """Note the keys of a parameter; a part, or a target of a patcher's conversion, can't have several origins."""
        before, was_added = self.origins.setdefault(name, (keys, is_added))
        if before != keys and (is_added or was_added or name in self.part_names):
            others = [key for key in (*before, *keys) if key != name]
            as_it_is = "as it is" if name in (*before, *keys) else f"as {others.pop()}"
            renames = is_added and len(before) == len(keys) == 1
            swap = " (renamings run one after another: they exchange names through a third)" if renames else ""
            self.problems["twice"].append(f"{name} twice: {as_it_is}, and as {', '.join(others)}{swap}")

    def _join_parts(self) -> None:
        """Have fused parameters read from their parts."""
        routing = self.routing
        keys_of_unplaced = {name: key for key, name in self.unplaced.items() if key in routing.rest}
        present = {name for layout in self.layouts for name in layout.fused} & keys_of_unplaced.keys()
        routing.is_runtime_layout = bool(present)
        arrange_in_blocks(routing.rest, keys_of_unplaced, self.layouts)
        # For all layers at once: each step of a load is taken for all of them, so that it can be followed.
        fused_shapes = [layout.fused_shapes() for layout in self.layouts]
        shapes = {name: shape_of(part.source) for name, part in self.parts.items()}
        for layout, (prefix, placed), fused_shape in zip(self.layouts, self.placed, fused_shapes, strict=True):
            parts = [self.parts[name] for name in layout.stock if name in self.parts]
            misfits = [
                f"{name}: found {shapes[name]}, expected {shape}"
                for name, shape in zip(layout.stock, layout.stock_shapes, strict=True)
                if name in shapes and shapes[name] != shape
            ]
            if misfits or len(parts) < len(layout.stock):
                self._note_incomplete(layout, placed, prefix, misfits)
                continue
            keys = tuple(dict.fromkeys(key for part in parts for key in part.keys))
            routing.routes.append(Route(keys, tuple(layout.fused), placed))
            self.shapes |= zip(layout.fused, map(tuple, fused_shape), strict=True)
            if twice := present.intersection(layout.fused):
                self.problems["twice"].append(f"{min(twice)} twice: as it is, and as {', '.join(keys)}")
            if self.dtype is not None:
                sources = self._unstacked(prefix, placed, parts[0]) if isinstance(placed, Matrices) else []
                sources = sources or fused_sources(placed, [part.source for part in parts])
                routing.sources |= zip(layout.fused, sources, strict=True)

    def _note_incomplete(self, layout: Layout, placed: Layout, prefix: str, misfits: list[str]) -> None:
        """Note the parts of a layout that are missing or don't fit."""
        has_parts = any(name in self.parts for name in layout.stock)
        if isinstance(placed, Matrices) and (has_parts or self.problems["failed"]):  # otherwise all of it is missing
            keys = expert_keys(prefix, placed, self.revert).values()
            absent = [key for key in keys if key not in self.checkpoint]
            if 0 < len(absent) < len(keys):
                self.problems["incomplete"] += absent
                return
        self.problems["lacking"] += [name for name in layout.stock if has_parts and name not in self.parts]
        self.problems["misfits"] += misfits

    def _unstacked(self, prefix: str, layout: Matrices, part: _Part) -> list[Any]:
        """Return the tensors that a checkpoint has for each layer of a layout; none if it hasn't all one by one."""
        if not part.stacked:
            return []
        keys, shape = expert_keys(prefix, layout, self.revert), layout.fused_shapes()[0]
        sources = [part.stacked.get(keys.get(name, "")) for name in layout.fused]
        is_one_dtype = len(set(map(dtype_of, part.stacked.values()))) == 1  # joined, they would have one
        if not is_one_dtype or any(item is None or shape_of(item) != shape or _is_view(item) for item in sources):
            return []
        part.source.group.expected.discard(part.source.name)
        return sources

    def _check_quantized(self, experts: Mapping[str, tuple[str, Layout]]) -> None:
        """Note quantized weights that a patcher converts, and full-precision ones that would be read as quantized.

        Beside the weights of a quantizer lie tensors that belong to the unfused layer (`SCB`, `weight_scale`). Layers
        that it left in full precision are converted as usual.

        Args:
            experts: the keys of quantized experts that are read unchanged.
        """
        keeps, is_quantized = keeps_quantized(self.quantizer), is_prequantized(self.quantizer)
        layers = {key.rpartition(".")[0] for part in self.parts.values() for key in part.keys}
        fused = {path for path, *_ in self.carriers} if is_quantized else set()
        for key, name in self.unplaced.items():
            # transformers ignores a weight or bias for which the model has no place.
            is_companion = _is_below(key, layers) and not key.endswith((".weight", ".bias"))
            if key in self.routing.rest and (is_companion or _is_below(name, fused)):
                self.problems["quantized"].append(key)
        if not (keeps or (is_quantized and self.added)):
            return
        replaced = tuple(map(inside, self.replaced))
        for layer, keys in group_by_layer(key for key in self.checkpoint if key not in experts).items():
            is_of_bytes = "weight" in keys and dtype_of(self.checkpoint[keys["weight"]]).startswith(_BYTES)
            if is_of_bytes or keys.keys() - {"weight", "bias"}:
                resolved = self.resolver.resolve(f"{layer}.weight")
                if resolved.added or (keeps and resolved.name in self.part_names):
                    self.problems["quantized"] += keys.values()
                elif keeps and is_of_bytes and resolved.name.startswith(replaced):
                    target = self.state.get(resolved.name)
                    is_kept = target is None or is_quantized_tensor(target)
                    self.problems["quantized"] += () if is_kept else keys.values()
        unchanged = {target for target, _ in experts.values()}
        for route in self.routing.routes if keeps else ():
            targets = self.state.keys() & set(route.parameters) - unchanged if route.layout is not None else ()
            if any(is_quantized_tensor(self.state[target]) for target in targets):
                self.problems["quantized"] += route.keys


def arrange_in_blocks(rest: dict[str, Any], keys: Mapping[str, str], layouts: Iterable[Layout]) -> None:
    """Arrange rows of a checkpoint in the runtime layout, in place, in the blocks of tensor parallelism."""
    for layout in filter(lies_in_blocks, layouts):
        for name in layout.fused:
            if name in keys:
                rest[keys[name]] = in_blocks(layout, rest[keys[name]])


def _is_view(source: Any) -> bool:
    """Whether a tensor shares its storage with others: tools that save would take them for tied."""
    return isinstance(source, torch.Tensor) and not is_alone(source)


def _is_below(key: str, paths: AbstractSet[str]) -> bool:
    while key:
        key = key.rpartition(".")[0]
        if key in paths:
            return True
    return False
