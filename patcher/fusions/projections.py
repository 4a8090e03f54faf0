"""Projections of one input, joined: what `qkv` and `gate_up` have in common."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, ClassVar

from torch import nn

from patcher.compat.models import kept_in_fp32
from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion, more_than_a_weight_and_bias
from patcher.fusions.finding import Surroundings
from patcher.fusions.fused_module import fused_class
from patcher.fusions.joined import Joined, JoinedProjections, part_property
from patcher.fusions.methods import NotUnderstoodError, located, methods_with, names_in, trees_of
from patcher.fusions.proof.calls import passes, touches
from patcher.fusions.proof.children import summaries
from patcher.fusions.proof.tracing import Constant, Guards, called_projections, prove
from patcher.fusions.proof.understanding import compared_names, joining_methods, understand
from patcher.fusions.proof.values import Summary
from patcher.fusions.rewrite import compile_subclass, rewritten
from patcher.layouts.layouts import Layout, Rows
from patcher.patterns import inside

#: class -> (family, what is joined, what its objects say of themselves) -> how to fuse them, or why not; and
#: projections -> the attributes that its methods compare
_plans: weakref.WeakKeyDictionary[type[nn.Module], dict[Any, Any]] = weakref.WeakKeyDictionary()


class Projections(Fusion):
    """A family that joins `nn.Linear` children which provably receive the same input."""

    #: the name of the joined projection
    joined_name: ClassVar[str] = ""

    #: whether a module is left alone of which another method calls some of the projections: such a call
    #: would be right, and compute all of them
    only_together: ClassVar[bool] = False

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """The names, among those of a module's children, that play the roles of this family together."""
        raise NotImplementedError

    # What the engine asks for.

    def is_fusable(self, module: nn.Module) -> bool:
        return self._decide(module)[0] is not None

    def refusal(self, module: nn.Module) -> str:
        return self._decide(module)[1]

    def layouts(self, module: nn.Module) -> Iterator[Layout]:
        joined = self._joined(module)
        assert joined is not None
        yield Rows(tuple(f"{name}.weight" for name in joined.projections), f"{joined.name}.weight")
        for name in joined.biased:
            yield Rows(f"{name}.bias", f"{name}_bias")
        if not joined.biased and getattr(module, joined.projections[0]).bias is not None:
            yield Rows(tuple(f"{name}.bias" for name in joined.projections), f"{joined.name}.bias")

    def recipe(self, module: nn.Module) -> tuple[Joined, Guards]:
        plan, reason = self._decide(module)
        if plan is None:
            raise InvalidPatcherError(f"{self.name} can't fuse {type(module).__qualname__}: {reason}.")
        return plan

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """The class for modules whose projections all have a bias, or all have none."""
        called = {name for method in methods_with(original_cls, lambda node: True) for name in names_in(method.node)}
        for group in self.groups(sorted(called)):
            joined = Joined(group, self._free_name(called))
            return fused_class(self, original_cls, (joined, understand(original_cls, group, {})))
        raise InvalidPatcherError(f"{self.name} finds no projections in {original_cls.__qualname__}.")

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        """The class with its methods rewritten.

        Raises:
            NotUnderstoodError: the projections don't provably share their input.
        """
        joined, guards = recipe
        sources = []
        for method in joining_methods(original_cls, joined.projections):
            try:
                proof = prove(original_cls, method, joined.projections, guards)
                if proof.inputs:
                    sources.append((method, rewritten(method, joined, proof, guards)))
            except NotUnderstoodError as error:
                raise located(error, method) from error
        listed = f"{', '.join(joined.projections[:-1])} and {joined.projections[-1]}"
        where = ", ".join(method.at(1) for method, _ in sources)
        cls = compile_subclass(
            f"Fused{original_cls.__name__}",
            f"{original_cls.__name__} with {listed} as one {joined.name}. Rewritten by patcher from {where}.",
            (JoinedProjections, original_cls),
            sources,
        )
        cls._joined = joined
        for number, name in enumerate(joined.projections):
            setattr(cls, name, part_property(joined, number))
        return cls

    def is_asked(self, path: str, module: nn.Module) -> bool:
        return self._group_of(module) is not None

    def obstacle(self, path: str, module: nn.Module, surroundings: Surroundings) -> str | None:
        group = self._group_of(module)
        assert group is not None
        if reason := _shared(path, module, group, surroundings, self._free_name(module._modules)):
            return reason
        plan, reason = self._decide(module)
        if plan is None:
            return reason
        if self.only_together and (reason := _called_alone(type(module), group)):
            return reason
        modules = surroundings.modules
        return touches(modules, path, group) or passes(modules, path, plan[1]) or None

    def is_told(self, path: str, module: nn.Module) -> bool:
        return True

    # How.

    def _free_name(self, taken: Iterable[str]) -> str:
        name, taken = self.joined_name, set(taken)
        while name in taken:
            name = f"fused_{name}"
        return name

    def _joined(self, module: nn.Module) -> Joined | None:
        """What takes the place of the projections of a module, None where it has none."""
        group = self._group_of(module)
        if group is None:
            return None
        biased = tuple(name for name in group if getattr(module._modules[name], "bias", None) is not None)
        return Joined(group, self._free_name(module._modules), () if len(biased) == len(group) else biased)

    def _decide(self, module: nn.Module) -> tuple[tuple[Joined, Guards] | None, str]:
        """How to fuse a module, or why not."""
        joined = self._joined(module)
        if joined is None:
            return None, "it has no such projections"
        group = joined.projections
        if reason := _unlike(group, [module._modules[name] for name in group]):
            return None, reason
        if "forward" in vars(module):
            return None, "its forward was replaced on the object"
        identities = tuple(name for name, child in module._modules.items() if type(child) is nn.Identity)
        attributes = tuple(sorted(self._state(module, group).items()))
        return self._plan(type(module), joined, attributes, identities, summaries(module))

    def _state(self, module: nn.Module, group: tuple[str, ...]) -> dict[str, Constant]:
        """What a module says of itself, as far as it may decide which way its forward goes."""
        original = type(module)
        plans = _plans.setdefault(original, {})
        if group not in plans:
            try:
                plans[group] = compared_names(original, group)
            except NotUnderstoodError:
                plans[group] = frozenset()
        return {
            name: value
            for name, value in vars(module).items()
            if name != "training"
            and (
                value is None
                or isinstance(value, bool)
                # Of these a module has many, and layers differ in them.
                or (
                    name in plans[group]
                    and (isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)))
                )
            )
        }

    def _group_of(self, module: nn.Module) -> tuple[str, ...] | None:
        """The children that play this family's roles: those that are alike, before those of which one is a Linear."""
        children = module._modules.items()
        return _group(self, tuple(module._modules), tuple(isinstance(child, nn.Linear) for _, child in children))

    def _plan(
        self,
        original: type[nn.Module],
        joined: Joined,
        attributes: tuple[tuple[str, Constant], ...],
        identities: tuple[str, ...],
        children: tuple[tuple[str, Summary], ...],
    ) -> tuple[tuple[Joined, Guards] | None, str]:
        key = (type(self), joined, attributes, identities, children)
        plans = _plans.setdefault(original, {})
        if key not in plans:
            try:
                guards = understand(original, joined.projections, dict(attributes), identities, children)
                fused_class(self, original, (joined, guards))
                plans[key] = (joined, guards), ""
            except NotUnderstoodError as error:
                plans[key] = None, str(error)
        plan: tuple[tuple[Joined, Guards] | None, str] = plans[key]
        return plan


@lru_cache(maxsize=4096)
def _group(family: Projections, names: tuple[str, ...], are_linear: tuple[bool, ...]) -> tuple[str, ...] | None:
    linear = dict(zip(names, are_linear, strict=True))
    groups = list(family.groups(names))
    for enough in (all, any):
        for group in groups:
            if enough(linear[name] for name in group):
                return group
    return None


def _called_alone(cls: type[nn.Module], group: tuple[str, ...]) -> str:
    """Which method calls some of the projections without the others, "" if none does."""
    for method, tree in trees_of(cls).items():
        called = called_projections(tree, group)
        if 0 < len(called) < len(group):
            return f"{method}() calls {', '.join(sorted(called))} alone, and would compute all of {', '.join(group)}"
    return ""


def _unlike(group: tuple[str, ...], children: list[nn.Module | None]) -> str:
    """Why the children can't be joined, by what they are."""
    for name, child in zip(group, children, strict=True):
        if type(child) is not nn.Linear:
            return f"{name} is {'absent' if child is None else f'a {type(child).__qualname__}, no nn.Linear'}"
        if reason := more_than_a_weight_and_bias(child):
            return f"{name} {reason}"
    linears: list[nn.Linear] = children  # type: ignore[assignment]
    if len({linear.in_features for linear in linears}) > 1:
        return f"{', '.join(group)} take inputs of different sizes"
    if len({linear.weight.dtype for linear in linears}) > 1:
        return f"{', '.join(group)} have different types"
    return ""


def _shared(path: str, module: nn.Module, group: tuple[str, ...], surroundings: Surroundings, joined: str) -> str:
    """Why the module is not by itself in this model."""
    prefix, model = inside(path), surroundings.model
    if surroundings.is_shared(module):
        return "the module is at several places of the model"
    for name in group:
        child = module._modules[name]
        if child is None:
            continue
        if surroundings.is_shared(child):
            return f"{name} is shared with another module"
        tied = surroundings.tied(f"{prefix}{name}", child)
        for key, _ in child.named_parameters(prefix=f"{prefix}{name}"):
            if key in tied:
                return f"{key.removeprefix(prefix)} is tied"
            if kept_in_fp32(model, key) != kept_in_fp32(model, f"{prefix}{joined}.weight"):
                return f"{name} is kept in float32"
    return ""
