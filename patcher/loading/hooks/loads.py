"""The hook: `patcher=` for `from_pretrained` and `from_config`, and `applied()`. One function per place.

A load calls back at six places. At each, the result of the next step takes the place of the one before it in a context
variable.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.checkpoints.weight_files import VARIANT
from patcher.compat.conversions import (
    adapted_to_quantizer,
    copy_transform,
    follow_earlier_imports,
    reads_gguf_by_name,
)
from patcher.compat.hooks import HOOKED, HOOKED_LATE, check, check_seam, when_imported
from patcher.compat.models import as_stock, named_modules, original_class
from patcher.compat.quantizers import settings_by_name
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import (
    Construction,
    begin_by_hand,
    current_construction,
    outside_of_construction,
)
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, Block, InForce, entered, entering, in_force_for
from patcher.construction.init_hooks import building, cover_new_classes, covering
from patcher.construction.lock import construction_lock
from patcher.construction.meta_init import MetaInit
from patcher.conversions.fused_weights import fused_modules
from patcher.conversions.selection import select_conversions
from patcher.errors import InvalidPatcherError, PatchConstructionError, PatcherError
from patcher.fusions.config import KEY, names_in_file, split_fusion_config
from patcher.loading.checks import Diagnostics
from patcher.loading.device_maps import for_patched_model
from patcher.loading.hooks import accelerate, exporters, pipelines, saves, trainer
from patcher.loading.hooks.recorders import install_output_hooks
from patcher.loading.layout_on_disk import fusions_of_layout
from patcher.loading.load import (
    Constructed,
    DryRun,
    Loaded,
    Request,
    Selected,
    check_gguf,
    check_supported,
    construct,
    finish,
    finish_by_hand,
    request,
    select,
)
from patcher.loading.quantizers import names_of_stock, remade_weights, settings_of_stock
from patcher.loading.reading.initial_values import InitialValues, keeping_computed
from patcher.loading.reading.read import read
from patcher.loading.record import record_of
from patcher.loading.saving import original_state_dict
from patcher.resolution.fused_modules import fuse_standing_modules, prepare_fusions, rebuild_fused_modules
from patcher.resolution.resolution import skeleton
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.patcher import Patcher

#: What stood at a place before the hook.
Stock = Callable[..., Any]

#: The load that this thread or task is in: the result of its last step.
_LOAD: ContextVar[Request | None] = ContextVar("patcher_load", default=None)
#: What the call of `from_pretrained` around this code was given, patched or not.
_CALL: ContextVar[Request | None] = ContextVar("patcher_call", default=None)
#: What makes the next load a dry run, and where its last result goes.
_DRY_RUN: ContextVar[tuple[DryRun, list[Request]] | None] = ContextVar("patcher_dry_run", default=None)

_install_lock = threading.Lock()
_installed = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _install_lock._at_fork_reinit())  # type: ignore[attr-defined]


def install() -> None:
    """Teach `from_pretrained` and `from_config` the argument `patcher=`. Done once; using any public name does it.

    >>> import patcher
    >>> patcher.install()

    Raises:
        PatcherError: this release of transformers lacks a seam that the hook relies on.
    """
    global _installed
    with _install_lock:
        if _installed:
            return
        check()
        for place, (owner, name, _) in HOOKED.items():
            _hook(owner, name, _HOOKS[place])
        follow_earlier_imports()
        for home in HOOKED_LATE:
            when_imported(home, _hook_late)
        _installed = True


def _hook(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    stock = inspect.getattr_static(owner, name)
    function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock
    wrapped = functools.wraps(function)(_bound(hook, function))
    setattr(owner, name, wrapped if function is stock else type(stock)(wrapped))


def _hook_late(module: ModuleType) -> None:
    for place, (path, parameters) in HOOKED_LATE[module.__name__].items():
        parents, _, name = path.rpartition(".")
        owner = getattr(module, parents) if parents else module
        check_seam(owner, name, parameters)
        _hook(owner, name, _HOOKS[place])


def _bound(hook: Callable[..., Any], stock: Stock) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(stock, *args, **kwargs)

    return hooked


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    install()
    entry, block = InForce(patcher, origin), Block()
    entries = (entry, *entered())
    check_pins(patcher)
    with entering(entries, block), covering(ClassRules(entries)):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    Diagnostics().adding_matches([entry], block.matched).warn()


def _from_pretrained(
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
            functools.partial(_from_pretrained, stock, cls, *args, patcher=patcher, **kwargs)
        )
    dry = _DRY_RUN.get()
    with ExitStack() as stack:
        for variable, value in (
            (_LOAD, request(cls, patcher, path, kwargs, dry[0] if dry is not None else None)),
            (_CALL, Request(model_class=cls, path=path, options=kwargs)),
            (_DRY_RUN, None),  # a load inside of this one is none
        ):
            stack.callback(variable.reset, variable.set(value))  # type: ignore[arg-type]
        try:
            result = stock(cls, *args, **kwargs)
        finally:
            load = _LOAD.get()  # the checkpoint's own config may have asked for one
            if dry is not None and load is not None:
                dry[1].append(load)
        if isinstance(load, Constructed) and dry is None:
            finish(load)
        return result


def dry_run(
    model_class: type[PreTrainedModel], patcher: Patcher, checkpoint: dict[str, Any], asked: DryRun, **options: Any
) -> tuple[Request | None, PatcherError | None]:
    """Take a load to where it would read: how far it came, and what it would raise on its way there.

    Raises:
        Exception: what transformers raises there, of its own.
    """
    install()
    results: list[Request] = []
    token = _DRY_RUN.set((asked, results))
    error: PatcherError | None = None
    try:
        model_class.from_pretrained(None, state_dict=checkpoint, patcher=patcher, **options)
    except PatcherError as raised:
        error = raised
    except Exception:
        # What transformers goes on to do with the weights, of a model that has none, says nothing.
        if not (results and isinstance(results[-1], Loaded)):
            raise
    finally:
        _DRY_RUN.reset(token)
    return (results[-1] if results else None), error


def _find_weights(
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


def _register_fusions(stock: Stock, cls: type[PreTrainedModel], config: Any, fusion_config: Any) -> None:
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


def _get_init_context(stock: Stock, cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
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


def _preprocess(stock: Stock, self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    construction = current_construction()
    if construction is None or construction.root is not model:
        return stock(self, model, *args, **kwargs)
    built = {id(each.module) for each in construction.outermost_built}
    replaced = [path for path, module in named_modules(model) if id(module) in built]
    with names_of_stock(self, remade_weights(model, construction.rules.entries, replaced)):
        return stock(self, model, *args, **kwargs)


def _conversion_mapping(
    stock: Stock, model: PreTrainedModel, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    load = _LOAD.get()
    if type(load) is not Constructed:
        return stock(model, key_mapping, hf_quantizer, *args, **kwargs)
    found = stock(as_stock(model), key_mapping, None, *args, **kwargs)
    selected, conversions = select(load, found, key_mapping)
    _LOAD.set(selected)
    return adapted_to_quantizer(hf_quantizer, conversions, model)


def _read_gguf(stock: Stock, self: Any, checkpoint_file: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a GGUF file read under the names that the stock model has: it goes by what it finds in the model."""
    load = _LOAD.get()
    if type(load) is Constructed:
        by_name = reads_gguf_by_name(self)
        check_gguf(load, by_name=by_name, architecture=load.model_class.__name__)
        if by_name:
            model = skeleton(load.record.model_class, model.config)
    return stock(self, checkpoint_file, model, *args, **kwargs)


def _device_map(stock: Stock, model: PreTrainedModel, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a map name the parameters of the stock model."""
    found, load = stock(model, device_map, *args, **kwargs), _LOAD.get()
    return for_patched_model(load, found) if isinstance(load, Selected) and load.model is model else found


def _convert_and_load(
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


def _finalize(stock: Stock, model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
    load = _LOAD.get()
    with construction_lock.held_for(type(model).__name__):
        if not isinstance(load, Loaded) or load.model is not model:
            return stock(model, load_config, loading_info)
        if load.dry_run is not None:
            return loading_info
        values = InitialValues(load)
        info = stock(model, load_config, loading_info)
        values.put_back(load_config)
        return info


def _report_keys(stock: Stock, model: PreTrainedModel, *args: Any, loading_info: Any, **kwargs: Any) -> None:
    """Log no key as missing or unexpected that a patcher has declared."""
    load = _LOAD.get()
    if isinstance(load, Loaded) and load.model is model:
        loading_info = copy.copy(loading_info)
        loading_info.missing_keys = set(loading_info.missing_keys).difference(load.record.new_weights)
        loading_info.unexpected_keys = set(loading_info.unexpected_keys).difference(load.record.dropped_weights)
    stock(model, *args, loading_info=loading_info, **kwargs)


def _from_config(
    stock: Stock, cls: type[PreTrainedModel], config: Any, *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    is_part = patcher is None and current_construction() is not None
    entries, own = ((), ()) if is_part else in_force_for(patcher)
    # For a part as well: a model built by hand doesn't hold it, and this sets torch's default type for the process.
    with construction_lock.held_for(cls.__name__):
        if is_part:
            cover_new_classes()  # of its code, which may just have been imported
        if not entries:
            return stock(cls, config, *args, **kwargs)
        check_supported(entries, None, {})
        for entry in own:
            check_pins(entry.patcher, cls)
        construction = Construction(ClassRules(entries), by_hand=True)
        with building(construction):
            model = stock(cls, config, *args, **kwargs)
    Diagnostics().adding_matches(own, construction.matched, cls.__name__).warn()
    return model


def _init(stock: Stock, self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(getattr(config, "__dict__", {}).get("patcher"), Patcher):  # configs take whatever they are given
        raise InvalidPatcherError(
            f"patcher= was given to the config of {type(self).__name__}, where no load finds it. Give it to what "
            "loads or makes a model; the parts of one that is put together take encoder_patcher=, decoder_patcher= "
            "and so on."
        )
    construction = current_construction() or begin_by_hand(self)
    if construction is not None and not construction.is_skeleton and construction.root in (None, self):
        construction.root = self
        prepare_fusions(construction, original_class(self) or type(self), config)  # type: ignore[arg-type]
    stock(self, config, *args, **kwargs)


def _post_init(stock: Stock, self: PreTrainedModel) -> None:
    # Built by hand as well: it rebinds `torch.nn.init` here, and a load in another thread has rebound `tie_weights`.
    with construction_lock.held_if_it_comes_free(type(self).__name__):
        _initialise(stock, self)


def _initialise(stock: Stock, self: PreTrainedModel) -> None:
    construction = current_construction()
    if construction is None or construction.is_skeleton:
        stock(self)
        return
    is_root = construction.root is self
    if is_root:
        for entry in construction.rules.entries:
            if entry.patcher.fingerprints:  # what the model is made of is all imported now
                classes = {original_class(module) or type(module) for module in self.modules()}
                home = (original_class(self) or type(self)).__module__
                check_built(entry.patcher, classes, home, all_there=entry.origin == "patcher=")
        rebuild_fused_modules(construction, self)
    with keeping_computed(construction.outermost_built):
        stock(self)
    if is_root:
        fuse_standing_modules(construction, self)
    if is_root and construction.by_hand:
        if original_class(self) is None:
            finish_by_hand(construction, self)
        else:
            construction.at_end = functools.partial(finish_by_hand, construction, self)


def _conversions_of(stock: Stock, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The conversions of a model that stands, as whoever loads an adapter into it asks for them."""
    record = record_of(model)
    if record is None:
        return stock(model, *args, **kwargs)
    found = stock(as_stock(model), *args, **kwargs)
    selected = select_conversions(found, record.patchers, record.fusion_transforms)
    return [*map(copy_transform, selected.added), *selected.kept]


def _revert(stock: Stock, model: nn.Module, state_dict: dict[str, Any]) -> Any:
    plan, offloaded = saves.SAVING.get(), saves.OFFLOADED.get()
    if offloaded is not None and offloaded.plan.model is model:
        return offloaded.original(state_dict)
    if record_of(model) is None and not fused_modules(model):
        return stock(model, state_dict)
    if plan is not None and plan.model is model:
        return plan.original_state_dict(state_dict)
    return original_state_dict(model, state_dict)  # type: ignore[arg-type]


# What stands at each place that `HOOKED` and `HOOKED_LATE` name.
_HOOKS: dict[str, Callable[..., Any]] = {
    "load": _from_pretrained,
    "find weights": _find_weights,
    "fusion config": _register_fusions,
    "make": _from_config,
    "construction contexts": _get_init_context,
    "construct": _init,
    "constructed": _post_init,
    "quantize": _preprocess,
    "conversions": _conversion_mapping,
    "conversions of others": _conversions_of,
    "conversions of adapters": _conversions_of,
    "read GGUF": _read_gguf,
    "device map": _device_map,
    "read": _convert_and_load,
    "report keys": _report_keys,
    "finish": _finalize,
    "save": saves.save_pretrained,
    "save config": saves.save_config,
    "weights to save": saves.weights_to_save,
    "read offloaded weight": saves.read_offloaded_weight,
    "write weights": saves.write_weights,
    "upload": saves.upload,
    "read into a model": accelerate.read_checkpoint,
    "give back": _revert,
    "record outputs": install_output_hooks,
    "load for a pipeline": pipelines.load_model,
    "make a pipeline": pipelines.make_pipeline,
    "shards": trainer.load_shards,
    "shards of a trainer": trainer.load_shards,
    "optimizer of a trainer, saved": trainer.save_optimizer,
    "optimizer of a trainer, loaded": trainer.load_optimizer,
    "patches of exporters": exporters.patch_attributes,
}
