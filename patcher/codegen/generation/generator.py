"""From a description to the text of a patched modeling file."""

from __future__ import annotations

import ast
import gc
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from patcher.codegen.generation.class_decorators import dropped_decorators, warn_of_decorators
from patcher.codegen.generation.header import render_header, without_banner
from patcher.codegen.generation.missing_names import check_names
from patcher.codegen.generation.patched_classes import edit_class
from patcher.codegen.generation.patched_definitions import Context, is_overload, replace_definition
from patcher.codegen.generation.provenance import Provenance
from patcher.codegen.generation.stock_conversions import with_stock_conversions
from patcher.codegen.generation.surroundings import (
    absolute_imports,
    dropped_names,
    insert,
    plan_imports,
    without_orphans,
)
from patcher.codegen.spec import Patch, PatchKind, PatchSpec, check_conflicts, check_target
from patcher.errors import CodegenError, PatcherWarning
from patcher.source.edits import Edit, Place, Text, applied, definitions, places, removals, without
from patcher.source.modules import SourceModule, load
from patcher.source.reading import parsed
from patcher.source.scopes import ImportedName, bound_names, imported_names, nearest, top_level


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: syntax trees are many objects, and none of them is garbage yet.

    With torch and transformers imported, collections took 40 % of the time of generating a file.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


@_without_garbage_collection()
def build(config: PatchSpec) -> Generated:
    """Like `generate`, with what the text was made from."""
    for index, patch in enumerate(config.patches):
        check_target(patch)
        check_conflicts(patch, config.patches[:index])
    source = load(config.source_module, config.where)
    try:
        original = parsed(source.text)
    except SyntaxError as error:
        raise config.error(
            f"{source.name} can't be patched, because {source.path} does not parse: {error.msg}, on line "
            f"{error.lineno}."
        ) from error
    text = Text(source.text, original)
    imported = imported_names(original)
    for name, where in config.dropped.items():
        if name not in imported:
            # Not an error: a config serves several releases, and a later one needs the name no more.
            problem = f"drop_import_names({name!r}) names nothing that {config.source_module} imports. "
            warnings.warn_explicit(problem + nearest(name, imported), PatcherWarning, where.file, where.line)
    edits, no_imports = dropped_names(text, config.dropped)
    unlisted, excluded = _exclude(config, text)
    gone = no_imports | excluded | _replaced_guards(config, text, no_imports)
    edits += [*unlisted, *removals(text, gone, original.body, original)]

    left = original  # what stays of it: other statements may bind what is left out as well
    if config.dropped or config.excluded:
        left = ast.parse(applied(source.text, edits))
    bound = set(bound_names(left))
    removable = _removable(text, imported_names(left), config)
    added, externals = plan_imports(config, bound, original, removable)
    provenance = Provenance.of(config, original)
    edits += [*absolute_imports(source, text, config.where), *dropped_decorators(config, text)]
    context = Context(source.name, text, source.newline, externals, bound, removable, provenance, edits)
    _edit(config, context, imported, gone)
    insert(config, added, gone, no_imports, context)

    code = applied(source.text, context.edits)
    orphans: tuple[str, ...] = ()
    if config.changes:
        code, orphans = without_orphans(config, source, code, original)
        check_names(config, source, code, original)
    warn_of_decorators(config, source, original, code)
    code, methods = with_stock_conversions(config, source, original, code)
    header = render_header(config, source, context.done, provenance.header(), orphans, methods)
    code = source.newline.join([*header, without_banner(code)])
    return Generated(config, source, code, tuple(context.done))


def _edit(
    config: PatchSpec, context: Context, imported: Mapping[str, ImportedName], gone: Collection[ast.stmt]
) -> None:
    """Patch the definitions of the top level."""
    tree = context.text.tree
    found = [place for place in definitions(tree.body, tree) if place.node not in gone]
    by_name: dict[str, list[Patch]] = {_name(place): [] for place in found}
    for patch in config.patches:
        name = patch.target.split(".")[0]
        if name not in by_name:
            raise _unknown(patch, name, found, context.source, imported.get(name))
        by_name[name].append(patch)
    for place in found:
        name, patches = _name(place), by_name[_name(place)]
        if name in config.renamed and isinstance(place.node, ast.ClassDef):
            context.rename(place.node, config.renamed[name])
        if name in config.bases and isinstance(place.node, ast.ClassDef):
            start = context.text.span(place.node.bases[0])[0]
            context.edits.append(Edit(start, start, f"{config.bases[name]}, "))
        if not patches:
            continue
        guarded = place.owner is not tree
        if name in imported and (guarded or name not in config.dropped):
            fix = f"Add config.drop_import_names({name!r})."
            if guarded:  # a guard chooses between the two: without the import there may be neither
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
        if whole and not is_overload(place.node):
            replace_definition(whole[0], place, context)
        elif isinstance(place.node, ast.ClassDef):
            edit_class(place, patches, context)
        elif not whole:
            raise patches[0].error(
                f"does not fit: {name!r} is a function in {context.source}, and has no methods. "
                f"Use replace_function({name!r})."
            )


def _name(place: Place) -> str:
    return str(place.node.name)  # type: ignore[attr-defined]


def _unknown(patch: Patch, name: str, found: list[Place], source: str, imported: ImportedName | None) -> CodegenError:
    if imported is not None:
        origin = f"{'.' * imported.level}{imported.module}" if imported.attribute else name
        return patch.error(
            f"names no definition of {source}: {name!r} is imported there, from "
            f"{origin}. Patch that module, or bind the name yourself with drop_import_names({name!r}) and add_helper."
        )
    wants_function = patch.kind is PatchKind.REPLACE_FUNCTION
    what = "function" if wants_function else "class"
    same = [_name(each) for each in found if isinstance(each.node, ast.ClassDef) != wants_function]
    choices = [_name(each) for each in found] if patch.kind is PatchKind.EXTERNAL else same
    return patch.error(f"names no {what} of {source}. {nearest(name, choices)}")


def _bound_by(node: ast.stmt) -> str:
    """The one name that a definition or an assignment binds, empty for other statements."""
    if isinstance(node, ast.Assign):
        target = node.targets[0] if len(node.targets) == 1 else None
    else:
        target = node.target if isinstance(node, ast.AnnAssign | ast.AugAssign) else None
    return target.id if isinstance(target, ast.Name) else str(getattr(node, "name", ""))


def _exclude(config: PatchSpec, text: Text) -> tuple[list[Edit], set[ast.stmt]]:
    """The edits that leave definitions out of `__all__`, and the statements that are left out."""
    edits, gone, known = list[Edit](), set[ast.stmt](), dict[str, list[ast.stmt]]()
    for place in places(text.tree.body, text.tree) if config.excluded else ():
        if name := _bound_by(place.node):
            known.setdefault(name, []).append(place.node)
    patched = {patch.target.split(".")[0]: patch for patch in config.patches}
    for name, where in config.excluded.items():
        if name not in known:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) names no class, function or constant of "
                f"{config.source_module}. {nearest(name, known)}"
            )
        if name in patched:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) leaves out what {patched[name].call} at "
                f"{patched[name].where} patches. Remove one."
            )
        gone.update(known[name])
    for node in known.get("__all__", []):
        listed = getattr(node, "value", None)
        named = listed.elts if isinstance(listed, ast.List) else []
        removed = [part for part in named if isinstance(part, ast.Constant) and part.value in config.excluded]
        end = text.span(node)[1]
        if removed and len(removed) == len(named):
            edits.append(Edit(text.span(listed)[0], end, "[]"))
        elif removed:
            edits += without(text, named, removed, end - 1)
    return edits, gone


def _replaced_guards(config: PatchSpec, text: Text, gone: Collection[ast.stmt]) -> set[ast.stmt]:
    """The guards of which only fallbacks are left, for names that the config binds itself.

    What falls back follows from the imports that are left out.
    """
    own = {helper.source.name for helper in config.helpers}
    own.update(name for each in config.imports for name in each.bound())
    own.update(name for block in config.blocks for name in bound_names(ast.parse(block.code)))
    own &= config.dropped.keys()
    found = set[ast.stmt]()
    for guard in text.tree.body if own else ():
        if isinstance(guard, ast.If | ast.Try):
            first = text.start_of(guard.lineno)
            code = applied(text.text[first : text.span(guard)[1]], _shifted(text, guard, config.dropped, first))
            body = ast.parse(code)
            names = bound_names(body).keys()
            if names and names <= own & imported_names(ast.Module([guard], [])).keys() and _only_binds(body):
                found.add(guard)
    return found


def _shifted(text: Text, guard: ast.stmt, dropped: Collection[str], first: int) -> list[Edit]:
    """The edits that leave names out of the imports of a statement, of its own text."""
    part = Text(text.text, ast.Module([guard], []))
    edits, gone = dropped_names(part, dropped)
    edits += removals(part, gone, part.tree.body, part.tree)
    return [Edit(start - first, end - first, new) for start, end, new in edits]


def _only_binds(body: ast.Module) -> bool:
    """Whether statements have no effect but on names."""
    for node in top_level(body.body):
        parts = list(ast.walk(node)) if isinstance(node, ast.Assign | ast.AnnAssign) else []
        if not parts and not isinstance(node, ast.If | ast.Try | ast.Pass | ast.FunctionDef | ast.ClassDef):
            return False
        if any(isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store) for part in parts):
            return False
    return True


def _removable(text: Text, imported: Collection[str], config: PatchSpec) -> dict[str, str]:
    """The names that can be left out of a module, each with the calls that do it."""
    calls = {name: [f"config.drop_import_names({name!r})"] for name in imported}
    names = {_bound_by(place.node) for place in places(text.tree.body, text.tree)}
    for name in sorted(names - config.excluded.keys() - {""}):
        calls.setdefault(name, []).append(f"config.exclude_from_output({name!r})")
    return {name: " and ".join(listed) for name, listed in calls.items()}
