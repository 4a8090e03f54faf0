"""Names that a definition uses, written differently."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Mapping

from patcher.errors import CodegenError
from patcher.source.scopes import bound_name
from patcher.source.texts import Edit, Text

_WORD = re.compile(r"[^\W\d]\w*")


def renaming(
    text: Text, names: Mapping[str, str], within: ast.stmt | None = None, *, parameter: ast.arg | None = None
) -> list[Edit]:
    """Return the edits that rename what a definition reads of its module.

    Local variables, attributes and keywords of calls keep their names. Names in quoted annotations, `-> "LlamaMLP"`,
    are renamed; other strings keep every character.

    Args:
        text: the code.
        names: name -> the new name, which may be dotted.
        within: the only statement of the code to edit.
        parameter: a parameter of a function in the code, to rename it instead.

    Raises:
        CodegenError: if the code has a variable of the same name as what is renamed, or of its new name.
    """
    names = {name: new for name, new in names.items() if new != name and re.search(rf"\b{name}\b", text.text)}
    if not names:
        return []
    statements = text.tree.body if within is None else [within]
    nodes = [node for statement in statements for node in ast.walk(statement)]
    renamed = names.keys() & ({parameter.arg} if parameter else _read(ast.unparse(ast.Module(statements, []))))
    declared = [*statements] if parameter is None else [parameter]
    variables = {bound_name(node) for node in nodes if node not in declared}
    # Python before 3.12 doesn't know the positions of these, and `{name=}` shows the name.
    formatted = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    edits = []
    for node in nodes:
        if isinstance(node, ast.Global) and (assigned := sorted(names.keys() & set(node.names))):
            raise CodegenError(
                f"{assigned[0]!r} is assigned by a `global` statement. Only what is read can be renamed."
            )
        if not isinstance(node, ast.Name) or node.id not in renamed:
            continue
        name, new = node.id, names[node.id]
        if node in formatted:
            raise CodegenError(
                f"{name!r}, a name in an f-string, has to be written differently. Put its value into a variable first."
            )
        for variable in variables.intersection((name, new.partition(".")[0])):
            raise CodegenError(
                f"{name!r} has to be written {new!r} in a place where a variable of the patch is called "
                f"{variable!r}. Give that variable another name."
            )
        edits.append(Edit(*text.span(node), new))
    annotations = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    for part in (part for annotation in annotations if annotation is not None for part in ast.walk(annotation)):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            edits.append(Edit(*text.span(part), _WORD.sub(lambda word: names.get(word[0], word[0]), text.code(part))))
    return edits


def _read(code: str) -> set[str]:
    """Return the names that code may read of its module; a class reads those that it hasn't bound yet."""
    names, tables = set[str](), [symtable.symtable(code, "<code>", "exec")]
    for table in tables:
        symbols = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
        names |= {symbol.get_name() for symbol in symbols if symbol.is_global() or table.get_type() != "function"}
        tables += table.get_children()
    return names
