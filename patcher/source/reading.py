"""The source of patch code: which text defines a class or function.

`inspect.getsource` is not enough here. It finds a class by name alone, so that of two definitions of one name it may
return the wrong one, it fails on classes of notebook cells, and it drops comments above a decorator or
after the last statement. The line numbers that Python recorded are used instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from patcher.errors import CodegenError, PatcherWarning, calling_frame
from patcher.source.code import has_code
from patcher.source.scopes import (
    Definition,
    bound_by,
    free_names,
    imported_names,
    start_line,
    statements_of,
)
from patcher.source.texts import Edit, Text, applied, dedented

#: From Python 3.14 on annotations are evaluated late, and may name what is imported for type checkers only.
_LATE: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    _LATE["annotation_format"] = annotationlib.Format.FORWARDREF

#: The methods of configs that decorate definitions, which are copied without them.
_DECORATORS = ("replace_class", "replace_function", "override_method", "modify_init", "add_helper", "add_helper_after")
#: The warnings that were issued: one of a file that is generated several times is issued once.
_WARNED: dict[str | tuple[str, type[Warning], int], int] = {}
_INSIDE = ("patcher.codegen.", "patcher.source.", "patcher.errors.")


@dataclass(frozen=True)
class Location:
    """A line of a config, as error messages print it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def warn(self, text: str) -> None:
        """Issue a warning at this line, once for each text."""
        warnings.warn_explicit(text, PatcherWarning, self.file, self.line, registry=_WARNED)


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a function or class, whatever its annotations name."""
    return inspect.signature(function, **_LATE)


def caller() -> Location:
    """Return the innermost line outside of code generation: the line of the config."""
    frame = calling_frame(_INSIDE)
    return Location(frame.f_code.co_filename, frame.f_lineno)


def caller_module() -> str:
    """Return the name of the module of that line."""
    return str(calling_frame(_INSIDE).f_globals.get("__name__", ""))


@dataclass(frozen=True)
class Source:
    """The text of one class or function definition.

    Attributes:
        name: the name that the definition binds.
        text: whole lines without the indentation of the file, newlines as `\\n`.
        file: the file that it was read from, "" for a text given as a string.
        line: the number of the first line of `text` in that file.
        is_class: whether it defines a class.
    """

    name: str
    text: str
    file: str
    line: int
    is_class: bool

    def tree(self) -> Definition:
        """Return the syntax tree of the definition."""
        return _definition_in(self.text)


@functools.lru_cache(maxsize=256)  # each patch of a config is read by several checks
def _definition_in(text: str) -> Definition:
    (node,) = ast.parse(text).body
    assert isinstance(node, Definition)
    return node


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a text, shared by its readers: it must not be changed."""
    return ast.parse(text)


def file_tree(file: str) -> ast.Module:
    """Return the syntax tree of a file as Python last read it; an empty one without a file."""
    try:
        return parsed("".join(linecache.getlines(file)) if file else "")
    except SyntaxError:
        return ast.Module([], [])


def is_of_config(decorator: ast.expr) -> bool:
    """Whether a decorator is that of a config, `@config.add_helper` or `@config.replace_class(...)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr in _DECORATORS


def unwrap(obj: Any) -> Any:
    """Return the function or class behind `staticmethod`, `classmethod`, `property` and decorators.

    A wrapper that a config decorates is returned itself, and one of a function that no decorator has wrapped: its
    definition lacks the wrapper. Methods may also be wrapped by their class (`GradientCheckpointingLayer`).
    """
    if isinstance(obj, property) and obj.fget is not None:
        obj = obj.fget
    inner = inspect.unwrap(obj, stop=lambda wrapper: inspect.isclass(wrapper) or _is_meant(wrapper))
    if not isinstance(obj, types.FunctionType) or not isinstance(inner, types.FunctionType):
        return inner
    is_method = obj.__qualname__.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")
    return inner if is_method or _first_line(inner).startswith("@") else obj


def _is_meant(function: Any) -> bool:
    """Whether a wrapper was written as such: in a module, not by a decorator; or for a config, which decorates it."""
    if not isinstance(function, types.FunctionType):
        return False
    line = _first_line(function)
    is_of_config = line.startswith("@") and any(f".{name}" in line for name in _DECORATORS)
    return is_of_config or "<locals>" not in function.__code__.co_qualname


def _first_line(function: types.FunctionType) -> str:
    return linecache.getline(function.__code__.co_filename, function.__code__.co_firstlineno).strip()


def read_source(obj: Any, call: str, where: Location) -> Source:
    """Return the definition of a class or function, or of a text that contains one.

    Args:
        obj: a class, a function (wrapped or not), or the text of a definition.
        call: the call of the config, for messages.
        where: the line of the config, for messages.

    Raises:
        CodegenError: for a lambda, an object without readable source, or a text that isn't a single definition.
    """
    if isinstance(obj, str):
        return _from_text(obj, call, where)
    inner = unwrap(obj)
    name = str(getattr(inner, "__name__", "")) or type(inner).__name__
    if inspect.isclass(inner):
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
    linecache.checkcache(file)
    # Code that was executed from a text has no source; Python 3.13 has the command of `python -c` there.
    lines = linecache.getlines(file, getattr(inner, "__globals__", None)) if file not in ("", "<string>") else []
    if not lines:
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, and none could be read from {file or 'its module'!r}. "
            "Define it in a file, give its text as a string, or use create_patch_from_external."
        )
    try:
        tree = parsed(text := "".join(lines))
    except SyntaxError as error:
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, but {file} does not parse: {error}"
        ) from error
    node = _definition_of(inner, name, tree)
    members = map(unwrap, vars(inner).values()) if inspect.isclass(inner) else [inner]
    codes = [member.__code__ for member in members if isinstance(member, types.FunctionType)]
    if node is None or not all(has_code(text, code) for code in codes if code.co_filename == file):
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, but {file} no longer defines it where Python read it. "
            "If the file was edited since, start again; if the class is defined twice, give one a name of its own; "
            "if it was made by type(), write it as a definition."
        )
    is_dispatched = hasattr(obj, "registry") and hasattr(obj, "dispatch")
    if changed := "its registry" if is_dispatched else _changed_later(inner, node):
        raise CodegenError(
            f"{where}: {call} needs the source of {name!r}, and {changed} was changed after its definition in {file}. "
            "Write the change into the definition."
        )
    return _quoted(_source_of(node, Text(text, tree), file), tree)


def _quoted(source: Source, tree: ast.Module) -> Source:
    """Return a definition with annotations as strings where the file that it comes from doesn't evaluate them.

    Those of builtins and of names that the file imports, but not from transformers, mean the same anywhere.
    """
    imported = imported_names(tree)
    if "annotations" not in imported or imported["annotations"].module != "__future__":
        return source
    absolute = {name: item.module for name, item in imported.items() if not item.guarded and not item.level}
    anywhere = {name for name, module in absolute.items() if not module.startswith("transformers")}
    text, edits = Text(source.text), []
    for node in ast.walk(text.tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is None or isinstance(annotation, ast.Constant):
                continue
            has_strings = any(isinstance(part, ast.Constant) and part.value for part in ast.walk(annotation))
            if has_strings or not free_names(ast.unparse(annotation)) <= anywhere:
                code = ast.unparse(annotation)
                edits.append(Edit(*text.span(annotation), repr(code) if '"' in code else f'"{code}"'))
    return replace(source, text=applied(source.text, edits))


def _changed_later(obj: Any, node: Definition, around: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a method, an attribute of a class, or a default that isn't that of the definition; "" if none is.

    Args:
        around: the attributes of the class around a method.
    """
    if not isinstance(node, ast.ClassDef):
        values, named = obj.__defaults__ or (), obj.__kwdefaults__ or {}
        pairs = [*zip(reversed(node.args.defaults), reversed(values), strict=False)]
        pairs += [
            (default, named[argument.arg])
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default is not None and argument.arg in named
        ]
        if attributes := [name for name in vars(obj) if not name.startswith("_") and not node.decorator_list]:
            return f"its {attributes[0]}"
        changed = (default for default, value in pairs if not _gives(default, value, obj.__globals__ | around))
        return next((f"{ast.unparse(default)}, a default of it," for default in changed), "")
    if node.decorator_list or type(obj) is not type or issubclass(obj, tuple):  # what makes it may change it
        return ""
    file, members = _class_file(obj), vars(obj)
    namespace = {**vars(sys.modules.get(obj.__module__, types)), **members}
    bound = Counter(name for statement in node.body for name in bound_by(statement))
    for statement in node.body:
        names = bound_by(statement)
        name, value = next(iter(names), ""), getattr(statement, "value", None)
        if len(names) != 1 or bound[name] > 1 or name not in members:
            continue
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(value, ast.expr):
            if not _gives(value, members[name], namespace):
                return f"its {name}"
        elif isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
            function = unwrap(members[name])
            if not isinstance(function, types.FunctionType) or not _is_inside(function, node, file):
                return f"its {name}"
            if changed_later := _changed_later(function, statement, members):
                return changed_later
    for name in members.keys() - bound.keys():
        value = unwrap(members[name])
        is_function = isinstance(value, types.FunctionType) and value.__code__.co_filename == file
        is_constant = type(value) in (bool, int, float, str) and not name.startswith("_")
        if is_constant or (is_function and not _is_inside(value, node, file)):
            return f"its {name}"
    return ""


def _is_inside(function: types.FunctionType, node: ast.ClassDef, file: str) -> bool:
    code = function.__code__
    return code.co_filename == file and start_line(node) <= code.co_firstlineno <= (node.end_lineno or 0)


def _gives(expression: ast.expr, value: Any, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression gives a value, as far as it can be evaluated without calling anything."""
    if any(isinstance(part, ast.Call | ast.Await | ast.NamedExpr | ast.Lambda) for part in ast.walk(expression)):
        return True
    try:
        found = eval(compile(ast.Expression(expression), "<definition>", "eval"), dict(namespace))
        is_equal = found is value or bool(found == value) or repr(found) == repr(value)
    except Exception:  # a name that isn't known any more, or a tensor
        return True
    return type(found) is type(value) and is_equal


def given_code(text: str, call: str, where: Location) -> tuple[str, ast.Module]:
    """Return a text given to a call of the config without its indentation, and its syntax tree."""
    text = textwrap.dedent(text.replace("\r\n", "\n")).strip("\n")
    try:
        return text, ast.parse(text)
    except SyntaxError as error:
        raise CodegenError(
            f"{where}: the text given to {call} does not parse: {error.msg}, on line {error.lineno} of it."
        ) from error


def _from_text(text: str, call: str, where: Location) -> Source:
    text, tree = given_code(text, call, where)
    node, *others = tree.body or [ast.Pass()]
    if others or not isinstance(node, Definition):
        raise CodegenError(
            f"{where}: the text given to {call} must be one class or one function and nothing else. "
            "Imports go to add_import, other code to add_post_import_block."
        )
    return _source_of(node, Text(text, tree), "")


def _class_file(cls: type) -> str:
    """Return the file of a class: that of its methods first, as a class of a notebook cell has no other."""
    for function in _methods(cls):
        if function.__qualname__ == f"{cls.__qualname__}.{function.__name__}":
            return function.__code__.co_filename
    return str(getattr(sys.modules.get(cls.__module__), "__file__", "") or "")


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for function in map(unwrap, vars(cls).values()):
        if not isinstance(function, types.FunctionType) or function.__module__ != cls.__module__:
            continue
        if not function.__code__.co_filename.startswith("<string"):  # generated by dataclass
            yield function


def _definition_of(obj: Any, name: str, tree: ast.Module) -> Definition | None:
    """Return the definition of an object in its file, None if it is unknown which one it is."""
    candidates = [node for node in statements_of(tree, ast.stmt) if isinstance(node, Definition) and node.name == name]
    if not inspect.isclass(obj):
        line = obj.__code__.co_firstlineno
        functions = (node for node in candidates if not isinstance(node, ast.ClassDef) and start_line(node) == line)
        return next(functions, None)
    classes = [node for node in candidates if isinstance(node, ast.ClassDef)]
    if len(classes) > 1:
        lines = {function.__code__.co_firstlineno for function in _methods(obj)}
        starts = {cls: {start_line(node) for node in cls.body if isinstance(node, Definition)} for cls in classes}
        classes = [cls for cls in classes if lines & starts[cls]]
    return classes[0] if len(classes) == 1 else None


def _source_of(node: Definition, text: Text, file: str) -> Source:
    """Return the lines of a definition, with the comments right above it and those that end its body."""
    start = start_line(node)
    while start > 1 and text.lines[start - 2].startswith(text.indent(node.lineno) + "#"):
        start -= 1
    code = text.text[text.start_of(start) : text.end_of(text.last_line(node))]
    return Source(node.name, dedented(code + "\n"), file, start, isinstance(node, ast.ClassDef))
