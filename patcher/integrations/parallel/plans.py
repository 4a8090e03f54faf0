"""A plan of tensor or expert parallelism, and its translation for a model with other layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.models import in_plan
from patcher.errors import InvalidPatcherError
from patcher.patterns import compress

#: Styles by which each process computes an equal share of the outputs, and keeps it.
OUTPUTS = ("colwise", "packed_colwise")
#: Styles by which each process takes an equal share of the inputs; the results are summed.
INPUTS = ("rowwise", "packed_rowwise")
#: Styles by which each process computes a share of the outputs, which are gathered afterwards.
GATHERED = ("colwise_gather_output", "colwise_rep")
#: The style of a module of experts whose results are summed.
SUMMED_EXPERTS = "moe_tp_experts"


def replaces_plan(config: Any) -> bool:
    """Whether the plan of a config replaces that of the model: if it has no rules; before 5.19 always."""
    return not config.tp_plan or not hasattr(config, "ep_size")


def tensor_plan(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """Return the plan that a load follows: module or parameter, with `*` for numbers -> its style."""
    plan = config.tp_plan
    if not isinstance(plan, dict):
        return dict(model.tp_plan or {})
    return dict(plan) if replaces_plan(config) else {**model.tp_plan, **plan}


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan for the stock model and the changes to it.

    Attributes:
        rules: module or parameter, with `*` for numbers -> its style, as transformers has it.
        processes: how many processes the model is sharded among.
        added: the rules for layers that only the patched model has, and these layers.
        removed: the rules for layers that only the stock model has, kept if another layer matches them.
        not_followed: the rules that are dropped in any case.
    """

    rules: dict[str, str]
    processes: int
    added: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    not_followed: set[str] = field(default_factory=set)

    def style(self, name: str) -> str | None:
        """Return the style of a module or parameter."""
        return self.rules.get(in_plan(name))

    def below(self, path: str) -> dict[str, str]:
        """Return the rules for a module and everything in it."""
        rule = in_plan(path)
        return {name: style for name, style in self.rules.items() if name == rule or name.startswith(f"{rule}.")}

    def drop_below(self, path: str) -> None:
        """Drop the rules for a module and everything in it."""
        for name in self.below(path):
            del self.rules[name]

    def add(self, path: str, style: str) -> None:
        """Add the rule for a layer that only the patched model has.

        Raises:
            InvalidPatcherError: if there is another rule for it.
        """
        rule = in_plan(path)
        known, paths = self.added.setdefault(rule, (self.rules.get(rule, style), set()))
        if known != style:
            raise cannot(
                [path],
                f"the plan has {known!r} for it, and {style!r} for its parts",
                f"Leave {rule!r} out of tp_plan.",
            )
        paths.add(path)

    def result(self, modules: Mapping[str, set[str]]) -> dict[str, str]:
        """Return the plan for the patched model, given the paths of its modules by their names in plans.

        Raises:
            InvalidPatcherError: if an added rule matches another layer as well, which the stock plan doesn't shard.
        """
        kept = {
            rule: style
            for rule, style in self.rules.items()
            if rule not in self.not_followed and (rule not in self.removed or rule in modules)
        }
        for rule, (_, paths) in self.added.items():
            if rule not in kept and (others := modules[rule] - paths):
                raise cannot(
                    sorted(paths),
                    f"{rule!r} in the plan also matches {sorted(others)[0]}, a layer of the model that isn't sharded",
                )
        return kept | {rule: style for rule, (style, _) in self.added.items()}


def cannot(paths: Iterable[str], reason: str, instead: str = "") -> InvalidPatcherError:
    """Return the error for modules that can't be sharded, with an alternative."""
    instead = instead or "Leave these modules out of the fusion: its modules=... say which it takes."
    return InvalidPatcherError(f"Tensor parallelism of {', '.join(compress(list(paths)))}: {reason}. {instead}")
