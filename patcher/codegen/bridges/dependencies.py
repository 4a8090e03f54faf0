"""The dependencies of a replacement in its own module, added to the generated file."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patcher.codegen.generation.surroundings import absolute_name
from patcher.compat import standing_alone
from patcher.compat.modeling_code import unrebound
from patcher.source.reading import Source, caller, file_tree, read_source, unwrap
from patcher.source.scopes import (
    Definition,
    bound_by,
    free_names,
    imported_names,
    modules_under,
    names_at_definition,
)
from patcher.source.texts import Text

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig


@dataclass
class Dependencies:
    """Adds names to the file of a config, each once.

    Attributes:
        config: the config that gets imports, helpers and constants.
        original: the patched module.
        targets: replacement -> the names of the classes or functions of the original module that it replaces, which
            are its names in the file.
    """

    config: PatchConfig
    original: types.ModuleType
    targets: Mapping[Any, Sequence[str]]
    _added: dict[str, Any] = field(default_factory=dict)
    #: helper -> the definition of the patched module that it is written behind
    _anchors: dict[str, str] = field(default_factory=dict)
    #: what is copied, and the constants that are imported
    _used: dict[str, Any] = field(default_factory=dict)
    _constants: set[str] = field(default_factory=set)  # with values of this file, whatever the copied code has

    @functools.cached_property
    def _lines(self) -> dict[str, int]:
        """The lines of the definitions of the patched module."""
        tree = file_tree(self.original.__file__ or "")
        return {node.name: node.lineno for node in tree.body if isinstance(node, Definition)}

    def add(self, obj: Any, call: str) -> dict[str, str]:
        """Add the dependencies of a class or function, and return the names that it has to write differently."""
        source, namespace = read_source(obj, call, self.config.where), _namespace(obj)
        names = free_names(source.text, namespace) - {source.name}
        # Missing names are reported by the generator.
        known = sorted(names & namespace.keys())
        renamed = {name: self._add_name(name, namespace[name], namespace, source, call) for name in known}
        node = source.tree()
        bases = [*node.bases, *node.keywords] if isinstance(node, ast.ClassDef) else []
        in_body = free_names("\n".join(map(ast.unparse, node.body)), namespace) if bases else set[str]()
        for name, new in renamed.items():
            stock = vars(self.original).get(new) if any(new in names for names in self.targets.values()) else None
            is_other = (new not in self.targets.get(obj, ()) or name in in_body) and isinstance(stock, type)
            if is_other and unrebound(namespace[name]) is stock:
                raise self.config.error(
                    f"{call} uses {name}, which the patcher replaces: this code has the class of "
                    f"{self.original.__name__} at a load, and would have the replacement in a file. If that one is "
                    "meant, use it by its own name; if not, load with the patcher itself."
                )
        for target in self.targets.get(obj, ()):
            names = {renamed.get(name, name) for name in names_at_definition(node)} - {target}
            for name in sorted(name for name in names if self._lines.get(name, 0) > self._lines.get(target, 0)):
                raise self.config.error(
                    f"{call} reads {name} when it is defined, and {self.original.__name__} defines that after "
                    f"{target}, in whose place it is. Use {name} inside of a method."
                )
        for part, base in zip(bases, getattr(obj, "__bases__", ()), strict=False):
            self._check_base(part, base, obj, call)
        return {name: new for name, new in renamed.items() if new != name}

    def _check_base(self, part: ast.AST, base: type, obj: type, call: str) -> None:
        """Raise for a base that a file would import, and that is of the original: it has none of the other patches."""
        home = self.original.__name__
        if len(self.targets) < 2 or (isinstance(part, ast.Name) and base.__module__ in (home, obj.__module__)):
            return
        for cls in base.__mro__:
            if cls.__module__ == home:
                raise self.config.error(
                    f"{call} derives from {ast.unparse(part)}, and in a file {cls.__name__} of {home} would come with "
                    f"it, without the other patches. Derive it from {cls.__name__}, imported by that name."
                )

    def define(self, obj: Any, call: str = "from_patcher()") -> None:
        """Add a class or a function, unless the file has it."""
        if not self._is_known(obj.__name__, obj, call):
            self._added[obj.__name__] = obj
            self._add_definition(obj.__name__, obj, "", call)

    def add_constants(self, values: Mapping[str, Any], description: str) -> None:
        """Add constants that copied code uses."""
        self._added.update(values)
        self._constants.update(values)
        lines = [f"{name} = {value!r}".replace("'", '"') for name, value in values.items()]
        self.config.add_post_import_block("\n".join(lines), description)

    def _add_name(self, name: str, value: Any, namespace: Mapping[str, Any], source: Source, call: str) -> str:
        """Add a name that a source uses, and return its name in the file."""
        if isinstance(value, type | types.FunctionType):
            value = unrebound(value)
            if len(names := self.targets.get(value, ())) > 1:
                raise self.config.error(
                    f"{call} uses {name}, which replaces {' and '.join(names)}: a file has a class for each of them. "
                    "Give each key a class of its own, derived from this one."
                )
            if names:
                return names[0]
        own_name = str(getattr(value, "__name__", ""))
        module = getattr(value, "__module__", None)
        if module == self.original.__name__ and vars(self.original).get(own_name) is value:
            return own_name
        if self._is_known(name, value, call, source.file):
            return name
        self._added[name] = value
        tree = file_tree(source.file)
        imported = imported_names(tree).get(name)
        if imported is not None and imported.guarded and not imported.level:
            self._add_guarded(imported.line, namespace, source, call)
        elif imported is not None and imported.attribute:
            relative, package = "." * imported.level + imported.module, str(namespace.get("__package__") or "")
            home = absolute_name(relative, package, package, self.config.where)
            self.config.add_import(home, names=[f"{imported.attribute} as {name}"])
        elif imported is not None:
            for home in [imported.module] if imported.alias else modules_under(tree, name):
                self.config.add_import(home, alias=imported.alias, is_from_import=False)
        elif isinstance(value, types.ModuleType):
            self.config.add_import(value.__name__, alias=name, is_from_import=False)
        else:
            self._add_definition(name, value, str(namespace.get("__name__", "")), call)
        return name

    def _add_guarded(self, line: int, namespace: Mapping[str, Any], source: Source, call: str) -> None:
        """Add the statement around an import, such as a `try`: what is optional there is optional in the file."""
        text = Text("".join(linecache.getlines(source.file)), file_tree(source.file))
        statement = next(node for node in text.tree.body if node.lineno <= line <= (node.end_lineno or 0))
        code = text.code(statement)
        for name in sorted(bound_by(statement) & namespace.keys()):
            self._is_known(name, namespace[name], call, source.file)
            self._added[name] = namespace[name]
        for name in sorted(free_names(code, namespace) & namespace.keys()):
            self._add_name(name, namespace[name], namespace, source, call)
        self.config.add_post_import_block(code)

    def _anchor(self, source: Source, name_map: Mapping[str, str]) -> str:
        """Return the last definition that a helper needs to be defined, "" if that isn't in the patched module."""
        lines = self._lines | {name: self._lines.get(anchor, 0) for name, anchor in self._anchors.items()}
        needed = [name_map.get(name, name) for name in names_at_definition(source.tree())]
        last = max(needed, key=lambda name: (lines.get(name, 0), name in self._anchors), default="")
        return last if lines.get(last, 0) else ""

    def _check_instances(self, name: str, value: Any, call: str) -> None:
        """Raise for a constant that a file would import, and whose class it would have a copy of."""
        self._used[name] = value
        for constant, item in self._used.items():
            cls = type(item).__name__
            if any(type(item) is other for other in self._used.values()):
                raise self.config.error(
                    f"{call} uses {constant!r}, and {cls}, its class, of which a file would have another one. Put "
                    f"{cls} into a module that the generated file can import, and import it at the top level."
                )

    def _is_known(self, name: str, value: Any, call: str, file: str = "") -> bool:
        """Whether the file has this value by this name; raises a CodegenError if it has another one."""
        names = vars(self.original) | self._added
        if name not in names:
            return False
        known = names[name]
        if name in self._constants or known is value or (_is_literal(value) and repr(known) == repr(value)):
            return True
        owner = "another replacement uses" if name in self._added else f"{self.original.__name__} has"
        raise self.config.error(
            f"{call} uses {name!r}, and {owner} another {name!r}. "
            f"Give the one in {file or 'the replacement'} a name of its own."
        )

    def _add_definition(self, name: str, value: Any, module: str, call: str) -> None:
        """Add a class, a function or a constant of the replacement's own module, or one from elsewhere."""
        inner = unwrap(value)
        if isinstance(inner, type | types.FunctionType):
            home = str(getattr(inner, "__module__", "") or "")
            if home != module and not _is_local(inner) and _is_importable(home, inner):
                self.config.add_import(home, names=[f"{inner.__name__} as {name}"])
                return
            call = f"{call.rstrip(',')}, which uses {name!r},"
            name_map = self.add(value, call)
            self._check_instances(name, inner, call)
            if inner.__name__ != name:
                raise self.config.error(
                    f"{call} calls it by another name than its own, {inner.__name__!r}. Use its own name."
                )
            anchor = self._anchor(read_source(inner, call, self.config.where), name_map)
            self._anchors[name] = anchor
            self.config.add_helper_after(anchor, inner, name_map=name_map)
            return
        if _is_literal(value):
            self.config.add_post_import_block(f"{name} = {value!r}")
        elif module and module != "__main__" and vars(sys.modules.get(module, builtins)).get(name) is value:
            self._check_instances(name, value, call)
            self.config.add_import(module, names=[name])
        else:
            raise self.config.error(
                f"{call} uses {name!r}, {value!r}, which can't be written as text. "
                "Put it into a module that the generated file can import, and import it at the top level."
            )


def _namespace(obj: Any) -> dict[str, Any]:
    """Return the names around the code of a class or function: of its module and of enclosing functions."""
    inner = unwrap(obj)
    members = map(unwrap, vars(inner).values()) if isinstance(inner, type) else [inner]
    namespace: dict[str, Any] = dict(vars(sys.modules.get(inner.__module__, builtins)))
    for function in members:
        if isinstance(function, types.FunctionType) and function.__module__ == inner.__module__:
            nonlocals = inspect.getclosurevars(function).nonlocals
            namespace |= function.__globals__ | {k: v for k, v in nonlocals.items() if k != "__class__"}
    if isinstance(inner, type) and _is_local(inner):
        # A base class that is a variable of the enclosing function is in no closure.
        node: Any = read_source(inner, inner.__name__, caller()).tree()
        for expression, base in zip(node.bases, inner.__bases__, strict=False):
            if isinstance(expression, ast.Name):
                namespace[expression.id] = base
    return namespace


def _is_literal(value: Any) -> bool:
    try:
        literal = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    return type(literal) is type(value) and bool(literal == value)


def _is_local(obj: Any) -> bool:
    return "<locals>" in obj.__qualname__


def _is_importable(module: str, obj: Any) -> bool:
    if module in ("", "__main__", standing_alone.__name__):
        return False
    try:
        return vars(importlib.import_module(module)).get(obj.__name__) is obj
    except ImportError:
        return False
