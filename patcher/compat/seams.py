"""Seams: functions of other libraries that functions of this package are called in place of.

    @seam("transformers.modeling_utils:PreTrainedModel.post_init")
    def post_init(stock, self):
        ...
        stock(self)

A seam is declared once, beside the function: where it is, and the parameters that the function relies on. It is
checked when it is installed, so that a release without it is named in one sentence instead of loading wrong weights.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from patcher.errors import PatcherError, unknown_release
from patcher.source.importing import is_imported, when_imported

F = TypeVar("F", bound=Callable[..., Any])

#: What a seam was before: the first argument of the function that is called in its place.
Stock = Callable[..., Any]


@dataclass(frozen=True)
class Seam:
    """One place in another library.

    Attributes:
        place: `module:name`, or `module:Class.name`.
        parameters: those that it must have.
        function: is called in its place, with the original as its first argument.
        follow: whether modules that have imported it by name get the new function as well.
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
        """What it is called in messages: `PreTrainedModel.post_init`."""
        return self.place.partition(":")[2]

    def install(self) -> None:
        """Have the function called in its place."""
        owner, name = find(self.place, *self.parameters)
        stock = inspect.getattr_static(owner, name)
        function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self.function(function, *args, **kwargs)

        for keyword in self.function.__kwdefaults__ or {}:
            known = inspect.signature(wrapped)
            if keyword not in known.parameters:
                wrapped.__signature__ = with_keyword(known, self.function, keyword)  # type: ignore[attr-defined]
        setattr(owner, name, wrapped if function is stock else type(stock)(wrapped))
        for each in list(sys.modules.values()) if self.follow else ():
            if getattr(each, "__dict__", {}).get(name) is stock:
                setattr(each, name, wrapped)


def with_keyword(signature: inspect.Signature, function: Callable[..., Any], name: str) -> inspect.Signature:
    """A signature with a keyword of another function, for `inspect.signature` and what completes with it."""
    parameters = {**signature.parameters, name: inspect.signature(function, eval_str=True).parameters[name]}
    return signature.replace(parameters=sorted(parameters.values(), key=lambda each: each.kind))


def show_in_auto_classes(module: ModuleType, function: Callable[..., Any], name: str) -> None:
    """Show a keyword of `from_pretrained` in the Auto classes, which hand on what they don't know.

    Only their signatures change: a call goes from them to the class that they choose as before. They copy bound
    methods, so without this the signatures of the copies lack their first parameter as well.
    """
    for cls in (each for each in vars(module).values() if isinstance(each, type)):
        for method in (vars(cls).get(each) for each in ("from_pretrained", "from_config")):
            if isinstance(method, classmethod):
                code = inspect.signature(method.__func__, follow_wrapped=False)
                method.__func__.__signature__ = with_keyword(code, function, name)  # type: ignore[attr-defined]


#: What is called or read of transformers besides its documented names and the seams, with the parameters.
USED = (
    ("transformers.quantizers.base:HfQuantizer.param_needs_quantization", "model", "param_name"),
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
    """Raise a `PatcherError` that names the library and its release if something of `USED` is missing."""
    for place, *parameters in USED:
        find(place, *parameters)


def find(place: str, *parameters: str) -> tuple[Any, str]:
    """The owner of what is at a place, and its name there.

    Raises:
        PatcherError: it is gone, or lacks one of the parameters; the message names the release of the library.
    """
    module, _, names = place.partition(":")
    *path, name = names.split(".")
    # What is imported may have an import that goes on to wait for us.
    owner: Any = sys.modules[module] if is_imported(module) else importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part, None)
    found, called, library = getattr(owner, name, None), f"{module}.{names}", module.partition(".")[0]
    if found is None:
        raise unknown_release(library, f"{called} is gone")
    known = inspect.signature(found).parameters if parameters else {}
    if missing := [each for each in parameters if each not in known]:
        raise unknown_release(library, f"{called} has no parameter {', '.join(missing)}")
    return owner, name


_seams: dict[Callable[..., Any], Seam] = {}
_installed: set[Seam] = set()
_awaited: set[Seam] = set()
#: Held while seams are installed. Nothing is imported meanwhile: see `when_imported`.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _lock._at_fork_reinit())  # type: ignore[attr-defined]


def seam(place: str, *parameters: str, follow: bool = False) -> Callable[[F], F]:
    """Declare that a function is called in the place of another one: see `Seam`."""

    def declared(function: F) -> F:
        _seams[function] = Seam(place, parameters, function, follow)
        return function

    return declared


def seams_in(*modules: str) -> tuple[Seam, ...]:
    """The seams that functions of some modules were declared for."""
    return tuple(each for function, each in _seams.items() if function.__module__ in modules)


def install(seams: Iterable[Seam]) -> None:
    """Install seams, all or none of those whose modules are imported, and the others as soon as theirs are.

    Raises:
        PatcherError: one is gone.
    """
    with _lock:
        ready = [each for each in seams if each not in _installed and is_imported(each.module)]
        for each in ready:
            find(each.place, *each.parameters)
        for each in ready:
            each.install()
            _installed.add(each)
        for each in set(seams) - _installed - _awaited:
            _awaited.add(each)
            when_imported(each.module, lambda _, own=each: install((own,)))  # type: ignore[misc]


def not_called(name: str) -> PatcherError:
    """The error for a seam of transformers that is there, and that it hasn't called: `PreTrainedModel.post_init`."""
    return unknown_release("transformers", f"{name} is not called where a model is loaded, or saved")
