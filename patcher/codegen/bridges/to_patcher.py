"""A config as a runtime `Patcher`: the generated text, executed, and the classes that a load builds from it."""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeGuard

from torch import nn

from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.spec import Blocks, Helpers, Patch, PatchSpec
from patcher.errors import CodegenError
from patcher.integrations import install
from patcher.source.scopes import bound_names, top_level
from patcher.source.texts import module_of_text
from patcher.spec.patcher import Patcher

#: In the name of every executed module.
MADE = "_by_to_patcher_"

_lock = threading.RLock()
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While)  # their statements are visited by themselves


def to_patcher(config: PatchSpec) -> Patcher:
    """See `PatchConfig.to_patcher`."""
    install()  # what is made here may be the first that a process has of this package
    if isinstance(config.runtime, Patcher):
        rest = _without(config, lambda patch: patch in config.of_runtime)
        rest.runtime, rest.renamed, rest.bases, rest.endings, rest.helpers = None, {}, {}, Blocks(), Helpers()
        return config.runtime | to_patcher(rest) if rest.patches else config.runtime
    generated = build(config)
    module = execute(generated)
    classes = _replacements(generated, module)
    if not classes:
        raise config.error(
            f"to_patcher() would change nothing: no nn.Module class of {config.source_module} is "
            "patched, or uses what is patched. Use generate() or write() for this config."
        )
    return Patcher(
        class_mapping=classes,
        alternatives=[tuple(classes)] if len(classes) > 1 else (),
        name=config.target_file,
    )


def _without(config: PatchSpec, is_left_out: Callable[[Patch], bool]) -> PatchSpec:
    """The config without some of its patches."""
    rest = copy.copy(config)
    rest.patches = [patch for patch in config.patches if not is_left_out(patch)]
    return rest


def execute(generated: Generated) -> ModuleType:
    """The generated text as a module. The same text is the same module, with the same classes.

    It is named after the module that it was made from, in the same package: transformers tells its own modeling code
    from that of others by the package, and treats the two differently.
    """
    source, where = generated.source, generated.config.where
    name = f"{source.name}{MADE}{hashlib.sha256(generated.text.encode()).hexdigest()[:10]}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        text = generated.text
        path = str(source.path.parent / f"<{generated.config.target_file} {name[-10:]}>")
        module = module_of_text(name, text, path)  # decorators of transformers ask for the source of their module
        try:
            exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            raise CodegenError(
                f"{where}: the module that {generated.config.target_file} would be can't be imported: "
                f"{type(error).__name__}: {error}\nIts text is generate(config); import that to see more."
            ) from error
        return module


def _replacements(generated: Generated, module: ModuleType) -> dict[str, type[nn.Module]]:
    """Class name -> class, of all classes of the original module that compute something else in the executed one."""
    original = importlib.import_module(generated.source.name)
    both = {
        name: (old, new)
        for name, old in vars(original).items()
        if _is_module_class(old) and _is_module_class(new := vars(module).get(name))
    }
    covered = {name for name, (old, _) in both.items() if old.__name__ == name}
    affected = sorted(both.keys() & affected_names(generated, covered))
    return {old.__name__: new for old, new in map(both.__getitem__, affected) if new is not old}


def _is_module_class(value: Any) -> TypeGuard[type[nn.Module]]:
    return isinstance(value, type) and issubclass(value, nn.Module)


def affected_names(generated: Generated, covered: set[str]) -> set[str]:
    """The names that are bound to something else than in the original module, or to something that uses such a name.

    Code that only builds a class of `covered` isn't affected by a change of that class: a load builds the other one
    there anyway, wherever code of the original names the class. Code that inherits from it, looks into it or
    compares with it is.
    """
    # The original as the generator writes it, with absolute imports.
    before, _ = _bindings(build(PatchSpec(generated.source.name, generated.config.target_file)))
    after, statements = _bindings(generated)
    affected = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    uses = {
        name: {used for node in found for used in _uses(node, covered)} - {name} for name, found in statements.items()
    }
    while more := {name for name, used in uses.items() if name not in affected and used & affected}:
        affected |= more
    return affected


def _bindings(generated: Generated) -> tuple[dict[str, list[str]], dict[str, list[ast.stmt]]]:
    """What binds each name of the top level, as texts without comments and formatting; and the statements that do."""
    texts: dict[str, list[str]] = {}
    statements: dict[str, list[ast.stmt]] = {}
    for node in top_level(ast.parse(generated.text).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                texts.setdefault(name, []).append(f"{getattr(node, 'module', '')}:{alias.name}")
        elif not isinstance(node, _COMPOUND):
            for name in bound_names(ast.Module([node], [])):
                texts.setdefault(name, []).append(ast.dump(node))
                statements.setdefault(name, []).append(node)
    return texts, statements


def _uses(node: ast.stmt, covered: set[str]) -> Iterator[str]:
    """The names that a definition depends on; of covered classes only those that it does more with than build."""
    stack: list[ast.AST] = [node]
    while stack:
        part = stack.pop()
        bare: Sequence[ast.AST] = ()  # what is looked at here as a class, not as something to build
        if isinstance(part, ast.ClassDef):
            bare = part.bases
        elif isinstance(part, ast.Attribute):
            bare = [part.value]
        elif isinstance(part, ast.Compare):
            bare = [part.left, *part.comparators]
        elif isinstance(part, ast.Call) and ast.unparse(part.func) in ("isinstance", "issubclass"):
            bare = [inner for argument in part.args[1:] for inner in ast.walk(argument)]
        for inner in bare:
            if isinstance(inner, ast.Name):
                yield inner.id
        if isinstance(part, ast.Name) and part.id not in covered:
            yield part.id
        for field, value in ast.iter_fields(part):
            if field not in ("annotation", "returns"):
                values = value if isinstance(value, list) else [value]
                stack += [inner for inner in values if isinstance(inner, ast.AST)]
