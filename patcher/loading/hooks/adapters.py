"""What stands at the places where adapters are loaded and saved: by transformers, and by peft."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import nn

from patcher.compat.adapters import (
    PREFIX,
    base_model,
    converted_config,
    in_stock_names,
    is_lora,
    prepared,
    read_config,
    read_weights,
)
from patcher.compat.conversions import copy_transform
from patcher.compat.hooks import Stock
from patcher.compat.models import as_stock
from patcher.conversions.either_layout import modules_with_layouts
from patcher.conversions.selection import in_order, select_conversions
from patcher.loading.adapters.combining import check_combination, plan_weighted, swapped
from patcher.loading.adapters.layers import layers_of
from patcher.loading.adapters.planning import (
    READING,
    AdapterPlan,
    ReadAdapter,
    check_unexpected,
    plan_adapter,
    reading,
)
from patcher.loading.adapters.reading import joined_tensors, named_in_model, onto_layers, put_down, settle_magnitudes
from patcher.loading.adapters.saving import stock_adapter, stock_configs
from patcher.loading.adapters.stock_models import check_names
from patcher.loading.hooks.loads import record_of_load
from patcher.loading.record import keep_record, record_of

#: Which conversions whoever asks for those of a model gets: its own, those of transformers, or none.
_CONVERSIONS: ContextVar[str] = ContextVar("patcher_adapter_conversions", default="own")
#: Whether the config that peft injects by names the layers that are there.
_IS_CONVERTED: ContextVar[bool] = ContextVar("patcher_adapter_converted", default=False)


@contextlib.contextmanager
def _with(variable: ContextVar[Any], value: Any) -> Any:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def conversions_of(stock: Stock, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The conversions of a model that stands, as whoever loads an adapter into it asks for them."""
    record, wanted = record_of(model), _CONVERSIONS.get()
    if wanted == "none":
        return []
    if record is None:
        return stock(model, *args, **kwargs)
    found = stock(as_stock(model), *args, **kwargs)
    if wanted == "stock":
        return found
    selected = select_conversions(found, record.patchers, record.fusion_transforms, record.replacements(), model)
    return in_order(map(copy_transform, selected.added), selected.kept)


def load_adapter(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter into a model of transformers; `from_pretrained` of an adapter's folder does it too."""
    if (record := record_of_load(self)) is not None:  # of an adapter's folder: the end of the load is yet to come
        keep_record([("", self)], record)
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    load_config = given["load_config"]
    options = {**(getattr(load_config, "download_kwargs", None) or {}), **(given["adapter_kwargs"] or {})}
    if given["local_files_only"]:
        options["local_files_only"] = True
    path = given["peft_model_id"] or getattr(load_config, "pretrained_model_name_or_path", None)
    config = given["peft_config"]
    is_patched = bool(modules_with_layouts(self))
    if config is None and path is not None and is_patched:
        config = read_config(path, options)
    name = given["adapter_name"] or "default"
    weights = given["adapter_state_dict"]
    if config is None or not is_patched or not is_lora(config) or (weights is None and path is None):
        result = stock(*arguments.args, **arguments.kwargs)
        _check_places(self, result)
        return result
    config.inference_mode = not given["is_trainable"]
    if weights is None:
        weights = read_weights(path, options)
    read = _read(self, config, weights, name, is_trained=given["is_trainable"])
    plan = plan_adapter(self, _converted(self, config, read), read)
    if plan is None:
        result = stock(*arguments.args, **arguments.kwargs)
        _check_places(self, result)
        return result
    if given["hotswap"] is True or name in (getattr(self, "peft_config", None) or {}):
        tensors = onto_layers(self, name, read.weights, _converted(self, config))
    else:
        plan, tensors = joined_tensors(self, plan)
    given["peft_config"], given["adapter_state_dict"] = config, named_in_model(tensors, name)
    if load_config is not None:
        given["load_config"] = replace(load_config, weight_mapping=None)
    with reading(read), _with(_CONVERSIONS, "none"), _with(_PLAN, plan):
        result = stock(*arguments.args, **arguments.kwargs)
    settle_magnitudes(self, name, plan)
    _check_places(self, result)
    return result


def _check_places(model: Any, result: Any) -> None:
    """Say which tensors have found no place, as far as peft or transformers know."""
    if record_of(model) is not None or layers_of(model):
        check_unexpected(model, list(result.unexpected_keys))
    else:
        check_names(model, result.unexpected_keys)


#: How the adapter that this thread loads is put onto its model, once that is known.
_PLAN: ContextVar[AdapterPlan | None] = ContextVar("patcher_adapter_plan", default=None)


def _read(model: Any, config: Any, weights: Mapping[str, Any], name: str, *, is_trained: bool) -> ReadAdapter:
    base = base_model(model)
    return ReadAdapter(base, _in_stock_names(base, config, weights, name), is_trained)


def _in_stock_names(model: nn.Module, config: Any, weights: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tensors of an adapter by the names of layers of today, or of the single experts that the model has."""
    own, others = _of_experts(model, weights)
    with _with(_CONVERSIONS, "stock"):
        return {**own, **(in_stock_names(model, config, others, name) if others else {})}


def _of_experts(model: nn.Module, weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors that are for single experts of the model as they are named, and the others."""
    layers = layers_of(model).of_experts
    bare = {key: key.removeprefix(PREFIX) for key in weights}
    own = {key for key, name in bare.items() if layers and name.partition(".lora_")[0] in layers}
    return {bare[key]: weights[key] for key in own}, {key: value for key, value in weights.items() if key not in own}


def _converted(model: nn.Module, config: Any, read: ReadAdapter | None = None) -> Any:
    """A copy of a config for the layers that transformers has today."""
    config = copy.deepcopy(config)
    layers = layers_of(model)
    if not layers.stacks or (
        read is not None and not layers.of_experts & {k.partition(".lora_")[0] for k in read.weights}
    ):
        converted_config(config, model)
    return config


def from_pretrained(stock: Stock, cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter around a model, as a `PeftModel`."""
    arguments = inspect.signature(stock).bind(cls, model, model_id, *args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    read = _read_by_peft(model, model_id, given, given["config"])
    with reading(read) if read is not None else contextlib.nullcontext():
        return stock(*arguments.args, **arguments.kwargs)


def load_into(stock: Stock, self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an adapter into a `PeftModel`."""
    arguments = inspect.signature(stock).bind(self, model_id, *args, **kwargs)
    arguments.apply_defaults()
    base, read = base_model(self), READING.get()
    if read is None or read.model is not base:
        read = _read_by_peft(
            base, model_id, arguments.arguments, self.peft_config.get(arguments.arguments["adapter_name"])
        )
    with reading(read) if read is not None else contextlib.nullcontext():
        result = stock(*arguments.args, **arguments.kwargs)
    _check_places(base, result)
    return result


def _read_by_peft(model: Any, path: Any, given: Mapping[str, Any], config: Any) -> ReadAdapter | None:
    """What `PeftModel` is going to load, if it is for a patched model; judged before anything is changed."""
    if not isinstance(model, nn.Module) or not modules_with_layouts(model):
        return None
    options = given["kwargs"]
    is_new = config is None or config not in getattr(model, "peft_config", {}).values()
    config = copy.deepcopy(config) if config is not None else read_config(path, options)
    config.inference_mode = not given["is_trainable"]
    if not is_lora(config):
        plan_adapter(model, config, None)
        return None
    weights = read_weights(path, options, given.get("key_mapping"))
    read = _read(model, config, weights, given["adapter_name"], is_trained=given["is_trainable"])
    if is_new:
        plan_adapter(model, _converted(model, config, read), read)
    return read


def inject(stock: Stock, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Put layers with an adapter into a model: peft's own place for it, whoever calls."""
    if not isinstance(model, nn.Module) or not layers_of(model):
        return stock(self, model, adapter_name, *args, **kwargs)
    read, plan, config = READING.get(), _PLAN.get(), self.peft_config[adapter_name]
    if read is not None and read.model is not model:
        read = plan = None
    asked = config
    if is_lora(config):
        with contextlib.suppress(ValueError):  # it knows no targets for the architecture: peft says so
            asked = prepared(self, config, model)
        asked = _converted(model, asked, read)
    weighted = _WEIGHTED.get()
    plan = plan or (plan_weighted(model, asked, *weighted) if weighted else plan_adapter(model, asked, read))
    if plan is None:
        with _with(_IS_CONVERTED, bool(layers_of(model).stacks)):
            result = stock(self, model, adapter_name, *args, **kwargs)
        put_down(model, adapter_name, None)
        return result
    vars(config).update(vars(asked))  # as peft would have changed it
    self.peft_config[adapter_name] = plan.config
    try:
        with _with(_IS_CONVERTED, True):
            result = stock(self, model, adapter_name, *args, **kwargs)
    finally:
        self.peft_config[adapter_name] = config
    put_down(model, adapter_name, plan)
    return result


#: What is being added up to a new adapter: the names of adapters, and how.
_WEIGHTED: ContextVar[tuple[tuple[str, ...], str] | None] = ContextVar("patcher_weighted_adapter", default=None)


def add_weighted(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add adapters up to a new one."""
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    adapters, kind = tuple(given["adapters"]), given["combination_type"]
    check_combination(self.model, adapters, "linear" if len(adapters) == 1 else kind)
    with _with(_WEIGHTED, (adapters, kind)):
        return stock(*arguments.args, **arguments.kwargs)


def hotswap(
    stock: Stock, model: Any, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Put the tensors of another adapter in the place of those of one that stands."""
    if layers_of(base_model(model)):
        state_dict = swapped(model, state_dict, adapter_name, config)
    return stock(model, state_dict, adapter_name, config, *args, **kwargs)


def convert_config(stock: Stock, *args: Any, **kwargs: Any) -> Any:
    return None if _IS_CONVERTED.get() else stock(*args, **kwargs)


def convert_weights(stock: Stock, *args: Any, **kwargs: Any) -> Any:
    """The tensors of an adapter as peft loads them into a model."""
    given = inspect.signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    model, config = given.arguments["model"], given.arguments["peft_config"]
    base = base_model(model)
    if not is_lora(config):
        return stock(*args, **kwargs)
    if not layers_of(base):
        check_names(base, given.arguments["adapter_state_dict"])
        return stock(*args, **kwargs)
    own, others = _of_experts(base_model(model), given.arguments["adapter_state_dict"])
    given.arguments["adapter_state_dict"] = others
    with _with(_CONVERSIONS, "stock"):
        found = stock(*given.args, **given.kwargs)
    found |= {f"{PREFIX}{key}": value for key, value in own.items()}
    return onto_layers(model, given.arguments["adapter_name"], found, config)


def state_of(stock: Stock, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors of an adapter as peft saves them."""
    given = inspect.signature(stock).bind(model, *args, **kwargs)
    given.apply_defaults()
    return stock_adapter(model, given.arguments["adapter_name"], stock(model, *args, **kwargs))


def save(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the adapters of a `PeftModel`."""
    with stock_configs(self):
        return stock(self, *args, **kwargs)
