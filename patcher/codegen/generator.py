"""From a description to the text of a patched modeling file."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from patcher.codegen import imports, tree
from patcher.codegen.config import (
    External,
    Helper,
    Import,
    Patch,
    PatchConfig,
    PatchKind,
    check_conflicts,
    check_target,
)
from patcher.codegen.diagnosis import check_names
from patcher.codegen.edits import Context, edit_class, replace_definition
from patcher.codegen.exclusion import exclude
from patcher.codegen.extract import own_decorators
from patcher.codegen.header import render_header, with_header
from patcher.codegen.names import bound_names, import_bindings, nearest
from patcher.codegen.source import SourceModule, load
from patcher.errors import CodegenError


@dataclass(frozen=True)
class Generated:
    """A generated file before it is written.

    Attributes:
        config: the description.
        source: the module that was patched.
        text: the whole text of the file.
        patches: the patches in the order of the text.
    """

    config: PatchConfig
    source: SourceModule
    text: str
    patches: tuple[Patch, ...]


def generate(config: PatchConfig) -> str:
    """The text of the modeling file that a config describes. Nothing is imported, and nothing written.

    Raises:
        CodegenError: for a target that the module doesn't have, for names that the file wouldn't define, and for
            anything else that would make the file differ from what the config says.
    """
    return build(config).text


def build(config: PatchConfig) -> Generated:
    """Like `generate`, with what the text was made from."""
    for index, patch in enumerate(config.patches):
        check_target(patch)
        check_conflicts(patch, config.patches[:index])
    source = load(config.source_module, config.where)
    try:
        module = cst.parse_module(source.text)
    except cst.ParserSyntaxError as error:
        raise CodegenError(
            f"{config.where}: {source.name} can't be patched, because {source.path} does not parse: {error}"
        ) from error
    module = imports.make_absolute(module, source, config.where)
    shipped = ast.parse(source.text)
    _check_dropped(config, shipped)
    module = imports.drop_names(module, {name for name, _ in config.dropped})
    excluded = exclude(module, config.excluded, config.patches, source.name)

    bound = set(bound_names(shipped)) - {name for name, _ in (*config.dropped, *config.excluded)}
    added, externals = _plan_imports(config, bound, shipped)
    context = Context(source.name, source.newline, module.default_indent, externals, bound)
    edits = dict(excluded) | _edit(config, module, context, shipped)
    module = _insert(config, module, edits, added, context)

    text = module.code
    if config.patches or config.helpers or config.blocks or config.imports or config.dropped or config.excluded:
        check_names(config, source, text, shipped)
    header = render_header(config, source, context.done)
    text = with_header(text, header, source)
    try:
        text.encode(source.encoding)
    except UnicodeEncodeError as error:
        raise CodegenError(
            f"{config.where}: {source.name} is written in {source.encoding}, which has no "
            f"{error.object[error.start]!r}. Leave the character out of the patches and descriptions."
        ) from error
    return Generated(config, source, text, tuple(context.done))


def _edit(
    config: PatchConfig, module: cst.Module, context: Context, shipped: ast.Module
) -> dict[cst.CSTNode, Sequence[Any]]:
    """What every patched definition of the top level turns into."""
    found = tree.definitions(module.body)
    known = {node.name.value for node in found}
    by_name: dict[str, list[Patch]] = {}
    for patch in config.patches:
        name = patch.target.split(".")[0]
        if name not in known:
            raise _unknown(patch, name, found, context.source, shipped)
        by_name.setdefault(name, []).append(patch)
    imported = import_bindings(shipped)
    dropped = {name for name, _ in config.dropped}
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    for node in found:
        patches = by_name.get(node.name.value, [])
        whole = [p for p in patches if p.target == node.name.value and p.kind is not PatchKind.MODIFY_INIT]
        if patches and node.name.value in imported and node.name.value not in dropped:
            raise CodegenError(
                f"{patches[0].where}: {patches[0].asked} would not always take effect: {context.source} also imports "
                f"{node.name.value!r}, on line {imported[node.name.value].lineno}. "
                f"Add config.drop_import_names({node.name.value!r})."
            )
        if whole:
            edits[node] = replace_definition(whole[0], node, context)
        elif patches:
            edits[node] = [_edit_members(patches, node, context)]
    return edits


def _edit_members(patches: list[Patch], node: tree.Definition, context: Context) -> cst.ClassDef:
    if not isinstance(node, cst.ClassDef):
        raise CodegenError(
            f"{patches[0].where}: {patches[0].asked} does not fit: {node.name.value!r} is a function in "
            f"{context.source}, and has no methods. Use replace_function({node.name.value!r})."
        )
    return edit_class(node, [(patch.target.split(".")[1:], patch) for patch in patches], context, node.name.value)


def _unknown(patch: Patch, name: str, found: list[tree.Definition], source: str, shipped: ast.Module) -> CodegenError:
    imported = import_bindings(shipped).get(name)
    if imported is not None:
        origin = f"{'.' * (getattr(imported, 'level', 0) or 0)}{getattr(imported, 'module', '') or ''}" or name
        return CodegenError(
            f"{patch.where}: {patch.asked} names no definition of {source}: {name!r} is imported there, from "
            f"{origin}. Patch that module, or bind the name yourself with drop_import_names({name!r}) and add_helper."
        )
    wants_function = patch.kind is PatchKind.REPLACE_FUNCTION
    what = "function" if wants_function else "class"
    same = [n.name.value for n in found if isinstance(n, cst.FunctionDef) == wants_function]
    choices = [n.name.value for n in found] if patch.kind is PatchKind.EXTERNAL else same
    return CodegenError(f"{patch.where}: {patch.asked} names no {what} of {source}. {nearest(name, choices)}")


def _check_dropped(config: PatchConfig, shipped: ast.Module) -> None:
    imported = import_bindings(shipped)
    for name, where in config.dropped:
        if name not in imported:
            raise CodegenError(
                f"{where}: drop_import_names({name!r}) names nothing that {config.source_module} imports. "
                f"{nearest(name, imported)}"
            )


def _plan_imports(
    config: PatchConfig, bound: set[str], shipped: ast.Module
) -> tuple[list[Import], dict[External, str]]:
    """The imports to add, and the expression for each imported replacement."""
    present = {name: node for name, node in import_bindings(shipped).items() if node in shipped.body}
    gone = {name for name, _ in config.dropped}
    added: list[Import] = []
    for entry in config.imports:
        fresh = []
        for name, (module, attribute) in entry.bound().items():
            node = None if name in gone else present.get(name)
            if node is not None and _binds(node, name, module, attribute, config.source_module):
                continue
            if name in bound:
                raise CodegenError(
                    f"{entry.where}: add_import({entry.module!r}) binds {name!r}, which {config.source_module} "
                    f"already binds to something else. Add config.drop_import_names({name!r}), or give it an alias."
                )
            fresh.append(name)
        if fresh:
            names = tuple((name, alias) for name, alias in entry.names if alias in fresh)
            added.append(Import(entry.module, names, entry.alias, entry.where))
    externals: dict[External, str] = {}
    taken = bound | {name for entry in added for name in entry.bound()}
    for patch in sorted(config.patches, key=lambda patch: patch.target):
        if isinstance(patch.replacement, External) and patch.replacement not in externals:
            first, *rest = patch.replacement.name.split(".")
            alias = first if first not in taken else f"external_{first}"
            taken.add(alias)
            externals[patch.replacement] = ".".join([alias, *rest])
            added.append(Import(patch.replacement.module, ((first, alias),), "", patch.where))
    return imports.merge(added), externals


def _binds(node: ast.Import | ast.ImportFrom, name: str, module: str, attribute: str, source: str) -> bool:
    """Whether an import statement of the original binds a name to just this."""
    for alias in node.names:
        if (alias.asname or alias.name.split(".")[0]) != name:
            continue
        if isinstance(node, ast.Import):
            return not attribute and module == (alias.name if alias.asname else name)
        package = ".".join(source.split(".")[: -node.level]) if node.level else ""
        origin = ".".join(part for part in (package, node.module or "") if part)
        return (origin, alias.name) == (module, attribute)
    return False


def _insert(
    config: PatchConfig,
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
        edits[anchor] = [*edits.get(anchor, [anchor]), *top]
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
    return module.with_changes(body=_padded(body, {id(s) for s in top} | _inserted(edits)))


def _rewritten(node: Any, edits: dict[cst.CSTNode, Sequence[Any]]) -> list[Any]:
    """A guard, with the edits in it: a statement that is replaced as a whole isn't visited any more."""
    return [node if isinstance(node, (cst.ClassDef, cst.FunctionDef)) else node.visit(tree.Rewriter(edits, node))]


def _inserted(edits: dict[cst.CSTNode, Sequence[Any]]) -> set[int]:
    return {id(statement) for new in edits.values() for statement in new[1:]}


def _padded(body: list[Any], inserted: set[int]) -> list[Any]:
    """Two blank lines behind an inserted definition."""
    for index in range(1, len(body)):
        before, node = body[index - 1], body[index]
        if id(before) not in inserted or id(node) in inserted or isinstance(before, cst.SimpleStatementLine):
            continue
        blank = 0
        for line in node.leading_lines:
            if line.comment is not None:
                break
            blank += 1
        if blank < 2:
            body[index] = node.with_changes(
                leading_lines=[*comment_blank(2 - blank), *node.leading_lines],
            )
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


def _blocks(config: PatchConfig, context: Context) -> list[Any]:
    nodes: list[Any] = []
    for block in config.blocks:
        own = _parsed(["pass", *block.code.split("\n")], context)[1:]
        notes = ["[ADDED CODE]", *([tree.why(block.description)] if block.description.strip() else [])]
        leading = [*comment_blank(1), *tree.comment_lines(notes), *own[0].leading_lines]
        nodes += [own[0].with_changes(leading_lines=leading), *own[1:]]
    return nodes


def _helpers(by_anchor: dict[str, list[Helper]], anchor: str, context: Context) -> list[Any]:
    """The helpers behind an anchor, each followed by those that are anchored to it."""
    nodes: list[Any] = []
    for helper in by_anchor.get(anchor, []):
        decorators = own_decorators(helper.helper, helper.source)
        node = tree.read_definition(helper.source, decorators, dict(helper.name_map), context.newline, "")
        box = tree.marker("[HELPERS]") if not nodes else []
        notes = [tree.why(helper.description)] if helper.description.strip() else []
        leading = [*comment_blank(2), *box, *tree.comment_lines(notes), *node.leading_lines]
        nodes += [node.with_changes(leading_lines=leading), *_helpers(by_anchor, helper.source.name, context)]
    return nodes
