"""The conversions of transformers for the models of a generated file: by default they apply to its own classes only.

transformers calls `is_custom_code()` of a model, which is True for a class outside of transformers: a file of Mixtral
would load random experts and save under other names. So the models of such files override the method. Which files need
it is read from the sources: transformers looks up conversions by the name of a class, then by the `model_type` of its
config.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from patcher.codegen.generation.definitions import ClassEdit
from patcher.codegen.generation.draft import Draft
from patcher.source.modules import find_spec
from patcher.source.reading import parsed
from patcher.source.scopes import bound_by, statements_of, top_level
from patcher.source.texts import Place, Text, applied

#: The method and its lines, with a comment that explains it.
METHOD = "is_custom_code"
_LINES = (
    "@classmethod",
    f"def {METHOD}(cls):",
    "    # transformers converts checkpoints for its own classes only. These read and write the very same ones.",
    "    return False",
)
_TABLE = "transformers.conversion_mapping"
_BUFFER = re.compile(r'register_buffer\(\s*"(\w+)"[^\n]*\bpersistent=False')
_MODEL_TYPE = re.compile(r'^    model_type\b[^=\n]*= *"([^"]+)"', re.MULTILINE)


def with_stock_conversions(draft: Draft, text: str) -> tuple[str, list[str]]:
    """Return a text whose models get the conversions of transformers, and the methods that were added for that.

    Nothing is added if the config overrides the method itself.
    """
    config = draft.config
    is_overridden = any(patch.target.rpartition(".")[2] == METHOD for patch in config.patches)
    is_of_transformers = draft.source.name.startswith("transformers.")
    if config.converts_itself or is_overridden or not is_of_transformers:
        return text, []
    if not _may_have_conversions(draft) and not _fills_buffers_of_parts(draft.text):
        return text, []
    file, methods = Draft(config, draft.source, Text(text, parsed(text))), list[str]()
    tree = file.text.tree
    _check_names(draft, tree)
    _check_initialization(draft, tree)
    for node in _base_models(tree):
        if not any(METHOD in bound_by(member) for member in node.body):
            methods.append(f"{node.name}.{METHOD}")
            edit = ClassEdit(Place(node, tree.body, tree), file)
            edit.add([f"{edit.indent}{line}" for line in _LINES])
    return applied(text, file.edits), methods


def _may_have_conversions(draft: Draft) -> bool:
    """Whether transformers may have conversions for a model of the module; True if that is unknown."""
    files = draft.source.path.parent.glob("configuration_*.py")
    types = {name for path in files for name in _MODEL_TYPE.findall(path.read_text("utf-8"))}
    return not types or not converted() or not converted().isdisjoint(types | _classes(draft.text.tree).keys())


def _fills_buffers_of_parts(text: Text) -> bool:
    """Whether `_init_weights` of a model fills buffers of its layers that no checkpoint has, as FalconH1's does.

    transformers doesn't call it for a model of other code whose own weights are loaded: the buffers would be garbage.
    """
    buffers = set(_BUFFER.findall(text.text))
    targets = [call.args[0] for call in _calls_of_init_weights(text.tree) if call.args]
    parts = [target for target in targets if isinstance(target, ast.Attribute) and target.attr in buffers]
    return any(isinstance(target.value, ast.Attribute) for target in parts)


@cache
def converted() -> frozenset[str]:
    """Return the class names and model types that transformers has conversions for; none if they can't be read."""
    spec = find_spec(_TABLE)
    if spec is None or not spec.origin:
        return frozenset()
    names = set[str]()
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return frozenset(names)


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in top_level(tree.body) if isinstance(node, ast.ClassDef)}


def _base_models(tree: ast.Module) -> list[ast.ClassDef]:
    """Return the classes of a file that inherit from `PreTrainedModel` through no other class of the file.

    Models of other modules are recognized by name: transformers has no other ones that modeling files inherit from.
    """
    first, models = list[ast.ClassDef](), set[str]()
    typing = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for node in top_level([statement for statement in tree.body if statement not in typing]):
        bases = list(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and any("PreTrained" in base or base in models for base in bases):
            first += [node] if models.isdisjoint(bases) else []
            models.add(node.name)
    return first


def _check_names(draft: Draft, tree: ast.Module) -> None:
    """Raise a CodegenError for new classes whose base class has conversions, which are looked up by its name."""
    known, classes = converted(), _classes(tree)
    for name in sorted(classes.keys() - _classes(draft.text.tree).keys() - known):
        pending = [] if name.startswith("Original") else [name]
        while pending:
            base = pending.pop()
            if base in known:
                raise draft.config.error(
                    f"{name} inherits from {base}, whose checkpoints transformers converts by the name of the "
                    f"class: it would read them wrongly. Call it {base}, with replace_class({base!r})."
                )
            pending += map(ast.unparse, classes[base].bases if base in classes else ())


def _check_initialization(draft: Draft, tree: ast.Module) -> None:
    """Raise a CodegenError if `_init_weights` of a patch would overwrite loaded weights."""
    known = {ast.unparse(call) for call in _calls_of_init_weights(draft.text.tree)}
    for call in _calls_of_init_weights(tree):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        writes = owner and name.endswith("_") and not name.endswith("__") and ast.unparse(call) not in known
        if writes and owner.rpartition(".")[2] != "init" and not owner.startswith("super("):
            raise draft.config.error(
                f"_init_weights of a patch writes with {owner}.{name}(), also over weights that were loaded. Use a "
                "function of transformers.initialization, which leaves those alone, such as "
                f"init.normal_({owner.removesuffix('.data')})."
            )


def _calls_of_init_weights(tree: ast.Module) -> list[ast.Call]:
    methods = [node for node in statements_of(tree, ast.FunctionDef) if node.name == "_init_weights"]
    return [part for node in methods for part in ast.walk(node) if isinstance(part, ast.Call)]
