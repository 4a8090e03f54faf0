"""Linear layers of a module that are given one tensor, joined: what `qkv`, `gate_up` and `siblings` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from patcher.compat.models import kept_in_fp32
from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Decision, Fusion, more_than_a_weight_and_bias
from patcher.fusions.callers import Caller
from patcher.fusions.finding import Surroundings
from patcher.fusions.fused_module import fused_class
from patcher.fusions.joined import Joined, JoinedProjections, part_property
from patcher.fusions.methods import NotUnderstoodError, located, method_to_rewrite, names_in, trees_of
from patcher.fusions.rewrite import compile_subclass, rewritten
from patcher.fusions.sharing import Form, digest_of, forms_of
from patcher.layouts.layouts import Layout, Rows
from patcher.patterns import inside


class Projections(Fusion):
    """A family that joins `nn.Linear` children which are given the same tensor.

    >>> class UpAndGate(Projections):
    ...     joined_name = "up_gate"
    ...     def groups(self, names):
    ...         yield from [("up", "gate")] if {"up", "gate"} <= set(names) else []
    >>> UpAndGate().is_fusable(nn.Linear(2, 2))
    False

    Whether they are given the same tensor is known when they are called: a projection that is given another one
    computes its own rows. What is read beforehand is only whether something between the calls writes into that tensor.
    """

    #: the name of the joined projection
    joined_name: ClassVar[str] = ""

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """The names, among those of a module's children, that play the roles of this family together."""
        return iter(())

    def group_in(self, module: nn.Module) -> tuple[str, ...] | None:
        """The children that play the roles: a group in which all are linear layers, before one in which some are."""
        linear = {name: isinstance(child, nn.Linear) for name, child in module._modules.items()}
        groups = list(self.groups(linear)) if any(linear.values()) else []
        for enough in (all, any):
            for group in groups:
                if enough(linear[name] for name in group):
                    return group
        return None

    # What the engine asks for.

    def is_fusable(self, module: nn.Module) -> bool:
        return self._decide(module, self.group_in(module), None)[0] is not None

    def refusal(self, module: nn.Module) -> str:
        return self._decide(module, self.group_in(module), None)[1]

    def layouts(self, module: nn.Module) -> Iterator[Layout]:
        group = self.group_in(module)
        assert group is not None
        yield from self._layouts(module, self._joined(module, group))

    def _layouts(self, module: nn.Module, joined: Joined) -> Iterator[Layout]:
        yield Rows(tuple(f"{name}.weight" for name in joined.projections), f"{joined.name}.weight")
        for name in joined.biased:
            yield Rows(f"{name}.bias", f"{name}_bias")
        if not joined.biased and getattr(module, joined.projections[0]).bias is not None:
            yield Rows(tuple(f"{name}.bias" for name in joined.projections), f"{joined.name}.bias")

    def recipe(self, module: nn.Module) -> tuple[Joined, tuple[Form, ...]]:
        plan, reason = self._decide(module, self.group_in(module), None)
        if plan is None:
            raise InvalidPatcherError(f"{self.name} can't fuse {type(module).__qualname__}: {reason}.")
        return plan

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """The class for modules whose projections all have a bias, or all have none, and that call no other child
        between them.
        """
        bare = original_cls.__new__(original_cls)
        nn.Module.__init__(bare)
        called = {name for tree in trees_of(original_cls).values() for name in names_in(tree)}
        group = next(iter(self.groups(sorted(called))), None)
        if group is None:
            raise InvalidPatcherError(f"{self.name} finds no projections in {original_cls.__qualname__}.")
        return fused_class(self, original_cls, (Joined(group, self._free_name(called)), forms_of(bare, group, None)))

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        """The class with its methods rewritten.

        Raises:
            NotUnderstoodError: its code isn't what it was when the recipe was made.
        """
        joined, forms = recipe
        sources = []
        for form in forms:
            method = method_to_rewrite(original_cls, form.method)
            if digest_of(method) != form.digest:
                raise NotUnderstoodError(
                    f"{original_cls.__qualname__}.{form.method} has other code here than where this was fused"
                )
            try:
                sources.append((method, rewritten(method, joined, form)))
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

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        group = self.group_in(module)
        if group is None:
            return None
        if reason := _shared(path, module, group, surroundings, self._free_name(module._modules)):
            return Decision(refusal=reason)
        plan, reason = self._decide(module, group, Caller(surroundings.modules, path))
        if plan is None:
            return Decision(refusal=reason)
        return Decision(tuple(self._layouts(module, plan[0])), plan)

    # How.

    def _free_name(self, taken: Iterable[str]) -> str:
        name, taken = self.joined_name, set(taken)
        while name in taken:
            name = f"fused_{name}"
        return name

    def _joined(self, module: nn.Module, group: tuple[str, ...]) -> Joined:
        """What takes the place of these projections of a module."""
        biased = tuple(name for name in group if getattr(module._modules[name], "bias", None) is not None)
        return Joined(group, self._free_name(module._modules), () if len(biased) == len(group) else biased)

    def _decide(
        self, module: nn.Module, group: tuple[str, ...] | None, caller: Caller | None
    ) -> tuple[tuple[Joined, tuple[Form, ...]] | None, str]:
        """How to join these projections of a module, or why not."""
        if group is None:
            return None, "it has no such projections"
        joined = self._joined(module, group)
        if reason := _unlike(group, [module._modules[name] for name in group]):
            return None, reason
        if "forward" in vars(module):
            return None, "its forward was replaced on the object"
        try:
            plan = joined, forms_of(module, group, caller)
            fused_class(self, type(module), plan)
        except NotUnderstoodError as error:
            return None, str(error)
        return plan, ""


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
    """Why the module is not alone in this model."""
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
