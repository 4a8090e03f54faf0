"""From a description to the text of a patched modeling file."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from patcher.codegen import import_statements as imports
from patcher.codegen.added_code import insert, plan_imports
from patcher.codegen.excluded_names import exclude
from patcher.codegen.header import render_header, with_header
from patcher.codegen.missing_names import check_names
from patcher.codegen.patched_classes import edit_class
from patcher.codegen.patched_definitions import Context, replace_definition
from patcher.codegen.spec import Patch, PatchKind, PatchSpec, check_conflicts, check_target
from patcher.errors import CodegenError
from patcher.source import trees as tree
from patcher.source.modules import SourceModule, load
from patcher.source.scopes import bound_names, imported_names, nearest


@dataclass(frozen=True)
class Generated:
    """A generated file before it is written.

    Attributes:
        config: the description.
        source: the module that was patched.
        text: the whole text of the file.
        patches: the patches in the order of the text.
    """

    config: PatchSpec
    source: SourceModule
    text: str
    patches: tuple[Patch, ...]


def generate(config: PatchSpec) -> str:
    """The text of the modeling file that a config describes. Nothing is imported, and nothing written.

    >>> from patcher.codegen import PatchConfig
    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> print(generate(config).splitlines()[1])
    # GENERATED FILE: change the config that it is made from, not this file.

    Raises:
        CodegenError: for a target that the module doesn't have, for names that the file wouldn't define, and for
            anything else that would make the file differ from what the config says.
    """
    return build(config).text


def build(config: PatchSpec) -> Generated:
    """Like `generate`, with what the text was made from."""
    for index, patch in enumerate(config.patches):
        check_target(patch)
        check_conflicts(patch, config.patches[:index])
    source = load(config.source_module, config.where)
    try:
        original = ast.parse(source.text)
        text, tail = _split_tail(source.text)
        module = cst.parse_module(text)
    except (SyntaxError, cst.ParserSyntaxError) as error:
        reason = f"{error.msg}, on line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
        raise config.error(
            f"{source.name} can't be patched, because {source.path} does not parse: {reason}."
        ) from error
    if module.code != text:
        raise config.error(
            f"{source.name} can't be patched: the parser would not give every character of "
            f"{source.path} back. Look for form feeds and mixed newlines in it."
        )
    module = imports.make_absolute(module, source, config.where)
    _check_dropped(config, original)
    module = imports.drop_names(module, {name for name, _ in config.dropped})
    excluded = exclude(module, config.excluded, config.patches, source.name)

    bound = set(bound_names(original)) - {name for name, _ in (*config.dropped, *config.excluded)}
    added, externals = plan_imports(config, bound, original)
    context = Context(source.name, source.newline, module.default_indent, externals, bound)
    edits = dict(excluded) | _edit(config, module, context, original)
    module = insert(config, module, edits, added, context)

    text = module.code + tail
    if config.changes:
        check_names(config, source, text, original)
    header = render_header(config, source, context.done)
    text = with_header(text, header, source)
    try:
        text.encode(source.encoding)
    except UnicodeEncodeError as error:
        raise config.error(
            f"{source.name} is written in {source.encoding}, which has no "
            f"{error.object[error.start]!r}. Leave the character out of the patches and descriptions."
        ) from error
    return Generated(config, source, text, tuple(context.done))


def _split_tail(text: str) -> tuple[str, str]:
    """A text up to the end of its last line with code, and the white space behind: libcst loses form feeds there."""
    end = len(text.rstrip())
    newline = text.find("\n", end)
    end = len(text) if newline < 0 else newline + 1
    return text[:end], text[end:]


def _edit(
    config: PatchSpec, module: cst.Module, context: Context, original: ast.Module
) -> dict[cst.CSTNode, Sequence[Any]]:
    """What every patched definition of the top level turns into."""
    found = tree.definitions(module.body)
    known = {node.name.value for node in found}
    by_name: dict[str, list[Patch]] = {}
    for patch in config.patches:
        name = patch.target.split(".")[0]
        if name not in known:
            raise _unknown(patch, name, found, context.source, original)
        by_name.setdefault(name, []).append(patch)
    imported = imported_names(original)
    dropped = {name for name, _ in config.dropped}
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    for node in found:
        patches = by_name.get(node.name.value, [])
        whole = [p for p in patches if p.target == node.name.value and p.kind is not PatchKind.MODIFY_INIT]
        if patches and node.name.value in imported and node.name.value not in dropped:
            raise patches[0].error(
                f"would not always take effect: {context.source} also imports "
                f"{node.name.value!r}, on line {imported[node.name.value].line}. "
                f"Add config.drop_import_names({node.name.value!r})."
            )
        if whole:
            edits[node] = replace_definition(whole[0], node, context, tree.depth_of(node, module.body))
        elif patches:
            edits[node] = [_edit_members(patches, node, context, tree.depth_of(node, module.body))]
    return edits


def _edit_members(patches: list[Patch], node: tree.Definition, context: Context, depth: int) -> cst.ClassDef:
    if not isinstance(node, cst.ClassDef):
        raise patches[0].error(
            f"does not fit: {node.name.value!r} is a function in "
            f"{context.source}, and has no methods. Use replace_function({node.name.value!r})."
        )
    items = [(patch.target.split(".")[1:], patch) for patch in patches]
    return edit_class(node, items, context, node.name.value, depth)


def _unknown(patch: Patch, name: str, found: list[tree.Definition], source: str, original: ast.Module) -> CodegenError:
    imported = imported_names(original).get(name)
    if imported is not None:
        origin = f"{'.' * imported.level}{imported.module}" if imported.attribute else name
        return patch.error(
            f"names no definition of {source}: {name!r} is imported there, from "
            f"{origin}. Patch that module, or bind the name yourself with drop_import_names({name!r}) and add_helper."
        )
    wants_function = patch.kind is PatchKind.REPLACE_FUNCTION
    what = "function" if wants_function else "class"
    same = [n.name.value for n in found if isinstance(n, cst.FunctionDef) == wants_function]
    choices = [n.name.value for n in found] if patch.kind is PatchKind.EXTERNAL else same
    return patch.error(f"names no {what} of {source}. {nearest(name, choices)}")


def _check_dropped(config: PatchSpec, original: ast.Module) -> None:
    imported = imported_names(original)
    for name, where in config.dropped:
        if name not in imported:
            raise CodegenError(
                f"{where}: drop_import_names({name!r}) names nothing that {config.source_module} imports. "
                f"{nearest(name, imported)}"
            )
