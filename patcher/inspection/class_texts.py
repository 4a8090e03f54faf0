"""Two classes as texts that can be compared: one as it is shipped, and its replacement.

A replacement that inherits from the class that it replaces says only what it changes. So its members are put in the
places of those that they override; the result is the text that one would have written in the modeling file.
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
from patcher.fusions.patch_embeddings import LinearPatchEmbedding
from patcher.source.reading import Location, read_source, start_line, unwrap
from patcher.source.texts import indented, moved

# How an object is pickled isn't a part of what it computes.
_PLUMBING = frozenset({"__reduce__", "__reduce_ex__"})
#: A base of a library isn't one that anybody wrote for this model.
_LIBRARIES = frozenset({"torch", "transformers", "patcher", *sys.stdlib_module_names}) - {"__main__"}
_DECORATORS, _HEAD, _DOCSTRING = "@", "class", "__doc__"


class _Member(NamedTuple):
    """A statement of a class with the comments above it, as whole lines; a method has an empty line above."""

    text: str
    is_method: bool = False

    def extends(self, name: str) -> bool:
        """Whether it is a method that calls the one that it overrides."""
        return self.is_method and bool(re.search(rf"\bsuper\([^()]*\)\.{name}\b", self.text))


#: The members of a class by the names that they bind; two of one name, a property and its setter, are one.
_Body = dict[str, _Member]


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """The text of a class, and of what is built in its place.

    A class whose source can't be read has a comment that says so in the place of its methods.
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
    for name in (name for body in bodies for name, each in body.items() if each.is_method and name not in before):
        # Overridden, and itself inherited: what it was is shown too.
        owner = next((base for base in original.__mro__[1:] if name in vars(base)), object)
        if _root(owner) not in ("torch", "builtins") and (known := _body_of(owner).get(name)) is not None:
            before[name] = known
    return _text(before), _text(functools.reduce(functools.partial(_overlaid, replaces=by_fusion), bodies, before))


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _rewritten(original: type[nn.Module], fused: Any) -> _Body:
    """The members that a generated file writes for a fused class, but for an `__init__` that can't be written."""
    texts = list(fused._rewritten.values())
    if hasattr(fused, "_joined"):
        described, module = PatchConfig(original.__module__, "of_one_class.py"), sys.modules[original.__module__]
        with suppress(CodegenError):
            layers = FusedLayers(described, ModuleText(module), {}, {}, lambda *_: None)
            text = layers.joined_init(original, fused._joined)
            texts.append(re.sub(r"super\(\w+, self\)", "super()", text))
    body = _parsed("class Fused:\n" + "".join(map(indented, texts)))
    del body[_HEAD]
    return body


def _overlaid(under: _Body, over: _Body, *, replaces: bool = False) -> _Body:
    """A class with the members of a subclass in the places of those that they override, and the others beside them.

    Args:
        replaces: whether no member runs what it overrides.
    """
    result = dict(under)
    for name, new in over.items():
        old = under.get(name)
        if old is not None and name == _DECORATORS:
            result[name] = _Member(f"{new.text}\n{old.text}")  # both are applied
        elif old is not None and new.extends(name) and not replaces:
            result[name] = _Member(f"{old.text}\n{new.text}", is_method=True)  # both are run
        elif name != _HEAD:
            result[name] = new
    return result


def _text(body: _Body) -> str:
    """A class as one would write it: what is documented, then values, then methods."""
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
        return _made_up(cls)
    body = _parsed(moved(source.text, source.indent, ""))
    # torch documents its layers on pages, which nothing here replaces.
    left_out = _PLUMBING | ({_DOCSTRING} if _root(cls) == "torch" else set())
    return {name: each for name, each in body.items() if name not in left_out}


def _parsed(text: str) -> _Body:
    """A class by its members: without types that have no values, and without statements that do nothing."""
    node: Any = ast.parse(text).body[0]
    starts, ends = [start_line(each) for each in node.body], [each.end_lineno for each in node.body]
    if any(start <= end for start, end in zip(starts, [node.lineno, *ends], strict=False)):
        return _parsed(ast.unparse(node))  # several statements were in a line
    lines = text.rstrip().split("\n")
    begin = starts[0] - 1
    while lines[begin - 1].strip()[:1] in ("", "#"):
        begin -= 1
    bounds = [begin, *ends[:-1], len(lines)]
    found = {_DECORATORS: _Member("\n".join(lines[: node.lineno - 1]))} if node.lineno > 1 else {}
    found[_HEAD] = _Member("\n".join(lines[node.lineno - 1 : begin]))
    for start, end, each in zip(bounds, bounds[1:], node.body, strict=False):
        value = each.value if isinstance(each, ast.Expr | ast.AnnAssign) else each
        if value is None or isinstance(each, ast.Pass) or getattr(value, "value", "") is ...:
            continue
        bound = getattr(each, "targets", None) or [getattr(each, "target", each)]  # or the statement itself
        name = getattr(each, "name", "") or ", ".join(map(ast.unparse, bound))
        if isinstance(value, ast.Constant) and isinstance(each, ast.Expr):
            name = _DOCSTRING
        is_method, own = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef), "\n".join(lines[start:end])
        own = re.sub(r"\A(?:\s*\n)?", "\n", own) if is_method else own
        found[name] = _Member(f"{found[name].text}\n{own}" if name in found else own, is_method)
    return found


def _made_up(cls: type) -> _Body:
    """A class without a source: of a notebook cell when it has no methods, or made by a call."""
    body = {_HEAD: _Member(f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}):")}
    for name, value in vars(cls).items():
        if value is None or isinstance(value, str | int | float):
            text = f"{name} = {value!r}"
        else:
            text = f"# {name}: a {type(value).__name__} whose source can't be read"
        if not name.startswith("_") or isinstance(unwrap(value), FunctionType):
            body[name] = _Member(f"    {text}")
    return body
