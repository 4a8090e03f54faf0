"""The rules of the package's architecture, as functions from parsed modules to what breaks them.

Every function returns lines to read: an empty list means that the rule holds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from tests.support.imports import Import, Module, dotted

__all__ = ["circles", "frame_users", "not_public", "private_attributes", "private_imports", "reached", "upward"]

Modules = Mapping[str, Module]
#: (module, function) pairs whose imports are exempt
Exempt = Collection[tuple[str, str]]


def target(statement: Import, modules: Modules) -> str:
    """The module of the package that is imported, or "": `from a.b import c` means `a.b.c` where that is a module."""
    submodule = f"{statement.module}.{statement.name}"
    return next((name for name in (submodule, statement.module) if name in modules), "")


def edges(modules: Modules, exempt: Exempt = ()) -> Iterator[tuple[str, str, Import]]:
    """Who imports whom inside the package, late imports included."""
    for module in modules.values():
        for statement in module.imports:
            imported = target(statement, modules)
            if imported and (module.name, statement.function) not in exempt:
                yield module.name, imported, statement


def circles(modules: Modules, exempt: Exempt = ()) -> list[str]:
    """A circle of imports, if there is one. A late import closes a circle like any other."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for importer, imported, _ in edges(modules, exempt):
        graph[importer].add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def room(module: str) -> str:
    """The first name below the package: `checkpoints` of `patcher.checkpoints.headers`, "" of `patcher` itself."""
    return module.partition(".")[2].partition(".")[0]


def upward(modules: Modules, order: Sequence[str], exempt: Exempt = ()) -> list[str]:
    """Modules that are missing in the order, and imports of what is below the importer in it."""
    rank = {name: number for number, name in enumerate(order)}
    lost = [f"{name}: {room(name)!r} is not in the order" for name in modules if room(name) not in rank]
    found = (
        f"{importer}:{statement.line} imports {imported}"
        for importer, imported, statement in edges(modules, exempt)
        if rank.get(room(importer), 0) < rank.get(room(imported), 0)
    )
    return lost + list(dict.fromkeys(found))  # a line can import several names


def reached(start: str, modules: Modules) -> set[str]:
    """What importing a module imports, in the package and outside: late imports apart, parent packages included."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if parent := name.rpartition(".")[0]:
            waiting.append(parent)
        if name in modules:
            early = [each for each in modules[name].imports if not each.function]
            waiting += [target(each, modules) or each.module for each in early]
    return seen


def private_imports(
    modules: Modules, library: str, public: Collection[str], is_module: Callable[[str], bool]
) -> list[str]:
    """Imports of a library's private names, and of its modules that are not documented as public."""
    found = []
    for module in modules.values():
        for statement in module.imports:
            if statement.module.partition(".")[0] != library:
                continue
            full = f"{statement.module}.{statement.name}".rstrip(".")
            home = full if is_module(full) else statement.module
            if home not in {library, *public} or any(part.startswith("_") for part in full.split(".")):
                found.append(f"{module.name}:{statement.line} imports {full}")
        found += [
            f"{module.name}:{line} uses {name}" for line, name in _dotted_uses(module, library, public, is_module)
        ]
    return found


def _dotted_uses(
    module: Module, library: str, public: Collection[str], is_module: Callable[[str], bool]
) -> Iterator[tuple[int, str]]:
    """`transformers.modeling_utils.x` after `import transformers`, and `sys.modules[...]` with such a name."""
    for node in ast.walk(module.tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = dotted(node)
        elif isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
            name = _text(node.slice)
        elif isinstance(node, ast.Call) and dotted(node.func) == "sys.modules.get" and node.args:
            name = _text(node.args[0])
        if name.partition(".")[0] == library and name not in {library, *public} and is_module(name):
            yield node.lineno, name


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def private_attributes(modules: Modules, known: Collection[str]) -> list[str]:
    """Underscore names read from or written to objects that no class of the package gives them: somebody else's.

    Syntax doesn't tell whose an object is. So a name counts as ours if the package binds it in any class or on `self`.
    """
    ours = {name for module in modules.values() for name in _bound(module.tree)} | set(known)
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            name = _accessed(node)
            if name.startswith("_") and not name.startswith("__") and name not in ours:
                found.append(f"{module.name}:{node.lineno} uses {name}")
    return found


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (inner.name for inner in node.body if isinstance(inner, ast.FunctionDef))
            names = (inner for statement in node.body for inner in ast.walk(statement) if isinstance(inner, ast.Name))
            yield from (inner.id for inner in names if isinstance(inner.ctx, ast.Store))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) == "object.__setattr__" and _is_self(node.args[0]):
            yield _text(node.args[1])  # in a frozen dataclass


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _accessed(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
        return _text(node.args[1]) if len(node.args) > 1 else ""
    return ""


FRAMES = ("sys._getframe", "sys._current_frames", "inspect.currentframe", "inspect.stack", "inspect.trace")
FRAMES += ("traceback.walk_stack", "traceback.extract_stack")


def frame_users(modules: Modules) -> set[str]:
    """The functions that look at frames, as `module:function`."""
    found = set()
    for module in modules.values():
        imported = {each.name for each in module.imports if f"{each.module}.{each.name}" in FRAMES}
        for function, node in _with_functions(module.tree, ""):
            if (isinstance(node, ast.Attribute) and dotted(node) in FRAMES) or (
                isinstance(node, ast.Name) and node.id in imported
            ):
                found.add(f"{module.name}:{function}")
    return found


def _with_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        yield function, child
        inside = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}".removeprefix(".")
        yield from _with_functions(child, inside)


def not_public(module: Module, package: str, public: Mapping[str, Collection[str]]) -> list[str]:
    """Imports of what a package doesn't declare public: `public` has the names of each public module."""
    found = []
    for each in module.imports:
        full = f"{each.module}.{each.name}".rstrip(".")
        is_ours = each.module.partition(".")[0] == package
        is_own = each.module == module.name or each.module.startswith(f"{module.name}.")
        if is_ours and not is_own and full not in public and each.name not in public.get(each.module, ()):
            found.append(f"{module.name}:{each.line} imports {full}")
    return found
