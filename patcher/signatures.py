"""Replacements that are called otherwise than they can be: the modeling code's calls against their signatures."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import nn

from patcher.source.call_sites import CallSites, shortened, signature_of, why_unfit

__all__ = ["misfits"]

Classes = tuple[type[nn.Module], type[nn.Module]]


def misfits(
    model: nn.Module, replaced: Mapping[str, Classes], *, built: bool = True
) -> tuple[tuple[str, str, str, str], ...]:
    """The calls in modeling code that fit what was replaced, and don't fit what replaces it.

    A call that can't be followed isn't reported.

    Args:
        model: the model, or its skeleton, with or without the replacements.
        replaced: path -> original class and replacement.
        built: whether the replacements were built, which shows that their `__init__` fits.

    Returns:
        (replacement, method, where it is called and how, why it doesn't fit) of each.
    """
    methods = ("forward",) if built else ("__init__", "forward")
    found: dict[tuple[str, str, str, str], None] = {}
    for parent, known in _parents(model, replaced).items():
        classes = {original.__name__: (original, new) for pairs in known.values() for _, original, new in pairs}
        held = {
            name: {("[]" if listed else "") + original.__name__ for listed, original, _ in pairs}
            for name, pairs in known.items()
        }
        for base in parent.__mro__:
            sites = _sites(base.__module__)
            if sites is None:
                continue
            for call, name, method, caller in sites.uses(base.__name__, held):
                if name in classes and method in methods:
                    problem = _problem(call, *classes[name], method)
                    if problem:
                        line = f"line {call.lineno} of {_file(base.__module__)}"
                        where = f"{base.__name__}.{caller}, {line}: {shortened(call)}"
                        found[classes[name][1].__qualname__, method, where, problem] = None
    return tuple(found)


def _parents(
    model: nn.Module, replaced: Mapping[str, Classes]
) -> dict[type[nn.Module], dict[str, set[tuple[bool, type[nn.Module], type[nn.Module]]]]]:
    """class of a parent -> attribute -> (whether it is a list, original, replacement) of what it holds."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[type[nn.Module], dict[str, set[tuple[bool, type[nn.Module], type[nn.Module]]]]] = {}
    for path, classes in replaced.items():
        parent, _, name = path.rpartition(".")
        listed = name.isdigit()
        if listed:
            parent, _, name = parent.rpartition(".")
        if path and parent in modules:
            held = found.setdefault(type(modules[parent]), {})
            held.setdefault(name, set()).add((listed, *classes))
    return found


@lru_cache(maxsize=64)
def _sites(module: str) -> CallSites | None:
    """The calls of a file, None where there is none: nobody can read what was typed into a prompt."""
    if module.startswith("torch.") or module == "builtins" or module not in sys.modules:
        return None
    try:
        return CallSites(ast.parse(inspect.getsource(sys.modules[module])))
    except (OSError, TypeError, SyntaxError):
        return None


def _problem(call: ast.Call, original: type[nn.Module], replacement: type[nn.Module], method: str) -> str:
    before, after = (signature_of(getattr(cls, method, None)) for cls in (original, replacement))
    return why_unfit(call, before, after, True) if before is not None else ""


def _file(module: str) -> str:
    return Path(getattr(sys.modules[module], "__file__", None) or module).name
