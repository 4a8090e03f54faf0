"""Classes whose projections are joined, as code: the class itself changed, or a class that inherits from it.

The class itself is changed where all its objects are fused. Where only some are (one class for self and for cross
attention), or where the rewritten forward decides call by call, the fused forward stands in a class that inherits from
it, and whoever builds the objects makes them of that class.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from patcher import matching
from patcher.codegen.dependencies import RUNTIME
from patcher.codegen.owning_classes import Owners
from patcher.codegen.registration import PatchRegistration
from patcher.fusions.joined import Joined
from patcher.fusions.rewrite import class_text

__all__ = ["as_subclass", "becomes_one_class", "join_projections"]


def join_projections(
    described: PatchRegistration,
    owners: Owners,
    original: type[nn.Module],
    fused: Mapping[str, Any],
    refused: Mapping[str, str],
) -> None:
    """The code of a class whose projections are joined.

    Args:
        described: the config that gets the patches.
        owners: the classes that build its objects.
        original: the class.
        fused: path -> rewritten class, of the objects that are fused.
        refused: path -> why an object isn't.
    """
    described.add_import(RUNTIME, names=["join_projections"])
    name, variants = original.__name__, list(dict.fromkeys(fused.values()))
    alike = becomes_one_class(owners, original, fused)
    if alike and not _leaves_calls(variants[0]):
        joined: Joined = variants[0]._joined
        listed = ", ".join(joined.projections)
        for method, code in variants[0]._rewritten.items():
            described.override_method(f"{name}.{method}", code, f"{listed} are one {joined.name}")
        for part in joined.projections if _is_used(original, joined, set(variants[0]._rewritten)) else ():
            described.override_method(f"{name}.{part}", _property(described, joined, part), "for others", new=True)
        owners.add(name, _joining("self", joined), f"one {joined.name} in place of {listed}")
        return
    for number, cls in enumerate(variants, 1):
        joined = cls._joined
        listed = ", ".join(joined.projections)
        new = cls.__name__ if len(variants) == 1 else f"{cls.__name__}{number}"
        used = _leaves_calls(cls) or _is_used(original, joined, set(cls._rewritten))
        extra = [_property(described, joined, part) for part in joined.projections] if used else []
        why = f"{name} with {listed} as one {joined.name}"
        described.add_helper_after(name, as_subclass(cls, new, name, extra), why)
        for path in (path for path, found in fused.items() if found is cls):
            owner, part = owners.part(path, fused, refused)
            statement = f"{part}.__class__ = {new}\n{_joining(part, joined)}"
            owners.add(owner, statement, f"{listed} of {part.removeprefix('self.')} are one {joined.name}")


def _leaves_calls(fused: Any) -> bool:
    """Whether a rewritten method leaves some calls to the original."""
    return any(f"super().{method}(" in code for method, code in fused._rewritten.items())


def _joining(module: str, joined: Joined) -> str:
    return f'join_projections({module}, {_names(joined)}, "{joined.name}")'


def _names(joined: Joined) -> str:
    return "[" + ", ".join(f'"{name}"' for name in joined.projections) + "]"


def _property(described: PatchRegistration, joined: Joined, name: str) -> str:
    described.add_import(RUNTIME, names=["joined_part"])
    body = f'return joined_part(self, "{name}", {_names(joined)}, "{joined.name}")'
    return f"@property\ndef {name}(self):\n    {body}\n"


def as_subclass(fused: Any, name: str, base: str, members: Iterable[str] = ()) -> str:
    """The text of a rewritten class, with the class that it was made from as its only base."""
    return class_text(name, base, str(fused.__doc__), [*members, *fused._rewritten.values()])


def becomes_one_class(owners: Owners, original: type[nn.Module], fused: Mapping[str, Any]) -> bool:
    """Whether all objects of a class become those of one other, and no class of its module inherits from it."""
    inherited = any(
        other is not original and issubclass(other, original) and other.__module__ == original.__module__
        for other in matching.module_subclasses()
    )
    return len(set(fused.values())) == 1 and set(fused) == set(owners.instances(original)) and not inherited


def _is_used(original: type[nn.Module], joined: Joined, rewritten: set[str]) -> bool:
    """Whether other code of the module may look for what is joined: other methods of the class, or other classes."""
    tree = ast.parse(inspect.getsource(sys.modules[original.__module__]))
    for owner in tree.body:
        for function in ast.walk(owner):
            if not isinstance(function, ast.FunctionDef) or not function.args.args:
                continue
            mine = isinstance(owner, ast.ClassDef) and owner.name in {base.__name__ for base in original.__mro__}
            if mine and (function.name == "__init__" or function.name in rewritten):
                continue
            this = function.args.args[0].arg
            for part in ast.walk(function):
                if not isinstance(part, ast.Attribute) or part.attr not in joined.projections:
                    continue
                if mine or not (isinstance(part.value, ast.Name) and part.value.id == this):
                    return True
    return False
