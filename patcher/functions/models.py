"""What function mappings do to a model: which of its classes they change, and the change itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from torch import nn

from patcher.compat.modeling_code import chosen_in, is_architecture_module, unrebound
from patcher.compat.models import named_modules
from patcher.construction.plain_tensors import attributes
from patcher.errors import PatchConstructionError
from patcher.functions.calls import Node, Use
from patcher.functions.rebinding import Rebinder, lock, rebinder_for
from patcher.functions.references import references_of
from patcher.functions.rules import Hit, Layers


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

    @property
    def rule(self) -> str:
        """The key that decides."""
        return f"function_mapping[{self.keys[0][1]!r}]"


@dataclass(frozen=True, eq=False)
class Functions:
    """What function mappings do to one model.

    Attributes:
        classes: class -> the one derived from it whose functions call the replacements.
        replaced: each function that is replaced.
        known: the names of the functions that the modeling code of the model calls.
        hints: name of a function -> why replacing it has no effect, where that is known.
    """

    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    replaced: tuple[ReplacedFunction, ...] = ()
    known: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)
    rebinder: Rebinder | None = field(default=None, repr=False)


NO_FUNCTIONS = Functions()

_IN_PLACE_OF_EAGER = "write function_mapping={'eager_attention_forward': function} and attn_implementation='eager'"
_UNDER_A_NAME = (
    "in place of the function_mapping give your function a name that loads may choose, with masks: transformers."
    "AttentionInterface.register('mine', function), transformers.AttentionMaskInterface.register('mine', "
    "ALL_MASK_ATTENTION_FUNCTIONS['eager']), whose masks are to be added, and attn_implementation='mine'"
)


def find_functions(model: nn.Module, layers: Layers) -> Functions:
    """What function mappings do to a constructed model, or to its skeleton. Nothing is changed.

    Raises:
        PatchConstructionError: a call can't be changed for one model alone.
    """
    with lock:
        return _Search(model, rebinder_for(layers)).result()


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
        self.roots = {cls: rebinder.add(cls) for cls in dict.fromkeys(map(_class_of, self.modules))}
        #: id of an original -> what replaces it, and the classes that call it
        self.found: dict[int, tuple[Hit, dict[str, None]]] = {}
        #: the originals that are called; of the others, what the configs have chosen instead
        self.called: set[int] = set()
        self.chosen: dict[int, tuple[str, str, str]] = {}

    def result(self) -> Functions:
        initialized = [cls for cls in self.roots if self._search_class(cls)]
        for module in self.modules:
            self._search_attributes(module)
        nodes = {cls: list(self.graph.reached(roots, all_of_them=True)) for cls, roots in self.roots.items()}
        for cls, reached in nodes.items():
            self._check_shared(cls, reached)
        for cls in initialized:
            hits = {hit.keys[0][1] for hit, callers in self.found.values() if cls.__name__ in callers}
            raise PatchConstructionError(
                f"function_mapping: {', '.join(map(repr, sorted(hits)))} can't be replaced for "
                f"{type(self.model).__name__} alone: {cls.__name__}.__init__ calls it, and has run before functions "
                f"are replaced. Replace {cls.__name__} as a whole instead, with class_mapping."
            )
        own = [
            node
            for node in {id(node): node for reached in nodes.values() for node in reached}.values()
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
            known=frozenset(use.name for node in own for use in node.uses if use.name),
            hints={name: hint for name, hint in self._hints(own) if name},
            rebinder=self.rebinder,
        )

    def _hints(self, own: Iterable[Node]) -> Iterator[tuple[str, str]]:
        """Why replacing a function, by its name, has no effect: the later ones are more precise."""
        for name, table in sorted({(_name(each), table) for node in own for each, table in node.shared}):
            instead = "Register a function of your own there, and choose it by its name"
            if table == "ALL_ATTENTION_FUNCTIONS":
                instead = f"For an attention of this model alone {_IN_PLACE_OF_EAGER}; or {_UNDER_A_NAME}"
            yield name, f": the modeling code looks for it in {table}, which all models share, when it runs. {instead}"
        for hit, _ in self.found.values():
            function = inspect.unwrap(hit.original)
            if isinstance(function, FunctionType):
                for reference in references_of(function.__code__).read:
                    yield reference.name, f": what calls it, {_name(hit.original)}, is itself replaced"
        for key, (hit, _) in self.found.items():
            if key not in self.called:
                default, argument, value = self.chosen.get(key, next(iter(self.chosen.values())))
                hint = f" under {argument}={value!r}: load the model with {argument}='eager'"
                if default != _name(hit.original):
                    hint = f", for nothing calls {default}{hint}"
                elif argument == "attn_implementation":
                    hint += f"; or {_UNDER_A_NAME}"
                yield _name(hit.original), hint

    def _search_class(self, cls: type[nn.Module]) -> bool:
        """Note what a class calls; whether its `__init__` calls something that is replaced."""
        roots = self.roots[cls]
        for use in roots:
            if use.hit is not None and not isinstance(use.hit.replacement, FunctionType):
                raise self._refused(use, cls, cls, f"as its method {use.name!r}")
        self._follow(cls, roots)
        unused = functools.partial(self._unused, [module for module in self.modules if _class_of(module) is cls])
        for node in self.graph.reached(roots, unused=unused):
            self.called |= {id(hit.original) for hit in node.hits} - unused(node).keys()
        running = [use for use in roots if use.name != "__init__"]
        for node in self.graph.reached(running, all_of_them=True):
            for made in node.builds - self.roots.keys():
                for use in filter(self.graph.changes, self.rebinder.add(made)):
                    how = f"through a {made.__name__} that it makes each time it runs"
                    raise self._refused(use, cls, node.function, how)
        first = self.graph.reached([use for use in roots if use.name == "__init__"], unused=lambda node: node.kept)
        return any(id(hit.original) not in node.kept for node in first for hit in node.hits)

    def _search_attributes(self, module: nn.Module) -> None:
        cls = _class_of(module)
        for name, value in attributes(module):
            is_own = isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)
            uses = self.graph.uses(value.__func__ if is_own else value, f"its attribute {name!r}")
            if not isinstance(value, FunctionType | MethodType):
                uses = [use._replace(through=use.through or f"its attribute {name!r}") for use in uses]
            self.graph.add(uses)
            self._follow(cls, uses)
            self.called |= {id(hit.original) for node in self.graph.reached(uses) for hit in node.hits}

    def _follow(self, cls: type[nn.Module], uses: list[Use]) -> None:
        """Note what some functions of a class call, and raise for what they call in a way that can't be changed."""
        for use in filter(self.graph.changes, uses):
            if use.through:
                raise self._refused(use, cls, cls, f"through {use.through}")
            if use.hit is not None:
                self._note(use.hit, cls)
                self.called.add(id(use.hit.original))
        for node in self.graph.reached(uses):
            for use in filter(self.graph.changes, node.uses):
                if use.through:
                    raise self._refused(use, cls, node.function, f"through {use.through}")
                if use.hit is not None:
                    self._note(use.hit, cls)
            for name in self.rebinder.written_names(node.function):
                how = f"beside the global {name!r}, which changes while it runs"
                raise self._refused(Use(node.function), cls, node.function, how)

    def _check_shared(self, cls: type[nn.Module], nodes: list[Node]) -> None:
        """Raise for what is replaced and is called through a table that all models share as well.

        A function of the same name that only such a table leads to is another one, and stays.
        """
        for node in nodes:
            for function, table in node.shared:
                use = Use(function, hit=self.graph.hit_of(function))
                self.graph.add([use])
                reached = [hit.original for inner in self.graph.reached([use]) for hit in inner.hits]
                if any(id(original) in self.found for original in (function, *reached)):
                    raise self._refused(use, cls, node.function, f"through {table}, which all models share")

    def _unused(self, modules: list[nn.Module], node: Node) -> dict[int, Any]:
        """What a function of some modules has for a choice that none of their configs makes, and what they choose."""
        found = {}
        for key, (default, table) in node.defaults.items():
            choices = [chosen_in(table, getattr(module, "config", None)) for module in modules]
            if choices and choices[0] is not None and None not in choices:
                found[key] = self.chosen[key] = (_name(default), *choices[0])
        return found

    def _note(self, hit: Hit, cls: type[nn.Module]) -> None:
        """A class calls a function that is replaced, itself or in what it calls."""
        self.found.setdefault(id(hit.original), (hit, {}))[1][cls.__name__] = None

    def _refused(self, use: Use, cls: type, where: Any, how: str) -> PatchConstructionError:
        """The error for a function that something refers to in a way that can't be changed for one model."""
        hits = [use.hit] if use.hit is not None else [hit for node in self.graph.reached([use]) for hit in node.hits]
        what = ", ".join(sorted({repr(hit.keys[0][1]) for hit in hits}))
        line = f":{where.__code__.co_firstlineno}" if isinstance(where, FunctionType) else ""
        return PatchConstructionError(
            f"function_mapping: {what} can't be replaced for {type(self.model).__name__} alone: {where.__qualname__} "
            f"({where.__module__}{line}) gets at it {how}, not by a plain call of a global name, and that "
            f"would go on calling the original. Replace {cls.__name__} as a whole instead, with class_mapping."
        )


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, also of one whose functions were replaced when it was loaded separately."""
    return unrebound(type(module))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def full_name(function: Any) -> str:
    """`module:name` of a function."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}:{name}" if module else str(name)
