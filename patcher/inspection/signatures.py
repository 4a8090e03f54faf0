"""Replacements that are called otherwise than they can be: the modeling code's calls against their signatures."""

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

#: What a module holds under a name: whether it is a list of them, the original class and the replacement.
Held = tuple[bool, type[nn.Module], type[nn.Module]]


def misfits(
    model: nn.Module, replaced: Iterable[PatchedModule], *, built: bool = True
) -> tuple[tuple[str, str, str, str], ...]:
    """The calls in modeling code that fit what was replaced, and don't fit what replaces it.

    A call that can't be followed isn't reported.

    Args:
        model: the model, or its skeleton, with or without the replacements.
        built: whether the replacements were built, which shows that their `__init__` fits.

    Returns:
        (replacement, method, where it is called and how, why it doesn't fit) of each.
    """
    modules = dict(named_modules(model))
    parents: dict[type[nn.Module], dict[str, set[Held]]] = {}
    for each in replaced:
        parent, _, name = each.path.rpartition(".")
        listed = name.isdigit()
        if listed:
            parent, _, name = parent.rpartition(".")
        if each.path and parent in modules:
            held = parents.setdefault(type(modules[parent]), {}).setdefault(name, set())
            held.add((listed, each.original, each.replacement))
    found: dict[tuple[str, str, str, str], None] = {}
    for cls, held_by_name in parents.items():
        for base in cls.__mro__:
            for caller in methods_of(base) if not base.__module__.startswith(("torch.", "builtins")) else ():
                for call, original, new, method in _calls(caller, held_by_name):
                    if built and method == "__init__":
                        continue
                    if problem := why_unfit(call, getattr(original, method), getattr(new, method)):
                        file = Path(sys.modules[base.__module__].__file__ or "").name
                        where = f"{base.__name__}.{caller.name}, line {call.lineno} of {file}: {shortened(call)}"
                        found[shown_name(new), method, where, problem] = None
    return tuple(found)


def _calls(
    caller: Function, held: Mapping[str, set[Held]]
) -> Iterator[tuple[ast.Call, type[nn.Module], type[nn.Module], str]]:
    """Each call in a method that makes or runs a replaced module, its classes, and the method called."""
    made = {each[1:] for pairs in held.values() for each in pairs}
    for call in ast.walk(caller):
        for original, new in made:
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == original.__name__:
                yield call, original, new, "__init__"
    for name, pairs in held.items():
        for listed, original, new in pairs:
            for call in calls_of_child(caller, name, listed):
                yield call, original, new, "forward"
