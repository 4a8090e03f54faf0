"""Which functions refer to which, from their bytecode, closures and defaults, as far as that can be followed.

Followed are functions that code finds by a global name, in a closure, as a default or as a member of a class, if
`with_functions` can put another one there; then those that these refer to. What refers to a function in another way (a
table, a class that isn't a module, an attribute of an imported module, an object) can't be given another one: its use
says what it goes `through`, and is refused if the function is replaced, or calls one that is. Registries of
transformers, which all models share (`ALL_ATTENTION_FUNCTIONS`), are not followed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.compat.modeling_code import is_architecture_module, is_modeling_module, registered
from patcher.construction.init_hooks import own_members
from patcher.functions.references import Reference, references_of
from patcher.functions.rules import FunctionRules, Hit
from patcher.source.alike import without_kernel

#: Packages whose functions call none of a model's.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accelerate", "peft", "patcher", "kernels"}) - {
    "__main__"
}
#: What is not looked into for functions. A module is its class, and the functions of modeling code with a kernel are.
_HOLDS_NONE = (str, bytes, int, float, torch.Tensor, torch.dtype, ModuleType, nn.Module)


class Use(NamedTuple):
    """A function that another one, a class or a module refers to.

    Attributes:
        name: the name by which it is found, "" in a closure or a default.
        through: what it is found through, where no other function can be put in its place for one model.
        hit: what replaces it.
    """

    to: Any  # a FunctionType; as an attribute of that type it would pass for a method
    name: str = ""
    through: str = ""
    hit: Hit | None = None


@dataclass(eq=False)
class Node:
    """One function and what it refers to.

    Attributes:
        uses: the functions that it may call.
        shared: (function, table) of what it finds in tables that all models share.
        builds: the classes of modules that it calls.
        defaults: id -> a function that runs where a config chooses none of a shared table, and the table.
        kept: the ids of what it finds by a global name and doesn't call.
    """

    function: Any
    uses: list[Use] = field(default_factory=list)
    shared: list[tuple[Any, str]] = field(default_factory=list)
    builds: set[type[nn.Module]] = field(default_factory=set)
    defaults: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    @property
    def hits(self) -> list[Hit]:
        """What it refers to that is replaced."""
        return [use.hit for use in self.uses if use.hit is not None]


class CallGraph:
    """The functions that are reached from those that were added, and which of them reach one that is replaced."""

    def __init__(self, rules: FunctionRules) -> None:
        self.rules = rules
        self.nodes: dict[int, Node] = {}
        self._needing: set[int] | None = None

    def add(self, uses: Iterable[Use]) -> None:
        """Look at functions, and at all that they may call."""
        waiting = list(uses)
        while waiting:
            function = waiting.pop().to
            is_known = id(function) in self.nodes or id(function) in self.rules.replacements
            if not is_known and isinstance(function, FunctionType):
                node = self.nodes[id(function)] = self._node(function)
                self._needing = None
                waiting += node.uses

    def needs(self, function: Any) -> bool:
        """Whether a function that was added may call one that is replaced."""
        if self._needing is None:
            callers: dict[int, list[int]] = {}
            for key, node in self.nodes.items():
                for use in node.uses:
                    if use.hit is None:
                        callers.setdefault(id(use.to), []).append(key)
            waiting = [key for key, node in self.nodes.items() if node.hits]
            self._needing = set()
            while waiting:
                key = waiting.pop()
                if key not in self._needing:
                    self._needing.add(key)
                    waiting += callers.get(key, ())
        return id(function) in self._needing

    def changes(self, use: Use) -> bool:
        """Whether a function that is referred to has to be another one."""
        return use.hit is not None or self.needs(use.to)

    def reached(
        self,
        uses: Iterable[Use],
        *,
        all_of_them: bool = False,
        unused: Callable[[Node], Container[int]] = lambda node: (),
    ) -> Iterator[Node]:
        """The nodes from which a replaced function is reached, from some on; or all of them.

        Args:
            unused: the ids of the functions that a node has, and doesn't call.
        """
        waiting, seen = [use.to for use in uses], set[int]()
        while waiting:
            function = waiting.pop()
            if id(function) in seen or id(function) not in self.nodes or not (all_of_them or self.needs(function)):
                continue
            seen.add(id(function))
            node = self.nodes[id(function)]
            yield node
            left_out = unused(node)
            followed = (use.to for use in node.uses if not use.through and use.hit is None)
            waiting += [each for each in followed if id(each) not in left_out]

    def members(self, cls: type) -> list[Use]:
        """The functions of one class, its own alone."""
        skipped = ("__dict__", "__weakref__", "__annotations__", "__init_subclass__", "__class_getitem__")
        own = own_members(cls).items()
        members = {name: value for name, value in own if name not in skipped and not isinstance(value, type)}
        return [use for name, value in members.items() for use in self.uses(value, name, name)]

    def hit_of(self, function: Any) -> Hit | None:
        """What replaces a function that is held as an object: not a method, whose name may be the same."""
        if not isinstance(function, FunctionType) or "." in function.__qualname__.replace("<locals>.", ""):
            return None
        return self.rules.hit(function.__name__, function)

    def uses(self, value: Any, place: str, name: str = "") -> list[Use]:
        """The functions in a value: what it is or is made of anew with others, or what it holds otherwise."""
        if found := functions_in(value):
            return [Use(each, name, "", self.hit_of(each)) for each in found]
        through = f"{place}, a {type(value).__name__}"
        if isinstance(value, torch.jit.ScriptFunction):  # what it calls has become a part of it
            keys = {key.rpartition(":")[2]: key for layer in self.rules.layers for key, _ in layer}
            hits = [Hit(((0, keys[each]),), value, None) for each in keys if each in str(value.code)]
            return [Use(value, name, through, hit) for hit in hits] or [Use(value, name)]
        return [Use(each, name if callable(value) else "", through, self.hit_of(each)) for each in held(value)]

    def _node(self, function: FunctionType) -> Node:
        node, references = Node(function), references_of(function.__code__)
        space = function.__globals__
        tables: list[Any] = []
        called: set[int] = set()
        handed: list[Any] = []  # what it hands on: to a table, where it looks in one
        if is_followed_module(space.get("__name__", "")):
            for reference in references.read:
                if reference.name in space:
                    value = without_kernel(space[reference.name])
                    tables += [value] * is_shared_table(value)
                    (called.add(id(value)) if reference.is_called else handed.append(value))
                    self._read(node, value, reference)
            node.kept = {id(value) for value in handed} - called
            for imported in references.imported:
                self._imported(node, *imported)
        for variable, value in closure_of(function).items():
            tables += [value] * is_shared_table(value)
            handed.append(value)
            if not isinstance(value, type):
                changes = f"its variable {variable!r}, which changes" if variable in references.written_cells else ""
                uses = self.uses(value, f"its variable {variable!r}")
                node.uses += [use._replace(through=use.through or changes) for use in uses]
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(value, type):
                node.uses += self.uses(value, "a default")
        for value in handed if tables else ():
            if isinstance(value, FunctionType) and id(value) not in called:
                node.defaults[id(value)] = value, tables[0]
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType) and all(use.to is not wrapped for use in node.uses):
            node.uses.append(Use(wrapped, "", "its decorator"))
        return node

    def _read(self, node: Node, value: Any, reference: Reference) -> None:
        """What a function does with what a global name is bound to."""
        name, attributes, place = reference.name, list(reference.attributes), reference.name
        while isinstance(value, ModuleType) and attributes:
            place = f"{place}.{attributes[0]}"
            value = vars(value).get(attributes.pop(0))
        if place == name and (hit := self.rules.hit(name, value)) is not None:
            node.uses.append(Use(value, name, "", hit))
        elif isinstance(value, type) and issubclass(value, nn.Module):
            if reference.is_called and not reference.attributes:
                node.builds.add(value)
            elif attributes:
                found = inspect.getattr_static(value, attributes[0], None)
                self._otherwise(node, found, f"{place}.{attributes[0]}")
        elif place != name:
            self._otherwise(node, value, place)
        elif isinstance(value, Mapping | list | tuple | set) and _is_registry(name, value, node.function.__globals__):
            items = value.values() if isinstance(value, Mapping) else value
            node.shared += [(each, name) for each in (items if _is_plain(value) else registered(value))]
        else:
            node.uses += self.uses(value, name, "" if isinstance(value, type) else name)

    def _imported(self, node: Node, level: int, module: str, name: str) -> None:
        package = node.function.__globals__.get("__package__") or ""
        try:
            full = importlib.util.resolve_name("." * level + (module or ""), package) if level else module
        except ImportError:
            return
        if full in sys.modules and is_followed_module(full):
            self._otherwise(node, vars(sys.modules[full]).get(name), f"an import of {full} where it runs")

    def _otherwise(self, node: Node, value: Any, place: str) -> None:
        """A value that isn't reached by a global name: one of a library is named by its module and name alone."""
        if any(value is each for each in self.rules.named.values() if each is not None):
            node.uses.append(Use(value, "", place, self.rules.hit("", value)))
        elif is_followed_module(getattr(value, "__module__", None) or ""):
            node.uses += [use._replace(name="", through=use.through or place) for use in self.uses(value, place)]


def with_functions(value: Any, change: Callable[[FunctionType], Any]) -> Any:
    """A value with other functions in it; itself, if none of them changes, or if it can't be made anew."""
    parts: tuple[Any, ...]
    make: Callable[..., Any]
    if (function := without_kernel(value)) is not value:  # its copy has none: it isn't the function that one is for
        changed_function = with_functions(function, change)
        return value if changed_function is function else changed_function
    if isinstance(value, FunctionType):
        return change(value)
    if isinstance(value, staticmethod | classmethod):
        parts, make = (value.__func__,), type(value)
    elif isinstance(value, property):
        parts, make = (value.fget, value.fset, value.fdel), functools.partial(type(value), doc=value.__doc__)
    elif isinstance(value, functools.cached_property):
        parts, make = (value.func,), type(value)
    elif hasattr(value, "cache_parameters") and isinstance(getattr(value, "__wrapped__", None), FunctionType):
        parts, make = (value.__wrapped__,), functools.lru_cache(**value.cache_parameters())
    else:
        return value
    changed = [with_functions(each, change) for each in parts]
    return value if all(new is old for new, old in zip(changed, parts, strict=True)) else make(*changed)


def functions_in(value: Any) -> list[FunctionType]:
    """The functions in a value that `with_functions` makes anew."""
    found: list[FunctionType] = []

    def note(function: FunctionType) -> FunctionType:
        found.append(function)
        return function

    with_functions(value, note)
    return found


def held(value: Any) -> Iterator[FunctionType]:
    """The functions that a value holds: what is in a container, an object or a class of modeling code."""
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _HOLDS_NONE):
            continue
        seen[id(each)] = each  # held, so that no other object gets its id
        if found := functions_in(each):
            yield from found
        elif isinstance(each, MethodType):
            waiting += [each.__func__, each.__self__]
        elif isinstance(each, functools.partial | functools.partialmethod):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, Mapping):
            waiting += each.values() if _is_plain(each) else ()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting.extend(each)  # and not `+=`, of which a list of another class, as pandas has, makes one of its own
        elif isinstance(each, type):
            if not issubclass(each, (nn.Module, torch.Tensor)):
                waiting += [
                    member for cls in filter(is_followed, each.__mro__) for member in own_members(cls).values()
                ]
        else:
            own = getattr(each, "__dict__", {})
            waiting += [type(each), *own.values()] if is_followed(type(each)) else [own.get("__wrapped__")]


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of functions around it that it reads, without those that have no value, and the class it is in."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    found.pop("__class__", None)
    return found


def is_followed_module(name: str) -> bool:
    """Whether the functions of a module are looked into: those of libraries call nothing of a model."""
    return name.partition(".")[0] not in _OTHERS


def is_followed(cls: type) -> bool:
    """Whether the functions of a class are code of a model: of a modeling file, or of somebody's own class.

    What all models have of transformers (loading, generation) is not.
    """
    name = cls.__module__
    return is_architecture_module(name) or (is_followed_module(name) and not is_modeling_module(name))


def is_shared_table(value: Any) -> bool:
    """Whether a value is a registry of transformers, of a kind of its own: `ALL_ATTENTION_FUNCTIONS`."""
    kind = type(value)
    return (
        isinstance(value, Mapping)
        and not _is_plain(value)
        and is_modeling_module(kind.__module__)
        and not is_architecture_module(kind.__module__)
    )


def _is_plain(value: Any) -> bool:
    """Whether a container can be looked into: one of a kind of its own may import a file for each entry."""
    return isinstance(value, list | tuple | set | frozenset) or type(value) is dict


def _is_registry(name: str, value: Any, space: Mapping[str, Any]) -> bool:
    """Whether a table is shared by all models: transformers has it outside of the files of its models."""
    if not _is_plain(value):
        return is_shared_table(value)
    return any(
        vars(module).get(name) is value
        for home, module in list(sys.modules.items())
        if home.startswith("transformers.") and not is_architecture_module(home) and isinstance(module, ModuleType)
    )
