"""Check the signatures of replacements against the calls in modeling code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from patcher.compat.models import named_modules
from patcher.loading.record import PatchedModule
from patcher.source.call_sites import calls_of_child, methods_of, shortened, why_unfit
from patcher.spec.forward_of import shown_name


def misfits(model: nn.Module, replaced: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """Return the calls in modeling code that fit an original class and don't fit its replacement.

    A call that can't be resolved statically isn't reported.

    Args:
        model: the model, or its skeleton, with the replacements.

    Returns:
        (replacement, where its `forward` is called and how, why that doesn't fit) of these calls.
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
        bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
        callers = [(base, caller) for base in bases for caller in methods_of(base)]
        for base, caller in callers:
            for call in calls_of_child(caller, name, in_list):
                if problem := why_unfit(call, original.forward, new.forward):
                    file = Path(sys.modules[base.__module__].__file__ or "").name
                    where = f"{base.__name__}.{caller.name}, line {call.lineno} of {file}: {shortened(call)}"
                    rows[shown_name(new), where, problem] = None
    return tuple(rows)
