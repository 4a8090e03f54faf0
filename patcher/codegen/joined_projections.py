"""Classes whose projections are joined, as code: the class itself changed, or a class that inherits from it.

The class itself is changed where all its objects are fused. Where only some are (one class for self and for cross
attention), or where the rewritten forward decides call by call, the fused forward stands in a class that inherits from
it, and whoever builds the objects makes them of that class.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from patcher import matching
from patcher.codegen.builder import PatchConfig
from patcher.codegen.checkpoint_methods import import_torch
from patcher.codegen.owning_classes import Owners
from patcher.fusions.rewrite import Joined

__all__ = ["add_helper_once", "as_subclass", "becomes_one_class", "class_node", "join_projections"]

_JOIN = '''
def joined_linear(module, names, joined):
    """Put one nn.Linear in the place of several with the same input: its rows are theirs, in the order of the names.

    The module keeps how many rows each had as `<joined>_sizes`.
    """
    parts = [module._modules.pop(name) for name in names]
    biased = [part.bias is not None for part in parts]
    sizes = [part.out_features for part in parts]
    linear = nn.Linear(parts[0].in_features, sum(sizes), bias=all(biased), device="meta")
    linear.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
    if all(biased):
        linear.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
    elif any(biased):  # they are added after the split
        for name, part in zip(names, parts):
            if part.bias is not None:
                module.register_parameter(f"{name}_bias", part.bias)
    setattr(module, joined, linear)
    setattr(module, f"{joined}_sizes", sizes)
'''

_PART = '''
class JoinedPart:
    """One of several projections that were joined, for code that looks at it: its rows, and what it computes."""

    def __init__(self, module, name, names, joined):
        sizes = getattr(module, f"{joined}_sizes")
        self.whole = getattr(module, joined)
        self.start = sum(sizes[: names.index(name)])
        self.in_features, self.out_features = self.whole.in_features, sizes[names.index(name)]
        self.own_bias = getattr(module, f"{name}_bias", None)

    @property
    def weight(self):
        return self._rows(self.whole.weight)

    @property
    def bias(self):
        return self.own_bias if self.whole.bias is None else self._rows(self.whole.bias)

    def __call__(self, features):
        result = self.whole(features).narrow(-1, self.start, self.out_features)
        return result if self.own_bias is None else result + self.own_bias

    def _rows(self, whole):
        rows = whole.narrow(0, self.start, self.out_features)
        rows._is_hf_initialized = getattr(whole, "_is_hf_initialized", False)  # _init_weights asks for it
        return rows
'''

_PROPERTY = '''
@property
def {name}(self):
    """The rows of {name} in {joined}; {name} itself until they are joined."""
    own = self._modules.get("{name}")
    return JoinedPart(self, "{name}", {names}, "{joined}") if own is None else own
'''


def join_projections(
    described: PatchConfig,
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
    add_helper_once(described, "joined_linear", _JOIN, "projections of one input as one")
    import_torch(described, sys.modules[original.__module__])
    name, variants = original.__name__, list(dict.fromkeys(fused.values()))
    alike = becomes_one_class(owners, original, fused)
    codes = {cls: _methods(cls) for cls in variants}
    if alike and not any(f"super().{method}(" in code for method, code in codes[variants[0]].items()):
        joined: Joined = variants[0]._joined
        listed = ", ".join(joined.projections)
        for method, code in codes[variants[0]].items():
            described.override_method(f"{name}.{method}", code, f"{listed} are one {joined.name}")
        for part in joined.projections if _is_used(original, joined, set(codes[variants[0]])) else ():
            described.override_method(f"{name}.{part}", _property(described, joined, part), "for others", new=True)
        owners.add(name, _joining("self", joined), f"one {joined.name} in place of {listed}")
        return
    for number, cls in enumerate(variants, 1):
        joined = cls._joined
        listed = ", ".join(joined.projections)
        new = cls.__name__ if len(variants) == 1 else f"{cls.__name__}{number}"
        rewritten = set(codes[cls])
        leaves = any(f"super().{method}(" in code for method, code in codes[cls].items())
        used = leaves or _is_used(original, joined, rewritten)
        extra = [_property(described, joined, part) for part in joined.projections] if used else []
        described.add_helper_after(
            name, as_subclass(cls, new, name, extra), f"{name} with {listed} as one {joined.name}"
        )
        for path in (path for path, found in fused.items() if found is cls):
            owner, part = owners.part(path, fused, refused)
            statement = f"{part}.__class__ = {new}\n{_joining(part, joined)}"
            owners.add(owner, statement, f"{listed} of {part.removeprefix('self.')} are one {joined.name}")


def _joining(module: str, joined: Joined) -> str:
    return f'joined_linear({module}, {_names(joined)}, "{joined.name}")'


def _names(joined: Joined) -> str:
    return "[" + ", ".join(f'"{name}"' for name in joined.projections) + "]"


def _property(described: PatchConfig, joined: Joined, name: str) -> str:
    add_helper_once(described, "JoinedPart", _PART, "code that looks at one of several projections that are joined")
    return _PROPERTY.format(name=name, names=_names(joined), joined=joined.name)


def _methods(fused: type[nn.Module]) -> dict[str, str]:
    """Name -> code of the methods that the rewriter has written."""
    text = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    found = {}
    for method in class_node(fused).body:
        if isinstance(method, ast.FunctionDef):
            first = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
            found[method.name] = textwrap.dedent("".join(text[first - 1 : method.end_lineno]))
    return found


def as_subclass(fused: type[nn.Module], name: str, base: str, members: list[str]) -> str:
    """The text of a rewritten class, with the class that it was made from as its only base."""
    node = class_node(fused)
    lines = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    first = node.body[1].lineno if len(node.body) > 1 else len(lines) + 1  # behind the docstring
    first = min([first, *(decorator.lineno for decorator in getattr(node.body[1], "decorator_list", []))])
    head = [f"class {name}({base}):\n", *lines[node.lineno : first - 1]]
    inserted = [textwrap.indent(member.strip("\n") + "\n\n", "    ") for member in members]
    return "".join([*head, *inserted, *lines[first - 1 :]])


def class_node(cls: type) -> ast.ClassDef:
    """The tree of the source of a class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def becomes_one_class(owners: Owners, original: type[nn.Module], fused: Mapping[str, Any]) -> bool:
    """Whether all objects of a class become those of one other, and no class of its module inherits from it."""
    inherited = any(
        other is not original and issubclass(other, original) and other.__module__ == original.__module__
        for other in matching.module_subclasses()
    )
    return len(set(fused.values())) == 1 and set(fused) == set(owners.instances(original)) and not inherited


def add_helper_once(
    described: PatchConfig, name: str, helper: Any, description: str, name_map: Mapping[str, str] | None = None
) -> None:
    """Add a helper that several patches use."""
    if all(known.source.name != name for known in described.helpers):
        described.add_helper(helper, description, name_map)


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
