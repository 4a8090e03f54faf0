"""What modules import, read from their syntax trees: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

__all__ = ["Import", "Module", "dotted", "modules_of", "parse", "trees_of"]


@dataclass(frozen=True)
class Import:
    """`import MODULE`, or `from MODULE import NAME`: on which line, and in which function ("" for none)."""

    module: str
    name: str
    function: str
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    imports: tuple[Import, ...]


def parse(name: str, source: str, *, is_package: bool = False) -> Module:
    """A module with its imports, those in functions and `import_module("...")` included.

    What is imported for annotations only (`if TYPE_CHECKING:`) doesn't count, nor what stands in strings.
    """
    return _module(name, ast.parse(source), is_package)


@cache
def trees_of(folder: Path) -> Mapping[Path, ast.Module]:
    """The syntax trees of a package, by file: parsed once a session, and only read."""
    return MappingProxyType({path: ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))})


def modules_of(folder: Path) -> dict[str, Module]:
    """Every module of the package in a folder, by name."""
    found = {}
    for path, tree in trees_of(folder).items():
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = _module(name, tree, is_package)
    return found


def _module(name: str, tree: ast.Module, is_package: bool) -> Module:
    return Module(name, tree, tuple(_imports(tree, name if is_package else name.rpartition(".")[0], "")))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression, "" of any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _imports(node: ast.AST, package: str, function: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and dotted(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(ast.Module(child.orelse, []), package, function)
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, "", function, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = _origin(child, package)
            yield from (Import(origin, alias.name, function, child.lineno) for alias in child.names)
        elif isinstance(child, ast.Call) and (name := _imported_by_call(child)):
            yield Import(name, "", function, child.lineno)
        inside = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}".removeprefix(".")
        yield from _imports(child, package, inside)


def _origin(statement: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module that a `from` names."""
    parents = package.split(".")[: package.count(".") + 2 - statement.level] if statement.level else []
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def _imported_by_call(call: ast.Call) -> str:
    if dotted(call.func).rpartition(".")[2] not in ("import_module", "__import__") or not call.args:
        return ""
    name = call.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
