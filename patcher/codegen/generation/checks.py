"""Checks of a file before it is written: names that it lacks, and patches that may never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from patcher.codegen.generation.draft import Draft
from patcher.codegen.spec import PatchSpec
from patcher.compat.decorators import replaces_forward
from patcher.errors import CodegenError
from patcher.source.definitions import decorator_name, decorators_of
from patcher.source.reading import file_tree, parsed
from patcher.source.scopes import (
    Definition,
    bound_names,
    free_names,
    imported_names,
    nearest,
    start_line,
    top_level,
    undefined_names,
)


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
