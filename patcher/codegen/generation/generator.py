"""Generation of the text of a patched modeling file from its description."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from patcher.codegen.generation.checks import check_meanings, check_names, warn_of_decorators
from patcher.codegen.generation.definitions import ClassEdit, replace_definition
from patcher.codegen.generation.draft import Draft
from patcher.codegen.generation.header import changes_of, render_header, without_banner
from patcher.codegen.generation.stock_conversions import with_stock_conversions
from patcher.codegen.generation.surroundings import (
    absolute_imports,
    added_imports,
    dropped_decorators,
    insert,
    remove,
    without_orphans,
)
from patcher.codegen.spec import Patch, PatchKind, PatchSpec
from patcher.errors import CodegenError
from patcher.source.modules import SourceModule, load
from patcher.source.reading import parsed
from patcher.source.scopes import decorator_name, decorators_of, find, nearest
from patcher.source.texts import Place, Text, applied, definitions, newline_of


@dataclass(frozen=True)
class Generated:
    """A generated file before it is written.

    Attributes:
        config: the description.
        source: the patched module.
        text: the whole text of the file.
        patches: the patches in source order.
    """

    config: PatchSpec
    source: SourceModule
    text: str
    patches: tuple[Patch, ...]


def generate(config: PatchSpec) -> str:
    """Return the text of the modeling file that a config describes. Nothing is imported or written.

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
    """Like `generate`, but return the text with its origins."""
    for index, patch in enumerate(config.patches):
        patch.check(config.patches[:index])
        _check_is_run(patch, config)
    source = load(config.source_module, config.where)
    try:
        original = parsed(source.text)
    except SyntaxError as error:
        raise config.error(
            f"{source.name} can't be patched, because {source.path} does not parse: {error.msg}, on line "
            f"{error.lineno}."
        ) from error
    draft = Draft(config, source, Text(source.text, original))
    remove(draft)
    imports = added_imports(draft)
    draft.edits += dropped_decorators(draft)
    patches = _in_source_order(config.patches, original)
    _patch_definitions(draft, patches)
    insert(draft, imports)

    text, orphans = applied(source.text, [*absolute_imports(draft), *draft.edits]), tuple[str, ...]()
    if draft.edits:
        text, orphans = without_orphans(config, text, original)
        check_names(draft, text)
        check_meanings(draft)
    warn_of_decorators(draft)
    text, methods = with_stock_conversions(draft, text)
    changes = changes_of(config, patches, draft.header_fingerprints, orphans, methods)
    text = newline_of(source.text).join([*render_header(config, source, changes), without_banner(text)])
    return Generated(config, source, text, tuple(patches))


def _check_is_run(patch: Patch, config: PatchSpec) -> None:
    """Raise for a patch of a method that the fused subclass has itself: it would never run."""
    cls, _, method = patch.definition.partition(".")
    if cls not in config.derived or patch in config.of_runtime:
        return
    for helper in (helper for helper in config.helpers if helper.after == cls):
        own = {getattr(node, "name", "") for node in getattr(helper.source.tree(), "body", ())}
        if not method or method in own:
            raise patch.error(
                f"changes what {helper.__name__}, the fused {cls} of this file, has itself, so it would never run. "
                f"Give the patcher a replacement of {cls}, in class_mapping, or leave the fusion out."
            )


def _in_source_order(patches: Iterable[Patch], tree: ast.Module) -> list[Patch]:
    """Return patches in the order of what they change; a new method is at the end of its class."""

    def line(patch: Patch) -> int:
        around = find(tree, patch.target.partition(".")[0])
        definition = find(tree, patch.definition)
        return definition[0].lineno if definition else max((node.end_lineno or 0 for node in around), default=0)

    return sorted(patches, key=line)


def _patch_definitions(draft: Draft, patches: Iterable[Patch]) -> None:
    """Patch the definitions of the top level."""
    config, tree = draft.config, draft.text.tree
    places = [place for place in definitions(tree) if place.node not in draft.removed]
    by_name: dict[str, list[Patch]] = {place.name: [] for place in places}
    for patch in patches:
        name = patch.target.split(".")[0]
        if name not in by_name:
            raise _unknown_target(patch, name, places, draft)
        if any(decorator_name(part).endswith("overload") for part in decorators_of(tree, patch.definition)):
            without = f"Leave them out with config.exclude_from_output({name!r}), and use add_helper."
            fix = without if patch.target == name else f"Use replace_class({name!r})."
            raise patch.error(f"names several definitions, by @overload. {fix}")
        by_name[name].append(patch)
    for place in places:
        name, of_name, imported = place.name, by_name[place.name], draft.imported.get(place.name)
        if isinstance(place.node, ast.ClassDef) and name in config.renamed:
            draft.rename(place.node, config.renamed[name])
            draft.behind.setdefault(place.node, []).append(["", "", f"{name} = {config.renamed[name]}"])
        if isinstance(place.node, ast.ClassDef) and name in config.bases:
            draft.insert(draft.text.span(place.node.bases[0])[0], f"{config.bases[name]}, ")
        if not of_name:
            continue
        guarded = place.owner is not tree
        if imported is not None and (guarded or name not in config.dropped):
            fix = f"Add config.drop_import_names({name!r})."
            if guarded:  # a guard chooses between the two: without the import there may be neither
                fix = (
                    f"Leave both out with config.drop_import_names({name!r}) and "
                    f"config.exclude_from_output({name!r}), and add a {name!r} of your own with add_helper in the "
                    "place of the patch."
                )
            raise of_name[0].error(
                f"would not always take effect: {draft.source.name} also imports {name!r}, on line "
                f"{imported.line}. {fix}"
            )
        replacements = [p for p in of_name if p.target == name and p.kind is not PatchKind.MODIFY_INIT]
        if replacements:
            replace_definition(replacements[0], place, draft)
        elif isinstance(place.node, ast.ClassDef):
            ClassEdit(place, draft).apply(of_name)
        else:
            raise of_name[0].error(
                f"does not fit: {name!r} is a function in {draft.source.name}, and has no methods. "
                f"Use replace_function({name!r})."
            )


def _unknown_target(patch: Patch, name: str, places: list[Place], draft: Draft) -> CodegenError:
    imported, source = draft.imported.get(name), draft.source.name
    if imported is not None:
        origin = f"{'.' * imported.level}{imported.module}" if imported.attribute else name
        return patch.error(
            f"names no definition of {source}: {name!r} is imported there, from "
            f"{origin}. Patch that module, or bind the name yourself with drop_import_names({name!r}) and add_helper."
        )
    is_function = patch.kind is PatchKind.REPLACE_FUNCTION
    fitting = [place for place in places if isinstance(place.node, ast.ClassDef) != is_function]
    choices = places if patch.kind is PatchKind.EXTERNAL else fitting
    hint = nearest(name, [place.name for place in choices])
    return patch.error(f"names no {'function' if is_function else 'class'} of {source}. {hint}")
