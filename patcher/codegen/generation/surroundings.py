"""What surrounds the definitions of a generated file: imports made absolute, dropped and added, blocks and helpers."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import libcst as cst

from patcher.codegen.additions import Helper, Import
from patcher.codegen.generation.patched_definitions import Context, below
from patcher.codegen.spec import External, PatchSpec
from patcher.errors import CodegenError
from patcher.source import trees
from patcher.source.definitions import find, span
from patcher.source.modules import SourceModule, lines_of
from patcher.source.reading import Location
from patcher.source.scopes import (
    ImportedName,
    bound_names,
    imported_names,
    nearest,
    statements_of,
)

_WITH_STATEMENTS = (
    cst.Module,
    cst.BaseCompoundStatement,
    cst.BaseSuite,
    cst.SimpleStatementLine,
    cst.Else,
    cst.Finally,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.MatchCase,
)


def with_absolute_imports(source: SourceModule, tree: ast.Module, where: Location) -> str:
    """The text of a module with every `from ..x import y` made absolute, those in functions and guards included.

    No line is added or taken away.

    Raises:
        CodegenError: an import goes above the top package.
    """
    lines = lines_of(source.text)
    relative = [node for node in statements_of(tree, ast.ImportFrom) if node.level]
    for node in reversed(relative):  # from the end: columns in front stay what they are
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        text = "".join(lines[first : last + 1])
        statement = cst.parse_module(text[len(head) : len(text) - len(tail)])
        parsed = cst.ensure_type(cst.ensure_type(statement.body[0], cst.SimpleStatementLine).body[0], cst.ImportFrom)
        name = "." * node.level + (node.module or "")
        absolute = cst.parse_expression(absolute_name(name, source.package, source.name, where))
        around = ("whitespace_after_from", "whitespace_before_import")  # needs none beside a dot
        spaces = {part: cst.SimpleWhitespace(" ") for part in around if getattr(parsed, part).empty}
        changed = statement.deep_replace(parsed, parsed.with_changes(relative=(), module=absolute, **spaces))
        assert isinstance(changed, cst.Module)
        lines[first : last + 1] = [head + changed.code + tail, *[""] * (last - first)]
    return "".join(lines)


def absolute_name(relative: str, package: str, source: str, where: Location) -> str:
    """The absolute name of a module that the module `source`, of a package, imports from by a name with dots."""
    try:
        return importlib.util.resolve_name(relative, package)
    except ImportError:
        raise CodegenError(
            f"{where}: {source} imports from {relative}, which is above its top package {package!r}. "
            f"Python can't import that either: give PatchConfig the full dotted name of {source}, from its top "
            "package on, or correct the import."
        ) from None


class DropNames(cst.CSTTransformer):
    """Leaves names out of the imports of the top level."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def on_visit(self, node: cst.CSTNode) -> bool:
        return isinstance(node, _WITH_STATEMENTS) and not isinstance(node, (cst.ClassDef, cst.FunctionDef))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.SimpleStatementLine) and not updated_node.body:
            return cst.RemoveFromParent()
        imports = isinstance(original_node, (cst.Import, cst.ImportFrom))
        if not imports or isinstance(original_node.names, cst.ImportStar):
            return updated_node
        names = {alias: alias.evaluated_alias or alias.evaluated_name.split(".")[0] for alias in original_node.names}
        removed = [alias for alias, name in names.items() if name in self.names]
        if len(removed) == len(original_node.names):
            return cst.RemoveFromParent()
        return updated_node.with_changes(names=trees.without(original_node.names, removed))


def without_orphans(
    config: PatchSpec, source: SourceModule, folded: str, text: str, original: ast.Module
) -> tuple[str, tuple[str, ...]]:
    """A generated text without the imports that only code used which is gone, and their names.

    What isn't known to be orphaned stays: an import that no code used which is gone, one in a guard, under `noqa` or
    by the config as well, and each whose name the text has anywhere else, be it in a string or a comment.

    Args:
        config: the description.
        source: the module that was patched.
        folded: the text with the definitions that stay as one line each: its imports are found quickly.
        text: the text.
        original: the syntax tree of the source.
    """
    said = re.sub(r"(?m)^[ \t]*# (?:Why|  [\w.]+): .*", "", text)  # without descriptions
    lines, unused = lines_of(folded), dict[str, set[str]]()
    for node in ast.parse(folded).body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") == "__future__":
            continue
        statement = "".join(lines[node.lineno - 1 : node.end_lineno])
        rest = said.replace(statement, "", 1)
        names = {part.asname or part.name.split(".")[0] for part in node.names} - {"*"}
        # The word, written so that it is searched for as fast as any characters are.
        names = {name for name in names if not re.search(rf"{name}(?<=\b{name})\b", rest)}
        if names and "noqa" not in statement and not node.col_offset and text.count(statement) == 1:
            unused[statement] = names
    if not unused:
        return text, ()
    gone = {patch.definition for patch in config.patches}.union(config.excluded)
    gone |= {name for name, _ in config.undecorated}
    known, asked = lines_of(source.text), re.compile("|".join(sorted({*itertools.chain(*unused.values())})))
    nodes = [node for name in gone for node in find(original, name)]
    nodes = [node for node in nodes if asked.search("".join(known[span(node)[0] - 1 : node.end_lineno]))]
    parts = [part for node in nodes for part in ast.walk(node)]
    kept_names = {name for entry in config.imports for name in entry.bound()}.union(gone)
    used = {part.id for part in parts if isinstance(part, ast.Name)} - kept_names
    for statement, names in unused.items():
        if orphans := names & used:
            above, under = text.split(statement)
            kept = cst.parse_module(statement).visit(DropNames(orphans)).code
            if not kept.strip():  # of the blank lines above and below, the larger number stays
                kept, behind = "", lines_of(under)
                blank = [len(list(itertools.takewhile(str.isspace, e))) for e in (lines_of(above)[::-1], behind)]
                under = "".join(behind[min(blank) :])
            text = above + kept + under
    return text, tuple(sorted(name for names in unused.values() for name in names & used))


def merge(imports: Iterable[Import]) -> list[Import]:
    """The statements in a fixed order, one for each module: the order of the config doesn't matter."""
    plain, named = dict[tuple[str, str], Import](), dict[str, Import]()
    for entry in imports:
        if not entry.names:
            plain.setdefault((entry.module, entry.alias), entry)
        else:
            known = named.get(entry.module)
            names = sorted({*entry.names, *(known.names if known else ())})
            named[entry.module] = Import(entry.module, tuple(names), "", (known or entry).where)
    return [plain[key] for key in sorted(plain)] + [named[key] for key in sorted(named)]


def last_import(module: cst.Module) -> Any:
    """The statement behind which new imports go: the last one with an import above the first definition.

    Returns:
        That statement, or the docstring if there is no import, or None.
    """
    found = None
    for index, node in enumerate(module.body):
        if isinstance(node, (cst.ClassDef, cst.FunctionDef)):
            break
        lines = [line for line in trees.statements([node]) if isinstance(line, cst.SimpleStatementLine)]
        parts = [part for line in lines for part in line.body]
        first = parts[0] if index == 0 and node in lines else None
        docstring = first.value if isinstance(first, cst.Expr) else None
        is_text = isinstance(docstring, (cst.SimpleString, cst.ConcatenatedString))
        if is_text or any(isinstance(part, (cst.Import, cst.ImportFrom)) for part in parts):
            found = node
    return found


def plan_imports(
    config: PatchSpec, bound: set[str], original: ast.Module, removable: Mapping[str, str]
) -> tuple[list[Import], dict[External, str]]:
    """The imports to add, and the expression for each imported replacement."""
    present = {name: found for name, found in imported_names(original).items() if not found.guarded}
    added: list[Import] = []
    for entry in config.imports:
        fresh = []
        for name, (module, attribute) in entry.bound().items():
            found = None if name in config.dropped else present.get(name)
            if found is not None and _is(found, config.source_module, module, attribute):
                if "." in entry.module and entry.module != found.module and not attribute and not entry.alias:
                    fresh.append(name)  # `import a.b` beside `import a`
                continue
            if name in bound:
                raise CodegenError(
                    f"{entry.where}: add_import({entry.module!r}) binds {name!r}, which {config.source_module} "
                    f"already binds. Give it an alias{_or_without(name, removable)}."
                )
            fresh.append(name)
        if fresh:
            names = tuple((name, alias) for name, alias in entry.names if alias in fresh)
            added.append(Import(entry.module, names, entry.alias, entry.where))
    externals: dict[External, str] = {}
    aliases: dict[tuple[str, str], str] = {}
    taken = bound | {name for entry in added for name in entry.bound()}
    for patch in sorted(config.patches, key=lambda patch: patch.target):
        if isinstance(external := patch.replacement, External) and not patch.is_import:
            first, *rest = external.name.split(".")
            if (external.module, first) not in aliases:
                alias = first if first not in taken else f"external_{first}"
                taken.add(alias)
                aliases[external.module, first] = alias
                added.append(Import(external.module, ((first, alias),), "", patch.where))
            externals[external] = ".".join([aliases[external.module, first], *rest])
    return merge(added), externals


def _or_without(name: str, removable: Mapping[str, str]) -> str:
    return f", or leave the original out: {removable[name]}" if name in removable else ""


def _is(found: ImportedName, source: str, module: str, attribute: str) -> bool:
    """Whether an import statement of the original binds a name to this module, or this attribute of it.

    `import torch.nn.functional as F` and `from torch.nn import functional as F` are one.
    """
    package = ".".join(source.split(".")[: -found.level]) if found.level else ""
    bound = found.module if found.attribute or found.alias else found.module.split(".")[0]
    return ".".join(filter(None, (package, bound, found.attribute))) == ".".join(filter(None, (module, attribute)))


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
        if helper.source.name in context.bound:
            raise CodegenError(
                f"{helper.where}: the helper {helper.source.name!r} has the name of something in {context.source}. "
                f"Rename it{_or_without(helper.source.name, context.removable)}."
            )
    fresh = {helper.source.name for helper in config.helpers}
    lines = [line for entry in added for line in entry.lines()]
    top = _parsed(lines, ["[ADDED IMPORTS]"], context) if lines else []
    for block in config.blocks:
        notes = ["[ADDED CODE]", *([trees.why(block.description)] if block.description.strip() else [])]
        top += _parsed(block.code.split("\n"), notes, context)
    top += _helpers(by_anchor, "", context)
    anchor = last_import(module)
    behind = module.body[module.body.index(anchor) + 1 :] if anchor is not None else module.body
    _check_blocks(config, [node for node in behind if edits.get(node) != ()], context)
    if anchor is not None and top:
        edits[anchor] = [*edits.get(anchor, _rewritten(anchor, edits)), *top]
    outermost = {name.name.value: node for node in module.body for name in trees.definitions([node])}
    for name, helpers in by_anchor.items():
        if not name or name in fresh:
            continue
        node = outermost.get(name)
        if node is None:
            raise CodegenError(
                f"{helpers[0].where}: add_helper_after({name!r}) finds no such definition in the file that is made of "
                f"{context.source}. {nearest(name, [*outermost, *fresh])}"
            )
        edits[node] = [*edits.get(node, _rewritten(node, edits)), *_helpers(by_anchor, name, context)]
    module = module.visit(trees.Rewriter(edits, module))
    body = [*top, *module.body] if anchor is None and top else list(module.body)
    inserted = [*top, *(statement for new in edits.values() for statement in new[1:])]
    return module.with_changes(
        body=_padded(body, set(map(id, inserted))),
        has_trailing_newline=module.has_trailing_newline or (bool(top) and not module.body),
    )


def _check_blocks(config: PatchSpec, behind: Sequence[Any], context: Context) -> None:
    """Raise a CodegenError if what a block binds is bound again by the statements behind it, and so lost."""
    bound = [(block, name) for block in config.blocks for name in bound_names(ast.parse(block.code))]
    known = context.bound | {helper.source.name for helper in config.helpers}
    later = bound_names(ast.parse(cst.Module(list(behind)).code)) if any(name in known for _, name in bound) else {}
    for block, name in bound:
        if name in later:
            raise CodegenError(
                f"{block.where}: the text given to add_post_import_block binds {name!r}, and {context.source} binds "
                f"it again further down. Rename it{_or_without(name, context.removable)}."
            )


def _rewritten(node: Any, edits: dict[cst.CSTNode, Sequence[Any]]) -> list[Any]:
    """A guard, with the edits in it: a statement that is replaced as a whole isn't visited any more."""
    return [node if isinstance(node, (cst.ClassDef, cst.FunctionDef)) else node.visit(trees.Rewriter(edits, node))]


def _padded(body: list[Any], inserted: set[int]) -> list[Any]:
    """Two blank lines between an inserted definition and what follows, one behind inserted lines."""
    for index in range(1, len(body)):
        before, node = body[index - 1], body[index]
        if id(before) not in inserted or id(node) in inserted:
            continue
        wanted = 2 if any(isinstance(part, (cst.ClassDef, cst.FunctionDef)) for part in (before, node)) else 1
        blank = len(node.leading_lines) - len(trees.without_blank(node.leading_lines))
        if blank < wanted:
            body[index] = below(node, trees.comment_lines([], blank_before=wanted - blank))
    return body


def _parsed(lines: Sequence[str], notes: Sequence[str], context: Context) -> list[Any]:
    """The statements of a text below an empty line and notes; comments above the first are that one's own."""
    _, first, *more = cst.parse_module(context.newline.join(["pass", *lines, ""])).body
    return [below(first, trees.comment_lines(notes, blank_before=1)), *more]


def _helpers(by_anchor: dict[str, list[Helper]], anchor: str, context: Context, *, boxed: bool = False) -> list[Any]:
    """The helpers behind an anchor, each followed by those that are anchored to it."""
    nodes: list[Any] = []
    for helper in by_anchor.get(anchor, []):
        node = context.read_source(helper.source, helper.helper, dict(helper.name_map))
        box = trees.marker("[HELPERS]") if not nodes and not boxed else []
        notes = [trees.why(helper.description)] if helper.description.strip() else []
        nodes.append(below(node, [*trees.comment_lines([], blank_before=2), *box, *trees.comment_lines(notes)]))
        nodes += _helpers(by_anchor, helper.source.name, context, boxed=True)
    return nodes
