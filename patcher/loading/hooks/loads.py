"""What stands at the places where a model is loaded.

A load calls back at six places. At each, the result of the next step takes the place of the one before it in a context
variable.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from patcher.checkpoints.weight_files import VARIANT
from patcher.compat.conversions import adapted_to_quantizer, reads_gguf_by_name
from patcher.compat.hooks import Stock
from patcher.compat.models import as_stock, named_modules
from patcher.compat.parallel import keep_config
from patcher.compat.quantizers import settings_by_name
from patcher.construction.construction import current_construction, outside_of_construction
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, InForce
from patcher.construction.lock import construction_lock
from patcher.construction.meta_init import MetaInit
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.fusions.config import KEY, names_in_file, split_fusion_config
from patcher.loading.device_maps import for_patched_model
from patcher.loading.layout_on_disk import fusions_of_layout
from patcher.loading.load import (
    Constructed,
    DryRun,
    Finalized,
    Loaded,
    Request,
    Selected,
    check_gguf,
    check_supported,
    construct,
    finish,
    never_constructed,
    request,
    select,
)
from patcher.loading.parallel.sharing import follow_plan
from patcher.loading.quantizers import names_of_stock, remade_weights, settings_of_stock
from patcher.loading.reading.initial_values import InitialValues
from patcher.loading.reading.read import read
from patcher.loading.record import PatchRecord
from patcher.resolution.resolution import skeleton
from patcher.spec.patcher import Patcher

#: The load that this thread or task is in: the result of its last step.
_LOAD: ContextVar[Request | None] = ContextVar("patcher_load", default=None)
#: What the call of `from_pretrained` around this code was given, patched or not.
_CALL: ContextVar[Request | None] = ContextVar("patcher_call", default=None)
#: What makes the next load a dry run, and where its last result goes.
DRY_RUN: ContextVar[tuple[DryRun, list[Request]] | None] = ContextVar("patcher_dry_run", default=None)


def from_pretrained(
    stock: Stock, cls: type[PreTrainedModel], *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if (replacement := MetaInit.current()) is not None:
        if replacement.to_meta:
            raise PatchConstructionError(
                f"{cls.__name__}.from_pretrained({str(path)!r}) is called while a model is being loaded, in the "
                "__init__ of a replacement. transformers doesn't load a model inside of another one: load it before, "
                "and let __init__ take that object."
            )
        return outside_of_construction(
            functools.partial(from_pretrained, stock, cls, *args, patcher=patcher, **kwargs)
        )
    dry = DRY_RUN.get()
    with ExitStack() as stack:
        for variable, value in (
            (_LOAD, request(cls, patcher, path, kwargs, dry[0] if dry is not None else None)),
            (_CALL, Request(model_class=cls, path=path, options=kwargs)),
            (DRY_RUN, None),  # a load inside of this one is none
        ):
            stack.callback(variable.reset, variable.set(value))  # type: ignore[arg-type]
        try:
            result = stock(cls, *args, **kwargs)
        finally:
            load = _LOAD.get()  # the checkpoint's own config may have asked for one
            if dry is not None and load is not None:
                dry[1].append(load)
        if type(load) is Request and load.own:
            raise never_constructed(load)
        if isinstance(load, Constructed) and dry is None:
            finish(load)
        return result


def record_of_load(model: Any) -> PatchRecord | None:
    """The record of a model whose load in this thread has come as far as its weights, and not to its end."""
    load = _LOAD.get()
    return load.record if isinstance(load, Loaded) and load.model is model else None


def find_weights(
    stock: Stock,
    pretrained_model_name_or_path: Any,
    variant: str | None,
    gguf_file: str | None,
    *args: Any,
    transformers_explicit_filename: str | None = None,
    download_kwargs: Any = None,
    **kwargs: Any,
) -> Any:
    """Find weights in a runtime layout under the names that they have, and ask for the fusions that made it."""
    call, path, file = _CALL.get(), pretrained_model_name_or_path, transformers_explicit_filename
    if call is not None and gguf_file is None:
        options = {**call.options, **(download_kwargs or {})}
        if file is None:
            _CALL.set(replace(call, path=path, options=options))  # an adapter's folder may have led here
            names = fusions_of_layout(path, options, variant)
        else:  # an adapter; or what a config names
            names = fusions_of_layout(Path(path or "", options.get("subfolder") or "", file), options)
        if names:
            _ask_for(names, LAYOUT)
            load = _LOAD.get()
            if type(load) is Request:
                _LOAD.set(replace(load, runtime_layout=True))
            variant = VARIANT
    kwargs |= {"transformers_explicit_filename": file, "download_kwargs": download_kwargs}
    return stock(path, variant, gguf_file, *args, **kwargs)


def register_fusions(stock: Stock, cls: type[PreTrainedModel], config: Any, fusion_config: Any) -> None:
    """Apply what `fusion_config` says under our name; the rest is transformers' own."""
    asked, rest = split_fusion_config(fusion_config)
    call = _CALL.get()
    # An argument takes the place of what the file says, but the weights in it lie as they do.
    names = [*(names_in_file(call.path, call.options) if call is not None else ()), *asked]
    if names:
        if config.fusion_config is fusion_config or config.fusion_config == fusion_config:
            # What a model's config says is how its weights lie in a file: the one in memory says nothing of a file.
            if rest:
                config.fusion_config = rest
            else:
                del config.fusion_config
        load = _LOAD.get()
        _ask_for(names, LAYOUT if type(load) is Request and load.runtime_layout else FUSION_CONFIG)
    if rest:
        stock(cls, config, rest)


def _ask_for(names: Iterable[str], origin: str) -> None:
    """Have the load apply the fusions that a file or a config names."""
    call, load = _CALL.get(), _LOAD.get()
    before = load if type(load) is Request else call
    if call is None or before is None:
        raise InvalidPatcherError(
            f"fusion_config: {KEY!r} is for a load, and none goes on here. For what is built otherwise write "
            f"with Patcher(fusions={list(names)!r}).applied(): ..."
        )
    known = {fusion for entry in before.own if entry.origin in (LAYOUT, origin) for fusion in entry.patcher.fusions}
    entry = InForce(Patcher(fusions=[name for name in names if name not in known]), origin)
    if entry.patcher.fusions:
        check_supported((entry,), call.path, call.options)
        _LOAD.set(replace(before, in_force=(*before.in_force, entry), own=(*before.own, entry)))


def get_init_context(stock: Stock, cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    contexts = list(stock(cls, *args, **kwargs))
    load = _LOAD.get()
    inner = [construct(load, _LOAD.set)] if type(load) is Request else []
    call = _CALL.get()
    what = f"{cls.__name__} from {call.path}" if call is not None and call.path is not None else cls.__name__
    return [_entered([construction_lock.held_for(what), *contexts, *inner])]


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All contexts, and if one of them can't be entered, none: transformers would leave those before it entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def preprocess(stock: Stock, self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    construction = current_construction()
    if construction is None or construction.root is not model:
        return stock(self, model, *args, **kwargs)
    built = {id(each.module) for each in construction.outermost_built}
    replaced = [path for path, module in named_modules(model) if id(module) in built]
    with names_of_stock(self, remade_weights(model, construction.rules.entries, replaced)):
        return stock(self, model, *args, **kwargs)


def conversion_mapping(
    stock: Stock, model: PreTrainedModel, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    load = _LOAD.get()
    if type(load) is not Constructed:
        return stock(model, key_mapping, hf_quantizer, *args, **kwargs)
    found = stock(as_stock(model), key_mapping, None, *args, **kwargs)
    selected, conversions = select(load, found, key_mapping)
    _LOAD.set(selected)
    return adapted_to_quantizer(hf_quantizer, conversions, model)


def read_gguf(stock: Stock, self: Any, checkpoint_file: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a GGUF file read under the names that the stock model has: it goes by what it finds in the model."""
    load = _LOAD.get()
    if type(load) is Constructed:
        by_name = reads_gguf_by_name(self)
        check_gguf(load, by_name=by_name, architecture=load.model_class.__name__)
        if by_name:
            model = skeleton(load.record.model_class, model.config)
    return stock(self, checkpoint_file, model, *args, **kwargs)


def distribute(
    stock: Stock,
    cls: type[PreTrainedModel],
    model: PreTrainedModel,
    distributed_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Have processes share the layers that the patched model has, before its weights are read."""
    load = _LOAD.get()
    if not isinstance(load, Selected) or load.model is not model:
        return stock(cls, model, distributed_config, *args, **kwargs)
    config = follow_plan(load, distributed_config)
    model = stock(cls, model, config, *args, **kwargs)
    if config is not distributed_config:
        keep_config(model, distributed_config)
    return model


def device_map(stock: Stock, model: PreTrainedModel, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a map name the parameters of the stock model."""
    found, load = stock(model, device_map, *args, **kwargs), _LOAD.get()
    return for_patched_model(load, found) if isinstance(load, Selected) and load.model is model else found


def convert_and_load(
    stock: Stock, model: PreTrainedModel, state_dict: dict[str, Any], load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    load = _LOAD.get()
    if type(load) is not Selected:  # unpatched, or an adapter that is read after the model
        return stock(model, state_dict, load_config, *args, **kwargs)
    quantizer = load_config.hf_quantizer
    remade = remade_weights(model, load.in_force, dict(load.outermost)) if settings_by_name(quantizer) else ()
    with settings_of_stock(quantizer, remade):
        loaded, info, disk_index = read(
            load, state_dict, load_config, lambda checkpoint, how: stock(model, checkpoint, how, *args, **kwargs)
        )
    _LOAD.set(loaded)
    return info, disk_index


def finalize(stock: Stock, model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
    load = _LOAD.get()
    with construction_lock.held_for(type(model).__name__):
        if not isinstance(load, Loaded) or load.model is not model:
            return stock(model, load_config, loading_info)
        if load.dry_run is not None:
            return loading_info
        values = InitialValues(load)
        info = stock(model, load_config, loading_info)
        values.put_back(load_config)
        _LOAD.set(Finalized(**vars(load)))
        return info


def report_keys(stock: Stock, model: PreTrainedModel, *args: Any, loading_info: Any, **kwargs: Any) -> None:
    """Log no key as missing or unexpected that a patcher has declared."""
    load = _LOAD.get()
    if isinstance(load, Loaded) and load.model is model:
        loading_info = copy.copy(loading_info)
        loading_info.missing_keys = set(loading_info.missing_keys).difference(load.record.new_weights)
        loading_info.unexpected_keys = set(loading_info.unexpected_keys).difference(load.record.dropped_weights)
    stock(model, *args, loading_info=loading_info, **kwargs)
