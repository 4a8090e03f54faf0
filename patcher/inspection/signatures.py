"""Replacements that are called otherwise than they can be: the modeling code's calls against their signatures."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from torch import nn

from patcher.compat.models import named_modules
from patcher.loading.record import PatchedModule
from patcher.source.call_sites import CallSites, calls_of_child, shortened, signature_of, why_unfit
from patcher.spec.forward_of import shown_name

Classes = tuple[type[nn.Module], type[nn.Module]]
#: whether it is a list of them, original and replacement
Held = tuple[bool, Classes]


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
    found: dict[tuple[str, str, str, str], None] = {}
    for parent, held in _parents(model, replaced).items():
        for base in parent.__mro__:
            sites = _sites(base.__module__)
            for call, (original, new), method, caller in _calls(sites, base.__name__, held) if sites else ():
                if built and method == "__init__":
                    continue
                before, after = signature_of(getattr(original, method)), signature_of(getattr(new, method))
                if before is not None and (problem := why_unfit(call, before, after, True)):
                    file = Path(getattr(sys.modules[base.__module__], "__file__", None) or base.__module__).name
                    line = f"line {call.lineno} of {file}"
                    where = f"{base.__name__}.{caller}, {line}: {shortened(call)}"
                    found[shown_name(new), method, where, problem] = None
    return tuple(found)


def _calls(
    sites: CallSites, owner: str, held: Mapping[str, set[Held]]
) -> Iterator[tuple[ast.Call, Classes, str, str]]:
    """Each call that makes or runs a replaced module, its classes, the method called, and the one it is in."""
    classes = {pair: None for each in held.values() for _, pair in each}
    for call, name, caller in sites.constructions(owner):
        for pair in classes:
            if pair[0].__name__ == name:
                yield call, pair, "__init__", caller
    for caller, method in sites.methods(owner).items():
        for name, each in held.items():
            for listed, pair in each:
                for call in calls_of_child(method, name, listed):
                    yield call, pair, "forward", caller


def _parents(model: nn.Module, replaced: Iterable[PatchedModule]) -> dict[type[nn.Module], dict[str, set[Held]]]:
    """class of a parent -> attribute -> what it holds."""
    modules = dict(named_modules(model))
    found: dict[type[nn.Module], dict[str, set[Held]]] = {}
    for each in replaced:
        parent, _, name = each.path.rpartition(".")
        listed = name.isdigit()
        if listed:
            parent, _, name = parent.rpartition(".")
        if each.path and parent in modules:
            held = found.setdefault(type(modules[parent]), {}).setdefault(name, set())
            held.add((listed, (each.original, each.replacement)))
    return found


@lru_cache(maxsize=64)
def _sites(module: str) -> CallSites | None:
    """The calls of a file, None where there is none: what was typed into a prompt can't be read."""
    if module.startswith("torch.") or module == "builtins" or module not in sys.modules:
        return None
    try:
        return CallSites(ast.parse(inspect.getsource(sys.modules[module])))
    except (OSError, TypeError, SyntaxError):
        return None
