"""A plan of tensor or expert parallelism, and what becomes of it where a model has other layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.parallel import in_plan
from patcher.errors import InvalidPatcherError
from patcher.patterns import compress

#: Styles that give each process an equal share of the outputs, and keep it there.
OUTPUTS = ("colwise", "packed_colwise")
#: Styles that give each process an equal share of the inputs; the results are summed.
INPUTS = ("rowwise", "packed_rowwise")
#: Styles that give each process a share of the outputs, which are gathered then.
GATHERED = ("colwise_gather_output", "colwise_rep")
#: The style of a module of experts whose results are summed.
SUMMED_EXPERTS = "moe_tp_experts"


def replaces_plan(config: Any) -> bool:
    """Whether a plan takes the place of that of the model: one without rules; before 5.19 every one that is given."""
    return not config.tp_plan or not hasattr(config, "ep_size")


def tensor_plan(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """Module or parameter, with `*` for numbers -> how it is shared, as a load uses it."""
    given = config.tp_plan
    if not isinstance(given, dict):
        return dict(model.tp_plan or {})
    return dict(given) if replaces_plan(config) else {**model.tp_plan, **given}


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan, and what becomes of it.

    Attributes:
        rules: module or parameter, with `*` for numbers -> its style, as transformers has it.
        processes: among how many processes it shares.
        added: the rules for layers that only the patched model has, and these layers.
        gone: the rules for those that only transformers has, or that are not followed.
    """

    rules: dict[str, str]
    processes: int
    added: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    not_followed: set[str] = field(default_factory=set)

    def of(self, name: str) -> str | None:
        """The style of a module or parameter."""
        return self.rules.get(in_plan(name))

    def below(self, path: str) -> dict[str, str]:
        """The rules for a module and what is in it."""
        rule = in_plan(path)
        return {name: style for name, style in self.rules.items() if name == rule or name.startswith(f"{rule}.")}

    def drop_below(self, path: str) -> None:
        self.not_followed.update(self.below(path))

    def add(self, path: str, style: str) -> None:
        """Add the rule for a layer that only the patched model has.

        Raises:
            InvalidPatcherError: there is another one for it.
        """
        rule = in_plan(path)
        known, paths = self.added.setdefault(rule, (self.rules.get(rule, style), set()))
        if known != style:
            raise cannot(
                [path],
                f"the plan has {known!r} for it, and {style!r} for what it is made of",
                f"Leave {rule!r} out of tp_plan.",
            )
        paths.add(path)

    def result(self, modules: Mapping[str, set[str]]) -> dict[str, str]:
        """The plan for the patched model, which has these modules by what plans call them.

        Raises:
            InvalidPatcherError: a rule for a layer of it holds for another one, which transformers doesn't share.
        """
        kept = {
            rule: style
            for rule, style in self.rules.items()
            if rule not in self.not_followed and (rule not in self.gone or rule in modules)
        }
        for rule, (_, paths) in self.added.items():
            if rule not in kept and (others := modules[rule] - paths):
                raise cannot(
                    sorted(paths),
                    f"{rule!r}, as a plan calls it, is {sorted(others)[0]} as well, a layer of the model that isn't "
                    "shared",
                )
        return kept | {rule: style for rule, (style, _) in self.added.items()}


def cannot(paths: Iterable[str], reason: str, instead: str = "") -> InvalidPatcherError:
    """The error for modules that can't be shared, with what can be done instead."""
    instead = instead or "Leave these modules out of the fusion: its modules=... say which it takes."
    return InvalidPatcherError(f"Tensor parallelism of {', '.join(compress(list(paths)))}: {reason}. {instead}")
