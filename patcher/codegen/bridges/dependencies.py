"""What a replacement needs of the module that it was written in, brought into the generated file."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patcher.codegen.generation.additions import absolute_name
from patcher.compat import standing_alone
from patcher.compat.modeling_code import unrebound
from patcher.source.reading import Source, caller, file_tree, read_source, unwrap
from patcher.source.scopes import free_names, imported_names, modules_under
from patcher.source.texts import dedented

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig


@dataclass
class Dependencies:
    """Brings names into the file of a config, each once.

    Attributes:
        config: the config that gets imports, helpers and constants.
        original: the module that is patched.
        targets: replacement -> the class or function of the original module that it replaces, under whose name the
            file has it.
    """

    config: PatchConfig
    original: types.ModuleType
    targets: Mapping[Any, str]
    _known: dict[str, Any] = field(default_factory=dict)

    def bring(self, obj: Any, call: str) -> dict[str, str]:
        """Bring what the source of a class or function needs.

        Returns:
            The names that it has to write differently.
        """
        source, namespace = read_source(obj, call, self.config.where), _namespace(obj)
        names = free_names(dedented(source.text)) - {source.name}
        # The generator reports what is missing, and where.
        known = [name for name in sorted(names & namespace.keys()) if not hasattr(builtins, name)]
        brought = {name: self._bring(name, namespace[name], namespace, source, call) for name in known}
        return {name: new for name, new in brought.items() if new != name}

    def define(self, obj: Any, call: str = "from_patcher()") -> None:
        """Have the file know a class or a function by its name."""
        if not self._is_known(obj.__name__, obj):
            self._known[obj.__name__] = obj
            self._bring_definition(obj.__name__, obj, "", call)

    def constants(self, values: Mapping[str, Any], description: str) -> None:
        """Bind names of constants that copied code uses."""
        self._known.update(values)
        lines = [f"{name} = {value!r}".replace("'", '"') for name, value in values.items()]
        self.config.add_post_import_block("\n".join(lines), description)

    def _bring(self, name: str, value: Any, namespace: Mapping[str, Any], source: Source, call: str) -> str:
        if isinstance(value, type | types.FunctionType):
            value = unrebound(value)
            if value in self.targets:
                return self.targets[value]
        home = getattr(value, "__module__", None)
        own = str(getattr(value, "__name__", ""))
        if home == self.original.__name__ and vars(self.original).get(own) is value:
            return own
        if self._is_known(name, value):
            return name
        if name in vars(self.original) and vars(self.original)[name] is not value:
            raise self.config.error(
                f"{call} uses {name!r}, and {self.original.__name__} has another {name!r}. "
                f"Give the one in {source.file or 'the replacement'} a name of its own."
            )
        self._known[name] = value
        tree = file_tree(source.file)
        found = imported_names(tree).get(name)
        if found is not None and found.attribute:
            imported, package = "." * found.level + found.module, str(namespace.get("__package__") or "")
            module = absolute_name(imported, package, package, self.config.where)
            self.config.add_import(module, names=[f"{found.attribute} as {name}"])
        elif found is not None:
            for module in [found.module] if found.alias else modules_under(tree, name):
                self.config.add_import(module, alias=found.alias, is_from_import=False)
        elif isinstance(value, types.ModuleType):
            self.config.add_import(value.__name__, alias=name, is_from_import=False)
        else:
            self._bring_definition(name, value, str(namespace.get("__name__", "")), call)
        return name

    def _is_known(self, name: str, value: Any) -> bool:
        return name in self._known or vars(self.original).get(name, self._known) is value

    def _bring_definition(self, name: str, value: Any, module: str, call: str) -> None:
        """A class, a function or a constant of the replacement's own module, or one that comes from elsewhere."""
        inner = unwrap(value)
        home = str(getattr(inner, "__module__", "") or "")
        if isinstance(inner, type | types.FunctionType):
            if home and home != module and not _is_local(inner) and _importable(home, inner):
                self.config.add_import(home, names=[f"{inner.__name__} as {name}"])
                return
            call = f"{call}, which uses {name!r},"
            name_map = self.bring(inner, call)
            if inner.__name__ != name:
                raise self.config.error(
                    f"{call} calls it by another name than its own, {inner.__name__!r}. Use its own name."
                )
            self.config.add_helper(inner, name_map=name_map)
            return
        try:
            literal = ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError):
            literal = False
        if literal:
            self.config.add_post_import_block(f"{name} = {value!r}")
        elif module and module != "__main__" and vars(sys.modules.get(module, builtins)).get(name) is value:
            self.config.add_import(module, names=[name])
        else:
            raise self.config.error(
                f"{call} uses {name!r}, {value!r}, which can't be written as text. "
                "Put it into a module that the generated file can import, and import it at the top level."
            )


def _namespace(obj: Any) -> dict[str, Any]:
    """What the code of a class or function sees around it: its module, and the functions that it is defined in."""
    inner = unwrap(obj)
    functions = [inner] if isinstance(inner, types.FunctionType) else []
    if isinstance(inner, type):
        functions = [f for value in vars(inner).values() if isinstance(f := unwrap(value), types.FunctionType)]
    namespace: dict[str, Any] = dict(vars(sys.modules.get(inner.__module__, builtins)))
    for function in functions:
        if function.__module__ == inner.__module__:
            namespace |= function.__globals__
            namespace |= {k: v for k, v in inspect.getclosurevars(function).nonlocals.items() if k != "__class__"}
    if isinstance(inner, type) and _is_local(inner):
        # A base that is a variable of the function around: no closure keeps it, but the class does.
        source = read_source(inner, inner.__name__, caller())
        node = source.tree()
        if isinstance(node, ast.ClassDef):
            for text, base in zip(node.bases, inner.__bases__, strict=False):
                if isinstance(text, ast.Name):
                    namespace.setdefault(text.id, base)
    return namespace


def _is_local(obj: Any) -> bool:
    return "<locals>" in obj.__qualname__


def _importable(module: str, obj: Any) -> bool:
    if module in ("__main__", standing_alone.__name__):
        return False
    try:
        return vars(importlib.import_module(module)).get(obj.__name__) is obj
    except ImportError:
        return False
