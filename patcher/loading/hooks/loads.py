"""The seams where a model is loaded.

A load calls several of them in turn. At each, the state of the load in a context variable is replaced by the next one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from patcher.checkpoints.headers import VARIANT
from patcher.compat.models import as_stock, unreported
from patcher.compat.seams import Stock, seam
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, InForce, construction_around, unpatched
from patcher.construction.lock import construction_lock
from patcher.errors import InvalidPatcherError, PatchConstructionError, PatcherError
from patcher.fusions.config import KEY, names_in_file, split_fusion_config
from patcher.layouts.carried import is_in_original_layout
from patcher.loading.initial_values import InitialValues
from patcher.loading.integration import integrations
from patcher.loading.layout_on_disk import fusions_of_layout
from patcher.loading.load import (
    Constructed,
    DryRun,
    Finalized,
    Loaded,
    Request,
    Selected,
    check_supported,
    construct,
    finish,
    not_constructed_error,
    record_load,
    request,
    select,
)
from patcher.loading.new_weights import check_new_weights
from patcher.loading.reading import read
from patcher.loading.record import record_of
from patcher.loading.state_dicts import convert_checkpoint_keys, without_stacking
from patcher.spec.patcher import Patcher

#: The state of the load in this thread or task, patched or not; before it, the dry run that it is to be.
_LOAD: ContextVar[Request | DryRun | None] = ContextVar("patcher_load", default=None)


@seam("transformers.modeling_utils:PreTrainedModel.from_pretrained")
def from_pretrained(
    stock: Stock, cls: type[PreTrainedModel], *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    construction = construction_around()
    if construction is not None and (replacement := construction.meta_init) is not None:
        if replacement.to_meta:
            raise PatchConstructionError(
                f"{cls.__name__}.from_pretrained({str(path)!r}) is called while a model is being loaded, in the "
                "__init__ of a replacement. transformers doesn't load a model inside of another one: load it before, "
                "and let __init__ take that object."
            )
        # A separate model, not a part of the one around it.
        return unpatched(functools.partial(from_pretrained, stock, cls, *args, patcher=patcher, **kwargs))
    state = _LOAD.get()
    dry = state if isinstance(state, DryRun) else None
    token = _LOAD.set(request(cls, patcher, path, kwargs, dry))
    try:
        result = stock(cls, *args, **kwargs)
        load = _LOAD.get()
        if type(load) is Request and load.requested:
            raise not_constructed_error(load)
        if isinstance(load, Constructed):
            finish(load)
        return result
    finally:
        if dry is None:  # otherwise `dry_run` takes the state
            _LOAD.reset(token)


def _request() -> Request | None:
    """Return the load in this thread, None if its model is constructed already, or there is no load."""
    load = _LOAD.get()
    return load if type(load) is Request else None


def current_load() -> Request | None:
    """Return the state of the load in this thread; None if nothing is patched."""
    load = _LOAD.get()
    return load if isinstance(load, Request) and load.in_force else None


@seam(
    "transformers.modeling_utils:_get_resolved_checkpoint_files",
    *("pretrained_model_name_or_path", "variant", "gguf_file"),
    *("transformers_explicit_filename", "download_kwargs"),
)
def find_weights(
    stock: Stock,
    pretrained_model_name_or_path: Any,
    variant: str | None,
    gguf_file: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Find weights in a runtime layout by their file names, and request the fusions of the layout."""
    load, path, file = _request(), pretrained_model_name_or_path, kwargs.get("transformers_explicit_filename")
    if load is not None and gguf_file is None:
        options = {**load.options, **(kwargs.get("download_kwargs") or {})}
        if file is None:
            _LOAD.set(replace(load, path=path, options=options))  # may differ if an adapter's folder was passed
            names = fusions_of_layout(path, options, variant)
        else:  # an adapter, or a file that the config names
            names = fusions_of_layout(Path(path or "", options.get("subfolder") or "", file), options)
        if names:
            _LOAD.set(replace(_with_fusions(names, LAYOUT), runtime_layout=True))
            variant = VARIANT
    result = stock(path, variant, gguf_file, *args, **kwargs)
    if result[0] and (load := _request()) is not None:
        _LOAD.set(replace(load, files=tuple(result[0])))
    return result


@seam("transformers.fusion_mapping:register_fusion_patches", "cls", "config", "fusion_config")
def register_fusions(stock: Stock, cls: type[PreTrainedModel], config: Any, fusion_config: Any) -> None:
    """Apply the entry of `fusion_config` for this package, and leave the rest to transformers."""
    ours, rest = split_fusion_config(fusion_config)
    load = _request()
    # An argument overrides the config in the file, but not the layout of the weights beside it.
    names = [*(names_in_file(load.path, load.options) if load is not None else ()), *ours]
    if names:
        if config.fusion_config is fusion_config or config.fusion_config == fusion_config:
            # The config of a file describes the layout of weights; that of a model in memory doesn't.
            if rest:
                config.fusion_config = rest
            else:
                del config.fusion_config
        _LOAD.set(_with_fusions(names, LAYOUT if load is not None and load.runtime_layout else FUSION_CONFIG))
    if rest:
        stock(cls, config, rest)


def _with_fusions(names: Iterable[str], origin: str) -> Request:
    """Return the load with the fusions that a file or a config names."""
    load = _request()
    if load is None:
        raise InvalidPatcherError(
            f"fusion_config: {KEY!r} applies to a load, and this isn't one. A model that is built otherwise is "
            f"patched by a block: with Patcher(fusions={list(names)!r}).applied(): ..."
        )
    entries = [entry for entry in load.requested if entry.origin in (LAYOUT, origin)]
    known = {fusion for entry in entries for fusion in entry.patcher.fusions}
    entry = InForce(Patcher(fusions=[name for name in names if name not in known]), origin)
    if not entry.patcher.fusions:
        return load
    check_supported((entry,), load.path, load.options)
    return replace(load, in_force=(*load.in_force, entry), requested=(*load.requested, entry))


@seam("transformers.modeling_utils:PreTrainedModel.get_init_context")
def get_init_context(stock: Stock, cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    contexts = list(stock(cls, *args, **kwargs))
    load = _request()
    inner = [construct(load, _constructed)] if load is not None and load.in_force else []
    what = f"{cls.__name__} from {load.path}" if load is not None and load.path is not None else cls.__name__
    return [_entered([construction_lock.held_for(what), *contexts, *inner])]


def _constructed(load: Constructed) -> None:
    for integration in integrations():
        integration.on_constructed(load)
    _LOAD.set(load)


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter all contexts; if one fails, exit the others, which transformers would leave entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@seam(
    "transformers.conversion_mapping:get_model_conversion_mapping",
    *("model", "key_mapping", "hf_quantizer", "add_legacy"),
    follow=True,
)
def conversion_mapping(
    stock: Stock, model: PreTrainedModel, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return the conversions of a load, or of a model into which something else is loaded."""
    load = _LOAD.get()
    if type(load) is not Constructed or load.model is not model:
        return without_stacking(model, stock(as_stock(model), key_mapping, hf_quantizer, *args, **kwargs))
    mapping = stock(as_stock(model), key_mapping, None, *args, **kwargs)
    selected, conversions = select(load, mapping, key_mapping)
    for integration in integrations():
        integration.on_routed(selected, hf_quantizer)
    _LOAD.set(selected)
    if hf_quantizer is None:
        return conversions
    adapt = hf_quantizer.update_weight_conversions
    takes_model = "model" in inspect.signature(adapt).parameters  # since 5.19
    return adapt(conversions, model) if takes_model else adapt(conversions)


@seam("transformers.modeling_utils:convert_and_load_state_dict_in_model", "model", "state_dict", "load_config")
def convert_and_load(
    stock: Stock, model: PreTrainedModel, state_dict: dict[str, Any], load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    load = _LOAD.get()
    if type(load) is not Selected:  # stock, or an adapter that is read after the model
        info, disk_index = stock(model, state_dict, load_config, *args, **kwargs)
        if type(load) is Request:
            check_new_weights(load, info.unexpected_keys)
        return info, disk_index
    loaded = read(
        load, state_dict, load_config, lambda checkpoint, config: stock(model, checkpoint, config, *args, **kwargs)
    )
    _LOAD.set(check_new_weights(loaded, loaded.info.unexpected_keys))
    if load.dry_run is not None:
        raise _EndOfDryRun
    return loaded.info, loaded.disk_index


@seam("transformers.modeling_utils:PreTrainedModel._finalize_model_loading", "model", "load_config", "loading_info")
def finalize(stock: Stock, model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
    load = _LOAD.get()
    with construction_lock.held_for(type(model).__name__):
        if not isinstance(load, Loaded) or load.model is not model:
            return stock(model, load_config, loading_info)
        values, record = InitialValues(load), load.record
        with unreported(model, loading_info, missing=record.new_weights, unexpected=record.dropped_weights):
            info = stock(model, load_config, loading_info)
        values.restore(load_config)
        finalized = Finalized(**vars(load))
        record_load(finalized)
        if load_config.weight_mapping is not None:
            # An adapter that is loaded next, because its folder was passed, has the names of the stock model.
            first = load_config.weight_mapping[: len(load.key_mapping or ())]
            load_config.weight_mapping[:] = [*first, *without_stacking(model, load.stock)]
        _LOAD.set(finalized)
        return info


@seam("transformers.modeling_utils:PreTrainedModel._load_from_state_dict", "state_dict", "prefix")
def load_from_state_dict(
    stock: Stock, self: PreTrainedModel, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Have `load_state_dict` of a patched model, and of its sub-models, accept the keys of checkpoints."""
    if record_of(self) is not None or is_in_original_layout():
        _, _, missing_keys, _, error_msgs = args
        convert_checkpoint_keys(self, state_dict, prefix, missing_keys, error_msgs)
    stock(self, state_dict, prefix, *args, **kwargs)


class _EndOfDryRun(BaseException):
    """Ends a dry run where a load would read weights."""


def dry_run(
    model_class: type[PreTrainedModel], patcher: Patcher, checkpoint: dict[str, Any], run: DryRun, **options: Any
) -> tuple[Request | None, PatcherError | None]:
    """Run a load up to where it would read weights; return the state that it reached, and the error that it raises.

    Raises:
        Exception: an error of transformers.
    """
    token = _LOAD.set(run)
    error: PatcherError | None = None
    try:
        with suppress(_EndOfDryRun):
            model_class.from_pretrained(None, state_dict=checkpoint, patcher=patcher, **options)
    except PatcherError as raised:
        error = raised
    finally:
        load = current_load()
        _LOAD.reset(token)
    return load, error
