"""Check the signatures of replacements against the calls in modeling code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from patcher.compat.models import named_modules
from patcher.errors import CodegenError
from patcher.functions.models import full_name
from patcher.functions.rebinding import rebinder_of
from patcher.loading.record import PatchedModule
from patcher.source.call_sites import calls_of_child, methods_of, shortened, why_unfit
from patcher.source.reading import Location, read_source
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
        bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
        callers = [(base, caller) for base in bases for caller in methods_of(base)]
        for base, caller in callers:
            for call in calls_of_child(caller, name, in_list):
                if problem := why_unfit(call, original.forward, new.forward):
                    file = Path(sys.modules[base.__module__].__file__ or "").name
                    where = f"{base.__name__}.{caller.name}, line {call.lineno} of {file}: {shortened(call)}"
                    rows[shown_name(new), where, problem] = None
    return (*rows, *_of_functions(model))


def _of_functions(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the same of calls of functions."""
    rebinders = dict.fromkeys(filter(None, (rebinder_of(module) for _, module in named_modules(model))))
    for function, name, hit in (item for rebinder in rebinders for item in rebinder.references()):
        with suppress(CodegenError):  # without a source
            source = read_source(function, "", Location("", 0))
            calls = [call for call in ast.walk(source.tree()) if isinstance(call, ast.Call)]
            for call in (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name):
                if problem := why_unfit(call, hit.original, hit.replacement, ()):
                    line = f"line {source.line + call.lineno - 1} of {Path(source.file).name}"
                    yield full_name(hit.replacement), f"{function.__qualname__}, {line}: {shortened(call)}", problem
