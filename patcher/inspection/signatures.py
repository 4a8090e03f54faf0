"""Check the signatures of replacements against the calls in modeling code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import nn

from patcher.compat.models import named_modules
from patcher.loading.record import PatchedModule
from patcher.source.call_sites import Function, calls_of_child, methods_of, shortened, why_unfit
from patcher.spec.forward_of import shown_name

#: A replaced child of a module: whether it is in a list, its original class and the replacement.
Child = tuple[bool, type[nn.Module], type[nn.Module]]


def misfits(model: nn.Module, replaced: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """Return the calls in modeling code that fit an original class and don't fit its replacement.

    A call that can't be resolved statically isn't reported.

    Args:
        model: the model, or its skeleton, with the replacements.

    Returns:
        (replacement, where its `forward` is called and how, why that doesn't fit) of these calls.
    """
    modules = dict(named_modules(model))
    parents: dict[type[nn.Module], dict[str, set[Child]]] = {}
    for module in replaced:
        parent, _, name = module.path.rpartition(".")
        in_list = name.isdigit()
        if in_list:
            parent, _, name = parent.rpartition(".")
        if module.path and parent in modules:
            children = parents.setdefault(type(modules[parent]), {}).setdefault(name, set())
            children.add((in_list, module.original, module.replacement))
    rows: dict[tuple[str, str, str], None] = {}
    for cls, children_by_name in parents.items():
        for base in cls.__mro__:
            for caller in methods_of(base) if not base.__module__.startswith(("torch.", "builtins")) else ():
                for call, original, new in _calls(caller, children_by_name):
                    if problem := why_unfit(call, original.forward, new.forward):
                        file = Path(sys.modules[base.__module__].__file__ or "").name
                        where = f"{base.__name__}.{caller.name}, line {call.lineno} of {file}: {shortened(call)}"
                        rows[shown_name(new), where, problem] = None
    return tuple(rows)


def _calls(
    caller: Function, children_by_name: Mapping[str, set[Child]]
) -> Iterator[tuple[ast.Call, type[nn.Module], type[nn.Module]]]:
    """Yield the calls of replaced modules in a method, with their original classes and the replacements."""
    for name, children in children_by_name.items():
        for in_list, original, new in children:
            for call in calls_of_child(caller, name, in_list):
                yield call, original, new
