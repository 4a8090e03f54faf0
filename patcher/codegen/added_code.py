"""What a generated file has on top of the original: imports, blocks of code and helpers, in their places."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst

from patcher.codegen import import_statements as imports
from patcher.codegen.patched_definitions import Context
from patcher.codegen.spec import External, Helper, Import, PatchSpec
from patcher.errors import CodegenError
from patcher.source import trees as tree
from patcher.source.reading import own_decorators
from patcher.source.scopes import ImportedName, imported_names, nearest


def plan_imports(config: PatchSpec, bound: set[str], original: ast.Module) -> tuple[list[Import], dict[External, str]]:
    """The imports to add, and the expression for each imported replacement."""
    present = {name: found for name, found in imported_names(original).items() if not found.guarded}
    gone = {name for name, _ in config.dropped}
    added: list[Import] = []
    for entry in config.imports:
        fresh = []
        for name, (module, attribute) in entry.bound().items():
            found = None if name in gone else present.get(name)
            if found is not None and _origin(found, config.source_module) == (module, attribute):
                continue
            if name in bound:
                remedy = f"Add config.drop_import_names({name!r})"
                if found is None:
                    remedy = f"Leave the original out with config.exclude_from_output({name!r})"
                raise CodegenError(
                    f"{entry.where}: add_import({entry.module!r}) binds {name!r}, which {config.source_module} "
                    f"already binds to something else. {remedy}, or give it an alias."
                )
            fresh.append(name)
        if fresh:
            names = tuple((name, alias) for name, alias in entry.names if alias in fresh)
            added.append(Import(entry.module, names, entry.alias, entry.where))
    externals: dict[External, str] = {}
    aliases: dict[tuple[str, str], str] = {}
    taken = bound | {name for entry in added for name in entry.bound()}
    for patch in sorted(config.patches, key=lambda patch: patch.target):
        if isinstance(external := patch.replacement, External):
            first, *rest = external.name.split(".")
            if (external.module, first) not in aliases:
                alias = first if first not in taken else f"external_{first}"
                taken.add(alias)
                aliases[external.module, first] = alias
                added.append(Import(external.module, ((first, alias),), "", patch.where))
            externals[external] = ".".join([aliases[external.module, first], *rest])
    return imports.merge(added), externals


def _origin(found: ImportedName, source: str) -> tuple[str, str]:
    """The absolute module and the attribute that an import statement of the original binds a name to."""
    if not found.attribute:
        return found.module if found.alias else found.module.split(".")[0], ""
    package = ".".join(source.split(".")[: -found.level]) if found.level else ""
    return ".".join(part for part in (package, found.module) if part), found.attribute


def insert(
    config: PatchSpec,
    module: cst.Module,
    edits: dict[cst.CSTNode, Sequence[Any]],
    added: list[Import],
    context: Context,
) -> cst.Module:
    """Apply the edits, and put imports, blocks and helpers in their places."""
    by_anchor: dict[str, list[Helper]] = {}
    for helper in config.helpers:
        by_anchor.setdefault(helper.after, []).append(helper)
    fresh: set[str] = {helper.source.name for helper in config.helpers}
    for helper in config.helpers:
        if helper.source.name in context.bound:
            raise CodegenError(
                f"{helper.where}: the helper {helper.source.name!r} has the name of something in {context.source}. "
                "Rename it, replace the definition, or leave the original out with exclude_from_output."
            )
    top = _added_imports(added, context) + _blocks(config, context) + _helpers(by_anchor, "", context)
    anchor = imports.last_import(module)
    if anchor is not None and top:
        edits[anchor] = [*edits.get(anchor, _rewritten(anchor, edits)), *top]
    outermost = {name.name.value: node for node in module.body for name in tree.definitions([node])}
    for name, helpers in by_anchor.items():
        if not name or name in fresh:
            continue
        node = outermost.get(name)
        if node is None or edits.get(node) == []:
            raise CodegenError(
                f"{helpers[0].where}: add_helper_after({name!r}) finds no such definition in the file that is made of "
                f"{context.source}. {nearest(name, [*outermost, *fresh])}"
            )
        edits[node] = [*edits.get(node, _rewritten(node, edits)), *_helpers(by_anchor, name, context)]
    module = module.visit(tree.Rewriter(edits, module))
    body = [*top, *module.body] if anchor is None and top else list(module.body)
    return module.with_changes(
        body=_padded(body, {id(s) for s in top} | _inserted(edits)),
        has_trailing_newline=module.has_trailing_newline or (bool(top) and not module.body),
    )


def _rewritten(node: Any, edits: dict[cst.CSTNode, Sequence[Any]]) -> list[Any]:
    """A guard, with the edits in it: a statement that is replaced as a whole isn't visited any more."""
    return [node if isinstance(node, (cst.ClassDef, cst.FunctionDef)) else node.visit(tree.Rewriter(edits, node))]


def _inserted(edits: dict[cst.CSTNode, Sequence[Any]]) -> set[int]:
    return {id(statement) for new in edits.values() for statement in new[1:]}


def _padded(body: list[Any], inserted: set[int]) -> list[Any]:
    """Two blank lines between an inserted definition and what follows, one behind inserted lines."""
    for index in range(1, len(body)):
        before, node = body[index - 1], body[index]
        if id(before) not in inserted or id(node) in inserted:
            continue
        wanted = 2 if any(isinstance(part, (cst.ClassDef, cst.FunctionDef)) for part in (before, node)) else 1
        blank = len(node.leading_lines) - len(tree.without_blank(node.leading_lines))
        if blank < wanted:
            lines = [*comment_blank(wanted - blank), *node.leading_lines]
            body[index] = node.with_changes(leading_lines=lines)
    return body


def comment_blank(count: int) -> list[cst.EmptyLine]:
    """Blank lines."""
    return tree.comment_lines([], blank_before=count)


def _parsed(lines: Sequence[str], context: Context) -> list[Any]:
    return list(cst.parse_module(context.newline.join([*lines, ""])).body)


def _added_imports(added: list[Import], context: Context) -> list[Any]:
    if not added:
        return []
    nodes = _parsed([line for entry in added for line in entry.lines()], context)
    leading = [*comment_blank(1), *tree.comment_lines(["[ADDED IMPORTS]"])]
    return [nodes[0].with_changes(leading_lines=leading), *nodes[1:]]


def _blocks(config: PatchSpec, context: Context) -> list[Any]:
    nodes: list[Any] = []
    for block in config.blocks:
        own = _parsed(["pass", *block.code.split("\n")], context)[1:]
        notes = ["[ADDED CODE]", *([tree.why(block.description)] if block.description.strip() else [])]
        leading = [*comment_blank(1), *tree.comment_lines(notes), *own[0].leading_lines]
        nodes += [own[0].with_changes(leading_lines=leading), *own[1:]]
    return nodes


def _helpers(by_anchor: dict[str, list[Helper]], anchor: str, context: Context, *, boxed: bool = False) -> list[Any]:
    """The helpers behind an anchor, each followed by those that are anchored to it."""
    nodes: list[Any] = []
    for helper in by_anchor.get(anchor, []):
        decorators = own_decorators(helper.helper, helper.source)
        node = tree.read_definition(
            helper.source, decorators, dict(helper.name_map), context.newline, "", context.unit
        )
        box = tree.marker("[HELPERS]") if not nodes and not boxed else []
        notes = [tree.why(helper.description)] if helper.description.strip() else []
        leading = [*comment_blank(2), *box, *tree.comment_lines(notes), *node.leading_lines]
        nodes += [
            node.with_changes(leading_lines=leading),
            *_helpers(by_anchor, helper.source.name, context, boxed=True),
        ]
    return nodes
