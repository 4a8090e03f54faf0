"""Which classes are built as others, where, and for how long: per thread and task, and undone exactly.

No name is rebound. While a scope is open, the `__init__` of each class that a mapping names is a gate: when it is
called for an object of exactly that class, in the context that opened the scope, the object becomes one of the
replacement and is initialised as such. So it doesn't matter where modeling code finds the class (a module attribute,
an alias, a table, a function that imports it late), and for every other thread the class is what it always was: it can
be pickled, subclassed and compared meanwhile.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from patcher import matching
from patcher.bindings import Bindings
from patcher.errors import PatchConflictError, PatchConstructionError
from patcher.materialize import Materialization, watching_parameters
from patcher.patcher import Patcher

__all__ = ["Built", "Layer", "Match", "Scope", "active_scope", "opened", "original_class", "under_construction"]

_ACTIVE: ContextVar[Scope | None] = ContextVar("patcher_scope", default=None)

#: On a replaced module: the class that it was built for.
ORIGINAL = "_patcher_original"


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module was built in place of, if it is a replacement."""
    return module.__dict__.get(ORIGINAL)


@dataclass(frozen=True, eq=False)
class Layer:
    """A patcher and how it came into force: `patcher=`, `applied()` or the process-wide registry."""

    patcher: Patcher
    origin: str
    #: what has had an effect, over all that was built in this layer: class keys, filters, conversions, fusions
    matched: set[Any] = field(default_factory=set)
    #: what the built models have, by kind, to name what was probably meant
    candidates: dict[str, set[str]] = field(default_factory=dict)
    #: how many checkpoints were read: conversions have a say only there
    reads: list[str] = field(default_factory=list)

    @property
    def is_registry(self) -> bool:
        return self.origin == "monkey_patching"


@dataclass(frozen=True)
class Match:
    #: the class key, or the fusion, that asked for it
    key: Any
    replacement: type[nn.Module]
    layer: Layer


@dataclass(eq=False)
class Built:
    """One replacement that was built, and how: enough to build it again."""

    module: nn.Module
    original: type[nn.Module]
    replacement: type[nn.Module]
    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: not a part of another replacement
    outermost: bool


class Scope:
    """What is replaced in one context: layers, the innermost first, and what was built under them."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = tuple(layers)
        self.open = True
        #: built for its names and shapes only: no fusions, no judgement
        self.is_sketch = False
        #: buffers go to the meta device too, so that not even the largest replacement takes any memory
        self.on_meta = False
        self.built: list[Built] = []
        #: classes whose constructor arguments are kept, and object -> (object, args, kwargs): fusions rebuild them
        self.recorded: frozenset[type[nn.Module]] = frozenset()
        self.arguments: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        #: the outermost model under construction, its resolution, and what to do when its modules stand
        self.root: nn.Module | None = None
        self.resolution: Any = None
        self.on_built: Callable[[Any], None] | None = None
        self._building: list[nn.Module] = []
        self._matches: dict[type[nn.Module], Match | None] = {}
        keys = [(key, layer.is_registry) for layer in self.layers for key in layer.patcher.class_mapping]
        self._exact = frozenset(key for key, _ in keys)
        self._expressions = [key for key, loose in dict.fromkeys(keys) if loose or matching.is_expression(key)]
        self._replacements = frozenset(cls for layer in self.layers for cls in layer.patcher.class_mapping.values())

    def match(self, cls: type[nn.Module]) -> Match | None:
        """What is built in place of `cls`. Innermost layer first; within one, an exact name before an expression.

        Raises:
            PatchConflictError: two expressions of a layer ask for different replacements.
        """
        if cls not in self._matches:
            self._matches[cls] = self._find(cls)
        return self._matches[cls]

    def _find(self, cls: type[nn.Module]) -> Match | None:
        matches = (self._match_in(layer, cls) for layer in self.layers)
        return next((match for match in matches if match is not None), None)

    def _match_in(self, layer: Layer, cls: type[nn.Module]) -> Match | None:
        key = self._key(layer, cls)
        return None if key is None else Match(key, layer.patcher.class_mapping[key], layer)

    def _key(self, layer: Layer, cls: type[nn.Module]) -> str | None:
        key = matching.find_key(cls.__name__, layer.patcher.class_mapping, names_too=layer.is_registry)
        # An expression is about modeling code, not about the replacements that stand beside it.
        return key if key == cls.__name__ or cls not in self._replacements else None

    def match_bound(self, cls: type[nn.Module], name: str) -> Match | None:
        """What is built where modeling code has bound `cls` to `name`: to the registry the name counts as well."""
        for layer in self.layers:
            if layer.is_registry:
                mapping = layer.patcher.class_mapping
                key = matching.find_key(name, mapping, names_too=True)
                if key is not None and mapping[key] is not cls:
                    return Match(key, mapping[key], layer)
            match = self._match_in(layer, cls)
            if match is not None:
                return match
        return None

    def meant(self) -> list[type[nn.Module]]:
        """All classes whose name is a key of some mapping, or has a key found in it, and those to be recorded."""
        found = matching.module_subclasses(self._is_meant if self._expressions else self._exact.__contains__)
        return list(dict.fromkeys([*found, *self.recorded]))

    def _is_meant(self, name: str) -> bool:
        return name in self._exact or any(matching.search(text, name) for text in self._expressions)

    def concerns(self, cls: type[nn.Module], name: str = "") -> bool:
        """Whether a mapping names `cls`. Two expressions that disagree about it are an error when it is built."""
        try:
            return self.match_bound(cls, name or cls.__name__) is not None
        except PatchConflictError:
            return True

    def note(self, cls: type[nn.Module], layer: Layer) -> None:
        """Write down that the keys for `cls` have done their part, those included that inner layers override."""
        for outer in self.layers[self.layers.index(layer) :]:
            if self._key(outer, cls) is not None:
                outer.matched.update(
                    matching.hits(cls.__name__, outer.patcher.class_mapping, names_too=outer.is_registry)
                )

    @property
    def outermost(self) -> bool:
        return not self._building

    @property
    def is_constructing(self) -> bool:
        """Whether a model is being built right now, so that what is built is a part of it."""
        if self.root is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self.root:
                return True
            frame = frame.f_back
        return False

    def decides(self, module: nn.Module | None, caller: FrameType | None) -> bool:
        """Whether this construction is up to the scope.

        Inside of a replacement's own code a class is what its name says: only what modeling code builds there is
        replaced. Otherwise a replacement could not wrap an object of the class that it replaces.
        """
        if not self.open or (module is not None and any(module is building for building in self._building)):
            return False
        if not self._building:
            return True
        name = caller.f_globals.get("__name__", "") if caller is not None else ""
        return matching.is_modeling_module(name)

    def fusion_of(self, path: str) -> tuple[Any, Layer]:
        """The fusion that takes the module at `path`, and the layer that asks for it."""
        for fusion, paths in self.resolution.by_fusion.items():
            if path in paths:
                return fusion, next(layer for layer in self.layers if fusion in layer.patcher.fusions)
        raise KeyError(path)

    def rebuild(self, built: Built, wanted: Iterable[int]) -> dict[int, nn.Parameter]:
        """Build a replacement once more, for the values that its `__init__` gives to some of its parameters."""
        module = built.original.__new__(built.original)
        materialization = Materialization(wanted)
        self._building.append(module)
        try:
            materialization.construct(module, built.original, built.replacement, built.args, built.kwargs)
        finally:
            self._building.pop()
        return materialization.kept

    def build(
        self, module: nn.Module, original: type[nn.Module], match: Match, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make an object of `original` one of its replacement."""
        built = Built(module, original, match.replacement, match.layer, args, kwargs, self.outermost)
        module.__dict__[ORIGINAL] = original
        self._building.append(module)
        try:
            if not (self.on_meta and self._built_on_meta(module, original, match, args, kwargs)):
                Materialization.current().construct(module, original, match.replacement, args, kwargs)
        finally:
            self._building.pop()
        module.__dict__[ORIGINAL] = original  # again: `__init__` may have started from an empty `__dict__`
        for layer in self.layers[self.layers.index(match.layer) :]:
            if layer is match.layer or match.key in layer.patcher.fusions:
                layer.matched.add(match.key)
        self.note(original, match.layer)
        self.built.append(built)
        if module is self.root and self.on_built is not None:
            self.on_built(module)

    def _built_on_meta(
        self, module: nn.Module, original: type[nn.Module], match: Match, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the replacement could be built without a value; if it looks at one it has to be real."""
        count = len(self.built)
        try:
            Materialization.on_meta().construct(module, original, match.replacement, args, kwargs)
        except PatchConstructionError:
            del self.built[count:]
            module.__class__ = original
            module.__dict__.clear()
            module.__dict__[ORIGINAL] = original
            return False
        return True


def active_scope() -> Scope | None:
    """The scope of this thread or task, if one is open."""
    scope = _ACTIVE.get()
    return scope if scope is not None and scope.open else None


def under_construction() -> bool:
    """Whether a model is being built here under a patcher, so that what is built now is a part of it."""
    scope = active_scope()
    return scope is not None and (scope.is_sketch or scope.is_constructing)


@contextmanager
def opened(scope: Scope) -> Iterator[Scope]:
    """Put a scope into force in this context. On exit nothing of it is left anywhere."""
    gates = _Gates(scope)
    token = None
    try:
        with watching_parameters():
            gates.bindings.add_all(gates.add_all())
            token = _ACTIVE.set(scope)
            yield scope
    finally:
        scope.open = False
        if token is not None:
            _ACTIVE.reset(token)
        gates.remove_all()


def cover_new_classes() -> None:
    """Put gates on classes that came into being after the scope was opened, other than by an import."""
    with _lock:
        current = list(_Gates.active)
    for gates in current:
        gates.add_all()


# --- gates ---------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_MISSING = object()


class _Gate:
    """The `__init__` of one class, as long as some scope needs it; scopes that overlap share it."""

    installed: dict[type[nn.Module], _Gate] = {}  # noqa: RUF012 - the registry of this class

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls
        self.users = 0
        self.before = cls.__dict__.get("__init__", _MISSING)
        self.function = _gate_function(cls, None if self.before is _MISSING else self.before)
        cls.__init__ = self.function  # type: ignore[method-assign]

    def remove(self) -> None:
        # Somebody who has replaced `__init__` meanwhile keeps theirs; what they wrapped goes on passing through.
        if self.cls.__dict__.get("__init__") is self.function:
            if self.before is _MISSING:
                del self.cls.__init__
            else:
                self.cls.__init__ = self.before  # type: ignore[method-assign]


def _gate_function(cls: type[nn.Module], before: Any) -> Callable[..., None]:
    @functools.wraps(cls.__init__)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        scope = _ACTIVE.get()
        if scope is not None and type(self) is cls and scope.decides(self, sys._getframe(1)):
            match = scope.match(cls)
            if match is not None and match.replacement is not cls:
                scope.build(self, cls, match, args, kwargs)
                return
            if match is not None:  # the class itself, whatever the outer layers say
                scope.note(cls, match.layer)
            if cls in scope.recorded:
                scope.arguments[id(self)] = (self, args, kwargs)
        if before is None:
            super(cls, self).__init__(*args, **kwargs)
        else:
            before(self, *args, **kwargs)

    return __init__


class _Gates:
    """The gates of one scope."""

    active: set[_Gates] = set()  # noqa: RUF012 - the open scopes of the process

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.mine: set[type[nn.Module]] = set()
        self.bindings = Bindings(scope)
        self._custom: set[str] = set()
        with _lock:
            _Gates.active.add(self)
            if len(_Gates.active) == 1:
                sys.meta_path.insert(0, _watcher)

    def add_all(self) -> list[type[nn.Module]]:
        """Put gates on all classes of modeling code that are meant.

        Returns:
            The other classes that are meant by name.
        """
        scope = self.scope
        meant = [cls for cls in scope.meant() if cls not in self.mine]
        if all(matching.is_modeling_module(cls.__module__) for cls in meant):
            self._custom = set()
        else:
            self._custom = matching.custom_modeling_modules()
        for cls in meant:
            self.add(cls)
        return [cls for cls in meant if cls not in self.mine]

    def add(self, cls: type[nn.Module]) -> None:
        if cls in self.mine or not (matching.is_modeling_module(cls.__module__) or cls.__module__ in self._custom):
            return
        if not self.scope.concerns(cls) and cls not in self.scope.recorded:
            return
        with _lock:
            if self not in _Gates.active:
                return  # the scope was left meanwhile, by another thread than the one that imports
            gate = _Gate.installed.get(cls)
            if gate is None:
                gate = _Gate.installed[cls] = _Gate(cls)
            gate.users += 1
            self.mine.add(cls)

    def remove_all(self) -> None:
        with _lock:
            _Gates.active.discard(self)
            if not _Gates.active and _watcher in sys.meta_path:
                sys.meta_path.remove(_watcher)
            self.bindings.remove_all()
            while self.mine:
                gate = _Gate.installed[self.mine.pop()]
                gate.users -= 1
                if gate.users == 0:
                    del _Gate.installed[gate.cls]
                    gate.remove()


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Sees modeling modules that are first imported while a scope is open, and has their classes covered."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not matching.is_modeling_module(name) or getattr(self._searching, "on", False):
            return None
        self._searching.on = True
        try:
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        if isinstance(spec.loader, importlib.abc.Loader):
                            spec.loader = _CoveringLoader(spec.loader)
                        return spec
        finally:
            self._searching.on = False
        return None


class _CoveringLoader(importlib.abc.Loader):
    """Lets the real loader work, takes itself out of the module, and covers its classes."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with _lock:
            current = list(_Gates.active)
        classes = [
            value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        for gates in current:
            for cls in classes:
                gates.add(cls)
            with _lock:
                if gates in _Gates.active:
                    gates.bindings.add(module)


_watcher = _ImportWatcher()
