"""Names that would mean something else in a file than where they were written."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from patcher.codegen.generation.draft import Draft
from patcher.codegen.spec import Helper, Patch
from patcher.errors import CodegenError
from patcher.source.definitions import find, fingerprint
from patcher.source.modules import load
from patcher.source.reading import Location, Source, file_tree, is_of_config, parsed
from patcher.source.scopes import Definition, bound_name, bound_names, free_names, statements_of

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def check_meanings(draft: Draft) -> None:
    """Raise a CodegenError for names that code of the original or of a patch would take from elsewhere in the file."""
    config, source = draft.config, draft.source
    for item in (*config.imports, *config.helpers, *config.blocks):
        added = {name for name in item.bound() if "*" in draft.bound or hasattr(builtins, name)}
        for name in sorted(added & free_names(draft.text.text, added)) if added else ():
            origin = "the builtins" if hasattr(builtins, name) else "the module of a star import"
            raise CodegenError(
                f"{item.where}: {item.call} binds {name!r}, which {source.name} uses and has from {origin}. "
                "Give it another name."
            )
    is_own = config.added_names() | {patch.target for patch in config.patches}
    items = [*config.patches, *config.helpers]
    for item in items if config.runtime is None else ():  # from_patcher() has compared values
        for name, place in _rebound(item, item.source, is_own, draft) if item.source is not None else ():
            owner = f"{source.name} has another" if name in draft.bound else "the file would use the builtin"
            raise CodegenError(
                f"{item.where}: {item.call} uses {name!r} of {place}, and {owner} {name!r}. If that one is "
                f"meant, write name_map={{{name!r}: {name!r}}}; if not, give the first another name, there or by "
                "name_map."
            )


def _rebound(item: Patch | Helper, source: Source, is_own: set[str], draft: Draft) -> Iterator[tuple[str, Location]]:
    """Yield the names of a patch that the file takes from elsewhere, with the line that binds them around it."""
    home = file_tree(source.file)
    functions = (node for node in statements_of(home, ast.stmt) if isinstance(node, _FUNCTIONS))
    around = [node for node in functions if node.lineno < source.line <= (node.end_lineno or 0)]
    parameters = {part.arg: part for node in around for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    scopes = [*(ast.Module(node.body, []) for node in reversed(around)), home]  # the innermost function first
    known = parameters.keys() | {name for scope in scopes for name in bound_names(scope)}
    decorators = filter(is_of_config, source.tree().decorator_list)
    in_decorators = {name for decorator in decorators for name in free_names(ast.unparse(decorator))}
    skipped = {source.name, *dict(item.name_map), *in_decorators, *is_own}
    for name in sorted(free_names(source.text, known) & known - skipped):
        bound_there = [parameters[name]] if name in parameters else []
        nodes: Any = next(filter(None, (find(scope, name) for scope in scopes)), bound_there)
        is_in_file = name in draft.bound or hasattr(builtins, name)
        if nodes and is_in_file and not _is_same(name, nodes, home, draft):
            yield name, Location(source.file, nodes[0].lineno)


def _is_same(
    name: str, nodes: Sequence[Any], home: ast.Module, draft: Draft, seen: frozenset[str] = frozenset()
) -> bool:
    """Whether what binds a name around a patch binds what the original has by that name, as far as texts tell."""
    in_file = find(draft.text.tree, name) if name in draft.bound else []
    if not in_file or all(map(_is_stub, nodes)):
        return name in draft.bound
    origins, origins_in_file = ({_origin(node, name) for node in group} for group in (nodes, in_file))
    if origins == {""}:
        seen |= {name}
        definitions = (node for node in nodes if isinstance(node, Definition))
        used = {name for node in definitions for name in free_names(ast.unparse(node))} & draft.bound - seen
        others = ((name, find(home, name)) for name in used)
        values, in_file = ([getattr(node, "value", node) for node in group] for group in (nodes, in_file))
        return fingerprint(values) == fingerprint(in_file) and all(
            _is_same(name, bound_there, home, draft, seen) for name, bound_there in others if bound_there
        )
    if origins_in_file != {""}:
        return bool(origins & origins_in_file - {""})
    for node in nodes:
        module = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
        if module in ("", draft.source.name):
            continue
        with suppress(CodegenError, SyntaxError):  # of modules without a source in Python
            tree = parsed(load(module, draft.config.where).text)
            if defined := find(tree, name):
                return _is_same(name, defined, tree, draft, seen)
    return name in origins


def _is_stub(node: Any) -> bool:
    """Whether a definition stands in a config for the one of the file: it has no code."""
    body = getattr(node, "body", ())
    values = [getattr(part, "value", None) if isinstance(part, ast.Expr) else part for part in body]
    return bool(body) and all(isinstance(value, ast.Pass | ast.Constant) for value in values)


def _origin(node: Any, name: str) -> str:
    """Return the last part of the dotted name that a statement binds a name to, "" for other values."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        alias = next(alias for alias in node.names if bound_name(alias) == name)
        return name if isinstance(node, ast.Import) and not alias.asname else alias.name.rpartition(".")[2]
    value = getattr(node, "value", None)
    return ast.unparse(value).rpartition(".")[2] if isinstance(value, ast.Name | ast.Attribute) else ""
