"""A config as a runtime `Patcher`: the generated text is executed, and its classes are those that a load builds."""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType

from torch import nn

from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.spec import Blocks, Helpers, PatchSpec
from patcher.compat.modeling_code import is_module_class
from patcher.integrations import install
from patcher.source.scopes import bound_by, top_level
from patcher.source.texts import module_of_text
from patcher.spec.patcher import Patcher

#: Part of the name of every executed module.
MADE = "_by_to_patcher_"

_lock = threading.RLock()
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # `top_level` yields their statements as well


def to_patcher(config: PatchSpec) -> Patcher:
    """See `PatchConfig.to_patcher`."""
    install()  # this may be the first use of the package in a process
    if isinstance(config.runtime, Patcher):
        rest = copy.copy(config)
        rest.patches = [patch for patch in config.patches if patch not in config.of_runtime]
        rest.runtime, rest.renamed, rest.bases, rest.endings, rest.helpers = None, {}, {}, Blocks(), Helpers()
        for helper in (helper for helper in config.helpers if helper not in config.of_runtime):
            rest.helpers.add(helper)
        return config.runtime | to_patcher(rest) if rest.patches else config.runtime
    generated = build(config)
    original, module = vars(importlib.import_module(generated.source.name)), vars(execute(generated))
    names = [name for name in original if is_module_class(original[name]) and is_module_class(module.get(name))]
    covered = {name for name in names if original[name].__name__ == name}
    affected = sorted(_affected_names(generated, covered).intersection(names))
    replaced = [name for name in affected if module[name] is not original[name]]
    classes: dict[str, type[nn.Module]] = {original[name].__name__: module[name] for name in replaced}
    if not classes:
        raise config.error(
            f"to_patcher() would change nothing: no nn.Module class of {config.source_module} is "
            "patched, or uses what is patched. Use generate() or write() for this config."
        )
    alternatives = [tuple(classes)] if len(classes) > 1 else ()
    return Patcher(class_mapping=classes, alternatives=alternatives, name=config.target_file)


def execute(generated: Generated) -> ModuleType:
    """Execute a generated text as a module. The same text gives the same module with the same classes.

    The module is named after the original, in the same package: transformers treats modeling code of its own package
    differently.
    """
    source, text = generated.source, generated.text
    name = f"{source.name}{MADE}{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        path = str(source.path.parent / f"<{generated.config.target_file} {name[-10:]}>")
        module = module_of_text(name, text, path)  # decorators of transformers read the source of their module
        try:
            exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            raise generated.config.error(
                f"the module that {generated.config.target_file} would be can't be imported: "
                f"{type(error).__name__}: {error}\nIts text is generate(config); import that to see more."
            ) from error
        return module


def _affected_names(generated: Generated, covered: set[str]) -> set[str]:
    """Return the names of what a config changes or adds, and of what uses such a name.

    Code that only constructs a class of `covered` isn't affected by its change: a load constructs the replacement
    wherever code of the original names the class. Code that inherits from it, accesses its attributes or compares it
    is affected.
    """
    config = generated.config
    affected = {patch.target.partition(".")[0] for patch in config.patches} | config.added_names()
    affected |= {*config.dropped, *config.excluded, *(target for target, _ in config.undecorated)}
    uses: dict[str, set[str]] = {}
    for node in top_level(ast.parse(generated.text).body):
        for name in () if isinstance(node, _COMPOUND) else bound_by(node):
            uses[name] = uses.get(name, set()) | {*_uses(node, covered)} - {name}
    while more := {name for name, used in uses.items() if name not in affected and used & affected}:
        affected |= more
    return affected


def _uses(node: ast.stmt, covered: set[str]) -> Iterator[str]:
    """Yield the names that a definition depends on; of covered classes only those that aren't only constructed."""
    stack: list[ast.AST] = [node]
    while stack:
        part = stack.pop()
        as_class: Sequence[ast.AST] = ()  # used as a class, not constructed
        if isinstance(part, ast.ClassDef):
            as_class = part.bases
        elif isinstance(part, ast.Attribute):
            as_class = [part.value]
        elif isinstance(part, ast.Compare):
            as_class = [part.left, *part.comparators]
        elif isinstance(part, ast.Call) and ast.unparse(part.func) in ("isinstance", "issubclass"):
            as_class = [nested for argument in part.args[1:] for nested in ast.walk(argument)]
        yield from (used.id for used in as_class if isinstance(used, ast.Name))
        if isinstance(part, ast.Name) and part.id not in covered:
            yield part.id
        for field, value in ast.iter_fields(part):
            if field not in ("annotation", "returns"):
                values = value if isinstance(value, list) else [value]
                stack += [child for child in values if isinstance(child, ast.AST)]
