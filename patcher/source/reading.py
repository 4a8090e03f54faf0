"""The source of patch code: which text defines this class or function, and which decorators are ours.

`inspect.getsource` is not enough here. It finds a class by name alone, so of two definitions of one name it may
return the wrong one, it fails on classes of notebook cells, and it drops comments above a decorator or
behind the last statement. What is read here is the line that Python itself recorded.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patcher.errors import CodegenError, calling_frame
from patcher.source.texts import dedented, indent_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# Lines on which a decorator of ours was applied to an object. A definition can carry several of them, of several
# configs, and the outer ones run after the inner ones: so it is read when the text is generated, not before.
_DECORATED: weakref.WeakKeyDictionary[Any, set[Location]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Location:
    """A line of a config, as error messages print it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Source:
    """The text of one class or function definition.

    Attributes:
        name: the name that the definition binds.
        text: whole lines, newlines as `\\n`, indentation as it stood in the file.
        file: where it was read, empty for a text given as a string.
        line: the number of the first line of `text` in that file.
        indent: the white space in front of the definition.
        decorators: first and last line of each decorator.
        is_class: whether it defines a class.
    """

    name: str
    text: str
    file: str
    line: int
    indent: str
    decorators: tuple[tuple[int, int], ...]
    is_class: bool

    def tree(self) -> Definition:
        """The syntax tree of the definition."""
        return _definition_in(self.text)


_INSIDE = ("patcher.codegen.", "patcher.source.", "patcher.errors.")


def caller() -> Location:
    """The innermost line that is not part of code generation: the line of the config."""
    frame = calling_frame(_INSIDE)
    return Location(frame.f_code.co_filename, frame.f_lineno)


def caller_module() -> tuple[str, str]:
    """Name and file of the module that the innermost foreign line belongs to."""
    frame = calling_frame(_INSIDE)
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename


def unwrap(obj: Any) -> Any:
    """The function or class behind `staticmethod`, `classmethod`, `property` and `functools.wraps`."""
    while True:
        if isinstance(obj, (staticmethod, classmethod)):
            obj = obj.__func__
        elif isinstance(obj, property) and obj.fget is not None:
            obj = obj.fget
        elif inspect.isclass(obj) or not hasattr(obj, "__wrapped__"):
            return obj
        else:
            obj = obj.__wrapped__


@functools.lru_cache(maxsize=256)  # of the patches of a config: each is looked at by several checks
def _definition_in(text: str) -> Definition:
    (node,) = ast.parse(dedented(text)).body
    if not isinstance(node, _DEFINITIONS):
        raise SyntaxError(f"no definition: {text}")
    return node


def note_decorator(obj: Any, site: Location) -> None:
    """Remember that a decorator on this line is ours, so that the generated text leaves it out."""
    try:
        _DECORATED.setdefault(unwrap(obj), set()).add(site)
    except TypeError:  # not weakly referable: not a class or a function, and reported as such by read_source
        return


def own_decorators(obj: Any, source: Source) -> set[int]:
    """Indices of the decorators of a definition that are ours."""
    try:
        lines = {site.line for site in _DECORATED.get(unwrap(obj), set()) if site.file == source.file}
    except TypeError:
        return set()
    return {i for i, (first, last) in enumerate(source.decorators) if any(first <= n <= last for n in lines)}


def read_source(obj: Any, call: str, where: Location, site: Location | None = None) -> Source:
    """The definition of a class or function, or of a text that holds one.

    Args:
        obj: a class, a function (wrapped or not), or the text of a definition.
        call: the call of the config, for messages.
        where: the line of the config, for messages.
        site: the line on which a decorator was applied to it; it tells apart definitions of one name.

    Raises:
        CodegenError: for a lambda, an object without readable source, or a text that isn't a single definition.
    """
    if isinstance(obj, str):
        return _from_text(obj, call, where)
    inner = unwrap(obj)
    name = str(getattr(inner, "__name__", "")) or type(inner).__name__
    if site is not None:
        file = site.file
    elif inspect.isclass(inner):
        file = _class_file(inner)
    elif isinstance(inner, types.FunctionType):
        name, file = inner.__code__.co_name, inner.__code__.co_filename
    else:
        raise CodegenError(
            f"{where}: {call} was given {obj!r}, which is neither a class nor a function written in Python, so "
            "there is no source to copy. Give a class or a function, its text, or use create_patch_from_external."
        )
    if name == "<lambda>":
        raise CodegenError(f"{where}: {call} was given a lambda, which has no text of its own. Write it as a def.")
    lines = _lines(file, inner)
    if not lines:
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, and none could be read from {file or 'its module'!r}. "
            "Define it in a file, give its text as a string, or use create_patch_from_external."
        )
    text = "".join(lines)
    try:
        parsed(text)
    except SyntaxError as error:
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, but {file} does not parse: {error}"
        ) from error
    found = _decorated_on(text, site.line) if site is not None else _pick(text, name, inner)
    if found is None:
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, but {file} no longer defines it where Python read it. "
            "If the file was edited since, start again; if the class is defined twice, give one a name of its own; "
            "if it was made by type(), write it as a definition."
        )
    return _cut(found, lines, file)


def _from_text(text: str, call: str, where: Location) -> Source:
    text = textwrap.dedent(text.replace("\r\n", "\n")).strip("\n") + "\n"
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise CodegenError(
            f"{where}: the text given to {call} does not parse: {error.msg}, on line {error.lineno} of it."
        ) from error
    if len(body) != 1 or not isinstance(body[0], _DEFINITIONS):
        raise CodegenError(
            f"{where}: the text given to {call} must be one class or one function and nothing else. "
            "Imports go to add_import, other code to add_post_import_block."
        )
    return _cut(body[0], text.splitlines(keepends=True), "")


def _class_file(cls: type) -> str:
    """The file of a class: that of its methods first, because a class of a notebook cell has no other."""
    for function in _methods(cls):
        if function.__qualname__ == f"{cls.__qualname__}.{function.__name__}":
            return function.__code__.co_filename
    return str(getattr(sys.modules.get(cls.__module__), "__file__", "") or "")


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        inner = unwrap(value)
        if not isinstance(inner, types.FunctionType) or inner.__module__ != cls.__module__:
            continue
        if not inner.__code__.co_filename.startswith("<string"):  # dataclass writes methods of its own
            yield inner


def _lines(file: str, obj: Any) -> list[str]:
    if file in ("", "<string>"):  # what was executed from a text; Python 3.13 has the command of `python -c` there
        return []
    linecache.checkcache(file)
    return linecache.getlines(file, getattr(obj, "__globals__", None))


def file_tree(file: str) -> ast.Module:
    """The syntax tree of a file as Python last read it; an empty one where there is none."""
    try:
        return parsed(_text_of(file))
    except SyntaxError:
        return ast.Module([], [])


def _text_of(file: str) -> str:
    return "".join(linecache.getlines(file)) if file else ""


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module:
    """The syntax tree of a text, to read only: several checks look at one."""
    return ast.parse(text)


@functools.lru_cache(maxsize=8)
def _definitions(text: str) -> tuple[Definition, ...]:
    return tuple(node for node in ast.walk(parsed(text)) if isinstance(node, _DEFINITIONS))


def start_line(node: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _decorated_on(text: str, line: int) -> Definition | None:
    """The definition with a decorator on this line, whatever its object is called by now."""
    for node in _definitions(text):
        for decorator in node.decorator_list:
            if decorator.lineno <= line <= (decorator.end_lineno or decorator.lineno):
                return node
    return None


def stands_as_decorator(site: Location) -> bool:
    """Whether the line that runs now is a decorator, not a call in a statement."""
    try:
        return _decorated_on(_text_of(site.file), site.line) is not None
    except SyntaxError:
        return False


def _pick(text: str, name: str, obj: Any) -> Definition | None:
    """The one definition that made this object, None when that can't be known."""
    is_class = inspect.isclass(obj)
    candidates: list[Definition] = [
        node for node in _definitions(text) if node.name == name and isinstance(node, ast.ClassDef) == is_class
    ]
    if not is_class:
        line = obj.__code__.co_firstlineno
        return next((node for node in candidates if start_line(node) == line), None)
    if len(candidates) > 1:
        lines = {function.__code__.co_firstlineno for function in _methods(obj)}
        candidates = [
            node
            for node in candidates
            if any(isinstance(child, _DEFINITIONS) and start_line(child) in lines for child in node.body)
        ]
    return candidates[0] if len(candidates) == 1 else None


def _cut(node: Definition, lines: list[str], file: str) -> Source:
    """The lines of a definition, with the comments right above it and those that end its body."""
    start, end = start_line(node), node.end_lineno or node.lineno
    indent = indent_of(lines[start - 1])
    while start > 1 and lines[start - 2].startswith(indent + "#"):
        start -= 1
    last = end
    for number in range(end, len(lines)):
        line = lines[number]
        if not line.strip():
            continue
        width = len(line.expandtabs()) - len(line.expandtabs().lstrip())
        if not line.lstrip().startswith("#") or width <= len(indent.expandtabs()):
            break
        last = number + 1
    text = "".join(lines[start - 1 : last])
    return Source(
        name=node.name,
        text=text if text.endswith("\n") else text + "\n",
        file=file,
        line=start,
        indent=indent,
        decorators=tuple((d.lineno, d.end_lineno or d.lineno) for d in node.decorator_list),
        is_class=isinstance(node, ast.ClassDef),
    )
