"""A load by names and shapes: what it would do with a checkpoint, without reading it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import dot_natural_key, key_renamer
from patcher.layouts.groups import Alike, Group, made_by_name
from patcher.layouts.layouts import Layout
from patcher.layouts.tracing import trace_of


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
    #: parameter -> the keys that a conversion makes it of, and the one that has it as it is
    twice: dict[str, tuple[str, ...]] = field(default_factory=dict)
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
    sources: Mapping[str, torch.Size] | None = None,
    going_on: bool = False,
) -> Outcome:
    """Load a checkpoint of meta tensors into a model on meta, by name and shape; traced conversions keep trace.

    As transformers does it, step by step. A load that doesn't read is this one.

    Args:
        unknown: the keys whose shapes nobody knows: they fit, and conversions that take one are taken at their word.
        sources: the shapes of parameters that are read besides; whoever makes these knows the routes.
        going_on: note which conversions raise and go on, as transformers does until it has read everything. Of layers
            that are alike one is converted, and the traces have that one alone.
    """
    parameters = model.state_dict()
    outcome = Outcome(missing=set(parameters))
    groups: dict[str, Group] = {}
    shapes: dict[str, torch.Size] = dict(sources or {})
    as_they_are: dict[str, str] = {}
    rename = key_renamer(conversions, model, parameters)
    for key in sorted(checkpoint, key=dot_natural_key):
        renamed, taker, pattern = rename(key)
        converter = taker if isinstance(taker, WeightConverter) else None
        if converter is None:
            as_they_are[renamed] = key
        if renamed not in parameters:
            outcome.unexpected.update([renamed] if converter is None else made_by_name(converter, renamed))
        elif renamed in groups or (converter is not None and renamed not in shapes):  # the first of them says how
            if converter is not None and renamed not in groups:
                groups[renamed] = Group(converter, renamed)
            groups[renamed].add(key, pattern or key, checkpoint[key])
        elif renamed not in shapes:
            shapes[renamed] = parameters[renamed].shape if key in unknown else checkpoint[key].shape
            outcome.routes.append(Route((key,), (renamed,)))
    alike = Alike()
    for group in groups.values():
        is_blind = not unknown.isdisjoint(group.shapes)
        made = alike.made_by(group) if going_on else None
        if made is None:
            info: Any = (Outcome() if is_blind else outcome) if going_on else None
            try:
                made = group.convert(model, info)
            except Exception:
                if is_blind:
                    group.take_at_its_word()
                    made = dict.fromkeys(made_by_name(group.converter, group.first), torch.Size())
                elif group.first in outcome.conversion_errors:
                    continue
                else:
                    raise
            alike.keep(group, made)
        for name, shape in made.items():
            shapes[name] = parameters[name].shape if is_blind and name in parameters else shape
        outcome.routes.append(Route(tuple(group.shapes), tuple(made), group.converter))
        if trace_of(group.converter) is not None:  # of its own conversions transformers takes care
            for name in made.keys() & as_they_are.keys():
                others = [key for key in group.shapes if key != as_they_are[name]]
                outcome.twice[name] = (*others, as_they_are[name])
    for name, shape in shapes.items():
        outcome.missing.discard(name)
        if name not in parameters:
            outcome.unexpected.add(name)
        elif shape != parameters[name].shape:
            outcome.mismatched[name] = (shape, parameters[name].shape)
        else:
            outcome.loaded.add(name)
    return outcome
