"""`patcher=` for `from_pretrained` and `from_config`, and `applied()`: the hook, one function per place."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher import seams
from patcher.errors import InvalidPatcherError
from patcher.fingerprints import check_built, check_pins
from patcher.fusing import convert_modules, fuse_modules, prepare_fusions
from patcher.fusions.config import names_fusions, names_in_file, split_fusion_config, with_fusion_names
from patcher.patcher import Patcher
from patcher.record import record_of
from patcher.recorders import install_output_hooks
from patcher.rehearsal import Rehearsal, RehearsedSignal
from patcher.resolution import arrange, as_stock
from patcher.saving import check_saving, original_state_dict
from patcher.scope import Layer, Scope, active_scope, cover_new_classes, opened, original_class, under_construction
from patcher.session import Session, finish_by_hand, layers_in_force
from patcher.strictness import Complaints, judge_matches
from patcher.values import Values, keeping_computed

__all__ = ["applied", "install", "rehearse"]

# --- the hook ------------------------------------------------------------------------------------------------------

#: The load that this thread or task is in, and what it was asked for.
_SESSION: ContextVar[Session | None] = ContextVar("patcher_session", default=None)
_ASKED: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("patcher_asked", default=(None, {}))
#: What goes through the next load instead of it.
_REHEARSAL: ContextVar[Rehearsal | None] = ContextVar("patcher_rehearsal", default=None)

_install_lock = threading.Lock()
_installed = False


def install() -> None:
    """Teach `from_pretrained` and `from_config` the argument `patcher=`. Done once; using any public name does it.

    ```python
    import patcher

    patcher.install()
    ```

    Raises:
        PatcherError: this release of transformers lacks a seam that the hook relies on.
    """
    global _installed
    with _install_lock:
        if _installed:
            return
        seams.check()
        for place, hook in _HOOKS.items():
            owner, name, _ = seams.HOOKED[place]
            stock = inspect.getattr_static(owner, name)
            function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock
            wrapped = functools.wraps(function)(_bound(hook, function))
            kind = type(stock) if isinstance(stock, classmethod | staticmethod) else None
            setattr(owner, name, kind(wrapped) if kind is not None else wrapped)
        seams.follow_earlier_imports()
        _installed = True


def _bound(hook: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(stock, *args, **kwargs)

    return hooked


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    install()
    layer = Layer(patcher, origin)
    outer = active_scope()
    scope = Scope([layer, *(outer.layers if outer is not None else ())])
    scope.on_built = functools.partial(finish_by_hand, scope)
    check_pins(patcher)
    with opened(scope):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    complaints = Complaints()
    complaints.add(judge_matches(layer), strict=patcher.strict)
    complaints.warn()


def _from_pretrained(
    stock: Callable[..., Any], cls: type[PreTrainedModel], *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    layers, own = layers_in_force(patcher)
    session = None
    if layers:
        for layer in own:
            check_pins(layer.patcher, cls)
        session = _session(cls, layers, own)
        _check_supported(layers, args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
    token = _SESSION.set(session)
    asked = _ASKED.set((args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs))
    try:
        result = stock(cls, *args, **kwargs)
        session = _SESSION.get()  # the checkpoint's own config may have asked for one
        if session is not None:
            session.finished(result[0] if isinstance(result, tuple) else result)
        return result
    finally:
        _ASKED.reset(asked)
        _SESSION.reset(token)


def _session(cls: type[PreTrainedModel], layers: list[Layer], own: list[Layer]) -> Session:
    rehearsal = _REHEARSAL.get()
    if rehearsal is None:
        return Session(cls, layers, own)
    _REHEARSAL.set(None)
    rehearsal.set_layers(layers, own)
    return rehearsal


def rehearse(rehearsal: Rehearsal, patcher: Patcher, checkpoint: dict[str, Any], **options: Any) -> None:
    """Take a load of the rehearsal's class to where it would read.

    Raises:
        Exception: what the load would raise on its way there.
    """
    install()
    token = _REHEARSAL.set(rehearsal)
    try:
        rehearsal.model_class.from_pretrained(None, state_dict=checkpoint, patcher=patcher, **options)
    except RehearsedSignal:
        pass
    finally:
        _REHEARSAL.reset(token)


def _register_fusions(stock: Callable[..., Any], cls: type[PreTrainedModel], config: Any, fusion_config: Any) -> None:
    """Apply what `fusion_config` says under our name; the rest is transformers' own."""
    asked, rest = split_fusion_config(fusion_config)
    # An argument takes the place of what the file says, but the weights in it lie as they do.
    names = list(dict.fromkeys([*names_in_file(*_ASKED.get()), *asked]))
    if names:
        if config.fusion_config is fusion_config or config.fusion_config == fusion_config:
            # What a model's config says is how its weights lie in a file: the one in memory says nothing of a file.
            if rest:
                config.fusion_config = rest
            else:
                del config.fusion_config
        layer = Layer(Patcher(fusions=names), "fusion_config")
        _check_supported([layer], *_ASKED.get())
        session = _SESSION.get()
        if session is None:
            _SESSION.set(Session(cls, [layer], [layer]))
        else:
            session.add(layer)
    if rest:
        stock(cls, config, rest)


def _check_supported(layers: list[Layer], path: Any, kwargs: dict[str, Any]) -> None:
    """Raise for what conversions are not yet known to survive."""
    if not any(
        layer.patcher.filtered_weight_conversion_patterns
        or layer.patcher.extra_weight_conversions
        or layer.patcher.fusions
        for layer in layers
    ):
        return
    asked = [
        name for name in ("gguf_file", "tp_plan", "tp_size", "distributed_config", "device_mesh") if kwargs.get(name)
    ]
    if seams.distributed_checkpoint(path, kwargs):
        asked.append(f"the distributed checkpoint in {path}")
    if asked:
        raise InvalidPatcherError(
            f"A patcher with weight conversions was asked for together with {', '.join(asked)}, which is not "
            "supported. Load the model without the patcher, save it with save_pretrained, and load that with it."
        )


def _from_config(
    stock: Callable[..., Any],
    cls: type[PreTrainedModel],
    config: Any,
    *args: Any,
    patcher: Patcher | None = None,
    **kwargs: Any,
) -> Any:
    if patcher is None and under_construction():
        cover_new_classes()  # a part of the model under construction, whose code may just have been imported
        return stock(cls, config, *args, **kwargs)
    layers, own = layers_in_force(patcher)
    with seams.construction_lock:
        if not layers:
            return stock(cls, config, *args, **kwargs)
        for layer in own:
            check_pins(layer.patcher, cls)
        inner = Scope(layers)
        inner.on_built = functools.partial(finish_by_hand, inner)
        with opened(inner):
            model = stock(cls, config, *args, **kwargs)
    complaints = Complaints()
    for layer in own:
        complaints.add(judge_matches(layer, model_name=cls.__name__), strict=layer.patcher.strict)
    complaints.warn()
    return model


def _get_init_context(stock: Callable[..., Any], cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    contexts = list(stock(cls, *args, **kwargs))
    session = _SESSION.get()
    inner = [session.construction()] if session is not None else []
    return [_entered([seams.construction_lock, *contexts, *inner])]


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All contexts, and if one of them can't be entered, none: transformers would leave those before it entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _init(stock: Callable[..., Any], self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
    scope = active_scope()
    if scope is not None and not scope.is_sketch and not scope.is_constructing:
        scope.root = self
        prepare_fusions(scope, original_class(self) or type(self), config)  # type: ignore[arg-type]
    stock(self, config, *args, **kwargs)


def _post_init(stock: Callable[..., Any], self: PreTrainedModel) -> None:
    scope = active_scope()
    if scope is None or scope.is_sketch:
        return stock(self)  # type: ignore[no-any-return]
    is_root = scope.root is self
    if is_root:
        for layer in scope.layers:
            if layer.patcher.fingerprints:  # what the model is made of is all imported now
                classes = {original_class(module) or type(module) for module in self.modules()}
                home = (original_class(self) or type(self)).__module__
                check_built(layer.patcher, classes, home, all_there=layer.origin == "patcher=")
        fuse_modules(scope, self)
    with keeping_computed(scope):
        stock(self)
    if is_root:
        convert_modules(scope, self)
    names: dict[str, set[str]] = {}
    for module in self.modules():
        original = original_class(module)
        if original is not None:
            names.setdefault(original.__name__, set()).add(type(module).__name__)
    seams.follow_no_split_names(self, names)
    if is_root and scope.on_built is not None and original_class(self) is None:
        scope.on_built(self)  # a replacement goes on after `post_init`, if it has called that through `super()`
    return None


def _conversion_mapping(
    stock: Callable[..., Any],
    model: PreTrainedModel,
    key_mapping: dict[str, str] | None = None,
    hf_quantizer: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    session = _SESSION.get()
    if session is None:
        return stock(model, key_mapping, hf_quantizer, *args, **kwargs)
    if session.model is None:  # a model that never called `post_init`
        session.built(model)
    session.key_mapping = key_mapping
    with as_stock(model):
        return stock(model, key_mapping, _BeforeQuantizer(hf_quantizer, session.conversions), *args, **kwargs)


def _conversions_of(stock: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The conversions of a model that stands, as whoever loads an adapter into it asks for them."""
    record = record_of(model)
    if record is None:
        return stock(model, *args, **kwargs)
    with as_stock(model):
        conversions = stock(model, *args, **kwargs)
    arranged = arrange(conversions, record.layers(), record.fusion_transforms)
    return [*map(seams.copy_transform, arranged.added), *arranged.kept]


class _BeforeQuantizer:
    """Passes for the quantizer where transformers lets that adapt the conversions, to edit them just before."""

    def __init__(self, quantizer: Any, edit: Callable[[list[Any]], list[Any]]) -> None:
        self._quantizer = quantizer
        self._edit = edit

    def update_weight_conversions(self, conversions: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        edited = self._edit(conversions)
        if self._quantizer is None:
            return edited
        adapted: list[Any] = self._quantizer.update_weight_conversions(edited, *args, **kwargs)
        return adapted


def _convert_and_load(
    stock: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: dict[str, Any],
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    session = _SESSION.get()
    if isinstance(session, Rehearsal):
        session.rehearse(model, state_dict, load_config)
    result = stock(model, state_dict, load_config, *args, **kwargs)
    if session is not None:
        session.read(model, state_dict, load_config, result[0])
        session.disk_index = result[1]
    return result


def _finalize(stock: Callable[..., Any], model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
    session = _SESSION.get()
    with seams.construction_lock:
        if session is None or session.model is not model:
            return stock(model, load_config, loading_info)
        values = Values(model, session.scope, session.intent, loading_info, session.disk_index)
        info = stock(model, load_config, loading_info)
        values.put_back(load_config)
        return info


#: The model that this thread is saving, and whether in the original format.
_SAVING: ContextVar[tuple[PreTrainedModel | None, bool]] = ContextVar("patcher_saving", default=(None, True))


def _save_pretrained(stock: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if record_of(self) is None and not names_fusions(self.config):
        return stock(self, *args, **kwargs)
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    check_saving(self, arguments.arguments["state_dict"], arguments.arguments["save_original_format"])
    token = _SAVING.set((self, arguments.arguments["save_original_format"]))
    try:
        return stock(self, *args, **kwargs)
    finally:
        _SAVING.reset(token)


def _save_config(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    model, original_format = _SAVING.get()
    if model is None or model.config is not self:
        return stock(self, *args, **kwargs)
    record = record_of(model)
    if record is not None:
        self.architectures = [record.model_class.__name__]
    # Names stand in the file if the weights beside it lie so: a config that was read from elsewhere may say otherwise.
    before = self.__dict__.get("fusion_config")
    after = with_fusion_names(before, () if original_format or record is None else record.fusions)
    if after == (before or {}):
        return stock(self, *args, **kwargs)
    self.fusion_config = after
    try:
        if not after:
            del self.fusion_config
        return stock(self, *args, **kwargs)
    finally:
        if before is None:
            del self.fusion_config
        else:
            self.fusion_config = before


def _revert(stock: Callable[..., Any], model: nn.Module, state_dict: dict[str, Any]) -> Any:
    return original_state_dict(model, state_dict) if record_of(model) is not None else stock(model, state_dict)  # type: ignore[arg-type]


# What stands at each place that `seams.HOOKED` names.
_HOOKS: dict[str, Callable[..., Any]] = {
    "load": _from_pretrained,
    "fusion config": _register_fusions,
    "make": _from_config,
    "construction contexts": _get_init_context,
    "construct": _init,
    "constructed": _post_init,
    "conversions": _conversion_mapping,
    "conversions of others": _conversions_of,
    "conversions of adapters": _conversions_of,
    "read": _convert_and_load,
    "finish": _finalize,
    "save": _save_pretrained,
    "save config": _save_config,
    "give back": _revert,
    "record outputs": install_output_hooks,
}
