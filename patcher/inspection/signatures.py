"""Check the signatures of replacements against the calls in modeling code."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import nn

from patcher.compat.models import named_modules
from patcher.functions.models import full_name
from patcher.functions.rebinding import rebinder_of
from patcher.fusions.methods import Method, NotUnderstoodError, read_function, readable
from patcher.loading.record import PatchedModule
from patcher.source.call_sites import calls_of_child, calls_of_function, shortened, why_unfit
from patcher.spec.forward_of import shown_name


def misfits(model: nn.Module, replaced: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """Return the calls in modeling code that fit an original class or function and don't fit its replacement.

    A call that can't be resolved statically isn't reported.

    Args:
        model: the model, or its skeleton, with the replacements.

    Returns:
        (replacement, where its `forward` or itself is called and how, why that doesn't fit) of these calls.
    """
    modules = dict(named_modules(model))
    #: (class of the parent, name of the child or of its list, whether it is in one, original, replacement)
    children: dict[tuple[Any, ...], None] = {}
    for module in replaced:
        parent, _, name = module.path.rpartition(".")
        if in_list := name.isdigit():
            parent, _, name = parent.rpartition(".")
        if module.path and parent in modules:
            children[type(modules[parent]), name, in_list, module.original, module.replacement] = None
    rows: dict[tuple[str, str, str], None] = {}
    for cls, name, in_list, original, new in children:
        for _, method in readable(cls):
            for call in calls_of_child(method.node, name, in_list):
                if problem := why_unfit(call, original.forward, new.forward):
                    rows[shown_name(new), _where(method, call), problem] = None
    rebinders = dict.fromkeys(filter(None, map(rebinder_of, modules.values())))
    for function, name, hit in (item for rebinder in rebinders for item in rebinder.references()):
        with suppress(NotUnderstoodError):
            method = read_function(function)
            for call in calls_of_function(method.node, name):
                if problem := why_unfit(call, hit.original, hit.replacement, ()):
                    rows[full_name(hit.replacement), _where(method, call), problem] = None
    return tuple(rows)


def _where(method: Method, call: ast.Call) -> str:
    file, _, line = method.at(call.lineno).rpartition(":")
    return f"{method.function.__qualname__}, line {line} of {file}: {shortened(call)}"
