"""Names of a module: which its statements bind, import and use, and the definitions by these names."""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import hashlib
import symtable
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

_BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__path__"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

#: The fingerprint of a definition that doesn't exist.
NOTHING = "none"
#: The statements that `find` returns.
_BINDING = (Definition, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind"})

N = TypeVar("N", bound=ast.AST)


def statements_of(tree: ast.Module, kind: type[N]) -> list[N]:
    """Return all statements of a type in a module, nested ones included."""
    return [node for node in _nodes(tree) if isinstance(node, kind)]


@functools.lru_cache(maxsize=8)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def start_line(node: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the body does: those in `if`, `try`, `with` and loops included."""
    for node in body:
        yield node
        for block, head in () if isinstance(node, Definition) else inner_blocks(node):
            if not (isinstance(head, ast.ExceptHandler) and _has_empty_try(node)):
                yield from top_level(block)


def inner_blocks(node: Any) -> Iterator[tuple[list[ast.stmt], Any]]:
    """Yield the blocks of a compound statement, each with the node that it belongs to."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list) and block:
            yield block, node
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body, getattr(part, "pattern", part)


def _has_empty_try(node: ast.AST) -> bool:
    """Whether the body of a `try` is empty, as after its import was dropped, so that its handlers never run."""
    return isinstance(node, ast.Try) and all(isinstance(statement, ast.Pass) for statement in node.body)


def bound_names(tree: ast.Module) -> dict[str, int]:
    """Return the names that a module binds at its top level, each with the first such line; `*` for a star import."""
    names: dict[str, int] = {}
    for name, line in _bindings(tree.body):
        names.setdefault(name, line)
    for node in statements_of(tree, ast.Global):
        for name in node.names:
            names.setdefault(name, node.lineno)
    return names


def bound_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    return {name for name, _ in _bindings([node])}


def bound_name(node: ast.AST) -> str:
    """Return the name that a node of a syntax tree binds itself, "" if it binds none."""
    match node:
        case ast.Name(id=name):
            return "" if isinstance(node.ctx, ast.Load) else name
        case ast.alias(name=name, asname=alias):
            return alias or name.partition(".")[0]
        case ast.MatchMapping(rest=name):
            return name or ""
        case ast.arg(arg=name):
            return name
    name = getattr(node, "name", None)  # of a definition, an `except` or a `case`
    return name if isinstance(name, str) else ""


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, int]]:
    for statement in top_level(body):
        stack: list[Any] = [statement]
        while stack:
            node = stack.pop()
            if name := bound_name(node):
                yield name, node.lineno
            children = () if isinstance(node, Definition) else ast.iter_child_nodes(node)
            stack += [child for child in children if not isinstance(child, ast.stmt | ast.Lambda | ast.comprehension)]


class ImportedName(NamedTuple):
    """What an import statement binds a name to.

    Attributes:
        module: the module, as written in the statement.
        attribute: the name in the module, "" if the module itself is bound.
        level: the number of dots of a relative import.
        alias: the name after `as`, "" if there is none.
        line: the line of the statement.
        guarded: whether the statement is nested in another one, such as an `if`.
    """

    module: str
    attribute: str
    level: int
    alias: str
    line: int
    guarded: bool


def imported_names(tree: ast.Module) -> dict[str, ImportedName]:
    """Return the names that import statements bind at the top level, guarded ones included."""
    names: dict[str, ImportedName] = {}
    for node in top_level(tree.body):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            origin = (alias.name, "", 0)
            if isinstance(node, ast.ImportFrom):
                origin = (node.module or "", alias.name, node.level)
            imported = ImportedName(*origin, alias.asname or "", node.lineno, node not in tree.body)
            names.setdefault(bound_name(alias), imported)
    return names


def modules_under(tree: ast.Module, name: str) -> list[str]:
    """Return the modules that a name leads to: `import a.b` and `import a.c` both bind `a`."""
    statements = [node for node in top_level(tree.body) if isinstance(node, ast.Import)]
    aliases = [alias for node in statements for alias in node.names if bound_name(alias) == name]
    return [alias.name for alias in aliases if not alias.asname]


def undefined_names(text: str, tree: ast.Module) -> dict[str, int]:
    """Return the global names that a module uses and doesn't bind, each with the first line that uses it."""
    bound = bound_names(tree)
    missing = set[str]() if "*" in bound else _global_names(text) - bound.keys()
    lines = dict.fromkeys(missing, 0)
    for node in ast.walk(tree) if missing else ():
        if isinstance(node, ast.Name) and node.id in missing and not lines[node.id]:
            lines[node.id] = node.lineno
    return dict(sorted(lines.items(), key=lambda item: (item[1], item[0])))


def names_at_definition(node: Definition) -> set[str]:
    """Return the global names that are read when a definition is executed, before anything is called."""
    tree = ast.parse(ast.unparse(node))
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            part.body = [ast.Pass()]
    return free_names(ast.unparse(tree))


def free_names(text: str, around: Collection[str] = ()) -> set[str]:
    """Return the global names that a piece of code uses and doesn't bind: no builtins but those bound `around` it.

    One that it declares as `global` is free: what binds it first is code of the module around it.
    """
    return _global_names(text, around) - {name for name, _ in _bindings(ast.parse(text).body)}


def _global_names(text: str, around: Collection[str] = ()) -> set[str]:
    names, tables = set[str](), [symtable.symtable(text, "<text>", "exec")]
    for table in tables:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            is_used = symbol.is_referenced() or symbol.is_declared_global()  # `count += 1` doesn't refer to it
            if is_used and (symbol.is_global() or (is_module and not symbol.is_assigned())):
                names.add(symbol.get_name())
        tables += table.get_children()
    return names - _BUILTINS.difference(name for name in around if not name.startswith("__"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar names, or with all of them if there are few."""
    choices = sorted(set(known))
    if matches := difflib.get_close_matches(name, choices, 3, 0.6):
        return f"Nearest: {', '.join(matches)}."
    return f"It has: {', '.join(choices)}." if 0 < len(choices) <= 8 else "Nothing there has a similar name."


def looks_misspelt(name: str, known: str) -> bool:
    """Whether a name is so similar to a known one that it is probably misspelt: by a letter, not by a word."""
    words, known_words, threshold = name.strip("_").split("_"), known.strip("_").split("_"), 0.6
    if set(words) <= set(known_words) or set(known_words) <= set(words):
        return False  # `_forward` and `forward`, `rope_parameters` and `default_rope_parameters`
    if len(words) != len(known_words):
        words, known_words, threshold = [name], [known], 0.9
    pairs = [pair for pair in zip(words, known_words, strict=True) if pair[0] != pair[1]]
    ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs if set(pair) != {"get", "set"}]
    return len(ratios) == len(pairs) and min(ratios) >= threshold


# --- definitions ----------------------------------------------------------------------------------------------------


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return what a module binds a dotted name to: classes, functions, assignments and imports, guarded ones included.

    >>> [node.lineno for node in find(ast.parse("class A:\\n    if x:\\n        def f(self): ..."), "A.f")]
    [3]
    """
    owner, _, member = name.rpartition(".")
    if not owner:
        return list(_by_name(tree).get(member, []))
    classes = [node for node in _by_name(tree).get(owner, []) if isinstance(node, ast.ClassDef)]
    body = (node for cls in classes for node in top_level(cls.body) if isinstance(node, _BINDING))
    return [node for node in body if member in bound_by(node) and not is_accessor(node)]


@functools.lru_cache(maxsize=8)
def _by_name(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    nodes: dict[str, list[ast.stmt]] = {}
    for node in top_level(tree.body):
        for name in bound_by(node) if isinstance(node, _BINDING) else ():
            nodes.setdefault(name, []).append(node)
    return nodes


def is_accessor(node: ast.stmt) -> bool:
    """Whether a definition is a setter or deleter of the property above, `@name.setter`."""
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())]
    return any(decorator.rpartition(".")[0] == getattr(node, "name", None) for decorator in decorators)


def canonical(node: Any, *, annotations: bool = True) -> Any:
    """Return a syntax tree without positions, docstrings and empty fields, equal for all releases of Python.

    >>> written, formatted = ast.parse("def f(x): 'Doc.'; return x"), ast.parse("def f( x ):  # note\\n    return (x)")
    >>> canonical(written) == canonical(formatted)
    True

    Args:
        node: a node, a list of nodes, or the value of a field.
        annotations: whether the annotations of parameters and return values, which nothing runs, are included.
    """
    if isinstance(node, list):
        return [canonical(item, annotations=annotations) for item in node]
    if not isinstance(node, ast.AST):
        return node
    skipped = _SKIPPED_FIELDS
    if not annotations and isinstance(node, (*_FUNCTIONS, ast.arg)):
        skipped |= {"returns", "annotation"}
    fields = {}
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if value is not None and value != [] and name not in skipped:
            fields[name] = canonical(value, annotations=annotations)
    return (type(node).__name__, sorted(fields.items()))


def fingerprint(definitions: Iterable[ast.stmt]) -> str:
    """Return a short hash of definitions: of all that share a name, such as the branches of an `if`.

    >>> fingerprint(ast.parse("def f(x: int): return x").body) == fingerprint(ast.parse("def f(x): return (x)").body)
    True

    Docstrings and the annotations of functions, which nothing runs, don't count: they are more than half of what one
    release of transformers changes in the methods of another.
    """
    trees = [canonical(node, annotations=False) for node in definitions]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8] if trees else NOTHING


def decorators_of(tree: ast.Module, name: str) -> list[ast.expr]:
    """Return the decorators of a class or function of a module."""
    return [part for node in find(tree, name) if isinstance(node, Definition) for part in node.decorator_list]


def decorator_name(decorator: ast.expr) -> str:
    """Return `a.b` for `@a.b(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
