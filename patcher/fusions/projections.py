"""Linear layers of a module that are given one tensor, joined: what `qkv`, `gate_up` and `siblings` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Decision, Fusion, why_unlike
from patcher.fusions.callers import Caller
from patcher.fusions.finding import Surroundings
from patcher.fusions.fused_module import fused_class
from patcher.fusions.joined import Joined, JoinedProjections, part_property
from patcher.fusions.methods import NotUnderstoodError, located, method_to_rewrite, names_in, trees_of
from patcher.fusions.rewrite import compile_subclass, rewritten
from patcher.fusions.sharing import Asked, Form, digest_of, forms_of, forms_of_all
from patcher.layouts.layouts import Layout, Rows

#: What takes the place of projections, and how their methods are rewritten.
Plan = tuple[Joined, tuple[Form, ...]]


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
        return not isinstance(self._planned_alone(module), str)

    def refusal(self, module: nn.Module) -> str:
        plan = self._planned_alone(module)
        return plan if isinstance(plan, str) else ""

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

    def recipe(self, module: nn.Module) -> Plan:
        plan = self._planned_alone(module)
        if isinstance(plan, str):
            raise InvalidPatcherError(f"{self.name} can't fuse {type(module).__qualname__}: {plan}.")
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
        return self.decided({path: module}, surroundings).get(path)

    def decisions(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        is_own = type(self).decide is not Projections.decide  # of a family that decides one by one
        return super().decisions(modules, surroundings) if is_own else self.decided(modules, surroundings)

    def decided(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        """What becomes of each of these modules, by their paths: what is alike is looked at once."""
        groups = self._groups_in(modules)
        names = {path: self._free_name(modules[path]._modules) for path in groups}
        reasons = surroundings.not_alone(groups, names)
        found = {path: Decision(refusal=reason) for path, reason in reasons.items()}
        left = {path: group for path, group in groups.items() if path not in reasons}
        plans = self._planned(
            {path: (modules[path], group, Caller(surroundings.modules, path)) for path, group in left.items()}
        )
        layouts: dict[Any, tuple[Layout, ...]] = {}
        for path, plan in plans.items():
            if isinstance(plan, str):
                found[path] = Decision(refusal=plan)
                continue
            joined = plan[0]
            kind = joined, getattr(modules[path], joined.projections[0]).bias is None
            if kind not in layouts:
                layouts[kind] = tuple(self._layouts(modules[path], joined))
            found[path] = Decision(layouts[kind], plan)
        return {path: found[path] for path in groups}

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

    def _groups_in(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
        """The children of each module that play the roles, of those that have such."""
        by_names = type(self).group_in is Projections.group_in
        known: dict[Any, tuple[str, ...] | None] = {}
        found: dict[str, tuple[str, ...]] = {}
        for path, module in modules.items():
            kind = tuple((name, type(child)) for name, child in module._modules.items()) if by_names else path
            if kind not in known:
                known[kind] = self.group_in(module)
            if (group := known[kind]) is not None:
                found[path] = group
        return found

    def _planned_alone(self, module: nn.Module) -> Plan | str:
        group = self.group_in(module)
        if group is None:
            return "it has no such projections"
        plan = self._planned({"": (module, group, None)})[""]
        try:
            if not isinstance(plan, str):
                fused_class(self, type(module), plan)
        except NotUnderstoodError as error:
            return str(error)
        return plan

    def _planned(self, asked: Mapping[str, Asked]) -> dict[str, Plan | str]:
        """How to join the projections of each of these modules, or why not."""
        children = {path: [module._modules[name] for name in group] for path, (module, group, _) in asked.items()}
        found: dict[str, Any] = {path: why_unlike(group, children[path]) for path, (_, group, _) in asked.items()}
        for path, (module, _, _) in asked.items():
            if not found[path] and "forward" in vars(module):
                found[path] = "its forward was replaced on the object"
        forms = forms_of_all({path: each for path, each in asked.items() if not found[path]})
        for path, answer in forms.items():
            module, group, _ = asked[path]
            found[path] = answer if isinstance(answer, str) else (self._joined(module, group), answer)
        return found
