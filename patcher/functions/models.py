"""What function mappings do to a model: which of its classes they change, and the change itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from torch import nn

from patcher.compat.modeling_code import chosen_in, is_architecture_module, unrebound
from patcher.compat.models import named_modules
from patcher.construction.init_hooks import own_members
from patcher.construction.plain_tensors import attributes
from patcher.errors import PatchConstructionError
from patcher.functions.calls import Blocked, Node, is_followed
from patcher.functions.rebinding import Rebinder, lock, rebinder_for
from patcher.functions.references import references_of
from patcher.functions.rules import Hit, Layers
from patcher.functions.signatures import check_signature


@dataclass(frozen=True)
class ReplacedFunction:
    """One function that a model calls another one in place of.

    Attributes:
        keys: (number of the mapping, key) of all that name it, that which decides first.
        callers: the names of the classes that call it, directly or through other functions.
    """

    original: Any
    replacement: Any
    keys: tuple[tuple[int, str], ...]
    callers: tuple[str, ...]

    @property
    def name(self) -> str:
        return full_name(self.original)


@dataclass(frozen=True, eq=False)
class Functions:
    """What function mappings do to one model.

    Attributes:
        classes: class -> the one derived from it whose functions call the replacements.
        replaced: each function that is replaced.
        known: the names of the functions that the modeling code of the model calls.
        registries: (function, the table, shared by all models, in which the modeling code looks for it).
        hidden: (function, the one that is replaced and that alone calls it).
        unchosen: (function, default, argument, value) of what nothing calls under that value of an argument of a load:
            the modeling code has this default for others, itself or what calls it.
        initialized: the classes whose `__init__` calls a function that is replaced.
    """

    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    replaced: tuple[ReplacedFunction, ...] = ()
    known: frozenset[str] = frozenset()
    registries: frozenset[tuple[str, str]] = frozenset()
    hidden: frozenset[tuple[str, str]] = frozenset()
    unchosen: frozenset[tuple[str, str, str, str]] = frozenset()
    initialized: frozenset[type[nn.Module]] = frozenset()
    rebinder: Rebinder | None = field(default=None, repr=False)


NO_FUNCTIONS = Functions()


def find_functions(model: nn.Module, layers: Layers) -> Functions:
    """What function mappings do to a model that stands, or to its skeleton. Nothing is changed.

    Raises:
        PatchConstructionError: a replacement doesn't fit a call, or a call can't be changed for one model alone.
    """
    with lock:
        return _Search(model, rebinder_for(layers)).result()


def check_initialized(model: nn.Module, functions: Functions) -> None:
    """Raise for modules that were built with the originals: their `__init__` has called one already.

    Raises:
        PatchConstructionError: it is the model itself, or of a class that isn't built through modeling code.
    """
    for module in model.modules():
        cls = type(module)
        if cls in functions.initialized:
            keys = sorted({each.keys[0][1] for each in functions.replaced if cls.__name__ in each.callers})
            what = "the model itself" if module is model else f"a {cls.__name__}"
            raise PatchConstructionError(
                f"function_mapping: {', '.join(map(repr, keys))} can't be replaced for {type(model).__name__} alone: "
                f"{cls.__name__}.__init__ calls it, and {what} is built before that can be changed. "
                f"Replace {cls.__name__} as a whole instead, with class_mapping."
            )


def swap_functions(model: nn.Module, functions: Functions) -> None:
    """Have a model call the replacements."""
    rebinder = functions.rebinder
    if rebinder is None:
        return
    for _, module in named_modules(model):
        cls = type(module)
        new = functions.classes.get(cls)
        if new is None and unrebound(cls) is cls:
            with lock:
                rebinder.add(cls)
                new = rebinder.class_of(cls)
        if new is not None and new is not cls:
            module.__class__ = new
        for name, value in function_attributes(module):
            changed = rebinder.attribute(value)
            if changed is not value:
                module.__dict__[name] = changed


def function_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The functions and methods that a module keeps as attributes."""
    for name, value in attributes(module):
        if isinstance(value, FunctionType | MethodType):
            yield name, value


class _Search:
    """The search through one model."""

    def __init__(self, model: nn.Module, rebinder: Rebinder) -> None:
        self.model, self.rebinder, self.graph = model, rebinder, rebinder.graph
        self.modules = [module for _, module in named_modules(model)]
        self.roots = {cls: rebinder.add(cls) for cls in dict.fromkeys(map(type, self.modules))}
        #: id of an original -> what replaces it, and the classes that call it
        self.found: dict[int, tuple[Hit, dict[str, None]]] = {}
        self.shared: list[tuple[Node, Blocked]] = []
        #: the originals that are called; of the others, what the configs have chosen instead
        self.called: set[int] = set()
        self.chosen: dict[int, tuple[str, str, str]] = {}

    def result(self) -> Functions:
        initialized = {cls for cls in self.roots if self._search_class(cls)}
        for module in self.modules:
            self._search_attributes(module)
        self._check_shared()
        functions = [function for roots in self.roots.values() for function in roots]
        nodes = [
            node
            for node in self.graph.reached(functions, all_of_them=True)
            if is_architecture_module(node.function.__module__ or "")
        ]
        return Functions(
            classes=MappingProxyType(
                {cls: new for cls in self.roots if (new := self.rebinder.class_of(cls)) is not cls}
            ),
            replaced=tuple(
                ReplacedFunction(hit.original, hit.replacement, hit.keys, tuple(sorted(callers)))
                for key, (hit, callers) in self.found.items()
                if key in self.called
            ),
            known=frozenset(name for node in nodes for name in node.known),
            registries=frozenset(item for node in nodes for item in node.registries.items()),
            hidden=frozenset(self._hidden()),
            unchosen=frozenset(
                (_name(hit.original), *self.chosen.get(key, next(iter(self.chosen.values()))))
                for key, (hit, _) in self.found.items()
                if key not in self.called
            ),
            initialized=frozenset(initialized),
            rebinder=self.rebinder,
        )

    def _hidden(self) -> Iterator[tuple[str, str]]:
        for hit, _ in self.found.values():
            function = inspect.unwrap(hit.original)
            if isinstance(function, FunctionType):
                for name in references_of(function.__code__).read:
                    yield name.name, getattr(hit.original, "__name__", "")

    def _check_shared(self) -> None:
        """Raise for what is replaced and is called through a table that all models share as well.

        A function of the same name that only such a table leads to is another one, and stays.
        """
        for node, each in self.shared:
            if isinstance(each.value, FunctionType):
                self.graph.add([each.value])
                reached = [hit.original for inner in self.graph.reached([each.value]) for _, hit in inner.hits]
                for original in (each.value, *reached):
                    if id(original) in self.found:
                        raise self._not_followed(original, node.function.__qualname__, each.how)

    def _search_class(self, cls: type[nn.Module]) -> bool:
        """Note what a class calls; whether its `__init__` does."""
        for base in filter(is_followed, cls.__mro__):
            for name, edge in self.graph.member_edges(base):
                hit = self.graph.hit_of(edge.to)
                if hit is not None:
                    where = f"{base.__qualname__}.{name}"
                    if edge.obstacle or not isinstance(hit.replacement, FunctionType):
                        raise self._not_followed(edge.to, where, edge.obstacle or "has it as a method")
                    self._note(hit, cls, edge.to, "")
                elif edge.obstacle and self.graph.needs(edge.to):
                    raise self._not_followed(edge.to, f"{base.__qualname__}.{name}", edge.obstacle)
        for node in self.graph.reached(self.roots[cls]):
            self._check(node)
            for name, hit in node.hits:
                self._note(hit, cls, node.function, name, is_called=False)
        unused = functools.partial(self._unused, [module for module in self.modules if type(module) is cls])
        for node in self.graph.reached(self.roots[cls], unused=unused):
            self.called |= {id(hit.original) for _, hit in node.hits} - unused(node).keys()
        for node in self.graph.reached(self.roots[cls], all_of_them=True):
            self.shared += [(node, each) for each in node.shared]
        running = [function for function in self.roots[cls] if function.__name__ != "__init__"]
        for node in self.graph.reached(running, all_of_them=True):
            for made in node.builds - self.roots.keys():
                if any(map(self.graph.needs, self.rebinder.add(made))):
                    how = f"makes a {made.__name__}, which calls it, each time it runs"
                    raise self._not_followed(None, node.function.__qualname__, how)
        inits = [own_members(base).get("__init__") for base in filter(is_followed, cls.__mro__)]
        return any(map(self.graph.needs, inits))

    def _unused(self, modules: list[nn.Module], node: Node) -> dict[int, Any]:
        """What a function of some modules has for a choice that none of their configs makes, and what they choose."""
        found = {}
        for key, (default, table) in node.defaults.items():
            choices = [chosen_in(table, getattr(module, "config", None)) for module in modules]
            if choices and choices[0] is not None and None not in choices:
                found[key] = self.chosen[key] = (_name(default), *choices[0])
        return found

    def _check(self, node: Node) -> None:
        """Raise for what stands in the way of having a function call a replacement."""
        where = node.function.__qualname__
        for each in node.blocked:
            raise self._not_followed(each.value, where, each.how)
        for edge in node.edges:
            if edge.obstacle and self.graph.needs(edge.to):
                raise self._not_followed(edge.to, where, edge.obstacle)
        names = self.rebinder.written_names(node.function)
        if names:
            how = f"needs {', '.join(names)}, which the code of its module binds anew while it runs"
            raise self._not_followed(None, where, how)

    def _search_attributes(self, module: nn.Module) -> None:
        for name, value in attributes(module):
            if isinstance(value, FunctionType | MethodType):
                function = value.__func__ if isinstance(value, MethodType) else value
                if not isinstance(function, FunctionType):
                    continue
                self.graph.add([function])
                hit = self.graph.hit_of(function)
                if hit is not None:
                    self._note(hit, type(module), function, "")
                for node in self.graph.reached([function]):
                    self._check(node)
                    for known, found in node.hits:
                        self._note(found, type(module), node.function, known)
                continue
            for edge in self.graph.held(value, ""):
                self.graph.add([edge.to])
                if self.graph.hit_of(edge.to) is not None or self.graph.needs(edge.to):
                    where = f"{type(module).__qualname__}.{name}"
                    raise self._not_followed(edge.to, where, f"holds it in a {type(value).__name__}")

    def _note(
        self, hit: Hit, cls: type[nn.Module], caller: FunctionType, name: str, *, is_called: bool = True
    ) -> None:
        """A class calls a function that is replaced, in this function of it or of what it calls."""
        key = self.rebinder.rules.layers and hit.keys[0][1]
        check_signature(str(key), caller, name, hit.original, hit.replacement)
        self.called |= {id(hit.original)} if is_called else set()
        self.found.setdefault(id(hit.original), (hit, {}))[1][cls.__name__] = None

    def _not_followed(self, function: Any, where: str, how: str) -> PatchConstructionError:
        hits = [hit for node in self.graph.reached([function]) for _, hit in node.hits]
        hits += [hit] if (hit := self.graph.hit_of(function)) is not None else []
        keys = {hit.keys[0][1] for hit in hits} or {key for layer in self.rebinder.layers for key, _ in layer}
        what = ", ".join(map(repr, sorted(keys)))
        owner, _, method = where.partition(".")
        field = "class_mapping" if method else "function_mapping"
        return PatchConstructionError(
            f"function_mapping: {what} can't be replaced for {type(self.model).__name__} alone: {where} {how}, and "
            f"that would go on calling the original. Replace {owner} as a whole instead, with {field}."
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def full_name(function: Any) -> str:
    """`module:name` of a function."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}:{name}" if module else str(name)
