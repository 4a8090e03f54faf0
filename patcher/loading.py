"""`patcher=` for `from_pretrained` and `from_config`: the hook, and the course of one load."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import PreTrainedModel

from patcher import seams
from patcher.conversions import describe, journal_of, track
from patcher.errors import InvalidPatcherError, PatchedWeightsError, PatcherWarning
from patcher.fusing import fuse_modules, prepare_fusions
from patcher.patcher import Patcher
from patcher.record import PatchRecord, Replaced, keep_record, record_of
from patcher.recorders import install_output_hooks
from patcher.resolution import Arranged, arrange, as_stock, skeleton
from patcher.saving import check_saving, original_state_dict
from patcher.scope import Layer, Scope, active_scope, cover_new_classes, opened, original_class
from patcher.strictness import (
    Complaints,
    class_names,
    judge_matches,
    judge_weights,
    note_conversions,
    stock_outcome,
)
from patcher.values import Values, forget_indices, keep_new_weights

__all__ = ["applied", "install", "process_wide", "set_process_wide"]

# --- what is in force ----------------------------------------------------------------------------------------------

#: The patcher of `patcher.monkey_patching`: one value, replaced as a whole.
_process_wide: Patcher | None = None


def process_wide() -> Patcher:
    """The patcher that every load of this process meets."""
    return _process_wide or Patcher(strict=False)


def set_process_wide(patcher: Patcher) -> None:
    global _process_wide
    _process_wide = patcher if patcher.class_mapping else None


def registry_layer() -> Layer | None:
    """The process-wide registry as a layer, if anything is registered."""
    current = _process_wide
    return None if current is None else Layer(current, "monkey_patching")


def _layers_in_force(patcher: Any) -> tuple[list[Layer], list[Layer]]:
    """All layers, the innermost first, and those of them that this very call has put in force."""
    own: list[Layer] = []
    if patcher is not None:
        if not isinstance(patcher, Patcher):
            raise InvalidPatcherError(
                f"patcher= takes a patcher.Patcher, found {patcher!r} ({type(patcher).__name__}); "
                'write patcher=Patcher({"LlamaMLP": MyMLP}).'
            )
        own.append(Layer(patcher, "patcher="))
    scope = active_scope()
    layers = [*own, *(scope.layers if scope is not None else ())]
    registry = registry_layer()
    if registry is not None and not any(layer.is_registry for layer in layers):
        layers.append(registry)
    return [layer for layer in layers if layer.patcher or layer in own], own


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    install()
    layer = Layer(patcher, origin)
    outer = active_scope()
    scope = Scope([layer, *(outer.layers if outer is not None else ())])
    scope.on_built = functools.partial(_finish_by_hand, scope)
    _check_pins(patcher)
    with opened(scope):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    complaints = Complaints()
    complaints.add(judge_matches(layer), strict=patcher.strict)
    complaints.warn()


def _check_pins(patcher: Patcher) -> None:
    """The fingerprints decide, the release alone is worth a warning."""
    from patcher.fingerprints import check

    check(patcher)
    if patcher.transformers and not SpecifierSet(patcher.transformers).contains(
        transformers.__version__, prereleases=True
    ):
        warnings.warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on transformers "
            f"{patcher.transformers}, installed is {transformers.__version__}.",
            PatcherWarning,
            stacklevel=2,
        )


# --- one load ------------------------------------------------------------------------------------------------------

_SESSION: ContextVar[Session | None] = ContextVar("patcher_session", default=None)


class Session:
    """One `from_pretrained` under some layers, from the first line to the finished model."""

    def __init__(self, model_class: type[PreTrainedModel], layers: list[Layer], own: list[Layer]) -> None:
        self.model_class = model_class
        self.layers = layers
        self.own = own
        self.complaints = Complaints()
        self.scope = Scope(layers)
        self.scope.on_built = self.built
        self.model: PreTrainedModel | None = None
        self.record: PatchRecord | None = None
        self.arranged = Arranged([], [], [])
        self.tracked: list[Any] = []
        self.key_mapping: dict[str, str] | None = None
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.has_read = False

    @property
    def strict(self) -> bool:
        return any(layer.patcher.strict for layer in self.layers if not layer.is_registry)

    @contextmanager
    def construction(self) -> Iterator[None]:
        """While `cls(config)` runs."""
        started = time.perf_counter()
        with opened(self.scope):
            yield
        self.seconds["construction"] = time.perf_counter() - started
        for layer in self.own:
            self.complaints.add(judge_matches(layer, model_name=self._name), strict=layer.patcher.strict)

    @property
    def _name(self) -> str:
        return self.model_class.__name__

    def built(self, model: PreTrainedModel) -> None:
        """The modules stand, on meta; no weight has been read."""
        self.model = model
        self.record = _record(model, self.scope)

    def conversions(self, stock: list[Any]) -> list[Any]:
        """The conversions of this load, from those of transformers: before the quantizer adapts them."""
        asked = len(self.key_mapping or ())  # what the user's key_mapping asks for runs first and is never filtered
        fusions = self.record.fusion_transforms if self.record is not None else ()
        self.arranged = arrange(stock[asked:], self.layers, fusions)
        self.tracked = [track(transform) for transform in self.arranged.added]
        return [*stock[:asked], *self.tracked, *self.arranged.kept]

    def read(self, model: PreTrainedModel, checkpoint: dict[str, Any], load_config: Any, info: Any) -> None:
        """The weights have been read: put down what was done, and see whether it is what was asked for."""
        if self.record is None or self.has_read:
            return
        self.has_read = True
        self.seconds["reading"] = time.perf_counter() - self.started - self.seconds.get("construction", 0.0)
        journals = [journal for item in self.tracked if (journal := journal_of(item)) is not None]
        mapping = load_config.weight_mapping or []
        for journal, item in zip(journals, self.tracked, strict=True):
            # A quantizer that has rewritten a conversion has made one that nobody can follow.
            journal.lost = not any(item is other for other in mapping)
        for journal in journals:
            if journal.failed:
                text = next(
                    (str(info.conversion_errors[key]) for key in journal.failed if key in info.conversion_errors), ""
                )
                raise PatchedWeightsError(
                    f"{describe(journal.transform)} failed for {', '.join(journal.failed[:3])}: "
                    f"{text.strip().splitlines()[-2] if len(text.strip().splitlines()) > 1 else text}\n"
                    "Check the patterns, the order of the sources and the operations of this conversion."
                )
        parameters = set(model.state_dict())
        fired = [journal for journal in journals if journal.had_effect(parameters, model.base_model_prefix)]
        note_conversions(
            self.layers,
            self.arranged.dropped,
            fired,
            [*self.arranged.kept, *(t for t, _ in self.arranged.dropped)],
            checkpoint,
        )
        used = [item for item in mapping if journal_of(item) is None and seams.was_used(item)]
        seams.set_used_conversions(model, used)
        self.record.conversions = tuple(
            journal_of(item) or item
            for item in [*self.tracked_lost(mapping), *mapping]
            if journal_of(item) is not None or seams.was_used(item)
        )
        self.record.dropped = tuple(self.arranged.dropped)
        self.record.read = True
        for layer in self.own:
            self.complaints.texts.clear()  # said again, with all that was read
            self.complaints.add(judge_matches(layer, model_name=self._name), strict=layer.patcher.strict)
        mismatched = {
            name: f"found {tuple(found)}, expected {tuple(shape)}" for name, found, shape in info.mismatched_keys
        }
        found = judge_weights(
            model,
            self.record.replaced,
            self.layers,
            missing=set(info.missing_keys),
            mismatched=mismatched,
            unexpected=set(info.unexpected_keys),
            stock_outcome=lambda: stock_outcome(
                skeleton(self.record_class, model.config), self.key_mapping, checkpoint
            ),
        )
        self.record.new_weights, self.record.dropped_weights = found.new, found.dropped
        self.complaints.add(found.error, strict=self.strict)

    @property
    def record_class(self) -> type[PreTrainedModel]:
        assert self.record is not None
        return self.record.model_class

    def tracked_lost(self, mapping: list[Any]) -> list[Any]:
        return [item for item in self.tracked if not any(item is other for other in mapping)]

    def finished(self, model: PreTrainedModel) -> None:
        if self.record is not None:
            self.seconds["total"] = time.perf_counter() - self.started
            self.record.seconds = self.seconds
            self.record.warnings = tuple(self.complaints.texts)
            keep_record(model, self.record)
        self.scope.built.clear()
        self.scope.arguments.clear()
        self.complaints.warn()


def _record(model: PreTrainedModel, scope: Scope) -> PatchRecord:
    chosen = {id(built.module): not built.layer.is_registry for built in scope.built}
    fused = scope.resolution.fused if scope.resolution is not None else {}
    replaced, fused_as = [], {}
    for path, module in model.named_modules(remove_duplicate=False):
        original = original_class(module)
        if original is not None:
            if path in fused:
                fused_as[path] = (original, type(module))
            replaced.append(Replaced(path, original, type(module), chosen.get(id(module), True)))
    names = class_names(model)
    for layer in scope.layers:
        layer.candidates.setdefault("classes", set()).update(names)
        if scope.resolution is not None:
            layer.candidates.setdefault("refused", set()).update(
                f"{path} ({reason})" for path, reason in scope.resolution.refused.items()
            )
    return PatchRecord(
        model_class=original_class(model) or type(model),  # type: ignore[arg-type]
        patchers=tuple((layer.patcher, layer.origin) for layer in scope.layers),
        replaced=tuple(replaced),
        fused=fused_as,
        refused=dict(scope.resolution.refused) if scope.resolution is not None else {},
        fusion_transforms=scope.resolution.fusion_transforms if scope.resolution is not None else (),
    )


def _finish_by_hand(scope: Scope, model: PreTrainedModel) -> None:
    """A model made without a checkpoint stands: `Model(config)` in a block, or `from_config`."""
    record = _record(model, scope)
    keep_new_weights(model, scope, [text for layer in scope.layers for text in layer.patcher.new_weights])
    forget_indices(model)
    keep_record(model, record)
    scope.built.clear()
    scope.arguments.clear()


# --- the hook ------------------------------------------------------------------------------------------------------

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
        for owner, name, hook in _HOOKS:
            stock = inspect.getattr_static(owner, name)
            function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock
            wrapped = functools.wraps(function)(_bound(hook, function))
            kind = type(stock) if isinstance(stock, classmethod | staticmethod) else None
            setattr(owner, name, kind(wrapped) if kind is not None else wrapped)
        _installed = True


def _bound(hook: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(stock, *args, **kwargs)

    return hooked


def _from_pretrained(
    stock: Callable[..., Any], cls: type[PreTrainedModel], *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    layers, own = _layers_in_force(patcher)
    session = None
    if layers:
        for layer in own:
            _check_pins(layer.patcher)
        session = Session(cls, layers, own)
        _check_supported(layers, args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
    token = _SESSION.set(session)
    try:
        result = stock(cls, *args, **kwargs)
        if session is not None:
            session.finished(result[0] if isinstance(result, tuple) else result)
        return result
    finally:
        _SESSION.reset(token)


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
            f"A patcher with weight conversions was asked for together with {', '.join(asked)}, which is not supported. "
            "Load the model without the patcher, save it with save_pretrained, and load that with the patcher."
        )


def _from_config(
    stock: Callable[..., Any],
    cls: type[PreTrainedModel],
    config: Any,
    *args: Any,
    patcher: Patcher | None = None,
    **kwargs: Any,
) -> Any:
    scope = active_scope()
    if patcher is None and scope is not None and (scope.is_sketch or scope.is_constructing):
        cover_new_classes()  # a part of the model under construction, whose code may just have been imported
        return stock(cls, config, *args, **kwargs)
    layers, own = _layers_in_force(patcher)
    with seams.construction_lock:
        if not layers:
            return stock(cls, config, *args, **kwargs)
        for layer in own:
            _check_pins(layer.patcher)
        inner = Scope(layers)
        inner.on_built = functools.partial(_finish_by_hand, inner)
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
    return [seams.construction_lock, *contexts, *inner]


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
        fuse_modules(scope, self)
    stock(self)
    names: dict[str, set[str]] = {}
    for module in self.modules():
        original = original_class(module)
        if original is not None:
            names.setdefault(original.__name__, set()).add(type(module).__name__)
    seams.follow_no_split_names(self, names)
    if is_root and scope.on_built is not None:
        scope.on_built(self)
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
    result = stock(model, state_dict, load_config, *args, **kwargs)
    session = _SESSION.get()
    if session is not None:
        session.read(model, state_dict, load_config, result[0])
    return result


def _finalize(stock: Callable[..., Any], model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
    session = _SESSION.get()
    with seams.construction_lock:
        if session is None or session.model is not model:
            return stock(model, load_config, loading_info)
        values = Values(model, session.scope, loading_info)
        info = stock(model, load_config, loading_info)
        values.put_back(load_config)
        return info


#: The model that this thread is saving, if a root of it was replaced.
_SAVING: ContextVar[PreTrainedModel | None] = ContextVar("patcher_saving", default=None)


def _save_pretrained(stock: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    record = record_of(self)
    if record is None:
        return stock(self, *args, **kwargs)
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    check_saving(self, arguments.arguments["state_dict"], arguments.arguments["save_original_format"])
    token = _SAVING.set(self)
    try:
        return stock(self, *args, **kwargs)
    finally:
        _SAVING.reset(token)


def _save_config(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    model = _SAVING.get()
    record = record_of(model) if model is not None and model.config is self else None
    if record is not None:
        self.architectures = [record.model_class.__name__]
    return stock(self, *args, **kwargs)


def _revert(stock: Callable[..., Any], model: nn.Module, state_dict: dict[str, Any]) -> Any:
    return original_state_dict(model, state_dict) if record_of(model) is not None else stock(model, state_dict)  # type: ignore[arg-type]


_HOOKS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (PreTrainedModel, "from_pretrained", _from_pretrained),
    (PreTrainedModel, "_from_config", _from_config),
    (PreTrainedModel, "get_init_context", _get_init_context),
    (PreTrainedModel, "__init__", _init),
    (PreTrainedModel, "post_init", _post_init),
    (PreTrainedModel, "_finalize_model_loading", _finalize),
    (PreTrainedModel, "save_pretrained", _save_pretrained),
    (seams.PretrainedConfig, "save_pretrained", _save_config),
    (seams.modeling_utils, "get_model_conversion_mapping", _conversion_mapping),
    (seams.modeling_utils, "convert_and_load_state_dict_in_model", _convert_and_load),
    (seams.modeling_utils, "revert_weight_conversion", _revert),
    (seams.output_capturing, "install_all_output_capturing_hooks", install_output_hooks),
)
