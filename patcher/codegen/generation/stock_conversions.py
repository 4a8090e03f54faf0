"""Models of a generated file whose checkpoints transformers converts: it does so for its own classes only.

It asks each model for `is_custom_code()`, which is true of a class outside of transformers, so that a file of Mixtral
would load random experts and save under other names. The classes of such a file answer for themselves. Which files
those are is read from the sources: transformers looks its conversions up by the name of a class, then by the
`model_type` of its config.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from patcher.codegen.spec import PatchSpec
from patcher.source.edits import Edit, Text, applied
from patcher.source.modules import SourceModule, find_spec
from patcher.source.reading import parsed
from patcher.source.scopes import bound_by, statements_of, top_level

#: The method, and the comment that says why it is there.
METHOD = "is_custom_code"
_LINES = (
    "@classmethod",
    f"def {METHOD}(cls):",
    "    # transformers converts checkpoints for its own classes only. These read and write the very same ones.",
    "    return False",
)
_TABLE = "transformers.conversion_mapping"
_MODEL_TYPE = re.compile(r'^    model_type\b[^=\n]*= *"([^"]+)"', re.MULTILINE)


def with_stock_conversions(
    config: PatchSpec, source: SourceModule, original: ast.Module, text: str
) -> tuple[str, list[str]]:
    """The text of a file whose models get the conversions of transformers, and the methods that it has for that.

    A config that says itself what the file's classes answer is left alone.

    Args:
        config: the description.
        source: the module that is patched.
        original: its syntax tree.
        text: the text so far.
    """
    own = config.converts_itself or any(patch.target.rpartition(".")[2] == METHOD for patch in config.patches)
    if own or not source.name.startswith("transformers.") or not _concerns(source, original):
        return text, []
    file = Text(text, parsed(text))
    tree = file.tree
    classes = {node.name: node for node in top_level(tree.body) if isinstance(node, ast.ClassDef)}
    _check_names(config, original, classes)
    _check_initialisation(config, original, tree)
    models = [node for node in _first_models(tree) if not any(METHOD in bound_by(each) for each in node.body)]
    edits = [edit for node in models for edit in _added(file, node, source.newline)]
    return applied(text, edits), [f"{node.name}.{METHOD}" for node in models]


def _added(text: Text, node: ast.ClassDef, newline: str) -> Iterator[Edit]:
    """The edits that write the method at the end of a class."""
    first, end = node.body[0], text.end_of(node.end_lineno or 0)
    indent = text.indent(first.lineno)
    if text.is_in_line(node):  # `class A(B): ...`
        indent = text.indent(node.lineno) + "    "
        start = text.span(first)[0]
        yield Edit(len(text.text[:start].rstrip(" \t")), start, newline + indent)
    yield Edit(end, end, newline + "".join(f"{newline}{indent}{each}" for each in _LINES))


# --- which files ----------------------------------------------------------------------------------------------------


def _concerns(source: SourceModule, own: ast.Module) -> bool:
    """Whether transformers may have conversions for a model of a module. True where that can't be known."""
    files = {*source.path.parent.glob("configuration_*.py")}
    for each in statements_of(own, ast.ImportFrom):
        if "configuration_" in (each.module or "") and each.level:
            spec = find_spec(importlib.util.resolve_name("." * each.level + (each.module or ""), source.package))
            files |= {Path(spec.origin)} if spec is not None and spec.origin else set()
    types = {name for path in files for name in _MODEL_TYPE.findall(path.read_text("utf-8"))}
    classes = {node.name for node in top_level(own.body) if isinstance(node, ast.ClassDef)}
    return not types or not converted() or not converted().isdisjoint(types | classes)


@cache
def converted() -> frozenset[str]:
    """The class names and model types that transformers has conversions for; none where that can't be read."""
    spec = find_spec(_TABLE)
    if spec is None or not spec.origin:
        return frozenset()
    found = set[str]()
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return frozenset(found)


# --- which classes --------------------------------------------------------------------------------------------------


def _first_models(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes of a file that inherit from `PreTrainedModel` through no other class of the file.

    A model of another module is known by its name: transformers has none that a class of a modeling file inherits from
    and that isn't called so.
    """
    first, models = list[ast.ClassDef](), set[str]()
    typing = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for node in top_level([each for each in tree.body if each not in typing]):
        bases = list(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and any("PreTrained" in base or base in models for base in bases):
            first += [node] if models.isdisjoint(bases) else []
            models.add(node.name)
    return first


# --- what it can't be right for -------------------------------------------------------------------------------------


def _check_names(config: PatchSpec, original: ast.Module, classes: dict[str, ast.ClassDef]) -> None:
    """A class under a new name gets no conversions that transformers has for the name that it inherits from."""
    known = converted()
    before = {node.name for node in top_level(original.body) if isinstance(node, ast.ClassDef)}
    for name in sorted(classes.keys() - before - known):
        waiting = [] if name.startswith("Original") else [name]
        while waiting:
            base = waiting.pop()
            if base in known:
                raise config.error(
                    f"{name} inherits from {base}, whose checkpoints transformers converts by the name of the "
                    f"class: it would read them wrongly. Call it {base}, with replace_class({base!r})."
                )
            waiting += map(ast.unparse, classes[base].bases if base in classes else ())


def _initialising(tree: ast.Module) -> list[ast.Call]:
    methods = [node for node in statements_of(tree, ast.FunctionDef) if node.name == "_init_weights"]
    return [part for node in methods for part in ast.walk(node) if isinstance(part, ast.Call)]


def _check_initialisation(config: PatchSpec, original: ast.Module, tree: ast.Module) -> None:
    """Of transformers' own classes it initialises loaded weights as well, by functions that leave those alone."""
    known = set(map(ast.unparse, _initialising(original)))
    for call in _initialising(tree):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        writes = owner and name.endswith("_") and not name.endswith("__") and ast.unparse(call) not in known
        if writes and owner.rpartition(".")[2] != "init" and not owner.startswith("super("):
            raise config.error(
                f"_init_weights of a patch writes with {owner}.{name}(), also over weights that were loaded. Use a "
                "function of transformers.initialization, which leaves those alone, such as "
                f"init.normal_({owner.removesuffix('.data')})."
            )
