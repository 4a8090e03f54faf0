"""Function mappings for one model: which of its classes call replaced functions, and the replacement itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from torch import nn

from patcher.compat.attributes import TORCH_ATTRIBUTES, attributes
from patcher.compat.modeling_code import REBOUND, chosen_in, unrebound
from patcher.compat.models import named_modules
from patcher.errors import PatchConstructionError
from patcher.functions.graph import BUILDS, SHARED, Edge, Hit, Layers, Node, is_followed, references_of
from patcher.functions.rebinding import Rebinder, lock, rebinder_of, rebinders
from patcher.spec.like import reference

#: `module:name` of a function, as reports show it.
full_name = reference


@dataclass(frozen=True, eq=False)
class Functions:
    """The functions that are replaced in one model.

    Attributes:
        replaced: each replaced function, with the classes that call it.
        known: the names of all functions that the modeling code of the model calls.
        hints: name of a function -> why replacing it has no effect, if known.
        rebinder: makes the classes and functions that call the replacements.
    """

    replaced: tuple[Hit, ...] = ()
    known: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)
    rebinder: Rebinder | None = field(default=None, repr=False)


NO_FUNCTIONS = Functions()

#: Attribute of a module: name of a plain attribute -> the function there and the original, if it calls a replacement.
_KEPT = "_patcher_kept"
#: How modules reach a function through their hooks, and the advice: the class that registers one may be another.
_HOOK = "a hook"
_HOOK_LATER = (
    "Register the hook on the result, one that calls your function; if an __init__ registers it, replace the class "
    "that has the __init__ instead, with class_mapping."
)

_IN_PLACE_OF_EAGER = "write function_mapping={'eager_attention_forward': function} and attn_implementation='eager'"
_UNDER_A_NAME = (
    "in place of the function_mapping give your function a name that loads may choose, with masks: transformers."
    "AttentionInterface.register('mine', function), transformers.AttentionMaskInterface.register('mine', "
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS['eager']), whose masks are to be added, and "
    "attn_implementation='mine'"
)


def find_functions(model: nn.Module, layers: Layers) -> Functions:
    """Find the functions that mappings replace in a constructed model or skeleton, without replacing them.

    Raises:
        PatchConstructionError: if a function can't be replaced for one model alone.
    """
    modules: dict[type[nn.Module], list[nn.Module]] = {}
    for _, module in named_modules(model):  # by class; parts may be patched already
        modules.setdefault(unrebound(type(module)), []).append(module)
    own = {id(module) for instances in modules.values() for module in instances}
    return _Search(type(model).__name__, modules, Rebinder(layers, own)).result()


def replaced_now(model: nn.Module) -> tuple[Hit, ...]:
    """Return the functions that modules of a model call replacements of, in whatever model they were replaced."""
    calling: dict[Layers, dict[type[nn.Module], list[nn.Module]]] = {}
    for _, module in named_modules(model):
        if (rebinder := rebinder_of(module)) is not None:
            cls = getattr(type(module), REBOUND)  # a fused class inherits it
            calling.setdefault(rebinder.layers, {}).setdefault(cls, []).append(module)
    merged: dict[tuple[int, int], Hit] = {}
    for layers, modules in calling.items():
        for hit in _Search(type(model).__name__, modules, Rebinder(layers)).replaced:
            key = id(hit.original), id(hit.replacement)
            callers = {*hit.callers, *(merged[key].callers if key in merged else ())}
            merged[key] = replace(hit, callers=tuple(sorted(callers)))
    return tuple(merged.values())


def swap_functions(model: nn.Module, functions: Functions) -> None:
    """Replace functions in a model, in place."""
    rebinder = functions.rebinder
    if rebinder is None:
        return
    with lock:
        rebinders[rebinder.layers] = rebinder
        for _, module in named_modules(model):
            if unrebound(type(module)) is type(module):
                module.__class__ = rebinder.class_of(type(module))
            kept = dict(vars(module).get(_KEPT, {}))
            for name, value in attributes(module):
                if (copied := rebinder.copy(value)) is not value:
                    kept[name] = copied, kept[name][1] if name in kept else value
                    module.__dict__[name] = copied
            if kept:
                module.__dict__[_KEPT] = kept


def restore_functions(model: nn.Module) -> None:
    """Restore the original functions in a model, in place."""
    for _, module in named_modules(model):
        module.__class__ = unrebound(type(module))
        for name, (copied, original) in module.__dict__.pop(_KEPT, {}).items():
            if module.__dict__.get(name) is copied:  # not set to another since
                module.__dict__[name] = original


class _Search:
    """The search through the modules of one model, by class."""

    def __init__(self, model: str, modules: Mapping[type[nn.Module], list[nn.Module]], rebinder: Rebinder) -> None:
        self.model, self.modules, self.rebinder, self.graph = model, modules, rebinder, rebinder.graph
        self.roots = {cls: rebinder.add(cls) for cls in modules}
        #: id of an original -> its replacement, and the names of the classes that refer to it
        self.hits: dict[int, tuple[Hit, dict[str, None]]] = {}
        #: ids of the originals that are called; id of another -> what the configs choose instead
        self.called: set[int] = set()
        self.chosen: dict[int, tuple[str, str, str]] = {}

        for cls, instances in modules.items():
            self._follow(cls, self.roots[cls], instances)

    @property
    def replaced(self) -> tuple[Hit, ...]:
        """The functions that are called and replaced."""
        called = [hit for key, hit in self.hits.items() if key in self.called]
        return tuple(replace(hit, callers=tuple(sorted(callers))) for hit, callers in called)

    def result(self) -> Functions:
        of_classes = {*self.hits}
        for cls, modules in self.modules.items():
            self._check_running(cls, [edge for edge in self.roots[cls] if edge.name != "__init__"])
            for module in modules:
                edges = list[Edge]()
                for name, value in attributes(module, hooks=True):
                    edge = self.graph.edge(value, place := f"its attribute {name!r}")
                    if name in TORCH_ATTRIBUTES:
                        edge = Edge(value, through=f"{_HOOK} in {name!r}")
                    elif edge.hit is not None and id(edge.hit.original) not in of_classes:
                        edge = edge._replace(through=f"{place}, which other code has set")
                    edges.append(edge)
                self.graph.add(edges)
                self._follow(cls, edges, [module])
        nodes = {cls: list(self.graph.reached(roots, everything=True)) for cls, roots in self.roots.items()}
        for cls, reached in nodes.items():
            self._check_shared(cls, reached)
        for cls, roots in self.roots.items():
            self._check_init(cls, [edge for edge in roots if edge.name == "__init__"])
        unique = {id(node): node for reached in nodes.values() for node in reached}.values()
        functions = [node for node in unique if isinstance(node.value, FunctionType) and node.value.__module__]
        modeling = [node for node in functions if is_followed(node.value)]
        edges = [edge for node in modeling for edge in node.edges if not edge.kind]
        return Functions(
            replaced=self.replaced,
            known=frozenset(edge.name for edge in edges if callable(edge.to) and not isinstance(edge.to, type)) - {""},
            hints={name: hint for name, hint in self._hints(modeling) if name},
            rebinder=self.rebinder,
        )

    def _hints(self, nodes: Iterable[Node]) -> Iterator[tuple[str, str]]:
        """Yield names of functions and why replacing them has no effect; later ones are more precise."""
        shared = (edge for node in nodes for edge in node.edges if edge.kind == SHARED)
        for name, table in sorted({(_name(edge.to), edge.name) for edge in shared}):
            instead = "Register a function of your own there, and choose it by its name"
            if table == "ALL_ATTENTION_FUNCTIONS":
                instead = f"For an attention of this model alone {_IN_PLACE_OF_EAGER}; or {_UNDER_A_NAME}"
            yield name, f": the modeling code looks for it in {table}, which all models share, when it runs. {instead}"
        for key, (hit, _) in self.hits.items():
            function, name = inspect.unwrap(hit.original), _name(hit.original)
            if isinstance(function, FunctionType):
                for reference in references_of(function.__code__).read:
                    yield reference.name, f": what calls it, {name}, is itself replaced"
            if key not in self.called:
                default, argument, value = self.chosen.get(key, next(iter(self.chosen.values())))
                hint = (
                    f" under {argument}={value!r}: load the model with {argument}='eager' (in Python; commands have "
                    "no such option)"
                )
                if default != name:
                    hint = f", for nothing calls {default}{hint}"
                elif argument == "attn_implementation":
                    hint += f"; or {_UNDER_A_NAME}"
                yield name, hint

    def _follow(self, cls: type[nn.Module], edges: list[Edge], modules: list[nn.Module]) -> None:
        """Record the replaced functions that edges of a class lead to and those that run, or raise."""
        self._check_edges(edges, cls, cls)
        self.called |= {id(edge.hit.original) for edge in edges if edge.hit is not None}
        for node in self.graph.reached(edges):
            self._check_edges(node.edges, cls, node.value)
        runs = functools.partial(self._runs, modules)
        for node in self.graph.reached(edges, runs):
            self.called |= {id(hit.original) for hit in node.hits(runs)}

    def _check_running(self, cls: type[nn.Module], running: list[Edge]) -> None:
        """Raise for modules that are built while others run: their classes aren't replaced."""
        for node in self.graph.reached(running, everything=True):
            for built in (edge.to for edge in node.edges if edge.kind == BUILDS and edge.to not in self.roots):
                for edge in filter(self.graph.changes, self.graph.members(built)):
                    how = f"through a {built.__name__} that it builds in each call"
                    raise self._refused(edge, cls, node.value, how)

    def _check_edges(self, edges: Iterable[Edge], cls: type[nn.Module], where: Any) -> None:
        """Record the replaced functions that edges lead to, and raise for those that can't be replaced."""
        for edge in filter(self.graph.changes, edges):
            if edge.through:
                raise self._refused(edge, cls, where, f"through {edge.through}")
            if edge.hit is not None:
                self.hits.setdefault(id(edge.hit.original), (edge.hit, {}))[1][cls.__name__] = None

    def _check_shared(self, cls: type[nn.Module], nodes: list[Node]) -> None:
        """Raise for a replaced function to which a table of all models leads too; one that only a table has stays."""
        for node in nodes:
            for edge in (edge for edge in node.edges if edge.kind == SHARED):
                reached = [hit.original for inner in self.graph.reached([edge]) for hit in inner.hits()]
                if any(id(original) in self.hits for original in (edge.to, *reached)):
                    raise self._refused(edge, cls, node.value, f"through {edge.name}, which all models share")

    def _check_init(self, cls: type[nn.Module], init: list[Edge]) -> None:
        """Raise for a function that an `__init__` calls, which runs before functions are replaced."""

        def calls(edge: Edge) -> bool:
            return not edge.is_kept

        hits = [hit for node in self.graph.reached(init, calls) for hit in node.hits(calls)]
        if hits:
            raise self._error(
                cls, hits, f"{cls.__name__}.__init__ calls it, and has run before functions are replaced"
            )

    def _runs(self, modules: list[nn.Module], edge: Edge) -> bool:
        """Whether the object of an edge runs in any of the modules, whose configs may choose another function."""
        choices = [
            chosen_in(edge.table, getattr(module, "config", None)) for module in modules if edge.table is not None
        ]
        if not choices or choices[0] is None or None in choices:
            return True
        self.chosen[id(edge.to)] = (_name(edge.to), *choices[0])
        return False

    def _refused(self, edge: Edge, cls: type, where: Any, how: str) -> PatchConstructionError:
        """Return the error for a reference that can't be replaced for one model."""
        hits = [hit for node in self.graph.reached([edge]) for hit in node.hits()]
        line = f":{where.__code__.co_firstlineno}" if isinstance(where, FunctionType) else ""
        return self._error(
            cls,
            hits if edge.hit is None else [edge.hit],
            f"{where.__qualname__} ({where.__module__}{line}) reaches it {how}, not by calling a global name, and "
            "would go on calling the original",
            _HOOK_LATER if how.startswith(f"through {_HOOK}") else "",
        )

    def _error(self, cls: type, hits: Iterable[Hit], reason: str, advice: str = "") -> PatchConstructionError:
        what = ", ".join(sorted({repr(hit.keys[0][1]) for hit in hits}))
        return PatchConstructionError(
            f"function_mapping: {what} can't be replaced for {self.model} alone: {reason}. "
            + (advice or f"Replace {cls.__name__} as a whole instead, with class_mapping.")
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))
