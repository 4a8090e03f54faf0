"""Checks of a file before it is written: names that it lacks or means differently, and patches that never run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from patcher.codegen.generation.draft import Draft
from patcher.codegen.spec import Helper, Patch, PatchSpec
from patcher.compat.decorators import replaces_forward
from patcher.errors import CodegenError
from patcher.source.modules import load
from patcher.source.reading import Location, Source, file_tree, is_of_config, parsed
from patcher.source.scopes import (
    Definition,
    bound_name,
    bound_names,
    decorator_name,
    decorators_of,
    find,
    fingerprint,
    free_names,
    imported_names,
    nearest,
    start_line,
    statements_of,
    top_level,
    undefined_names,
)

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def warn_of_decorators(draft: Draft) -> None:
    """Issue a warning for each patched `forward` that a decorator of its class may keep from running."""
    config = draft.config
    rebound = {*config.dropped, *config.excluded}  # may be bound anew by the file
    for patch in config.patches:
        owner, _, method = patch.target.partition(".")
        for name in map(decorator_name, decorators_of(draft.text.tree, owner)) if method == "forward" else ():
            is_kept = (owner, name) not in config.undecorated and name.partition(".")[0] not in rebound
            if is_kept and replaces_forward(name):
                patch.where.warn(
                    f"{patch.call} may never run: @{name} of {owner} puts another forward in the place of the "
                    f"class's own. Leave the decorator out with config.drop_decorators({owner!r}, {name!r})."
                )


def check_names(draft: Draft, text: str) -> None:
    """Raise a CodegenError if the file uses names that it doesn't define."""
    config, original = draft.config, draft.text
    try:
        tree = parsed(text)
        compile(tree, config.target_file, "exec")
    except SyntaxError as error:
        raise config.error(
            f"{config.target_file} would not compile: {error.msg}. The line is "
            f"{text.splitlines()[(error.lineno or 1) - 1].strip()!r}: look at the patch that it comes from."
        ) from error
    # Names that the original lacks as well aren't reported; they are computed only if something is missing.
    if missing := undefined_names(text, tree):
        missing_before = undefined_names(original.text, original.tree)
        missing = {name: line for name, line in missing.items() if name not in missing_before}
    if missing:
        raise CodegenError("\n".join(_report_missing(config, tree, original.tree, missing)))


def _report_missing(
    config: PatchSpec, tree: ast.Module, original: ast.Module, missing: Mapping[str, int]
) -> Iterator[str]:
    """Yield the lines of the message: first what additions use, then what omissions removed."""
    reported = set[str]()
    for item in (*config.patches, *config.helpers, *config.blocks):
        renamed = dict(item.name_map)
        names = sorted({renamed.get(name, name) for name in free_names(item.code)} & missing.keys())
        if not names:
            continue
        reported.update(names)
        uses = f"{item.call} uses {', '.join(map(repr, names))}, which {config.target_file} does not define."
        yield f"{item.where}: {uses}" + (" Import it with config.add_import." if item.source is None else "")
        if item.source is not None:
            yield from (f"  {name}: {_remedy(name, item.source.file, original)}" for name in names)
    removed = {name: (where, "drop_import_names") for name, where in config.dropped.items()}
    removed |= {name: (where, "exclude_from_output") for name, where in config.excluded.items()}
    for name in (name for name in missing if name not in reported):
        where, call = removed.get(name, (config.where, ""))
        around = [node for node in tree.body if start_line(node) <= missing[name] <= (node.end_lineno or 0)]
        owner = next(map(repr, bound_names(ast.Module([*around], []))), "")
        also = f", or leave {owner} out as well" if owner else ""
        yield (
            f"{where}: {call}({name!r}) removes what {owner or 'the module'} still uses. Keep it, or bind {name!r} "
            f"another way{also}."
            if call
            else f"{where}: {config.target_file} would use {name!r} in {owner or 'the module'} without defining it."
        )


def _remedy(name: str, file: str, original: ast.Module) -> str:
    """Return the call to add, as far as the file of the patch code tells."""
    home = file_tree(file)
    imported, line = imported_names(home).get(name), bound_names(home).get(name)
    if imported is not None and not imported.attribute:
        alias = f", alias={imported.alias!r}" if imported.alias else ""
        return f"add config.add_import({imported.module!r}{alias}, is_from_import=False)"
    if imported is not None and imported.module and not imported.level:
        word = f"{imported.attribute} as {imported.alias}" if imported.alias else imported.attribute
        return f"add config.add_import({imported.module!r}, names=[{word!r}])"
    if line is None and name in bound_names(original):
        return "keep it, or bind it another way: the config leaves it out"
    if line is None:
        ways = "import it with config.add_import, or add it with config.add_helper or config.add_post_import_block"
        return f"{ways}. {nearest(name, bound_names(original))}"
    place = f"on line {line} of {Path(file).name}"
    if imported is not None:
        return f"imported {place}; add config.add_import with the absolute name of its module"
    if any(isinstance(node, Definition) and node.name == name for node in top_level(home.body)):
        return f"defined {place}; add config.add_helper({name})"
    return f"bound {place}; add config.add_post_import_block with the statements that bind it there"


# --- names that would mean something else than where they were written ----------------------------------------------


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
