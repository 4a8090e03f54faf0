"""The source of a class and of its replacement, as texts to compare.

A replacement that inherits from the class that it replaces has only the changes. So its members are put in the places
of those that they override: the result is what one would have written in the modeling file.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from patcher.codegen.bridges.fused_layers import FusedLayers, ModuleText
from patcher.codegen.config import PatchConfig
from patcher.compat import standing_alone
from patcher.errors import CodegenError
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.source.reading import Location, read_source, unwrap
from patcher.source.scopes import start_line
from patcher.source.texts import indented

#: Members that only pickle an object.
_PICKLING = frozenset({"__reduce__", "__reduce_ex__"})
#: Packages whose base classes weren't written for the patched model.
_LIBRARIES = frozenset({"torch", "transformers", "patcher", *sys.stdlib_module_names}) - {"__main__"}
_DECORATORS, _HEAD, _DOCSTRING = "@", "class", "__doc__"


class _Member(NamedTuple):
    """A statement of a class body with the comments above it, as whole lines; methods begin with an empty line."""

    text: str
    is_method: bool = False

    def extends(self, name: str) -> bool:
        """Whether this is a method that calls the one that it overrides."""
        return self.is_method and bool(re.search(rf"\bsuper\([^()]*\)\.{name}\b", self.text))


#: The members of a class by the names that they bind; a property and its setter are one member.
_Body = dict[str, _Member]


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """Return the text of a class, and of its replacement with the inherited members.

    If the source of a class can't be read, comments replace its methods.
    """
    before, by_fusion = _body_of(original), hasattr(replacement, "_rewritten")
    if replacement is LinearPatchEmbedding:
        replacement = standing_alone.LinearPatchEmbedding
    layers = [cls for cls in replacement.__mro__ if cls not in original.__mro__]
    layers = [cls for cls in layers if cls is replacement or _root(cls) not in _LIBRARIES]
    bodies = [_rewritten(original, replacement)] if by_fusion else list(map(_body_of, reversed(layers)))
    if not issubclass(replacement, original):
        patched = bodies.pop(0) | {_HEAD: _body_of(replacement)[_HEAD]}
        return _text(before), _text(functools.reduce(_overlaid, bodies, patched))
    for name in (name for body in bodies for name, member in body.items() if member.is_method and name not in before):
        # The original inherits the method that is overridden: it is shown as well.
        owner = next((base for base in original.__mro__[1:] if name in vars(base)), object)
        if _root(owner) not in ("torch", "builtins") and (inherited := _body_of(owner).get(name)) is not None:
            before[name] = inherited
    return _text(before), _text(functools.reduce(functools.partial(_overlaid, replaces=by_fusion), bodies, before))


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _rewritten(original: type[nn.Module], fused: Any) -> _Body:
    """Return the members that a generated file has for a fused class, without an `__init__` that can't be written."""
    texts = list(fused._rewritten.values())
    if hasattr(fused, "_joined"):
        # Only its patches are used. The folder of remote code, a hash, may have a name that a config can't have.
        config, module = PatchConfig("of_one_class", "of_one_class.py"), sys.modules[original.__module__]
        with suppress(CodegenError):
            layers = FusedLayers(config, ModuleText(module), {}, {}, lambda *_: None)
            text = layers.joined_init(original, fused._joined)
            texts.append(re.sub(r"super\(\w+, self\)", "super()", text))
    body = _parsed("class Fused:\n" + "".join(map(indented, texts)))
    del body[_HEAD]
    return body


def _overlaid(base: _Body, subclass: _Body, *, replaces: bool = False) -> _Body:
    """Return a class with the members of a subclass in the places of those that they override, and the others added.

    Args:
        replaces: whether no member calls the one that it overrides.
    """
    result = dict(base)
    for name, new in subclass.items():
        old = base.get(name)
        if old is not None and name == _DECORATORS:
            result[name] = _Member(f"{new.text}\n{old.text}")  # both are applied
        elif old is not None and new.extends(name) and not replaces:
            result[name] = _Member(f"{old.text}\n{new.text}", is_method=True)  # both are called
        elif name != _HEAD:
            result[name] = new
    return result


def _text(body: _Body) -> str:
    """Return the text of a class in the usual order: docstring, values, methods."""
    order = {_DECORATORS: 0, _HEAD: 1, _DOCSTRING: 2}
    names = sorted(body, key=lambda name: order.get(name, 4 if body[name].is_method else 3))
    texts = [body[name].text for name in names]
    first = names.index(_HEAD) + 1
    texts[first:] = [texts[first].lstrip("\n"), *texts[first + 1 :]] if texts[first:] else ["    pass"]
    return "\n".join(texts)


def _body_of(cls: type) -> _Body:
    try:
        source = read_source(cls, cls.__qualname__, Location("", 0))
    except CodegenError:
        return _without_source(cls)
    body = _parsed(source.text)
    # The docstrings of torch's layers are reference pages, too long for a diff.
    left_out = _PICKLING | ({_DOCSTRING} if _root(cls) == "torch" else set())
    return {name: member for name, member in body.items() if name not in left_out}


def _parsed(text: str) -> _Body:
    """Return the members of a class, without annotations that have no values and statements that do nothing."""
    node: Any = ast.parse(text).body[0]
    starts = [start_line(statement) for statement in node.body]
    ends = [statement.end_lineno for statement in node.body]
    if any(start <= end for start, end in zip(starts, [node.lineno, *ends], strict=False)):
        return _parsed(ast.unparse(node))  # several statements were on one line
    lines = text.rstrip().split("\n")
    begin = starts[0] - 1
    while lines[begin - 1].strip()[:1] in ("", "#"):
        begin -= 1
    bounds = [begin, *ends[:-1], len(lines)]
    body = {_DECORATORS: _Member("\n".join(lines[: node.lineno - 1]))} if node.lineno > 1 else {}
    body[_HEAD] = _Member("\n".join(lines[node.lineno - 1 : begin]))
    for start, end, statement in zip(bounds, bounds[1:], node.body, strict=False):
        value = statement.value if isinstance(statement, ast.Expr | ast.AnnAssign) else statement
        if value is None or isinstance(statement, ast.Pass) or getattr(value, "value", "") is ...:
            continue
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", statement)]
        name = getattr(statement, "name", "") or ", ".join(map(ast.unparse, targets))
        if isinstance(value, ast.Constant) and isinstance(statement, ast.Expr):
            name = _DOCSTRING
        is_method = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        source = "\n".join(lines[start:end])
        source = re.sub(r"\A(?:\s*\n)?", "\n", source) if is_method else source
        body[name] = _Member(f"{body[name].text}\n{source}" if name in body else source, is_method)
    return body


def _without_source(cls: type) -> _Body:
    """Return a class whose source can't be read: of a notebook cell without methods, or made by a call."""
    body = {_HEAD: _Member(f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}):")}
    for name, value in vars(cls).items():
        if value is None or isinstance(value, str | int | float):
            text = f"{name} = {value!r}"
        else:
            text = f"# {name}: a {type(value).__name__} whose source can't be read"
        if not name.startswith("_") or isinstance(unwrap(value), FunctionType):
            body[name] = _Member(f"    {text}")
    return body
