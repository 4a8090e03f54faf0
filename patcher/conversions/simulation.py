"""A load by names and shapes: what it would do with a checkpoint, without reading it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import dot_natural_key, key_renamer
from patcher.conversions.layouts import Layout
from patcher.conversions.sources import NamedSources
from patcher.conversions.tracing import LayerTrace, trace_of
from patcher.conversions.transforms import single
from patcher.patterns import common_prefix, without_numbers


@dataclass(frozen=True)
class Route:
    """Where tensors of the checkpoint go: the keys that one conversion takes at once, or one key that none takes."""

    keys: tuple[str, ...]
    parameters: tuple[str, ...]
    conversion: WeightTransform | Layout | None = None


@dataclass
class Outcome:
    """What a load would do, by names and shapes."""

    loaded: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    #: parameter -> the shape that was found, and the one that it has
    mismatched: dict[str, tuple[torch.Size, torch.Size]] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    #: parameter -> why the conversion that makes it raised, as transformers puts it
    conversion_errors: dict[str, str] = field(default_factory=dict)

    @property
    def missing_keys(self) -> set[str]:
        # Operations look there, where transformers passes what it knows of the load.
        return self.missing


def simulate(
    model: PreTrainedModel,
    conversions: list[WeightTransform],
    checkpoint: Mapping[str, torch.Tensor],
    unknown: Set[str] = frozenset(),
    *,
    going_on: bool = False,
) -> Outcome:
    """Load a checkpoint of meta tensors into a model on meta, by name and shape; traced conversions keep trace.

    As transformers does it, step by step. A load that doesn't read is this one.

    Args:
        unknown: the keys whose shapes nobody knows: they fit, and conversions that take one are taken at their word.
        going_on: note which conversions raise and go on, as transformers does until it has read everything. Of layers
            that are alike one is converted, and the traces have no sizes of the others.
    """
    parameters = model.state_dict()
    outcome = Outcome(missing=set(parameters))
    # The first converter that matches gives the name, and the last one with that text does the work.
    by_pattern = {
        text: item for item in conversions if isinstance(item, WeightConverter) for text in item.source_patterns
    }
    loads: dict[str, _Load] = {}
    shapes: dict[str, torch.Size] = {}
    rename = key_renamer(conversions, model, parameters)
    for key in sorted(checkpoint, key=dot_natural_key):
        renamed, taker, pattern = rename(key)
        if isinstance(taker, NamedSources) and renamed in parameters:  # it makes nothing else of what it takes
            shapes[renamed] = parameters[renamed].shape if key in unknown else checkpoint[key].shape
            continue  # whoever has put it there knows the route
        if renamed in parameters:
            if renamed not in loads:
                loads[renamed] = _Load(by_pattern[pattern] if pattern else None)
            loads[renamed].add(renamed, key, pattern or key, checkpoint[key])
        elif pattern:
            first, *_ = targets = by_pattern[pattern].target_patterns
            outcome.unexpected.update(renamed.replace(first, target) for target in targets)
        else:
            outcome.unexpected.add(renamed)
    #: what conversions have made of the same shapes, by the ends of the names
    known: dict[Any, tuple[str, dict[str, torch.Size]]] = {}
    for first, load in loads.items():
        blind = not unknown.isdisjoint(load.keys)
        if load.converter is None:
            shapes[first] = parameters[first].shape if blind else checkpoint[load.keys[0]].shape
            outcome.routes.append(Route((load.keys[0],), (first,)))
            continue
        end, made = known.get(load.kind(first), ("", {})) if going_on else ("", {})
        if made and first.endswith(end):
            made = {first.removesuffix(end) + name: shape for name, shape in made.items()}
            load.take_at_its_word(first)
        else:
            info: Any = (Outcome() if blind else outcome) if going_on else None
            try:
                made = load.run(first, model, info)
            except Exception:
                if blind:
                    made = load.take_at_its_word(first)
                elif first in outcome.conversion_errors:
                    continue
                else:
                    raise
            head = common_prefix([first, *made])
            ends = {name.removeprefix(head): shape for name, shape in made.items()}
            known[load.kind(first)] = (first.removeprefix(head), ends)
        for name, shape in made.items():
            shapes[name] = parameters[name].shape if blind and name in parameters else shape
        outcome.routes.append(Route(tuple(load.keys), tuple(made), load.converter))
    for name, shape in shapes.items():
        outcome.missing.discard(name)
        if name not in parameters:
            outcome.unexpected.add(name)
        elif shape != parameters[name].shape:
            outcome.mismatched[name] = (shape, parameters[name].shape)
        else:
            outcome.loaded.add(name)
    return outcome


class _Load:
    """The tensors that one conversion takes at once, or the one that none takes."""

    def __init__(self, converter: WeightConverter | None) -> None:
        self.converter = deepcopy(converter)
        self.keys: list[str] = []
        self._origin = id(converter)
        self._inputs: list[tuple[str, torch.Size]] = []

    def add(self, target: str, key: str, pattern: str, tensor: torch.Tensor) -> None:
        self.keys.append(key)
        self._inputs.append((pattern, tensor.shape))
        if self.converter is not None:
            self.converter.add_tensor(target, key, pattern, tensor)  # type: ignore[arg-type]

    def kind(self, first: str) -> Any:
        """What loads have in common that make the same shapes: layers that are alike."""
        return self._origin, without_numbers(first), tuple(self._inputs)

    def run(self, first: str, model: PreTrainedModel, info: Any) -> dict[str, torch.Size]:
        assert self.converter is not None
        made = self.converter.convert(first, model=model, config=model.config, loading_info=info)
        return {name: single(tensor).shape for name, tensor in made.items()}

    def take_at_its_word(self, first: str) -> dict[str, torch.Size]:
        """What it makes by its patterns alone; the trace has it that it did."""
        assert self.converter is not None
        trace = trace_of(self.converter)
        if trace is not None:
            trace.failed = [name for name in trace.failed if name != first]
            trace.entries.append(LayerTrace(first, {"": [(key, torch.Size()) for key in self.keys]}, {}, []))
        targets = self.converter.target_patterns
        return {first.replace(targets[0], target): torch.Size() for target in targets}
