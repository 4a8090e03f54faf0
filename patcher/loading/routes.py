"""Where the keys of a checkpoint go: routed once, by names and shapes, before a weight is read.

    checkpoint keys            layout                      parameters
    layers.0.q_proj.weight  \\
    layers.0.k_proj.weight   }-- rows one under the other -- layers.0.qkv_proj.weight
    layers.0.v_proj.weight  /
    layers.0.o_proj.weight  ---- as it is ----------------- layers.0.o_proj.weight

This table is what a plan shows, what is judged, what is read, and what a save reverses. Parameters that a fusion or a
patcher's conversion makes are read through one lazy source each, under their own names, so that transformers casts,
quantizes and shards them as any other tensor; what only transformers converts, it converts itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key, is_prequantized, keeps_quantized
from patcher.compat.models import ModelView, state_tensors
from patcher.errors import PatchedWeightsError
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.carried import fused_modules, is_quantized as is_quantized_tensor
from patcher.layouts.conversion import Converted, Group, convert, only_moves, target_names
from patcher.layouts.layouts import Layout, Rows, is_alone, lies_in_blocks
from patcher.layouts.names import Named, Names
from patcher.layouts.sources import Computation, Computed, dtype_of, fused_sources, in_blocks, shape_of
from patcher.layouts.transforms import Added, describe, has_known_operations
from patcher.loading.experts import default_revert, expert_keys, group_by_layer, quantized_experts
from patcher.loading.unfit import failure, partial_match_error, unfit_error
from patcher.patterns import compress, inside

#: Types of one byte, as safetensors calls them.
_BYTES = ("I8", "U8", "F8")


@dataclass(frozen=True, eq=False)
class Route:
    """Where tensors of a checkpoint go.

    Attributes:
        keys: those that are taken together, in the order in which they are joined.
        parameters: what becomes of them.
        layout: how; None for a tensor that is read as it is.
        by: the conversions of patchers that have a part in it.
        stock: what the parts are called in transformers.
        is_carried: whether modules carry how it was made: by a patcher, or by a conversion of transformers that joins
            parts of different sizes, which transformers would cut into equal ones.
    """

    keys: tuple[str, ...]
    parameters: tuple[str, ...]
    layout: Layout | None = None
    by: tuple[Added, ...] = ()
    stock: tuple[str, ...] = ()
    is_carried: bool = False

    @property
    def text(self) -> str:
        """How, in a line; "" for a tensor that is read as it is."""
        return describe(self.by[-1].transform) if self.by else str(self.layout or "")


@dataclass(eq=False)
class Routing:
    """The routes of a load, and what doesn't fit: by the names that transformers has for it at the end of a load.

    Attributes:
        rest: what transformers reads itself: key -> tensor, or what is read as one.
        sources: parameter -> what it is read from instead.
        mismatched_keys: (parameter, the shape that was found, its own).
        conversion_errors: parameter -> why the conversion that makes it raises.
        failed: the conversions of patchers that raise, for which parameters, and why first.
        used: the conversions of transformers that have had a part.
        follow: gives the place of a key.
        is_runtime_layout: whether the checkpoint has fused parameters as they are.
        problem: why it can't be read.
    """

    routes: list[Route] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    missing_keys: set[str] = field(default_factory=set)
    unexpected_keys: set[str] = field(default_factory=set)
    mismatched_keys: set[tuple[str, torch.Size, torch.Size]] = field(default_factory=set)
    conversion_errors: dict[str, str] = field(default_factory=dict)
    failed: dict[WeightTransform, tuple[list[str], str]] = field(default_factory=dict)
    used: list[WeightTransform] = field(default_factory=list)
    is_runtime_layout: bool = False
    problem: PatchedWeightsError | None = None
    follow: Callable[[str], Named] = Named

    @property
    def failure(self) -> PatchedWeightsError | None:
        """The error for conversions of patchers that raise."""
        found = next(iter(self.failed.items()), None)
        return None if found is None else failure(found[0], *found[1])

    @property
    def absent(self) -> set[str]:
        """The parameters that get nothing, or nothing of their shape."""
        return self.missing_keys | {name for name, *_ in self.mismatched_keys}

    def agrees_with(self, info: Any) -> bool:
        """Whether a load has come to what was expected of it."""
        return (
            not info.conversion_errors
            and self.missing_keys == info.missing_keys
            and self.unexpected_keys == info.unexpected_keys
            and {name for name, *_ in self.mismatched_keys} == {name for name, *_ in info.mismatched_keys}
        )

    def to_dict(self) -> dict[str, Any]:
        """As transformers gives it to whoever has asked for `output_loading_info`."""
        names = ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Conversions:
    """The conversions of a load.

    Attributes:
        mapping: those of transformers, as a quantizer has adapted them; first `requested` of a `key_mapping`.
        added: those of patchers.
        replaced: the paths of the modules that mappings have replaced.
    """

    mapping: Sequence[WeightTransform] = ()
    added: Sequence[Added] = ()
    requested: int = 0
    replaced: tuple[str, ...] = ()


def route(
    model: PreTrainedModel,
    checkpoint: Mapping[str, Any],
    conversions: Conversions,
    *,
    unknown: AbstractSet[str] = frozenset(),
    quantizer: Any = None,
    dtype: Callable[[str], torch.dtype] | None = None,
) -> Routing:
    """Where the keys of a checkpoint go.

    Args:
        checkpoint: tensors, or what has their shapes.
        unknown: the keys whose shapes aren't known: they fit.
        quantizer: the one of the load; what it has written is read as it is, or refused.
        dtype: gives the type that a parameter will have; None where nothing will be read.

    Raises:
        PatchedWeightsError: a conversion has targets in modules that are replaced and in others, where the tensors of
            the checkpoint don't fit as they are.
    """
    return _Router(model, checkpoint, conversions, unknown, quantizer, dtype).run()


def stock_state(own: Mapping[str, torch.Tensor], made: Iterable[Layout]) -> dict[str, torch.Tensor]:
    """A state dict as transformers has it, with the shapes of what is made otherwise, on the meta device."""
    stock = dict(own)
    for layout in made:
        for name in layout.fused:
            stock.pop(name, None)
        stock |= {
            name: torch.empty(shape, device="meta")
            for name, shape in zip(layout.stock, layout.stock_shapes, strict=True)
        }
    return stock


def stock_parameters(
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    wanted: AbstractSet[str],
    conversions: Sequence[WeightTransform],
    checkpoint: Mapping[str, Any],
) -> dict[str, torch.Tensor] | None:
    """The values of parameters of transformers that its conversions make of a checkpoint; None if some can't be made.

    Args:
        tensors: the state dict of the model as transformers has it.
        wanted: the parameters.
    """
    router = _Router(model, checkpoint, Conversions(conversions), stock=(tensors, wanted))
    router.take(sorted(checkpoint, key=dot_natural_key))
    if any(router.unfit.values()):
        return None
    return {name: part.source[...] for name, part in router.parts.items()}


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter of the model as transformers has it: what it is read from, and the keys that it takes.

    Attributes:
        stacked: what the checkpoint has for these, if transformers only moves their values.
    """

    source: Any
    keys: tuple[str, ...]
    stacked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Router:
    """One routing, under way.

    Args:
        stock: what the model would have without its fusions, and those of them that are parts of others.
    """

    model: PreTrainedModel
    checkpoint: Mapping[str, Any]
    conversions: Conversions
    unknown: AbstractSet[str] = frozenset()
    quantizer: Any = None
    dtype: Callable[[str], torch.dtype] | None = None
    stock: tuple[dict[str, torch.Tensor], AbstractSet[str]] | None = None

    def __post_init__(self) -> None:
        self.own = state_tensors(self.model)
        self.fused = fused_modules(self.model)
        prefixes = [each.prefix for each in self.fused]
        #: the layouts, each with what its names begin with; and by the names that they have in the model
        self.placed = [
            (at, each) for at, one in zip(prefixes, self.fused, strict=True) for each in one.carried.layouts
        ]
        self.layouts = [layout.named(prefix.__add__) for prefix, layout in self.placed]
        self.tensors, self.wanted = self.stock or (
            stock_state(self.own, self.layouts),
            {name for layout in self.layouts for name in layout.stock},
        )
        view = ModelView(self.model, get_parameter=self.tensors.__getitem__, state_dict=lambda: self.tensors)
        self.view: Any = view
        self.routing = Routing(rest=dict(self.checkpoint), missing_keys=set(self.own))
        self.parts: dict[str, _Part] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: parameter -> the keys that it comes from, and whether a patcher's conversion makes it
        self.origins: dict[str, tuple[tuple[str, ...], bool]] = {}
        self.unfit: dict[str, list[str]] = defaultdict(list)
        #: key -> name, of what the model has no place for
        self.unused: dict[str, str] = {}

    @cached_property
    def revert(self) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Gives the checkpoint that stacks are saved as."""
        return default_revert(self.model)

    def run(self) -> Routing:
        is_quantized = is_prequantized(self.quantizer)
        experts = quantized_experts(self.model, self.checkpoint, self.fused, self.own) if is_quantized else {}
        self.take(sorted((key for key in self.checkpoint if key not in experts), key=dot_natural_key))
        for key, (target, layout) in experts.items():
            self.shapes[target] = tuple(self.own[target].shape)
            self.routing.sources[target] = self.routing.rest.pop(key)
            self.routing.routes.append(Route((key,), (target,), layout))
        self._join()
        self._check_quantized(experts)
        self._judge()
        return self.routing

    def take(self, keys: Iterable[str]) -> None:
        """Route these keys, each alone or with those that are converted together."""
        self.named = self._placed(list(keys))
        for group in self._groups():
            self._convert(group)
        self.routing.used = self.names.used

    # --- names ---------------------------------------------------------------------------------------------------

    def _placed(self, keys: list[str]) -> dict[str, Named]:
        """Where each key goes; a conversion that a patcher adds acts on what it has replaced, where that is enough."""
        conversions = self.conversions
        names = Names(self.model, self.tensors, conversions.mapping, conversions.added, conversions.requested)
        self.names, self.routing.follow = names, names.follow
        named = {key: names.follow(key) for key in keys}
        paths = tuple(inside(path) for path in conversions.replaced)
        if not paths or "" in conversions.replaced:
            return named
        left_out: dict[str, frozenset[Added]] = {}
        for added in conversions.added:
            if added.modules is not None or added.names_modules:
                continue
            taken = {key: found for key, found in named.items() if added in found.by}
            outside = [key for key, found in taken.items() if not found.name.startswith(paths)]
            if len(outside) in (0, len(taken)):
                continue
            misfits = []
            for key in outside:
                without = left_out[key] = left_out.get(key, frozenset()) | {added}
                other = names.follow(key, without)
                if other.name not in self.tensors:
                    continue  # nothing else leads there
                expected = tuple(self.tensors[other.name].shape)
                if other.taker is not None or key in self.unknown or shape_of(self.checkpoint[key]) == expected:
                    named[key] = other
                else:
                    misfits.append(f"{other.name}: found {shape_of(self.checkpoint[key])}, expected {expected}")
            if misfits:
                within = compress([found.name for key, found in taken.items() if key not in outside])
                raise partial_match_error(added.transform, within, misfits)
        return named

    def _groups(self) -> list[Group]:
        """What converters take together; what none takes is put where it belongs."""
        groups: dict[tuple[str, int], Group] = {}
        shapes = {key: shape_of(self.checkpoint[key]) for key in self.named}
        for key, found in self.named.items():
            name, shape = found.name, shapes[key]
            if found.taker is not None:
                if name in self.tensors or "*" in name:
                    group = groups.setdefault((name, id(found.taker)), Group(found.taker, name))
                    group.add(key, found.pattern or key, shape)
                else:
                    self.routing.unexpected_keys.update(target_names(found.taker, name))
                    self.unused[key] = name
                continue
            if name not in self.tensors:
                self.unused[key] = name
                if name not in self.own:
                    self.routing.unexpected_keys.add(name)
                    continue
            self._origin(name, (key,), bool(found.by))
            own = self.tensors[name] if name in self.tensors else self.own[name]
            shape = tuple(own.shape) if key in self.unknown else shape
            layout = Rows((key,), (name,), (shape,)) if found.by else None
            if name in self.wanted:
                self.parts[name] = _Part(self.routing.rest.pop(key), (key,))
            else:
                self.shapes.setdefault(name, shape)
                if found.by:
                    self.routing.sources[name] = self.routing.rest.pop(key)
            if found.by or name not in self.wanted:
                self.routing.routes.append(Route((key,), (name,), layout, found.by, (found.stock,), bool(found.by)))
        return list(groups.values())

    # --- conversions -----------------------------------------------------------------------------------------------

    def _convert(self, group: Group) -> None:
        """Find what a converter makes of a group, and have it read from that where transformers can't do it alone."""
        by = tuple(dict.fromkeys(added for key in group.taken for added in self.named[key].by))
        of_quantizer = any(getattr(each, "hf_quantizer", None) is not None for each in group.transform.operations)
        by_name = target_names(group.transform, group.first)
        is_ours, is_wanted = bool(by), not self.wanted.isdisjoint(by_name)
        if of_quantizer and not (is_ours or is_wanted):
            # It makes what its patterns say, and writes to the parameters of the model on its way.
            self._made(Route(group.keys, tuple(by_name), None, by), {})
            return
        try:
            layout = self._layout(group, is_ours)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.routing.conversion_errors[group.first] = reason
            if is_wanted:
                self.unfit["failed"].append(f"{describe(group.transform)} raises {reason}")
            if is_ours:
                self.routing.failed.setdefault(by[-1].transform, ([], reason))[0].append(group.first)
                self.routing.routes.append(Route(group.keys, (), None, by))
            return
        is_wanted = not self.wanted.isdisjoint(layout.fused)  # patterns don't show all names
        shapes = dict(zip(layout.fused, layout.fused_shapes(), strict=True))
        is_carried = is_ours or (not is_wanted and layout.joins_unequal())
        stock = tuple(self.names.stock_name(key, self.named[key]) for key in group.keys) if is_carried else ()
        self._made(Route(group.keys, tuple(layout.fused), layout, by, stock, is_carried), shapes)
        if not (is_carried or is_wanted):
            return
        sources = {key: self.routing.rest.pop(key) for key in group.keys}
        computation = Computation(partial(self._run, layout, is_carried), sources)
        is_stacked = only_moves(group.transform) and not (is_ours or self.conversions.requested)
        dtype = dtype_of(next(iter(sources.values()))) if sources else ""
        for name, shape in shapes.items():
            source = Computed(computation, name, shape, dtype)
            if name in self.wanted:
                self.parts[name] = _Part(source, group.keys, sources if is_stacked else {})
            else:
                self.routing.sources[name] = source

    def _layout(self, group: Group, is_ours: bool) -> Converted:
        is_known = self.unknown.isdisjoint(group.keys)
        try:
            if is_known:
                return group.layout(self.view)
        except Exception:
            if has_known_operations(group.transform) or not is_ours:
                raise
        if is_known and self.dtype is not None:  # it may need values
            values = {key: self.checkpoint[key][...] for key in group.keys}
            return group.layout(self.view, self._cast(values, group.first))
        names = [name for name in target_names(group.transform, group.first) if name in self.tensors]
        made = dict(zip(names, group.transform.target_patterns, strict=False))
        return group.as_written(made=made, shapes=[self.tensors[name].shape for name in names])

    def _made(self, route: Route, shapes: Mapping[str, torch.Size]) -> None:
        """Note what a group makes."""
        for name in route.parameters:
            if name not in self.tensors:
                self.routing.unexpected_keys.add(name)
            elif name not in self.wanted:
                self.shapes[name] = tuple(shapes.get(name, self.tensors[name].shape))
            self._origin(name, route.keys, bool(route.by))
        self.routing.routes.append(route)

    @torch.no_grad()
    def _run(self, layout: Converted, is_ours: bool, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What a conversion makes of the tensors of a layer."""
        values = self._cast(tensors, layout.target) if is_ours else tensors
        given = [values[key] for key in layout.stock]
        try:
            return convert(layout, given, self.view)
        except Exception as error:  # in a thread of the load, which has no place for it
            if not is_ours:
                raise
            raise failure(layout.transform, [layout.target], f"{type(error).__name__}: {error}") from error

    def _cast(self, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """The tensors in the type that a parameter will have, as transformers gives them to a conversion."""
        if self.dtype is None or name not in self.tensors:
            return dict(tensors)
        dtype = self.dtype(name)
        return {key: tensor.to(dtype) for key, tensor in tensors.items()}

    # --- fused parameters --------------------------------------------------------------------------------------------

    def _origin(self, name: str, keys: tuple[str, ...], is_ours: bool) -> None:
        """Note where a parameter comes from; a part, and what a patcher's conversion makes, from nowhere else."""
        before, was_ours = self.origins.setdefault(name, (keys, is_ours))
        if before != keys and (is_ours or was_ours or name in self.wanted):
            others = [key for key in (*before, *keys) if key != name]
            as_it_is = "as it is" if name in (*before, *keys) else f"as {others.pop()}"
            self.unfit["twice"].append(f"{name} twice: {as_it_is}, and as {', '.join(others)}")

    def _join(self) -> None:
        """Have fused parameters read from their parts."""
        routing, unknown = self.routing, self.unknown
        at = {name: key for key, name in self.unused.items() if key in routing.rest}
        already = {name for layout in self.layouts for name in layout.fused} & at.keys()
        routing.is_runtime_layout = bool(already)
        share(routing.rest, at, self.layouts)
        made = [layout.fused_shapes() for layout in self.layouts]
        shapes = {name: shape_of(part.source) for name, part in self.parts.items()}
        for number, layout in enumerate(self.layouts):
            prefix, placed = self.placed[number]
            found = [self.parts[name] for name in layout.stock if name in self.parts]
            unfit = [
                f"{name}: found {shapes[name]}, expected {shape}"
                for name, shape in zip(layout.stock, layout.stock_shapes, strict=True)
                if name in shapes and shapes[name] != shape and unknown.isdisjoint(self.parts[name].keys)
            ]
            if unfit or len(found) < len(layout.stock):
                experts: dict[str, str] = {}
                if isinstance(placed, Matrices) and (found or self.unfit["failed"]):  # or they are missing whole
                    experts = expert_keys(prefix, placed, self.revert)
                absent = [key for key in experts.values() if key not in self.checkpoint]
                if 0 < len(absent) < len(experts):
                    self.unfit["incomplete"] += absent
                    continue
                self.unfit["lacking"] += [name for name in layout.stock if found and name not in self.parts]
                self.unfit["misfits"] += unfit
                continue
            keys = tuple(dict.fromkeys(key for part in found for key in part.keys))
            routing.routes.append(Route(keys, tuple(layout.fused), placed))
            self.shapes |= zip(layout.fused, map(tuple, made[number]), strict=True)
            if twice := already.intersection(layout.fused):
                self.unfit["twice"].append(f"{min(twice)} twice: as it is, and as {', '.join(keys)}")
            if self.dtype is not None:
                own = self._one_by_one(prefix, placed, found[0]) if isinstance(placed, Matrices) else []
                sources = own or fused_sources(placed, [part.source for part in found])
                routing.sources |= zip(layout.fused, sources, strict=True)

    def _one_by_one(self, prefix: str, layout: Matrices, part: _Part) -> list[Any]:
        """What a checkpoint has for each layer of a layout that stock would stack first; none where it hasn't that."""
        if not part.stacked:
            return []
        names, shape = expert_keys(prefix, layout, self.revert), layout.fused_shapes()[0]
        found = [part.stacked.get(names.get(name, "")) for name in layout.fused]
        is_one_dtype = len(set(map(dtype_of, part.stacked.values()))) == 1  # joined, they would have one
        if not is_one_dtype or any(each is None or shape_of(each) != shape or _is_cut(each) for each in found):
            return []
        part.source.group.expected.discard(part.source.name)
        return found

    def _check_quantized(self, experts: Mapping[str, tuple[str, Layout]]) -> None:
        """Note what a quantizer has written of weights that become others, and what it would read in full precision.

        Beside its weights lie tensors that belong to the layer as it is (`SCB`, `weight_scale`). What it has left
        alone is taken as ever.

        Args:
            experts: the keys of those that are read as they are.
        """
        keeps, is_quantized = keeps_quantized(self.quantizer), is_prequantized(self.quantizer)
        layers = {key.rpartition(".")[0] for part in self.parts.values() for key in part.keys}
        fused = {path for path, *_ in self.fused} if is_quantized else set()
        for key, name in self.unused.items():
            # What is called weight or bias transformers ignores, where the model has no place for it.
            is_companion = _is_below(key, layers) and not key.endswith((".weight", ".bias"))
            if key in self.routing.rest and (is_companion or _is_below(name, fused)):
                self.unfit["quantized"].append(key)
        if not (keeps or (is_quantized and self.conversions.added)):
            return
        for layer, held in group_by_layer(key for key in self.checkpoint if key not in experts).items():
            is_of_bytes = "weight" in held and dtype_of(self.checkpoint[held["weight"]]).startswith(_BYTES)
            if is_of_bytes or held.keys() - {"weight", "bias"}:
                found = self.names.follow(f"{layer}.weight")
                if found.by or (keeps and found.name in self.wanted):
                    self.unfit["quantized"] += held.values()
        as_they_are = {target for target, _ in experts.values()}
        for each in self.routing.routes if keeps else ():
            targets = self.own.keys() & set(each.parameters) - as_they_are if each.layout is not None else ()
            if any(is_quantized_tensor(self.own[target]) for target in targets):
                self.unfit["unquantized"] += each.keys

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        routing = self.routing
        routing.problem = unfit_error(self.unfit)
        for name, shape in self.shapes.items():
            routing.missing_keys.discard(name)
            if name not in self.own:
                routing.unexpected_keys.add(name)
            elif tuple(shape) != tuple(self.own[name].shape):
                routing.mismatched_keys.add((name, torch.Size(shape), self.own[name].shape))


def share(rest: dict[str, Any], read: Mapping[str, str], layouts: Iterable[Layout]) -> None:
    """Have the rows of a checkpoint in the runtime layout lie in the blocks that processes share.

    Args:
        rest: the checkpoint, which is changed.
        read: parameter -> its key in the checkpoint.
    """
    for layout in filter(lies_in_blocks, layouts):
        for target in layout.fused:
            if target in read:
                rest[read[target]] = in_blocks(layout, rest[read[target]])


def _is_cut(source: Any) -> bool:
    """Whether other tensors lie in the storage of one, which tools that save would take for tied."""
    return isinstance(source, torch.Tensor) and not is_alone(source)


def _is_below(key: str, paths: AbstractSet[str]) -> bool:
    while key:
        key = key.rpartition(".")[0]
        if key in paths:
            return True
    return False
