"""The base of the families that join linear layers which get the same tensor: `qkv`, `gate_up`, `siblings`."""

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
from patcher.fusions.sharing import Candidate, Form, digest_of, forms_of
from patcher.layouts.layouts import Layout, Rows

#: The recipe of a fused class: which projections are joined, and how the methods are rewritten.
Plan = tuple[Joined, tuple[Form, ...]]


class Projections(Fusion):
    """A family that joins `nn.Linear` children which get the same tensor.

    >>> class UpAndGate(Projections):
    ...     joined_name = "up_gate"
    ...     def groups(self, names):
    ...         yield from [("up", "gate")] if {"up", "gate"} <= set(names) else []
    >>> UpAndGate().is_fusable(nn.Linear(2, 2))
    False

    Whether they get the same tensor is checked at run time: a projection that gets another one computes its own rows.
    Only whether code between the calls writes into the tensor is analyzed beforehand.
    """

    #: the name of the joined projection
    joined_name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, other in (("layouts", "decide"), ("recipe", "decide"), ("make_fused_class", "make_class")):
            if name in vars(cls):
                raise InvalidPatcherError(
                    f"{cls.__name__}.{name}() would never be called: how layers are joined depends on the code around "
                    f"them. Override {other}() instead."
                )

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Yield the groups of names, among the names of a module's children, that this family joins."""
        return iter(())

    def group_in(self, module: nn.Module) -> tuple[str, ...] | None:
        """Return the children to join: preferably a group of linear layers only, else one with some."""
        linear = {name: isinstance(child, nn.Linear) for name, child in module._modules.items()}
        groups = list(self.groups(linear)) if any(linear.values()) else []
        for enough in (all, any):
            for group in groups:
                if enough(linear[name] for name in group):
                    return group
        return None

    # The interface of `Fusion`.

    def is_fusable(self, module: nn.Module) -> bool:
        return not isinstance(self._plan(module), str)

    def refusal(self, module: nn.Module) -> str:
        plan = self._plan(module)
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
        plan = self._plan(module)
        if isinstance(plan, str):
            raise InvalidPatcherError(f"{self.name} can't fuse {type(module).__qualname__}: {plan}.")
        return plan

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """Return the class for modules whose projections all have a bias, or none has.

        Between their calls no other child may be called.
        """
        bare = original_cls.__new__(original_cls)
        nn.Module.__init__(bare)
        names = {name for tree in trees_of(original_cls).values() for name in names_in(tree)}
        group = next(iter(self.groups(sorted(names))), None)
        if group is None:
            raise InvalidPatcherError(f"{self.name} finds no projections in {original_cls.__qualname__}.")
        forms = forms_of({"": (bare, group, None)})[""]
        if isinstance(forms, str):
            raise NotUnderstoodError(forms)
        return fused_class(self, original_cls, (Joined(group, self._free_name(names)), forms))

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        """Return the class with rewritten methods.

        Raises:
            NotUnderstoodError: the code of the original isn't that which the recipe was made of.
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
        parts = f"{', '.join(joined.projections[:-1])} and {joined.projections[-1]}"
        where = ", ".join(method.at(1) for method, _ in sources)
        cls = compile_subclass(
            f"Fused{original_cls.__name__}",
            f"{original_cls.__name__} with {parts} as one {joined.name}. Rewritten by patcher from {where}.",
            (JoinedProjections, original_cls),
            sources,
        )
        cls._joined = joined
        for index, name in enumerate(joined.projections):
            setattr(cls, name, part_property(joined, index))
        return cls

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        return self.decide_all({path: module}, surroundings).get(path)

    def decisions(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        is_overridden = type(self).decide is not Projections.decide  # by a family that decides one by one
        return super().decisions(modules, surroundings) if is_overridden else self.decide_all(modules, surroundings)

    def decide_all(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        """Decide about modules by path; identical modules are analyzed once."""
        groups = self._groups_in(modules)
        names = {path: self._free_name(modules[path]._modules) for path in groups}
        reasons = surroundings.not_alone(groups, names)
        decisions = {path: Decision(refusal=reason) for path, reason in reasons.items()}
        remaining = {path: group for path, group in groups.items() if path not in reasons}
        plans = self._plans(
            {path: (modules[path], group, Caller(surroundings.modules, path)) for path, group in remaining.items()}
        )
        layouts: dict[Any, tuple[Layout, ...]] = {}
        for path, plan in plans.items():
            if isinstance(plan, str):
                decisions[path] = Decision(refusal=plan)
                continue
            joined = plan[0]
            kind = joined, getattr(modules[path], joined.projections[0]).bias is None
            if kind not in layouts:
                layouts[kind] = tuple(self._layouts(modules[path], joined))
            decisions[path] = Decision(layouts[kind], plan)
        return {path: decisions[path] for path in groups}

    def _free_name(self, taken: Iterable[str]) -> str:
        name, taken = self.joined_name, set(taken)
        while name in taken:
            name = f"fused_{name}"
        return name

    def _joined(self, module: nn.Module, group: tuple[str, ...]) -> Joined:
        """Return the description of the joined projections of a module."""
        biased = tuple(name for name in group if getattr(module._modules[name], "bias", None) is not None)
        return Joined(group, self._free_name(module._modules), () if len(biased) == len(group) else biased)

    def _groups_in(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
        """Return path -> children to join, of the modules that have such."""
        by_names = type(self).group_in is Projections.group_in
        by_kind: dict[Any, tuple[str, ...] | None] = {}
        groups: dict[str, tuple[str, ...]] = {}
        for path, module in modules.items():
            kind = tuple((name, type(child)) for name, child in module._modules.items()) if by_names else path
            if kind not in by_kind:
                by_kind[kind] = self.group_in(module)
            if (group := by_kind[kind]) is not None:
                groups[path] = group
        return groups

    def _plan(self, module: nn.Module) -> Plan | str:
        group = self.group_in(module)
        if group is None:
            return "it has no such projections"
        plan = self._plans({"": (module, group, None)})[""]
        try:
            if not isinstance(plan, str):
                fused_class(self, type(module), plan)
        except NotUnderstoodError as error:
            return str(error)
        return plan

    def _plans(self, candidates: Mapping[str, Candidate]) -> dict[str, Plan | str]:
        """Return how to join the projections of each module, or why they can't be joined."""
        plans: dict[str, Any] = {}
        for path, (module, group, _) in candidates.items():
            plans[path] = why_unlike(group, [module._modules[name] for name in group])
            if not plans[path] and "forward" in vars(module):
                plans[path] = "its forward was replaced on the object"
        results = forms_of({path: candidate for path, candidate in candidates.items() if not plans[path]})
        for path, forms in results.items():
            module, group, _ = candidates[path]
            plans[path] = forms if isinstance(forms, str) else (self._joined(module, group), forms)
        return plans
