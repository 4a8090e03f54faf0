"""Names that a generated file would lack, found before it is written, each with the line that mends it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from patcher.codegen.spec import PatchKind, PatchSpec
from patcher.errors import CodegenError
from patcher.source.modules import SourceModule
from patcher.source.reading import Definition, Location, Source, file_tree, parsed, start_line
from patcher.source.scopes import (
    bound_names,
    free_names,
    imported_names,
    nearest,
    top_level,
    undefined_names,
    used_too_early,
)
from patcher.source.texts import dedented

_BLOCK = "the text given to add_post_import_block"


def check_names(config: PatchSpec, source: SourceModule, text: str, original: ast.Module) -> None:
    """Raise a CodegenError if the file uses names that it doesn't define, or doesn't define early enough."""
    try:
        tree = parsed(text)
        compile(tree, config.target_file, "exec")
    except SyntaxError as error:
        raise config.error(
            f"{config.target_file} would not compile: {error.msg}. The line is "
            f"{text.splitlines()[(error.lineno or 1) - 1].strip()!r}: look at the patch that it comes from."
        ) from error
    # What the original lacks as well isn't reported; it is looked at only if something is missing.
    if missing := undefined_names(text, tree):
        known_before = undefined_names(source.text, original)
        missing = {name: line for name, line in missing.items() if name not in known_before}
    if missing:
        raise CodegenError(_missing(config, tree, original, missing))
    if early := used_too_early(tree):
        early_before = used_too_early(original)
        early = {name: lines for name, lines in early.items() if name not in early_before}
    if early:
        name = next(iter(early))
        where, what = _user(config, name)
        raise CodegenError(
            f"{where}: {what} uses {name!r} while {config.target_file} is imported, and the file defines it only "
            f"further down. {_behind(config, where, name)} the name inside a function."
        )


def _sources(config: PatchSpec) -> list[tuple[Location, str, Source, dict[str, str]]]:
    found = [(p.where, p.call, p.source, dict(p.name_map)) for p in config.patches if p.source is not None]
    return found + [(h.where, f"the helper {h.source.name!r}", h.source, dict(h.name_map)) for h in config.helpers]


def _behind(config: PatchSpec, where: Location, name: str) -> str:
    """How what a line of the config adds comes behind the definition of a name, if it can."""
    if any(helper.where == where for helper in config.helpers):
        return f"Put it behind that definition with add_helper_after({name!r}), or use"
    for patch in config.patches:
        if patch.where == where and patch.kind in (PatchKind.REPLACE_CLASS, PatchKind.REPLACE_FUNCTION):
            target = patch.target
            return (
                f"Leave the original out with exclude_from_output({target!r}) and add a {target!r} behind that "
                f"definition with add_helper_after({name!r}), or use"
            )
    return "Use"


def _user(config: PatchSpec, name: str) -> tuple[Location, str]:
    """Who uses a name: the patch, helper or block, else the config."""
    for where, call, source, names in _sources(config):
        words = {names.get(part.id, part.id) for part in ast.walk(source.tree()) if isinstance(part, ast.Name)}
        if name in words:
            return where, call
    blocks = ((block.where, _BLOCK) for block in config.blocks if name in free_names(block.code))
    return next(blocks, (config.where, "the file"))


def _missing(config: PatchSpec, tree: ast.Module, original: ast.Module, missing: Mapping[str, int]) -> str:
    """The message: first what patches use, then what exclusions took away."""
    parts: list[str] = []
    named: set[str] = set()
    users: list[tuple[Location, str, set[str], Source | None]] = []
    for where, call, source, names in _sources(config):
        users.append((where, call, {names.get(name, name) for name in free_names(dedented(source.text))}, source))
    users += [(block.where, _BLOCK, free_names(block.code), None) for block in config.blocks]
    for where, call, used, written in users:
        if own := sorted(used & missing.keys()):
            named.update(own)
            uses = f"{call} uses {', '.join(map(repr, own))}, which {config.target_file} does not define."
            parts.append(f"{where}: {uses}" + ("" if written else " Import it with config.add_import."))
            parts += [f"  {name}: {_remedy(name, written, original)}" for name in own if written]
    removed = {name: (where, "drop_import_names") for name, where in config.dropped.items()}
    removed |= {name: (where, "exclude_from_output") for name, where in config.excluded.items()}
    for name in (name for name in missing if name not in named):
        where, call = removed.get(name, (config.where, ""))
        around = (node for node in tree.body if start_line(node) <= missing[name] <= (node.end_lineno or 0))
        owned = (other for node in around for other in bound_names(ast.Module([node], [])))
        owner = next(map(repr, owned), "")
        also = f", or leave {owner} out as well" if owner else ""
        parts.append(
            f"{where}: {call}({name!r}) removes what {owner or 'the module'} still uses. Keep it, or bind {name!r} "
            f"another way{also}."
            if call
            else f"{where}: {config.target_file} would use {name!r} in {owner or 'the module'} without defining it."
        )
    return "\n".join(parts)


def _remedy(name: str, source: Source, original: ast.Module) -> str:
    """The line to add, read from the file of the patch code."""
    home = file_tree(source.file)
    found = imported_names(home).get(name)
    if found is not None and not found.attribute:
        extra = f", alias={found.alias!r}" if found.alias else ""
        return f"add config.add_import({found.module!r}{extra}, is_from_import=False)"
    if found is not None and found.module and not found.level:
        word = f"{found.attribute} as {found.alias}" if found.alias else found.attribute
        return f"add config.add_import({found.module!r}, names=[{word!r}])"
    line = bound_names(home).get(name)
    if line is None:
        ways = "import it with config.add_import, or add it with config.add_helper or config.add_post_import_block"
        return f"{ways}. {nearest(name, bound_names(original))}"
    place = f"on line {line} of {Path(source.file).name}"
    if found is not None:
        return f"imported {place}; add config.add_import with the absolute name of its module"
    if any(isinstance(node, Definition) and node.name == name for node in top_level(home.body)):
        return f"defined {place}; add config.add_helper({name})"
    return f"bound {place}; add config.add_post_import_block with the statements that bind it there"
