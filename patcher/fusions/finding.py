"""Which modules of a model a family fuses, and why it doesn't fuse others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import kept_in_fp32, named_modules, named_parameters, ties
from patcher.expressions import search
from patcher.fusions.base import Fusion
from patcher.fusions.fused_module import fused_class, original_of
from patcher.fusions.methods import NotUnderstoodError
from patcher.layouts.layouts import Layout, unlike_parts
from patcher.patterns import inside, matches_path


@dataclass(frozen=True)
class Findings:
    """The modules that a fusion matches, with their layouts, recipes and fused classes, and why it refused others.

    Without a match, the refusals of every module that was considered are listed.
    """

    matches: Mapping[str, nn.Module] = field(default_factory=dict)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    recipes: Mapping[str, Hashable] = field(default_factory=dict)
    classes: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class Surroundings:
    """The model around a module: which modules and parameters are shared or tied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules = dict(named_modules(model))
        self._occurrences = Counter(id(module) for module in self.modules.values())
        self._owners = Counter(id(parameter) for _, parameter in named_parameters(model))
        self._tied = {*ties(model), *ties(model).values()}

    def is_shared(self, module: nn.Module) -> bool:
        """Whether the module is at several paths of the model."""
        return self._occurrences[id(module)] > 1

    def tied(self, path: str, module: nn.Module) -> list[str]:
        """Return the names of the parameters in the module that are tied to others."""
        parameters = named_parameters(module, path)
        return [name for name, parameter in parameters if name in self._tied or self._owners[id(parameter)] > 1]

    def sharing(self, path: str, module: nn.Module, subject: str) -> str:
        """Describe what the module shares with the rest of the model, "" if nothing."""
        if self.is_shared(module):
            return f"{subject} is at several places of the model"
        return "its weights are tied" if self.tied(path, module) else ""

    def not_alone(self, groups: Mapping[str, Sequence[str]], joined: Mapping[str, str]) -> dict[str, str]:
        """Describe what modules or their projections share with the rest of the model, of those that do.

        Args:
            groups: path -> the children to join.
            joined: path -> the name of the joined child.
        """
        reasons = {path: self._not_alone(path, group, joined[path]) for path, group in groups.items()}
        return {path: reason for path, reason in reasons.items() if reason}

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
    """Find the modules that a fusion fuses, and those that it applies to and can't fuse.

    Args:
        model: the skeleton of the outermost model, as transformers builds it, on the meta device.
    """
    surroundings, paths, patterns = Surroundings(model), fusion.modules, fusion.target_modules_patterns
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    modules = {
        path: module
        for path, module in surroundings.modules.items()
        if not paths or any(matches_path(pattern, path) for pattern in paths)
        if not patterns or any(search(pattern, path) for pattern in patterns)
    }
    decisions = fusion.decisions(modules, surroundings)
    restricts = _restricts(type(fusion))
    # Step by step for all modules, not module by module.
    reasons = {
        path: reason
        for path, decision in decisions.items()
        if (reason := decision.refusal or unlike_parts((layout.stock for layout in decision.layouts), modules[path]))
        or (restricts and not fusion.is_fusable(modules[path]) and (reason := Fusion.refusal(fusion, modules[path])))
    }
    kinds = {path: (original_of(modules[path]), decisions[path].recipe) for path in decisions if path not in reasons}
    classes: dict[Any, type[nn.Module] | str] = {}
    for path, kind in kinds.items():
        if kind not in classes:
            try:
                classes[kind] = fused_class(fusion, *kind)
            except NotUnderstoodError as error:
                classes[kind] = str(error)
        if isinstance(failure := classes[kind], str):
            reasons[path] = failure
    matches = {path: modules[path] for path in decisions if path not in reasons}
    reported = {path: reason for path, reason in reasons.items() if decisions[path].is_told}
    return Findings(
        matches,
        {path: tuple(layout.of(module) for layout in decisions[path].layouts) for path, module in matches.items()},
        {path: decisions[path].recipe for path in matches},
        {path: cls for path in matches if not isinstance(cls := classes[kinds[path]], str)},
        reported or ({} if matches else reasons),
    )


def _restricts(cls: type[Fusion]) -> bool:
    """Whether a class overrides `is_fusable` of a family that decides without calling it."""
    decides, accepts = (next(base for base in cls.__mro__ if name in vars(base)) for name in ("decide", "is_fusable"))
    return decides not in (Fusion, accepts) and issubclass(accepts, decides)
