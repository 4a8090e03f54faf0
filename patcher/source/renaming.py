"""Names that a piece of code takes from its module, renamed as scopes have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from patcher.errors import CodegenError
from patcher.source.edits import Edit, Text
from patcher.source.scopes import bound_name

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(eq=False)
class Scope:
    """The module, a function, a class, a comprehension or type parameters, with the names that are bound there.

    They are read from the syntax: `symtable` has others in each release of Python.
    """

    node: ast.AST
    bound: set[str] = field(default_factory=set)
    of_module: set[str] = field(default_factory=set)  # by a `global` statement
    of_others: set[str] = field(default_factory=set)  # by a `nonlocal` one


Scopes = tuple[Scope, ...]


class Use(NamedTuple):
    """A name in a piece of code, and the scopes that it is in, from the module on."""

    node: ast.Name
    scopes: Scopes

    def owner(self, name: str) -> ast.AST | None:
        """What a name is a variable of in this place, None for the module and for what is built in."""
        for scope in reversed(self.scopes[1:]):
            if isinstance(scope.node, ast.ClassDef) and scope is not self.scopes[-1]:
                continue  # functions in a class don't see its names
            if name in scope.of_module:
                return None
            if name in scope.bound - scope.of_others:
                return scope.node
        return None


def uses(tree: ast.Module) -> list[Use | ast.Global | ast.Constant]:
    """The names of a piece of code, its `global` statements, and the strings in its annotations."""
    found: list[Use | ast.Global | ast.Constant] = []
    _visit(tree.body, (Scope(tree),), False, found)
    return found


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
    edits = []
    shown = {id(part) for each in ast.walk(text.tree) if isinstance(each, ast.JoinedStr) for part in ast.walk(each)}
    for use in uses(text.tree):
        if isinstance(use, ast.Global):
            for name in use.names if parameters is None else ():
                if name in names:
                    raise CodegenError(
                        f"{name!r} is assigned by a `global` statement. Only what is read can be renamed."
                    )
        elif isinstance(use, ast.Constant):
            start, end = text.span(use)
            new = _WORD.sub(lambda match: names.get(match.group(), match.group()), text.text[start:end])
            edits.append(Edit(start, end, new))
        elif use.node.id in names and is_of(use, parameters):
            if id(use.node) in shown:  # Python before 3.12 doesn't know where it is, and `{name=}` shows it
                raise CodegenError(
                    f"{use.node.id!r}, a name in an f-string, has to be written differently. Put its value into a "
                    "variable first."
                )
            edits.append(Edit(*text.span(use.node), _checked(use, names[use.node.id])))
    return edits


def is_of(use: Use, function: ast.AST | None) -> bool:
    """Whether a name is one of the module, or a parameter or a variable of a function."""
    owner = use.owner(use.node.id)
    if function is not None:
        return owner is function
    if isinstance(owner, ast.ClassDef) and isinstance(use.node.ctx, ast.Load):
        raise CodegenError(
            f"{use.node.id!r} in the body of a class that binds it may be the one of the module or of the class. "
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


def _visit(
    nodes: Sequence[ast.AST | None], scopes: Scopes, quoted: bool, found: list[Use | ast.Global | ast.Constant]
) -> None:
    here = scopes[-1]
    for node in nodes:
        if isinstance(node, ast.Global):
            here.of_module.update(node.names)
            found.append(node)
        elif isinstance(node, ast.Nonlocal):
            here.of_others.update(node.names)
        elif isinstance(node, ast.Constant):
            found += [node] if quoted and isinstance(node.value, str) else []
        elif isinstance(node, ast.NamedExpr):  # binds in the function around comprehensions
            at = next(each for each in reversed(scopes) if not isinstance(each.node, _COMPREHENSIONS))
            at.bound.add(node.target.id)
            found.append(Use(node.target, scopes))
            _visit([node.value], scopes, quoted, found)
        elif node is not None:
            here.bound.update(filter(None, [bound_name(node)]))
            found += [Use(node, scopes)] if isinstance(node, ast.Name) else []
            for parts, inner, annotation in _parts(node, scopes):
                _visit(parts, inner, quoted or annotation, found)


def _parts(node: ast.AST, scopes: Scopes) -> Iterator[tuple[Sequence[ast.AST | None], Scopes, bool]]:
    """What a node holds, with the scopes of each part and whether it is an annotation."""
    parameters = getattr(node, "type_params", [])
    around = (*scopes, Scope(node)) if parameters else scopes
    inside = (*around, Scope(node))
    yield parameters, around, False
    if isinstance(node, _FUNCTIONS):
        given = node.args
        listed = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        inside[-1].bound.update(each.arg for each in listed)
        yield [*getattr(node, "decorator_list", ()), *given.defaults, *given.kw_defaults], scopes, False
        yield [*(each.annotation for each in listed), getattr(node, "returns", None)], around, True
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
