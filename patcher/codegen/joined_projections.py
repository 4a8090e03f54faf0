"""Classes whose projections are joined, as code: the class itself changed, or a class that inherits from it.

The class itself is changed where all its objects are fused. Where only some are (one class for self and for cross
attention), or where the rewritten forward decides call by call, the fused forward stands in a class that inherits from
it, and whoever builds the objects makes them of that class.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from patcher.codegen.dependencies import RUNTIME
from patcher.codegen.owning_classes import Owners, becomes_one_class
from patcher.codegen.registration import PatchRegistration
from patcher.fusions.joined import Joined
from patcher.fusions.rewrite import class_text

__all__ = ["join_projections"]


def join_projections(
    owners: Owners, original: type[nn.Module], fused: Mapping[str, Any], refused: Mapping[str, str]
) -> None:
    """The code of a class whose projections are joined.

    Args:
        owners: the classes that build its objects.
        original: the class.
        fused: path -> rewritten class, of the objects that are fused.
        refused: path -> why an object isn't.
    """
    described, name = owners.described, original.__name__
    described.add_import(RUNTIME, names=["join_projections"])
    first: Any = next(iter(fused.values()))
    if becomes_one_class(owners, original, fused) and not _leaves_calls(first):
        joined: Joined = first._joined
        listed = ", ".join(joined.projections)
        for method, code in first._rewritten.items():
            described.override_method(f"{name}.{method}", code, f"{listed} are one {joined.name}")
        for part in joined.projections if _is_used(original, first) else ():
            described.override_method(f"{name}.{part}", _property(described, joined, part), "for others", new=True)
        owners.add(name, _joining("self", joined), f"one {joined.name} in place of {listed}")
        return

    def write(cls: Any, new: str) -> tuple[str, str]:
        joined, used = cls._joined, _leaves_calls(cls) or _is_used(original, cls)
        extra = [_property(described, joined, part) for part in joined.projections] if used else []
        text = class_text(new, name, str(cls.__doc__), [*extra, *cls._rewritten.values()])
        return text, f"{name} with {', '.join(joined.projections)} as one {joined.name}"

    def change(cls: Any, part: str) -> tuple[str, str]:
        joined, path = cls._joined, part.removeprefix("self.")
        return _joining(part, joined), f"{', '.join(joined.projections)} of {path} are one {joined.name}"

    owners.make_subclasses(name, fused, refused, write, change)


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


def _is_used(original: type[nn.Module], fused: Any) -> bool:
    """Whether other code of the module may look for what is joined: other methods of the class, or other classes."""
    joined, rewritten = fused._joined, fused._rewritten
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
