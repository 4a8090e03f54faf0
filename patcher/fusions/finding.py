"""What a family finds in a model: which modules it fuses, and why it leaves others alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import kept_in_fp32, named_modules, named_parameters, ties
from patcher.fusions.base import Fusion
from patcher.fusions.fused_module import fused_class, original_of
from patcher.fusions.methods import NotUnderstoodError
from patcher.layouts.layouts import Layout, unlike_parts
from patcher.patterns import inside, matches_path


@dataclass(frozen=True)
class Findings:
    """What a fusion has found: path -> module, its layouts, its recipe, its class, and path -> why one is left alone.

    Where it has found nothing, every module that was looked at is listed.
    """

    matches: Mapping[str, nn.Module] = field(default_factory=dict)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    recipes: Mapping[str, Hashable] = field(default_factory=dict)
    classes: Mapping[str, type[nn.Module]] = field(default_factory=dict)
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

    def not_alone(self, groups: Mapping[str, Sequence[str]], joined: Mapping[str, str]) -> dict[str, str]:
        """Why modules share something with the rest of the model, of those that do.

        Args:
            groups: path -> the children that would be joined.
            joined: path -> what that would be called.
        """
        found = {path: self._not_alone(path, group, joined[path]) for path, group in groups.items()}
        return {path: reason for path, reason in found.items() if reason}

    def _not_alone(self, path: str, group: Sequence[str], joined: str) -> str:
        prefix, module = inside(path), self.modules[path]
        if self.is_shared(module):
            return "the module is at several places of the model"
        for name in group:
            child = module._modules[name]
            if child is None:
                continue
            if self.is_shared(child):
                return f"{name} is shared with another module"
            tied = self.tied(f"{prefix}{name}", child)
            for key, _ in child.named_parameters(prefix=f"{prefix}{name}"):
                if key in tied:
                    return f"{key.removeprefix(prefix)} is tied"
                if kept_in_fp32(self.model, key) != kept_in_fp32(self.model, f"{prefix}{joined}.weight"):
                    return f"{name} is kept in float32"
        return ""


def discover(fusion: Fusion, model: PreTrainedModel) -> Findings:
    """The modules that are fused, and those that aren't though the family applies to them.

    Args:
        model: the skeleton of the outermost model, as transformers builds it, on the meta device.
    """
    surroundings, patterns = Surroundings(model), fusion.modules
    modules = {
        path: module
        for path, module in surroundings.modules.items()
        if not patterns or any(matches_path(pattern, path) for pattern in patterns)
    }
    decisions = fusion.decisions(modules, surroundings)
    reasons = {path: each.refusal or unlike_parts(each.layouts, modules[path]) for path, each in decisions.items()}
    kinds = {path: (original_of(modules[path]), each.recipe) for path, each in decisions.items() if not reasons[path]}
    classes: dict[Any, type[nn.Module] | str] = {}
    for path, kind in kinds.items():
        if kind not in classes:
            try:
                classes[kind] = fused_class(fusion, *kind)
            except NotUnderstoodError as error:
                classes[kind] = str(error)
        if isinstance(reason := classes[kind], str):
            reasons[path] = reason
    matches = {path: modules[path] for path, reason in reasons.items() if not reason}
    told, untold = (
        {path: reason for path, reason in reasons.items() if reason and decisions[path].is_told is is_told}
        for is_told in (True, False)
    )
    return Findings(
        matches,
        {path: tuple(layout.of(module) for layout in decisions[path].layouts) for path, module in matches.items()},
        {path: decisions[path].recipe for path in matches},
        {path: made for path in matches if not isinstance(made := classes[kinds[path]], str)},
        told or ({} if matches else untold),
    )
