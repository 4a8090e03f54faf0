"""Global names of a piece of code, renamed with respect to scopes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from patcher.errors import CodegenError
from patcher.source.scopes import bound_name
from patcher.source.texts import Edit, Text

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(eq=False)
class Scope:
    """A module, function, class, comprehension or list of type parameters, with the names that it binds.

    They are read from the syntax tree: `symtable` differs between releases of Python.
    """

    node: ast.AST
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)


Scopes = tuple[Scope, ...]


class Use(NamedTuple):
    """A name in a piece of code, and the scopes around it, from the module inwards."""

    node: ast.Name
    scopes: Scopes

    def owner(self, name: str) -> ast.AST | None:
        """Return the node whose variable a name is at this place, None for global and built-in names."""
        for scope in reversed(self.scopes[1:]):
            if isinstance(scope.node, ast.ClassDef) and scope is not self.scopes[-1]:
                continue  # functions in a class don't see its names
            if name in scope.globals:
                return None
            if name in scope.bound - scope.nonlocals:
                return scope.node
        return None


def renaming(
    text: Text, names: Mapping[str, str], function: ast.AST | None = None, *, within: ast.stmt | None = None
) -> list[Edit]:
    """Return the edits that rename global names in a piece of code.

    Local variables, parameters, attributes and keywords of calls keep their names. Names in quoted annotations,
    `-> "LlamaMLP"`, are renamed; other strings keep every character.

    Args:
        text: the code.
        names: name -> the new name, which may be dotted.
        function: a function in the code, to rename its parameters and local variables instead.
        within: the only statement of the code to edit.

    Raises:
        CodegenError: if a local variable has the new name where the code uses the global one.
    """
    if not any(re.search(rf"\b{name}\b", text.text) for name in names):
        return []
    edits, uses = [], list[Use | ast.Global | ast.Constant]()
    _visit(text.tree.body if within is None else [within], (Scope(text.tree),), False, uses)
    strings = (node for node in ast.walk(within or text.tree) if isinstance(node, ast.JoinedStr))
    formatted = {id(part) for string in strings for part in ast.walk(string)}
    for use in uses:
        if isinstance(use, ast.Global):
            for name in use.names if function is None else ():
                if name in names:
                    raise CodegenError(
                        f"{name!r} is assigned by a `global` statement. Only what is read can be renamed."
                    )
        elif isinstance(use, ast.Constant):
            start, end = text.span(use)
            new = _WORD.sub(lambda match: names.get(match.group(), match.group()), text.text[start:end])
            edits.append(Edit(start, end, new))
        elif use.node.id in names and _is_renamed(use, function):
            name, new = use.node.id, names[use.node.id]
            if id(use.node) in formatted:  # Python before 3.12 doesn't know its position, and `{name=}` prints it
                raise CodegenError(
                    f"{name!r}, a name in an f-string, has to be written differently. Put its value into a "
                    "variable first."
                )
            if use.owner(variable := new.partition(".")[0]) is not None:
                raise CodegenError(
                    f"{name!r} has to be written {new!r} in a place where a variable of the patch is "
                    f"called {variable!r}. Give that variable another name."
                )
            edits.append(Edit(*text.span(use.node), new))
    return edits


def _is_renamed(use: Use, function: ast.AST | None) -> bool:
    """Whether a name is global, or local to a function if one is given."""
    owner = use.owner(use.node.id)
    if function is None and isinstance(owner, ast.ClassDef) and isinstance(use.node.ctx, ast.Load):
        raise CodegenError(
            f"{use.node.id!r} in the body of a class that binds it may be the one of the module or of the class. "
            "Give one of them another name."
        )
    return owner is function


def _visit(
    nodes: Sequence[ast.AST | None], scopes: Scopes, in_annotation: bool, uses: list[Use | ast.Global | ast.Constant]
) -> None:
    """Collect the names of a piece of code, its `global` statements, and the strings in its annotations."""
    scope = scopes[-1]
    for node in nodes:
        if isinstance(node, ast.Global):
            scope.globals.update(node.names)
            uses.append(node)
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocals.update(node.names)
        elif isinstance(node, ast.Constant):
            uses += [node] if in_annotation and isinstance(node.value, str) else []
        elif isinstance(node, ast.NamedExpr):  # binds in the function around comprehensions
            outer = next(outer for outer in reversed(scopes) if not isinstance(outer.node, _COMPREHENSIONS))
            outer.bound.add(node.target.id)
            uses.append(Use(node.target, scopes))
            _visit([node.value], scopes, in_annotation, uses)
        elif node is not None:
            scope.bound.update(filter(None, [bound_name(node)]))
            uses += [Use(node, scopes)] if isinstance(node, ast.Name) else []
            for children, inner, is_annotation in _children(node, scopes):
                _visit(children, inner, in_annotation or is_annotation, uses)


def _children(node: ast.AST, scopes: Scopes) -> Iterator[tuple[Sequence[ast.AST | None], Scopes, bool]]:
    """Yield the children of a node, with the scopes around them and whether they are annotations."""
    type_parameters = getattr(node, "type_params", [])
    around = (*scopes, Scope(node)) if type_parameters else scopes
    inside = (*around, Scope(node))
    yield type_parameters, around, False
    if isinstance(node, _FUNCTIONS):
        args = node.args
        parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        inside[-1].bound.update(parameter.arg for parameter in parameters)
        yield [*getattr(node, "decorator_list", ()), *args.defaults, *args.kw_defaults], scopes, False
        yield [*(parameter.annotation for parameter in parameters), getattr(node, "returns", None)], around, True
        yield [node.body] if isinstance(node, ast.Lambda) else node.body, inside, False
    elif isinstance(node, ast.ClassDef):
        yield node.decorator_list, scopes, False
        yield [*node.bases, *node.keywords], around, False
        yield node.body, inside, False
    elif isinstance(node, _COMPREHENSIONS):
        first, *others = node.generators
        yield [first.iter], scopes, False
        values = [getattr(node, name, None) for name in ("elt", "key", "value")]
        yield [*values, first.target, *first.ifs, *others], inside, False
    elif isinstance(node, ast.AnnAssign):
        yield [node.annotation], scopes, True
        yield [node.target, node.value], scopes, False
    else:
        yield list(ast.iter_child_nodes(node)), scopes, False
