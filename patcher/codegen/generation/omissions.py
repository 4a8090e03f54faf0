"""What a generated file omits of its original: dropped and orphaned imports, excluded definitions, decorators."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator

from patcher.codegen.generation.draft import Draft
from patcher.codegen.spec import PatchKind, PatchSpec
from patcher.errors import CodegenError
from patcher.source.definitions import decorator_name, decorators_of, find
from patcher.source.edits import Edit, Text, applied, places, removals, without
from patcher.source.reading import Definition, parsed
from patcher.source.scopes import bound_by, bound_name, bound_names, imported_names, nearest, top_level


def remove(draft: Draft) -> set[ast.stmt]:
    """Remove the imports that a config drops and the definitions that it excludes; returns the removed imports."""
    config, text = draft.config, draft.text
    tree = text.tree
    for name, where in config.dropped.items():
        if name not in draft.imported:
            # Not an error: a config supports several releases, and a later one may not import the name.
            problem = f"drop_import_names({name!r}) names nothing that {config.source_module} imports. "
            where.warn(problem + nearest(name, draft.imported))
    imports = set[ast.stmt]()
    for place in places(tree.body, tree):
        aliases = _aliases(place.node)
        dropped = [alias for alias in aliases if bound_name(alias) in config.dropped and alias.name != "*"]
        if aliases and len(dropped) == len(aliases):
            imports.add(place.node)
        elif dropped:
            draft.edits += _without_aliases(text, place.node, dropped)
    guards = _replaced_guards(draft, imports)
    draft.removed = imports | _excluded(draft) | guards
    draft.edits += removals(text, draft.removed, tree.body, tree)
    is_changed = config.dropped or config.excluded
    draft.bound = set(bound_names(ast.parse(applied(text.text, draft.edits)) if is_changed else tree))
    return imports


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def _without_aliases(text: Text, node: ast.stmt, removed: Collection[ast.alias]) -> list[Edit]:
    end = text.span(node)[1]
    return without(text, _aliases(node), removed, end - (text.text[end - 1] == ")"))


def _replaced_guards(draft: Draft, imports: Collection[ast.stmt]) -> set[ast.stmt]:
    """Return the guards that without the dropped imports only bind fallbacks, for names that the config binds."""
    added, tree = draft.config.added_names() & draft.config.dropped.keys(), draft.text.tree
    if not added:
        return set()
    rest = applied(draft.text.text, [*draft.edits, *removals(draft.text, imports, tree.body, tree)])
    guards = set[ast.stmt]()
    for node, remaining in zip((node for node in tree.body if node not in imports), ast.parse(rest).body, strict=True):
        names = bound_by(remaining) if isinstance(node, ast.If | ast.Try) else set()
        imported = imported_names(ast.Module([node], [])).keys()
        if names and names <= added & imported and _only_binds_names(remaining):
            guards.add(node)
    return guards


def _only_binds_names(guard: ast.stmt) -> bool:
    """Whether the statements of a guard have no effect except on names."""
    for node in top_level([guard]):
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
        if not is_assignment and not isinstance(node, ast.If | ast.Try | ast.Pass | ast.FunctionDef | ast.ClassDef):
            return False
        targets = (part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Subscript))
        if is_assignment and any(isinstance(target.ctx, ast.Store) for target in targets):
            return False
    return True


def _excluded(draft: Draft) -> set[ast.stmt]:
    """Return the excluded statements, and remove their names from `__all__`."""
    config, text = draft.config, draft.text
    removed, bindings = set[ast.stmt](), dict[str, list[ast.stmt]]()
    for place in places(text.tree.body, text.tree) if config.excluded else ():
        if place.bound_name:
            bindings.setdefault(place.bound_name, []).append(place.node)
    patched = {patch.target.split(".")[0]: patch for patch in config.patches}
    for name, where in config.excluded.items():
        call = f"{where}: exclude_from_output({name!r})"
        if name not in bindings:
            raise CodegenError(
                f"{call} names no class, function or constant of {config.source_module}. {nearest(name, bindings)}"
            )
        if name in patched:
            patch = patched[name]
            raise CodegenError(f"{call} leaves out what {patch.call} at {patch.where} patches. Remove one.")
        removed.update(bindings[name])
    for node in bindings.get("__all__", []):
        value = getattr(node, "value", None)
        items = value.elts if isinstance(value, ast.List) else []
        dropped = [item for item in items if isinstance(item, ast.Constant) and item.value in config.excluded]
        end = text.span(node)[1]
        if dropped and len(dropped) == len(items):
            draft.edits.append(Edit(text.span(value)[0], end, "[]"))
        elif dropped:
            draft.edits += without(text, items, dropped, end - 1)
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
    kept = {name for statement in config.imports for name in statement.bound()}.union(removed)
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - kept
    described = re.sub(r"(?m)^[ \t]*# (?:Why|  [\w.]+): .*", "", text)  # without descriptions
    file, edits, orphans = Text(text, parsed(text)), list[Edit](), set[str]()
    for node in file.tree.body:
        names = {bound_name(alias) for alias in _aliases(node)} & used
        if not names or getattr(node, "module", "") == "__future__" or node.col_offset or not file.is_alone(node):
            continue
        statement = "".join(file.lines[node.lineno - 1 : node.end_lineno])
        rest = described.replace(statement, "", 1)
        # A whole word, written so that the search is as fast as that of a string.
        names = {name for name in names if not re.search(rf"{name}(?<=\b{name})\b", rest)}
        if not names or "noqa" in statement:
            continue
        orphans |= names
        unused = [alias for alias in _aliases(node) if bound_name(alias) in names]
        if len(unused) < len(_aliases(node)):
            edits += _without_aliases(file, node, unused)
            continue
        # Of the blank lines above and below, the larger number stays.
        next_line = (node.end_lineno or 0) + 1
        above = itertools.takewhile(str.isspace, reversed(file.lines[: node.lineno - 1]))
        below = itertools.takewhile(str.isspace, file.lines[next_line - 1 :])
        blank = min(len(list(above)), len(list(below)))
        edits.append(Edit(file.start_of(node.lineno), file.start_of(next_line + blank), ""))
    return applied(text, edits), tuple(sorted(orphans))
