"""What surrounds the definitions of a generated file: imports made absolute, dropped and added, blocks and helpers."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from patcher.codegen.additions import WIDTH, Helper, Import, import_by_line
from patcher.codegen.generation.patched_definitions import Context, marker, why
from patcher.codegen.spec import External, PatchSpec
from patcher.errors import CodegenError
from patcher.source.definitions import find
from patcher.source.edits import Edit, Place, Text, applied, definitions, places, without
from patcher.source.modules import SourceModule
from patcher.source.reading import Definition, Location, parsed, start_line
from patcher.source.scopes import (
    ImportedName,
    bound_name,
    bound_names,
    imported_names,
    nearest,
    statements_of,
)

_SPACE = r"(?:\s|\\\r?\n)*"
_RELATIVE = re.compile(
    rf"from(?P<before>{_SPACE})(?:\.{_SPACE})*\.(?P<dots>{_SPACE})(?P<name>[^\W\d]\w*(?:{_SPACE}\.{_SPACE}[^\W\d]\w*)*)?"
    rf"(?P<behind>{_SPACE})\bimport\b"
)


def absolute_imports(source: SourceModule, text: Text, where: Location) -> Iterator[Edit]:
    """The edits that make every `from ..x import y` absolute, those in functions and guards included.

    Raises:
        CodegenError: an import goes above the top package.
    """
    for node in statements_of(text.tree, ast.ImportFrom):
        if not node.level:
            continue
        start, _ = text.span(node)
        match = _RELATIVE.match(text.text, start)
        assert match is not None
        name = absolute_name("." * node.level + (node.module or ""), source.package, source.name, where)
        behind = match["behind"] if node.module else match["dots"] + match["behind"]  # needs none beside a dot
        line = f"from {name} import {text.text[match.end() : text.span(node)[1]].lstrip()}"
        if len(line) + node.col_offset > WIDTH and text.is_alone(node) and "\n" not in line and "(" not in line:
            between = text.line_break(node.lineno) + text.indent(node.lineno)
            yield Edit(start, text.span(node)[1], between.join(import_by_line(name, map(ast.unparse, node.names))))
            continue
        yield Edit(start, match.end(), f"from{match['before'] or ' '}{name}{behind or ' '}import")


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


def dropped_names(text: Text, names: Collection[str]) -> tuple[list[Edit], set[ast.stmt]]:
    """The edits that leave names out of imports of the top level, and the statements of which none is left."""
    edits, gone = list[Edit](), set[ast.stmt]()
    for place in places(text.tree.body, text.tree):
        node = place.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            removed = [alias for alias in node.names if bound_name(alias) in names and alias.name != "*"]
            if len(removed) == len(node.names):
                gone.add(node)
            elif removed:
                end = text.span(node)[1]
                edits += without(text, node.names, removed, end - (text.text[end - 1] == ")"))
    return edits, gone


def without_orphans(
    config: PatchSpec, source: SourceModule, text: str, original: ast.Module
) -> tuple[str, tuple[str, ...]]:
    """A generated text without the imports that only code used which is gone, and their names.

    What isn't known to be orphaned stays: an import that no code used which is gone, one in a guard, under `noqa` or
    by the config as well, and each whose name the text has anywhere else, be it in a string or a comment.

    Args:
        config: the description.
        source: the module that was patched.
        text: the text.
        original: the syntax tree of the source.
    """
    gone = {patch.definition for patch in config.patches}.union(config.excluded)
    gone |= {name for name, _ in config.undecorated}
    nodes = [part for name in gone for node in find(original, name) for part in ast.walk(node)]
    kept_names = {name for entry in config.imports for name in entry.bound()}.union(gone)
    used = {part.id for part in nodes if isinstance(part, ast.Name)} - kept_names
    described = re.sub(r"(?m)^[ \t]*# (?:Why|  [\w.]+): .*", "", text)  # without descriptions
    file, removed = Text(text, parsed(text)), dict[ast.stmt, set[str]]()
    for node in file.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") == "__future__":
            continue
        names = {bound_name(alias) for alias in node.names} & used
        if names and not node.col_offset and file.is_alone(node):
            statement = "".join(file.lines[node.lineno - 1 : node.end_lineno])
            rest = described.replace(statement, "", 1)
            # The word, written so that it is searched for as fast as any characters are.
            names = {name for name in names if not re.search(rf"{name}(?<=\b{name})\b", rest)}
            if names and "noqa" not in statement:
                removed[node] = names
    edits = list[Edit]()
    for node, names in removed.items():
        listed, unused = _aliases(node), [alias for alias in _aliases(node) if bound_name(alias) in names]
        if len(unused) < len(listed):
            end = file.span(node)[1]
            edits += without(file, listed, unused, end - (text[end - 1] == ")"))
            continue
        # Of the blank lines above and below, the larger number stays.
        behind = (node.end_lineno or 0) + 1
        above = itertools.takewhile(str.isspace, reversed(file.lines[: node.lineno - 1]))
        below = itertools.takewhile(str.isspace, file.lines[behind - 1 :])
        blank = min(len(list(above)), len(list(below)))
        edits.append(Edit(file.start_of(node.lineno), file.start_of(behind + blank), ""))
    return applied(text, edits), tuple(sorted(name for names in removed.values() for name in names))


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


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


def last_import(text: Text, gone: Collection[ast.stmt]) -> ast.stmt | None:
    """The statement behind which new imports go: the last one with an import above the first definition.

    Returns:
        That statement, or the docstring if there is no import, or None.
    """
    found = None
    for index, node in enumerate(text.tree.body):
        if isinstance(node, Definition):
            break
        is_text = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        parts = (place.node for place in places([node], text.tree) if place.node not in gone)
        if is_text or any(isinstance(part, ast.Import | ast.ImportFrom) for part in parts):
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
    added: list[Import],
    gone: Collection[ast.stmt],
    no_anchors: Collection[ast.stmt],
    context: Context,
) -> None:
    """Put imports, blocks and helpers in their places.

    Args:
        config: the description.
        added: the imports.
        gone: statements that are left out.
        no_anchors: those of them that are imports.
        context: what the edits of the file share.
    """
    text = context.text
    body = text.tree.body
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
    top = [["", "# [ADDED IMPORTS]", *lines]] if lines else []
    for block in config.blocks:
        note = why(block.description)
        top.append(["", "# [ADDED CODE]", *([f"# {note}"] if note else []), *block.code.split("\n")])
    top += _helpers(by_anchor, "", context)
    anchor = last_import(text, no_anchors)
    behind = body[body.index(anchor) + 1 :] if anchor is not None else body
    _check_blocks(config, [node for node in behind if node not in gone], context)
    if anchor is not None:
        context.behind[anchor] = [*top, *context.behind.get(anchor, [])]
    outermost = {
        place.node.name: node  # type: ignore[attr-defined]
        for node in body
        for place in definitions([node], text.tree)
        if place.node not in gone
    }
    for name, helpers in by_anchor.items():
        if not name or name in fresh:
            continue
        if name not in outermost:
            raise CodegenError(
                f"{helpers[0].where}: add_helper_after({name!r}) finds no such definition in the file that is made of "
                f"{context.source}. {nearest(name, [*outermost, *fresh])}"
            )
        context.behind.setdefault(outermost[name], []).extend(_helpers(by_anchor, name, context))
    left = [node for node in body if node not in gone]
    if config.endings:
        last = next(node for node in reversed(left) if isinstance(node, Definition))
        context.behind.setdefault(last, []).extend(["", "", *block.code.split("\n")] for block in config.endings)
    for node, parts in context.behind.items():
        if parts:
            following = next((each for each in left if body.index(each) > body.index(node)), None)
            end = text.end_of(text.last_line(node))
            _insert(parts, end, following, context)
    if anchor is None and top:
        following = left[0] if left else None
        at = text.start_of(start_line(following)) if following is not None else len(text.text)
        _insert(top, at, following, context, first=True)


def _insert(
    parts: Sequence[Sequence[str]], at: int, following: ast.stmt | None, context: Context, *, first: bool = False
) -> None:
    """Write lines behind a statement, or in front of the first, apart from what follows: two lines at definitions."""
    newline, text = context.newline, context.text
    lines = [line for part in parts for line in part]
    if following is not None:
        last = ast.parse("\n".join(parts[-1])).body[-1]
        wanted = 2 if isinstance(last, Definition) or isinstance(following, Definition) else 1
        lines += [""] * (wanted - Place(following, text.tree.body, text.tree).blank_lines(text))
    if not first:
        context.edits.append(Edit(at, at, "".join(f"{newline}{line}" for line in lines)))
        return
    start = newline if at and not text.text[:at].endswith(("\n", "\r")) else ""
    context.edits.insert(0, Edit(at, at, start + "".join(f"{line}{newline}" for line in lines)))


def _check_blocks(config: PatchSpec, behind: Sequence[ast.stmt], context: Context) -> None:
    """Raise a CodegenError if what a block binds is bound again by the statements behind it, and so lost."""
    bound = [(block, name) for block in config.blocks for name in bound_names(ast.parse(block.code))]
    known = context.bound | {helper.source.name for helper in config.helpers}
    later = bound_names(ast.Module([*behind], [])).keys() - config.dropped if bound else set()
    for block, name in bound:
        if name in later and name in known:
            raise CodegenError(
                f"{block.where}: the text given to add_post_import_block binds {name!r}, and {context.source} binds "
                f"it again further down. Rename it{_or_without(name, context.removable)}."
            )


def _helpers(
    by_anchor: dict[str, list[Helper]], anchor: str, context: Context, *, boxed: bool = False
) -> list[list[str]]:
    """The helpers behind an anchor, each followed by those that are anchored to it."""
    found: list[list[str]] = []
    for helper in by_anchor.get(anchor, []):
        piece = context.read_source(helper.source, helper.helper, dict(helper.name_map))
        box = marker("[HELPERS]") if not found and not boxed else []
        note = why(helper.description)
        found.append(["", "", *box, *([f"# {note}"] if note else []), *piece.lines])
        found += _helpers(by_anchor, helper.source.name, context, boxed=True)
    return found
