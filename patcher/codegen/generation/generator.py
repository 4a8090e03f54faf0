"""From a description to the text of a patched modeling file."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import libcst as cst
import libcst.matchers as m

from patcher.codegen.generation.class_decorators import warn_of_decorators, without_decorators
from patcher.codegen.generation.header import render_header, with_header, without_banner
from patcher.codegen.generation.missing_names import check_names
from patcher.codegen.generation.patched_classes import edit_class
from patcher.codegen.generation.patched_definitions import (
    Context,
    behind_overloads,
    is_overload,
    replace_definition,
)
from patcher.codegen.generation.provenance import Provenance
from patcher.codegen.generation.stock_conversions import with_stock_conversions
from patcher.codegen.generation.surroundings import (
    DropNames,
    insert,
    plan_imports,
    with_absolute_imports,
    without_orphans,
)
from patcher.codegen.spec import Patch, PatchKind, PatchSpec, check_conflicts, check_target
from patcher.errors import CodegenError, PatcherWarning
from patcher.source import trees as tree
from patcher.source.collecting import without_collections
from patcher.source.folding import fold
from patcher.source.modules import SourceModule, load
from patcher.source.reading import parsed
from patcher.source.scopes import ImportedName, bound_names, imported_names, nearest, top_level

#: white space that libcst is not known to give back: all but spaces and one kind of newline
_UNUSUAL = re.compile(r"[^\S \n]|\\\n")


@dataclass(frozen=True)
class Generated:
    """A generated file before it is written.

    Attributes:
        config: the description.
        source: the module that was patched.
        text: the whole text of the file.
        patches: the patches in the order of the text.
        provenance: the fingerprints of what they replace.
        orphans: the imports of the source that are left out because only replaced code used them.
    """

    config: PatchSpec
    source: SourceModule
    text: str
    patches: tuple[Patch, ...]
    provenance: Provenance
    orphans: tuple[str, ...]


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


@without_collections()
def build(config: PatchSpec) -> Generated:
    """Like `generate`, with what the text was made from."""
    for index, patch in enumerate(config.patches):
        check_target(patch)
        check_conflicts(patch, config.patches[:index])
    source = load(config.source_module, config.where)
    try:
        original = parsed(source.text)
        text = with_absolute_imports(source, original, config.where)
        folded = fold(text, original, {patch.target for patch in config.patches})
        text, tail = _split_tail(folded.text)
        module = cst.parse_module(text, cst.PartialParserConfig(default_indent=folded.indent))
    except (SyntaxError, cst.ParserSyntaxError) as error:
        reason = f"{error.msg}, on line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
        raise config.error(
            f"{source.name} can't be patched, because {source.path} does not parse: {reason}."
        ) from error
    if _UNUSUAL.search(text) and module.code != text:
        raise config.error(
            f"{source.name} can't be patched: the parser would not give every character of "
            f"{source.path} back. Look for form feeds and mixed newlines in it."
        )
    imported = imported_names(original)
    for name, where in config.dropped.items():
        if name not in imported:
            # Not an error: a config serves several releases, and a later one needs the name no more.
            text = f"drop_import_names({name!r}) names nothing that {config.source_module} imports. "
            warnings.warn_explicit(text + nearest(name, imported), PatcherWarning, where.file, where.line)
    whole, module = module, module.visit(DropNames(config.dropped))
    edits = _exclude(config, module) | _replaced_guards(config, whole, module)

    left = original  # what stays of it: other statements may bind what is left out as well
    if config.dropped or config.excluded:
        left = ast.parse(module.visit(tree.Rewriter(edits, module)).code)
    bound = set(bound_names(left))
    removable = _removable(module, imported_names(left), config)
    added, externals = plan_imports(config, bound, original, removable)
    provenance = Provenance.of(config, original)
    step = module.default_indent
    context = Context(source.name, source.newline, step, externals, bound, removable, folded, provenance)
    edits |= _edit(config, module, context, imported)
    module = insert(config, module, edits, added, context)

    code = module.code
    text = without_decorators(config, folded.unfold(code + tail))
    orphans: tuple[str, ...] = ()
    if config.changes:
        text, orphans = without_orphans(config, source, code, text, original)
        check_names(config, source, text, original)
    warn_of_decorators(config, source, original, text)
    text, methods = with_stock_conversions(config, source, original, text)
    header = render_header(config, source, context.done, provenance.header(), orphans, methods)
    text = with_header(without_banner(text), header, source)
    try:
        text.encode(source.encoding)
    except UnicodeEncodeError as error:
        raise config.error(
            f"{source.name} is written in {source.encoding}, which has no "
            f"{error.object[error.start]!r}. Leave the character out of the patches and descriptions."
        ) from error
    return Generated(config, source, text, tuple(context.done), provenance, orphans)


def _split_tail(text: str) -> tuple[str, str]:
    """A text up to the end of its last line with code, and the white space behind: libcst loses form feeds there."""
    code = text.rstrip()
    line, newline, tail = text[len(code) :].partition("\n")
    return code + line + newline, tail


def _edit(
    config: PatchSpec, module: cst.Module, context: Context, imported: Mapping[str, ImportedName]
) -> dict[cst.CSTNode, Sequence[Any]]:
    """What every patched definition of the top level turns into."""
    found = tree.definitions(module.body)
    by_name: dict[str, list[Patch]] = {node.name.value: [] for node in found}
    for patch in config.patches:
        name = patch.target.split(".")[0]
        if name not in by_name:
            raise _unknown(patch, name, found, context.source, imported.get(name))
        by_name[name].append(patch)
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    stubs: list[tree.Definition] = []
    for node in found:
        name, patches = node.name.value, by_name[node.name.value]
        if not patches:
            continue
        depth = tree.depth_of(node, module.body)
        if name in imported and (depth or name not in config.dropped):
            fix = f"Add config.drop_import_names({name!r})."
            if depth:  # a guard chooses between the two: without the import there may be neither
                fix = (
                    f"Leave both out with config.drop_import_names({name!r}) and "
                    f"config.exclude_from_output({name!r}), and add a {name!r} of your own with add_helper in the "
                    "place of the patch."
                )
            raise patches[0].error(
                f"would not always take effect: {context.source} also imports {name!r}, on line "
                f"{imported[name].line}. {fix}"
            )
        whole = [p for p in patches if p.target == name and p.kind is not PatchKind.MODIFY_INIT]
        if whole and is_overload(node):
            edits[node] = ()  # it tells a signature of the original
            stubs.append(node)
        elif whole:
            edits[node] = replace_definition(whole[0], behind_overloads(node, stubs), context, depth)
            stubs = []
        elif isinstance(node, cst.ClassDef):
            items = [(patch.target.split(".")[1:], patch) for patch in patches]
            edits[node] = [edit_class(node, items, context, name, depth)]
        else:
            raise patches[0].error(
                f"does not fit: {name!r} is a function in {context.source}, and has no methods. "
                f"Use replace_function({name!r})."
            )
    return edits


def _unknown(
    patch: Patch, name: str, found: list[tree.Definition], source: str, imported: ImportedName | None
) -> CodegenError:
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


def _exclude(config: PatchSpec, module: cst.Module) -> dict[cst.CSTNode, Sequence[Any]]:
    """The edits that leave definitions out of a module, and their names out of its `__all__`."""
    if not config.excluded:
        return {}
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    known: dict[str, list[Any]] = {}
    for node in tree.statements(module.body):
        name = tree.bound_by(node)
        if name.isidentifier():
            known.setdefault(name, []).append(node)
    patched = {patch.target.split(".")[0]: patch for patch in config.patches}
    for name, where in config.excluded.items():
        if name not in known:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) names no class, function or constant of "
                f"{config.source_module}. {nearest(name, known)}"
            )
        if name in patched:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) leaves out what {patched[name].asked} at "
                f"{patched[name].where} patches. Remove one."
            )
        edits.update((node, ()) for node in known[name])
    for node in known.get("__all__", []):
        edits[node] = [cast(cst.SimpleStatementLine, node.visit(_Unlisted(config.excluded)))]
    for node, call in _calls_of_all(module):
        kept = _is_kept(call, config.excluded)
        edits[node] = [cast(cst.SimpleStatementLine, node.visit(_Unlisted(config.excluded)))] if kept else ()
    return edits


def _calls_of_all(module: cst.Module) -> Iterator[tuple[cst.CSTNode, cst.Call]]:
    """The statements `__all__.append(...)`, `__all__.extend(...)` and the like."""
    pattern = m.Call(func=m.Attribute(value=m.Name("__all__")))
    for node in tree.statements(module.body):
        if m.matches(node, m.SimpleStatementLine(body=[m.Expr(value=pattern)])):
            yield node, node.body[0].value


def _is_kept(call: cst.Call, excluded: Collection[str]) -> bool:
    """Whether such a call adds anything but one name that is left out."""
    value = call.args[0].value if len(call.args) == 1 else None
    return not (isinstance(value, cst.SimpleString) and value.evaluated_value in excluded)


def _replaced_guards(config: PatchSpec, whole: cst.Module, module: cst.Module) -> dict[cst.CSTNode, Sequence[Any]]:
    """The edits that leave out the guards of which only fallbacks are left, for names that the config binds itself.

    What falls back is told by `whole`, the module with the imports that are left out.
    """
    own = {helper.source.name for helper in config.helpers}
    own.update(name for each in config.imports for name in each.bound())
    own.update(name for block in config.blocks for name in bound_names(ast.parse(block.code)))
    own &= config.dropped.keys()
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    guards = [[part for part in each.body if own and isinstance(part, cst.If | cst.Try)] for each in (whole, module)]
    for guard, left in zip(*guards, strict=True):
        body = ast.parse(tree.code_of(left))
        names = bound_names(body).keys()
        if names and names <= own & imported_names(ast.parse(tree.code_of(guard))).keys() and _only_binds(body):
            edits[left] = ()
    return edits


def _only_binds(body: ast.Module) -> bool:
    """Whether statements have no effect but on names."""
    for node in top_level(body.body):
        parts = list(ast.walk(node)) if isinstance(node, ast.Assign | ast.AnnAssign) else []
        if not parts and not isinstance(node, ast.If | ast.Try | ast.Pass | ast.FunctionDef | ast.ClassDef):
            return False
        if any(isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store) for part in parts):
            return False
    return True


def _removable(module: cst.Module, imported: Collection[str], config: PatchSpec) -> dict[str, str]:
    """The names that can be left out of a module, each with the calls that do it."""
    calls = {name: [f"config.drop_import_names({name!r})"] for name in imported}
    for name in {tree.bound_by(node) for node in tree.statements(module.body)} - config.excluded.keys():
        calls.setdefault(name, []).append(f"config.exclude_from_output({name!r})")
    return {name: " and ".join(listed) for name, listed in calls.items()}


class _Unlisted(cst.CSTTransformer):
    """Removes the strings of `__all__` that name what is left out."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if not isinstance(original_node, (cst.List, cst.Tuple)):
            return updated_node
        names = [(part, part.value) for part in original_node.elements if isinstance(part.value, cst.SimpleString)]
        removed = [element for element, text in names if text.evaluated_value in self.names]
        return updated_node.with_changes(elements=tree.without(original_node.elements, removed))
