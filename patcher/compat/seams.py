"""Seams: functions of other libraries that this package wraps.

    @seam("transformers.modeling_utils:PreTrainedModel.post_init")
    def post_init(stock, self):
        ...
        stock(self)

A seam declares the place of the function and the parameters that the wrapper relies on. Both are checked when it is
installed, so that a library release without them raises a clear error instead of loading wrong weights.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from patcher.compat.locks import lock_for_forks
from patcher.errors import PatcherError, unknown_release
from patcher.source.importing import is_imported, when_imported

F = TypeVar("F", bound=Callable[..., Any])

#: The wrapped function: the first argument of the wrapper.
Stock = Callable[..., Any]


@dataclass(frozen=True)
class Seam:
    """A function of another library that is wrapped.

    Attributes:
        place: `module:name` or `module:Class.name`.
        parameters: those that it must have.
        function: the wrapper, called with the wrapped function as its first argument.
        follow: whether to replace the function in modules that have imported it by name too.
    """

    place: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]
    follow: bool = False

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """The name in messages: `PreTrainedModel.post_init`."""
        return self.place.partition(":")[2]

    def install(self) -> None:
        """Wrap the function."""
        owner, name = find(self.place, *self.parameters)
        stock = inspect.getattr_static(owner, name)
        function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self.function(function, *args, **kwargs)

        for keyword in self.function.__kwdefaults__ or {}:
            signature = inspect.signature(wrapped)
            if keyword not in signature.parameters:
                wrapped.__signature__ = with_keyword(signature, self.function, keyword)  # type: ignore[attr-defined]
        setattr(owner, name, wrapped if function is stock else type(stock)(wrapped))
        for module in list(sys.modules.values()) if self.follow else ():
            if getattr(module, "__dict__", {}).get(name) is stock:
                setattr(module, name, wrapped)


def with_keyword(signature: inspect.Signature, function: Callable[..., Any], name: str) -> inspect.Signature:
    """Return a signature with a keyword parameter of another function, for `inspect.signature` and completion."""
    parameters = {**signature.parameters, name: inspect.signature(function, eval_str=True).parameters[name]}
    return signature.replace(parameters=sorted(parameters.values(), key=lambda parameter: parameter.kind))


def show_in_auto_classes(module: ModuleType, function: Callable[..., Any], name: str) -> None:
    """Add a keyword of `from_pretrained` to the signatures of the Auto classes, which pass it on.

    Their methods are copies of bound methods, so without this their signatures lack the first parameter too.
    """
    for cls in filter(inspect.isclass, vars(module).values()):
        for method in (vars(cls).get("from_pretrained"), vars(cls).get("from_config")):
            if isinstance(method, classmethod):
                signature = inspect.signature(method.__func__, follow_wrapped=False)
                method.__func__.__signature__ = with_keyword(signature, function, name)  # type: ignore[attr-defined]


#: Private names of transformers that are used besides the seams, with the required parameters.
USED = (
    (
        "transformers.utils.output_capturing:install_output_capuring_hook",
        *("module", "key", "index", "capture_initial_hidden_state"),
    ),
    ("transformers.utils.output_capturing:_CAN_RECORD_REGISTRY",),
    ("transformers.distributed.tensor_parallel:replace_layer_number_by_wildcard", "name"),
    ("transformers.modeling_utils:PreTrainedModel.mark_tied_weights_as_initialized", "loading_info"),
    ("transformers.modeling_utils:PreTrainedModel.tie_weights", "missing_keys", "recompute_mapping"),
    ("transformers.modeling_utils:PreTrainedModel._adjust_missing_and_unexpected_keys", "loading_info"),
    ("transformers.core_model_loading:WeightTransform.rename_source_key", "source_key"),
    (
        "transformers.core_model_loading:WeightTransform.add_tensor",
        *("target_key", "source_key", "source_pattern", "future"),
    ),
    ("transformers.core_model_loading:WeightTransform.reverse_transform",),
    ("transformers.core_model_loading:WeightTransform._original_source_patterns",),
    ("transformers.core_model_loading:WeightTransform._was_used",),
)


def check_used() -> None:
    """Raise a `PatcherError` if something of `USED` is missing in this release."""
    for place, *parameters in USED:
        find(place, *parameters)


def find(place: str, *parameters: str) -> tuple[Any, str]:
    """Return the owner and the name of a function or attribute.

    Raises:
        PatcherError: if it is gone or lacks a parameter; the message names the release of the library.
    """
    module, _, names = place.partition(":")
    *path, name = names.split(".")
    # Importing an imported module again could wait for the lock of an import that waits for this one.
    owner: Any = sys.modules[module] if is_imported(module) else importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part, None)
    value, library = getattr(owner, name, None), module.partition(".")[0]
    if value is None:
        raise unknown_release(library, f"{module}.{names} is gone")
    actual = inspect.signature(value).parameters if parameters else {}
    if missing := [parameter for parameter in parameters if parameter not in actual]:
        raise unknown_release(library, f"{module}.{names} has no parameter {', '.join(missing)}")
    return owner, name


_seams: dict[Callable[..., Any], Seam] = {}
_installed: set[Seam] = set()
_awaited: set[Seam] = set()
#: Held while seams are installed, without importing anything: see `when_imported`.
_lock = lock_for_forks()


def seam(place: str, *parameters: str, follow: bool = False) -> Callable[[F], F]:
    """Declare a function as the wrapper of another one: see `Seam`."""

    def declare(function: F) -> F:
        _seams[function] = Seam(place, parameters, function, follow)
        return function

    return declare


def seams_in(*modules: str) -> tuple[Seam, ...]:
    """Return the seams that are declared in some modules."""
    return tuple(seam for function, seam in _seams.items() if function.__module__ in modules)


def install(seams: Iterable[Seam]) -> None:
    """Install all or none of the seams whose modules are imported, and each other one when its module is.

    Raises:
        PatcherError: if one is gone.
    """
    with _lock:
        ready = [seam for seam in seams if seam not in _installed and is_imported(seam.module)]
        for seam in ready:
            find(seam.place, *seam.parameters)
        for seam in ready:
            seam.install()
            _installed.add(seam)
        for seam in set(seams) - _installed - _awaited:
            _awaited.add(seam)
            when_imported(seam.module, lambda _, seam=seam: install((seam,)))  # type: ignore[misc]


def not_called(name: str) -> PatcherError:
    """Return the error for a seam that exists but that transformers no longer calls."""
    return unknown_release("transformers", f"{name} is not called where a model is loaded, or saved")
