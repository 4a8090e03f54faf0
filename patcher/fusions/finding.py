"""What a family finds in a model: which modules it fuses, and why it leaves others alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import named_modules, named_parameters, ties
from patcher.fusions.base import Fusion
from patcher.layouts.layouts import Layout, named_parameter


@dataclass(frozen=True)
class Findings:
    """What a fusion has found in a model: path -> module, its layouts, and path -> why a module is left alone.

    Where it has found nothing else, every module that was looked at is told.
    """

    matches: Mapping[str, nn.Module] = field(default_factory=dict)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
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
        """Why the module isn't by itself in the model, "" if it is."""
        if self.is_shared(module):
            return f"{subject} is at several places of the model"
        return "its weights are tied" if self.tied(path, module) else ""


def discover(fusion: Fusion, model: PreTrainedModel) -> Findings:
    """The modules that are fused, and those that aren't though the family is about them.

    Args:
        model: the skeleton of the outermost model, as transformers builds it, on the meta device.
    """
    matches: dict[str, nn.Module] = {}
    layouts: dict[str, tuple[Layout, ...]] = {}
    refused: dict[str, str] = {}
    untold: dict[str, str] = {}
    surroundings = Surroundings(model)
    for path, module in surroundings.modules.items():
        if not (fusion.is_asked_for(path) and fusion.is_asked(path, module)):
            continue
        reason = fusion.obstacle(path, module, surroundings)
        if reason is None:
            asked = tuple(fusion.layouts(module))
            reason = _unlike_parts(asked, module)
        if reason is None:
            matches[path], layouts[path] = module, tuple(layout.of(module) for layout in asked)
        elif fusion.is_told(path, module):
            refused[path] = reason
        elif reason:
            untold[path] = reason
    return Findings(matches, layouts, refused or ({} if matches else untold))


def _unlike_parts(layouts: Iterable[Layout], module: nn.Module) -> str | None:
    """Why parameters can't become one, which has one type and trains or doesn't; None if they can."""
    for layout in layouts:
        parts = {name: part for name in layout.stock if (part := named_parameter(module, name)) is not None}
        if len({part.dtype for part in parts.values()}) > 1:
            return f"{', '.join(parts)} have different types"
        frozen = [name for name, part in parts.items() if not part.requires_grad]
        if 0 < len(frozen) < len(parts):
            return f"{', '.join(frozen)} is frozen, and others of {', '.join(parts)} aren't"
    return None
