"""The code around the patched definitions: what a file omits of its original, and what it adds to it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from patcher.codegen.generation.draft import Draft, comments, marker, why
from patcher.codegen.spec import WIDTH, Helper, PatchKind, PatchSpec, import_from
from patcher.errors import CodegenError
from patcher.source.reading import Location, parsed
from patcher.source.scopes import (
    Definition,
    ImportedName,
    bound_name,
    bound_names,
    decorator_name,
    decorators_of,
    find,
    nearest,
    start_line,
    statements_of,
    top_level,
)
from patcher.source.texts import Edit, Place, Text, applied, listed, places, removals

#: A relative import up to its names.
_RELATIVE = re.compile(r"from[\s\\]*\.[\w.\s\\]*?\bimport\b")


# --- omissions ------------------------------------------------------------------------------------------------------


def remove(draft: Draft) -> None:
    """Remove the imports that a config drops and the definitions that it excludes."""
    config, text = draft.config, draft.text
    tree = text.tree
    for name, where in config.dropped.items():
        if name not in draft.imported:
            # Not an error: a config supports several releases, and a later one may not import the name.
            problem = f"drop_import_names({name!r}) names nothing that {config.source_module} imports. "
            where.warn(problem + nearest(name, draft.imported))
    imports = set[ast.stmt]()
    for place in places(text.tree):
        aliases = _aliases(place.node)
        dropped = [alias for alias in aliases if bound_name(alias) in config.dropped and alias.name != "*"]
        if aliases and len(dropped) == len(aliases):
            imports.add(place.node)
        elif dropped:
            draft.edits.append(listed(text, aliases, [alias for alias in aliases if alias not in dropped]))
    draft.removed = imports | _excluded(draft) | _replaced_guards(draft, imports)
    draft.edits += removals(text, draft.removed)
    is_changed = config.dropped or config.excluded
    draft.bound = set(bound_names(ast.parse(applied(text.text, draft.edits)) if is_changed else tree))


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _replaced_guards(draft: Draft, imports: Collection[ast.stmt]) -> set[ast.stmt]:
    """Return the guards that without the dropped imports only bind fallbacks, for names that the config binds."""
    config, guards = draft.config, set[ast.stmt]()
    replaced = config.added_names() & config.dropped.keys()
    for node in (node for node in draft.text.tree.body if replaced and isinstance(node, ast.If | ast.Try)):
        inner = [place for place in places(node) if not isinstance(place.node, ast.If | ast.Try | ast.Pass)]
        fallbacks = [place for place in inner if place.node not in imports]
        has_import = len(fallbacks) < len(inner)
        if has_import and fallbacks and all(place.bound_name in replaced for place in fallbacks):
            guards.add(node)
    return guards


def _excluded(draft: Draft) -> set[ast.stmt]:
    """Return the excluded statements, and remove their names from `__all__`."""
    config, text = draft.config, draft.text
    removed, bindings = set[ast.stmt](), dict[str, list[ast.stmt]]()
    for place in places(text.tree) if config.excluded else ():
        if place.bound_name:
            bindings.setdefault(place.bound_name, []).append(place.node)
    patched = {patch.target.split(".")[0]: patch for patch in config.patches}
    for name, where in config.excluded.items():
        if name not in bindings:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) names no class, function or constant of "
                f"{config.source_module}. {nearest(name, bindings)}"
            )
        if name in patched:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) leaves out what {patched[name].call} at "
                f"{patched[name].where} patches. Remove one."
            )
        removed.update(bindings[name])
    for node in top_level(text.tree.body) if config.excluded else ():
        parts = () if hasattr(node, "body") else tuple(ast.walk(node))
        if not any(isinstance(part, ast.Name) and part.id == "__all__" for part in parts):
            continue
        value = getattr(node, "value", None)
        is_assigned = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        items = value.elts if is_assigned and isinstance(value, ast.List) else []
        named = [part for part in parts if isinstance(part, ast.Constant) and part.value in config.excluded]
        dropped = [item for item in items if item in named]
        for name in (str(item.value) for item in named if item not in dropped):
            call = f"exclude_from_output({name!r})"
            raise CodegenError(
                f"{config.excluded[name]}: {call} can't take {name!r} out of __all__ in line {node.lineno} of "
                f"{config.source_module}, which isn't a list. Leave {call} out."
            )
        if dropped and len(dropped) == len(items):
            draft.edits.append(Edit(*text.span(value), "[]"))
        elif dropped:
            draft.edits.append(listed(text, items, [item for item in items if item not in dropped]))
    return removed


def dropped_decorators(draft: Draft) -> Iterator[Edit]:
    """Yield the edits that remove the decorators that a config drops."""
    config, text = draft.config, draft.text
    known = {node.name for node in top_level(text.tree.body) if isinstance(node, Definition)}
    replaced = {patch.target: patch for patch in config.patches if patch.kind is not PatchKind.MODIFY_INIT}
    for (target, name), where in config.undecorated.items():
        call = f"{where}: drop_decorators({target!r}, {name!r})"
        if target in replaced:
            raise CodegenError(
                f"{call} is of no use: {replaced[target].call} at {replaced[target].where} replaces {target!r} with "
                "its decorators. Remove one."
            )
        if target not in known:
            hint = nearest(target, known)
            raise CodegenError(f"{call} names no class or function of {config.source_module}. {hint}")
        decorators = decorators_of(text.tree, target)
        dropped = [decorator for decorator in decorators if decorator_name(decorator) == name]
        if not dropped:
            hint = nearest(name, map(decorator_name, decorators))
            raise CodegenError(f"{call} names no decorator of {target!r} in {config.source_module}. {hint}")
        for decorator in dropped:
            yield Edit(text.start_of(decorator.lineno), text.start_of((decorator.end_lineno or 0) + 1), "")


def without_orphans(config: PatchSpec, text: str, original: ast.Module) -> tuple[str, tuple[str, ...]]:
    """Return a generated text without the imports that only removed code used, and their names.

    An import stays unless it is known to be orphaned: if no removed code used it, if it is guarded, under `noqa` or
    also imported by the config, and if its name occurs anywhere else, be it in a string or a comment.
    """
    removed = {patch.definition for patch in config.patches}.union(config.excluded)
    removed |= {name for name, _ in config.undecorated}
    nodes = [part for name in removed for node in find(original, name) for part in ast.walk(node)]
    kept = {item.binds for item in config.imports}.union(removed)
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - kept
    described = re.sub(r"(?m)^[ \t]*# (?:Why|  [\w.]+): .*", "", text)  # without descriptions
    file, edits, orphans = Text(text, parsed(text)), list[Edit](), set[str]()
    emptied = set[ast.stmt]()
    for node in file.tree.body:
        names = {bound_name(alias) for alias in _aliases(node)} & used
        if not names or getattr(node, "module", "") == "__future__" or node.col_offset or not file.is_alone(node):
            continue
        statement = "".join(file.lines[node.lineno - 1 : node.end_lineno])
        rest = described.replace(statement, "", 1)
        names = {name for name in names if not re.search(rf"\b{name}\b", rest)}
        if not names or "noqa" in statement:
            continue
        orphans |= names
        others = [alias for alias in _aliases(node) if bound_name(alias) not in names]
        if others:
            edits.append(listed(file, _aliases(node), others))
        else:
            emptied.add(node)
    return applied(text, [*edits, *removals(file, emptied)]), tuple(sorted(orphans))


# --- imports --------------------------------------------------------------------------------------------------------


def absolute_imports(draft: Draft) -> Iterator[Edit]:
    """Yield the edits that make all imports absolute, those in functions and guards included."""
    text, source, at_top = draft.text, draft.source, {*top_level(draft.text.tree.body)}
    for node in statements_of(text.tree, ast.ImportFrom):
        if not node.level:
            continue
        start, end = text.span(node)
        match = _RELATIVE.match(text.text, start)
        assert match is not None
        relative = "." * node.level + (node.module or "")
        name = absolute_name(relative, source.package, source.name, draft.config.where)
        written = text.text[match.end() : end]
        dropped = draft.config.dropped if node in at_top else ()
        names = [ast.unparse(alias) for alias in node.names if bound_name(alias) not in dropped]
        width = node.col_offset + len(f"from {name} import {', '.join(names)}")
        if names and width > WIDTH and text.is_alone(node) and "\n" not in written and "(" not in written:
            yield Edit(start, end, f"\n{text.indent(node.lineno)}".join(import_from(name, names, 0)))
        else:
            yield Edit(*match.span(), f"from {name} import")


def absolute_name(relative: str, package: str, source: str, where: Location) -> str:
    """Return the absolute name of a module that the module `source` of a package imports from by a relative name."""
    try:
        return importlib.util.resolve_name(relative, package)
    except ImportError:
        raise CodegenError(
            f"{where}: {source} imports from {relative}, which is above its top package {package!r}. "
            f"Python can't import that either: give PatchConfig the full dotted name of {source}, from its top "
            "package on, or correct the import."
        ) from None


def added_imports(draft: Draft) -> list[str]:
    """Return the lines of the imports that the original lacks, one statement for each module.

    Their order is fixed, so that the order of the config doesn't matter.
    """
    config, plain, named = draft.config, set[str](), dict[str, set[str]]()
    for item in config.imports:
        imported = None if item.binds in config.dropped else draft.imported.get(item.binds)
        is_plain = not item.name and not item.alias  # `import a.b` binds `a`
        origin = item.binds if is_plain else f"{item.module}.{item.name}".rstrip(".")
        if imported is not None and not imported.guarded and _origin(imported, config.source_module) == origin:
            if not is_plain or item.module in (origin, imported.module):  # or it is in addition to `import a`
                continue
        elif item.binds in draft.bound:
            raise CodegenError(
                f"{item.where}: {item.call} binds {item.binds!r}, which {config.source_module} already binds. "
                f"Give it an alias{draft.or_without(item.binds)}."
            )
        alias = f" as {item.alias}" if item.alias else ""
        if item.name:
            named.setdefault(item.module, set()).add(f"{item.name}{alias}")
        else:
            plain.add(f"import {item.module}{alias}")
    return sorted(plain) + [line for module in sorted(named) for line in import_from(module, sorted(named[module]))]


def _origin(imported: ImportedName, source: str) -> str:
    """Return the dotted name of what an import of the original binds.

    `import torch.nn.functional as F` and `from torch.nn import functional as F` are the same.
    """
    package = ".".join(source.split(".")[: -imported.level]) if imported.level else ""
    module = imported.module if imported.attribute or imported.alias else imported.module.split(".")[0]
    return ".".join(filter(None, (package, module, imported.attribute)))


# --- additions ------------------------------------------------------------------------------------------------------


def insert(draft: Draft, imports: Sequence[str]) -> None:
    """Insert lines of imports, blocks, helpers and endings at their places."""
    text, body, config = draft.text, draft.text.tree.body, draft.config
    helpers: dict[str, list[Helper]] = {}
    for helper in config.helpers:
        helpers.setdefault(helper.after, []).append(helper)
        if helper.__name__ in draft.bound:
            raise CodegenError(
                f"{helper.where}: the helper {helper.__name__!r} has the name of something in {draft.source.name}. "
                f"Rename it{draft.or_without(helper.__name__)}."
            )
    top: list[Sequence[str]] = [["", "# [ADDED IMPORTS]", *imports]] if imports else []
    for block in config.blocks:
        top.append(["", "# [ADDED CODE]", *comments(why(block.description)), *block.code.split("\n")])
    top += _helper_lines(helpers, "", draft)
    anchor = _last_import(draft)
    remaining = [node for node in body if node not in draft.removed]

    def after(node: ast.stmt) -> list[ast.stmt]:
        return [other for other in body[body.index(node) + 1 :] if other not in draft.removed]

    _check_blocks(draft, remaining if anchor is None else after(anchor))
    if anchor is not None and top:
        draft.behind[anchor] = [*top, *draft.behind.get(anchor, [])]
    outermost = {
        part.name: node
        for node in remaining
        for part in top_level([node])
        if isinstance(part, Definition) and part not in draft.removed
    }
    names = {helper.__name__ for helper in config.helpers}
    for name in (name for name in helpers if name and name not in names):
        if name not in outermost:
            raise CodegenError(
                f"{helpers[name][0].where}: add_helper_after({name!r}) finds no such definition in the file that is "
                f"made of {draft.source.name}. {nearest(name, [*outermost, *names])}"
            )
        draft.behind.setdefault(outermost[name], []).extend(_helper_lines(helpers, name, draft))
    if config.endings:
        last = next(node for node in reversed(remaining) if isinstance(node, Definition))
        draft.behind.setdefault(last, []).extend(["", "", *block.code.split("\n")] for block in config.endings)
    for node, groups in draft.behind.items():
        draft.insert_lines_after(text.last_line(node), _separated(groups, next(iter(after(node)), None), draft))
    if anchor is None and top:
        following = remaining[0] if remaining else None
        position = text.start_of(start_line(following)) if following is not None else len(text.text)
        start = "\n" if position and not text.text[:position].endswith(("\n", "\r")) else ""
        code = start + "".join(f"{line}\n" for line in _separated(top, following, draft))
        draft.edits.insert(0, Edit(position, position, code))


def _last_import(draft: Draft) -> ast.stmt | None:
    """Return the last statement with an import above all definitions, else the docstring, else None."""
    last = None
    for index, node in enumerate(draft.text.tree.body):
        if isinstance(node, Definition):
            break
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        imports = (part for part in top_level([node]) if isinstance(part, ast.Import | ast.ImportFrom))
        if is_docstring or any(part not in draft.removed for part in imports):
            last = node
    return last


def _separated(groups: Sequence[Sequence[str]], following: ast.stmt | None, draft: Draft) -> list[str]:
    """Return lines with the blank lines before the following statement: two if either is a definition."""
    lines = [line for group in groups for line in group]
    if following is None or not lines:
        return lines
    last, tree = ast.parse("\n".join(groups[-1])).body[-1], draft.text.tree
    expected = 2 if isinstance(last, Definition) or isinstance(following, Definition) else 1
    return lines + [""] * (expected - Place(following, tree.body, tree).blank_lines(draft.text))


def _check_blocks(draft: Draft, following: Sequence[ast.stmt]) -> None:
    """Raise a CodegenError if the following statements rebind a name of a block."""
    bound = [(block, name) for block in draft.config.blocks for name in block.bound()]
    left_out = {*draft.config.dropped, *draft.config.excluded}
    rebound = bound_names(ast.Module([*following], [])).keys() - left_out if bound else set()
    for block, name in bound:
        if name in rebound:
            raise CodegenError(
                f"{block.where}: the text given to add_post_import_block binds {name!r}, and {draft.source.name} "
                f"binds it again further down. Rename it{draft.or_without(name)}."
            )


def _helper_lines(
    helpers: Mapping[str, Sequence[Helper]], anchor: str, draft: Draft, *, boxed: bool = False
) -> list[list[str]]:
    """Return the helpers after an anchor, each followed by those that are anchored to it."""
    groups: list[list[str]] = []
    for helper in helpers.get(anchor, []):
        box = marker("[HELPERS]") if not groups and not boxed else []
        groups.append(["", "", *box, *comments(why(helper.description)), *draft.code(helper)])
        groups += _helper_lines(helpers, helper.__name__, draft, boxed=True)
    return groups
