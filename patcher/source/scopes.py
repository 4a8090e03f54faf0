"""What a module binds, what it uses, and when: the analysis that finds missing names before a file is written."""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import importlib.util
import symtable
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

_BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__path__"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


N = TypeVar("N", bound=ast.AST)


def statements_of(tree: ast.Module, kind: type[N]) -> list[N]:
    """All statements of a module that are of a kind, wherever they are, in the order of the text."""
    return [node for node in _statements(tree) if isinstance(node, kind)]


@functools.lru_cache(maxsize=8)
def _statements(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(every_statement(tree.body))


def bound_names(tree: ast.Module) -> dict[str, int]:
    """The names that a module binds at its top level, each with the first line that does; `*` for a star import."""
    found: dict[str, int] = {}
    for name, line in _bound(tree.body):
        found.setdefault(name, line)
    for node in statements_of(tree, ast.Global):
        for name in node.names:
            found.setdefault(name, node.lineno)
    return found


class ImportedName(NamedTuple):
    """What an import statement binds a name to.

    Attributes:
        module: the module, as it is written.
        attribute: the name in the module, empty if the module itself is bound.
        level: the dots of a relative import.
        alias: the name behind `as`, empty if there is none.
        line: the line of the statement.
        guarded: whether the statement is inside of another one, such as an `if`.
    """

    module: str
    attribute: str
    level: int
    alias: str
    line: int
    guarded: bool

    def module_in(self, package: str) -> str:
        """The absolute name of the module, imported by a module of a package.

        Raises:
            ImportError: that is above the top package.
        """
        return importlib.util.resolve_name("." * self.level + self.module, package)


def imported_names(tree: ast.Module) -> dict[str, ImportedName]:
    """The names that import statements of the top level bind, guarded ones included."""
    found: dict[str, ImportedName] = {}
    for node in top_level(tree.body):
        for part in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            origin = (part.name, "", 0)
            if isinstance(node, ast.ImportFrom):
                origin = (node.module or "", part.name, node.level)
            imported = ImportedName(*origin, part.asname or "", node.lineno, node not in tree.body)
            found.setdefault(bound_name(part), imported)
    return found


def modules_under(tree: ast.Module, name: str) -> list[str]:
    """The modules that a name leads to: `import a.b` and `import a.c` bind one."""
    statements = [node for node in top_level(tree.body) if isinstance(node, ast.Import)]
    parts = [part for node in statements for part in node.names if bound_name(part) == name]
    return [part.name for part in parts if not part.asname]


def top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the body does: those of `if`, `try`, `with` and loops included."""
    for node in body:
        yield node
        for block in () if isinstance(node, _DEFINITIONS) else blocks(node):
            yield from top_level(block)


def every_statement(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a body and all in them, those of functions and classes included, in the order of the text.

    Many times faster than `ast.walk`, because it enters no expression.
    """
    for node in body:
        yield node
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            inner = getattr(node, field, ())
            yield from every_statement(inner if isinstance(inner, list) else ())


def inner_blocks(node: Any) -> Iterator[tuple[list[ast.stmt], Any]]:
    """The blocks of a compound statement, each with what begins it."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list) and block:
            yield block, node
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body, getattr(part, "pattern", part)


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a compound statement that may run."""
    # Nothing is handled where nothing is tried: an import that was left out of there.
    tried = not isinstance(node, ast.Try) or not all(isinstance(part, ast.Pass) for part in node.body)
    return [block for block, head in inner_blocks(node) if tried or not isinstance(head, ast.ExceptHandler)]


def undefined_names(text: str, tree: ast.Module) -> dict[str, int]:
    """The names that some code of a module looks up in the module, and that nothing there binds.

    Returns:
        Each name with the first line that uses it.
    """
    bound = bound_names(tree)
    if "*" in bound:
        return {}
    used = set(_free(symtable.symtable(text, "<generated>", "exec")))
    missing = used - bound.keys() - _BUILTINS
    lines = dict.fromkeys(missing, 0)
    for node in ast.walk(tree) if missing else ():
        if isinstance(node, ast.Name) and node.id in missing and not lines[node.id]:
            lines[node.id] = node.lineno
    return dict(sorted(lines.items(), key=lambda item: (item[1], item[0])))


def free_names(text: str) -> set[str]:
    """The names that a piece of code takes from its module."""
    bound = bound_names(ast.parse(text))
    return set(_free(symtable.symtable(text, "<patch>", "exec"))) - bound.keys() - _BUILTINS


def used_too_early(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """The names that a module uses while it is imported, and binds only further down.

    Returns:
        Each name with the line that uses it and the line that binds it.
    """
    later = bound_names(tree)
    if "*" in later:
        return {}
    future = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
    known = set(_BUILTINS)
    early: dict[str, tuple[int, int]] = {}
    for node in tree.body:
        inner = {name for name, _ in _bound([node])}
        own = set() if isinstance(node, _DEFINITIONS) else inner
        for name, line in _at_import([node], lazy_annotations=future):
            if name in later and name not in known | own:
                early.setdefault(name, (line, later[name]))
        known |= inner
    return early


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the names that are most alike, or with all of them if they are few."""
    choices = sorted(set(known))
    near = difflib.get_close_matches(name, choices, 3, 0.6)
    if near:
        return f"Nearest: {', '.join(near)}."
    return f"It has: {', '.join(choices)}." if 0 < len(choices) <= 8 else "Nothing there has a similar name."


def looks_misspelt(name: str, known: str) -> bool:
    """Whether a name is so close to a known one that it is probably a misspelling of it: a letter, not a word."""
    mine, theirs = name.strip("_").split("_"), known.strip("_").split("_")
    if set(mine) <= set(theirs) or set(theirs) <= set(mine):
        return False  # `_forward` beside `forward`, `rope_parameters` beside `default_rope_parameters`
    if len(mine) != len(theirs):
        return _alike(name, known) >= 0.9
    pairs = [pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1]]
    return all(set(pair) != {"get", "set"} and _alike(*pair) >= 0.6 for pair in pairs)


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    return {name for name, _ in _bound([node])}


def bound_name(node: ast.AST) -> str:
    """The name that a node of a syntax tree binds itself, empty if it binds none."""
    match node:
        case ast.Name(id=name):
            return "" if isinstance(node.ctx, ast.Load) else name
        case ast.alias(name=name, asname=alias):
            return alias or name.partition(".")[0]
        case ast.MatchMapping(rest=name):
            return name or ""
    name = getattr(node, "name", None)  # of a definition, an `except` or a `case`
    return name if isinstance(name, str) else ""


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in top_level(body):
        yield from [(node.name, node.lineno)] if isinstance(node, _DEFINITIONS) else _targets(node)


def _targets(node: ast.stmt) -> Iterator[tuple[str, int]]:
    """What a statement binds itself, without the statements in it."""
    stack: list[ast.AST] = [node]
    while stack:
        part = stack.pop()
        if name := bound_name(part):
            yield name, part.lineno  # type: ignore[attr-defined]
        inner = [c for c in ast.iter_child_nodes(part) if not isinstance(c, ast.stmt | ast.Lambda | ast.comprehension)]
        stack.extend(inner)


def _free(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _free(child)


def _at_import(body: Sequence[ast.stmt], *, lazy_annotations: bool) -> Iterator[tuple[str, int]]:
    """The names that are read while the statements run, those of function bodies left out."""
    parts: list[ast.AST | None]
    for node in body:
        if isinstance(node, _FUNCTIONS):
            parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
            if not lazy_annotations:
                parts += [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
            yield from _loads(parts)
        elif isinstance(node, ast.ClassDef):
            yield from _loads([*node.decorator_list, *node.bases, *(k.value for k in node.keywords)])
            local = {name for name, _ in _bound(node.body)}
            inner = _at_import(node.body, lazy_annotations=lazy_annotations)
            yield from ((name, line) for name, line in inner if name not in local)
        else:
            parts = [c for c in ast.iter_child_nodes(node) if not isinstance(c, (ast.stmt, ast.ExceptHandler))]
            yield from _loads([node.value] if lazy_annotations and isinstance(node, ast.AnnAssign) else parts)
            for block in blocks(node):
                yield from _at_import(block, lazy_annotations=lazy_annotations)


def _loads(parts: Sequence[ast.AST | None]) -> Iterator[tuple[str, int]]:
    stack = [part for part in parts if part is not None]
    while stack:
        part = stack.pop()
        if isinstance(part, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue  # scopes of their own; a late name in them is rare, and only a symtable tells it from a local one
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id, part.lineno
        stack.extend(ast.iter_child_nodes(part))
