"""Names that a piece of code takes from its module, renamed as scopes have it."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from patcher.errors import CodegenError
from patcher.source.edits import Edit, Text, applied

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = {
    ast.ListComp: "listcomp",
    ast.SetComp: "setcomp",
    ast.DictComp: "dictcomp",
    ast.GeneratorExp: "genexpr",
}
_WORD = re.compile(r"[^\W\d]\w*")
Tables = tuple[symtable.SymbolTable, ...]


class Use(NamedTuple):
    """A name in a piece of code, and the scopes that it is in, from the outermost."""

    node: ast.Name
    tables: Tables

    def owner(self, name: str) -> symtable.SymbolTable | None:
        """The scope that a name is of in this place, None for the module and for what is built in."""
        for depth in reversed(range(1, len(self.tables))):
            table = self.tables[depth]
            if table is not self.tables[-1] and table.get_type() == "class":
                continue  # functions in a class don't see its names
            try:
                symbol = table.lookup(name)
            except KeyError:
                continue
            if symbol.is_global():
                return None
            if symbol.is_local():
                return table
        return None


def uses(text: Text) -> Iterator[Use | ast.Global | ast.Constant]:
    """The names of a piece of code, its `global` statements, and the strings in its annotations."""
    top = symtable.symtable(text.text, "<patch>", "exec")
    return _Walk().visit(text.tree.body, (top,), False)


def renaming(text: Text, names: Mapping[str, str], parameters: ast.AST | None = None) -> list[Edit]:
    """The edits by which a piece of code calls what it takes from its module by other names.

    A local variable, a parameter or a comprehension that has such a name keeps it, and so do attributes and keywords
    of calls. Quoted annotations are renamed in, `-> "LlamaMLP"`; other strings keep every character.

    Args:
        text: the code.
        names: name -> what to write instead, a name or a dotted one.
        parameters: a function of the code: rename what it calls its parameters, in its body, instead.

    Raises:
        CodegenError: a local variable has the new name where the code would use it for the one of the module.
    """
    if not any(re.search(rf"\b{name}\b", text.text) for name in names):
        return []
    edits, quoted = dict[ast.Name, Edit](), list[Edit]()
    for use in uses(text):
        if isinstance(use, ast.Global):
            for name in use.names if parameters is None else ():
                if name in names:
                    raise CodegenError(
                        f"{name!r} is assigned by a `global` statement. Only what is read can be renamed."
                    )
        elif isinstance(use, ast.Constant):
            start, end = text.span(use)
            new = _WORD.sub(lambda match: names.get(match.group(), match.group()), text.text[start:end])
            quoted.append(Edit(start, end, new))
        elif use.node.id in names and is_of(use, parameters):
            start, end = text.span(use.node)
            edits[use.node] = Edit(start, end, _checked(use, names[use.node.id]))
    _check_strings(text, edits)
    return [*edits.values(), *quoted]


def is_of(use: Use, function: ast.AST | None) -> bool:
    """Whether a name is one of the module, or a parameter or a variable of a function."""
    name, owner = use.node.id, use.owner(use.node.id)
    if function is not None:
        return owner is not None and (owner.get_name(), owner.get_lineno()) == (function.name, function.lineno)  # type: ignore[attr-defined]
    own = owner is not None and owner is use.tables[-1] and owner.get_type() == "class"
    if own and isinstance(use.node.ctx, ast.Load):
        raise CodegenError(
            f"{name!r} in the body of a class that binds it may be the one of the module or of the class. "
            "Give one of them another name."
        )
    return owner is None


def _checked(use: Use, new: str) -> str:
    owner = new.partition(".")[0]
    if use.owner(owner) is not None:
        raise CodegenError(
            f"{use.node.id!r} has to be written {new!r} in a place where a variable of the patch is "
            f"called {owner!r}. Give that variable another name."
        )
    return new


def _check_strings(text: Text, edits: Mapping[ast.Name, Edit]) -> None:
    """Python before 3.12 doesn't always know where a name in an f-string is."""
    strings = [node for node in ast.walk(text.tree) if isinstance(node, ast.JoinedStr)]
    if edits.keys().isdisjoint([part for node in strings for part in ast.walk(node)]):
        return
    before = {node: node.id for node in edits}
    for node, edit in edits.items():
        node.id = edit.text
    expected = ast.unparse(text.tree)
    for node, name in before.items():
        node.id = name
    try:
        found = ast.unparse(ast.parse(applied(text.text, edits.values())))
    except SyntaxError:
        found = ""
    if found != expected:
        raise CodegenError("a name in an f-string has to be written differently. Put its value into a variable first.")


class _Walk:
    """Visits code with the scopes of `symtable` beside it."""

    def __init__(self) -> None:
        self._taken = set[int]()

    def visit(
        self, nodes: Sequence[ast.AST | None], tables: Tables, quoted: bool
    ) -> Iterator[Use | ast.Global | ast.Constant]:
        for node in nodes:
            if isinstance(node, ast.Name):
                yield Use(node, tables)
            elif isinstance(node, ast.Global):
                yield node
            elif isinstance(node, ast.Constant):
                if quoted and isinstance(node.value, str):
                    yield node
            elif node is not None:
                for parts, inner, annotation in self._parts(node, tables):
                    yield from self.visit(parts, inner, quoted or annotation)

    def _parts(self, node: ast.AST, tables: Tables) -> Iterator[tuple[Sequence[ast.AST | None], Tables, bool]]:
        """What a node holds, with the scopes of each part and whether it is an annotation."""
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            yield [*getattr(node, "decorator_list", ()), *node.args.defaults, *node.args.kw_defaults], tables, False
            annotations = [each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            yield [*annotations, getattr(node, "returns", None)], tables, True
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            yield body, self._inner(node, getattr(node, "name", "lambda"), tables), False
        elif isinstance(node, ast.ClassDef):
            yield [*node.decorator_list, *node.bases, *node.keywords], tables, False
            yield node.body, self._inner(node, node.name, tables), False
        elif type(node) in _COMPREHENSIONS:
            first, *others = node.generators  # type: ignore[attr-defined]
            yield [first.iter], tables, False
            inner = self._inner(node, _COMPREHENSIONS[type(node)], tables)
            values = [getattr(node, name, None) for name in ("elt", "key", "value")]
            yield [*values, first.target, *first.ifs, *others], inner, False
        elif isinstance(node, ast.AnnAssign):
            yield [node.annotation], tables, True
            yield [node.target, node.value], tables, False
        else:
            yield list(ast.iter_child_nodes(node)), tables, False

    def _inner(self, node: ast.AST, name: str, tables: Tables) -> Tables:
        """The scopes inside of a node; those of type parameters are between."""
        waiting: list[Tables] = [(*tables, child) for child in tables[-1].get_children()]
        while waiting:
            found = waiting.pop(0)
            table = found[-1]
            if table.get_type() not in ("function", "class") and str(table.get_type()) not in ("function", "class"):
                waiting += [(*found, child) for child in table.get_children()]
            elif table.get_name() == name and table.get_lineno() == node.lineno and table.get_id() not in self._taken:  # type: ignore[attr-defined]
                self._taken.add(table.get_id())
                return found
        raise CodegenError(f"the scopes of line {node.lineno} can't be told. Write it as plain functions.")  # type: ignore[attr-defined]
