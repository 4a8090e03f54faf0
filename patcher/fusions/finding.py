"""What a family finds in a model: which modules it fuses, and why it leaves others alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import named_modules, named_parameters, ties
from patcher.fusions.base import Decision, Fusion
from patcher.layouts.layouts import Layout, named_parameter
from patcher.patterns import matches_path


@dataclass(frozen=True)
class Findings:
    """What a fusion has found: path -> module, its layouts, its recipe, and path -> why a module is left alone.

    Where it has found nothing, every module that was looked at is listed.
    """

    matches: Mapping[str, nn.Module] = field(default_factory=dict)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    recipes: Mapping[str, Hashable] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class Surroundings:
    """A model, as far as it decides whether a module of it can be fused: what its modules share."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules = dict(named_modules(model))
        self._times = Counter(id(module) for module in self.modules.values())
        self._owners = Counter(id(parameter) for _, parameter in named_parameters(model))
        self._tied = {*ties(model), *ties(model).values()}

    def is_shared(self, module: nn.Module) -> bool:
        """Whether the module is at several places of the model."""
        return self._times[id(module)] > 1

    def tied(self, path: str, module: nn.Module) -> list[str]:
        """The names of the parameters in the module that are tied to others."""
        named = named_parameters(module, path)
        return [name for name, value in named if name in self._tied or self._owners[id(value)] > 1]

    def sharing(self, path: str, module: nn.Module, subject: str) -> str:
        """Why the module shares something with the rest of the model, "" if it doesn't."""
        if self.is_shared(module):
            return f"{subject} is at several places of the model"
        return "its weights are tied" if self.tied(path, module) else ""


def discover(fusion: Fusion, model: PreTrainedModel) -> Findings:
    """The modules that are fused, and those that aren't though the family applies to them.

    Args:
        model: the skeleton of the outermost model, as transformers builds it, on the meta device.
    """
    matches: dict[str, nn.Module] = {}
    decisions: dict[str, Decision] = {}
    refused: dict[str, str] = {}
    untold: dict[str, str] = {}
    surroundings = Surroundings(model)
    for path, module in surroundings.modules.items():
        if fusion.modules and not any(matches_path(pattern, path) for pattern in fusion.modules):
            continue
        if (decision := fusion.decide(path, module, surroundings)) is None:
            continue
        if reason := decision.refusal or _unlike_parts(decision.layouts, module):
            (refused if decision.is_told else untold)[path] = reason
        else:
            matches[path], decisions[path] = module, decision
    return Findings(
        matches,
        {path: tuple(layout.of(matches[path]) for layout in each.layouts) for path, each in decisions.items()},
        {path: each.recipe for path, each in decisions.items()},
        refused or ({} if matches else untold),
    )


def _unlike_parts(layouts: Iterable[Layout], module: nn.Module) -> str:
    """Why parameters can't become one, which has one type and trains or doesn't; "" if they can."""
    for layout in layouts:
        parts = {name: part for name in layout.stock if (part := named_parameter(module, name)) is not None}
        if len({part.dtype for part in parts.values()}) > 1:
            return f"{', '.join(parts)} have different types"
        frozen = [name for name, part in parts.items() if not part.requires_grad]
        if 0 < len(frozen) < len(parts):
            return f"{', '.join(frozen)} is frozen, and others of {', '.join(parts)} aren't"
    return ""
