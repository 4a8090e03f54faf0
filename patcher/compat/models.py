"""What transformers keeps on models and parameters, and which class a replaced module was built for."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN as ACT2FN
from transformers.distributed import tensor_parallel
from transformers.integrations import moe
from transformers.integrations.accelerate import (
    get_device as get_device,
    load_offloaded_parameter as load_offloaded_parameter,
    offload_weight as offload_weight,
)
from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer
from transformers.modeling_utils import (
    LoadStateDictConfig as LoadStateDictConfig,
    local_torch_dtype as local_torch_dtype,
    remove_tied_weights_from_state_dict,
    str_to_torch_dtype as str_to_torch_dtype,
)
from transformers.utils import output_capturing
from transformers.utils.generic import TransformersKwargs as TransformersKwargs
from transformers.utils.hub import get_checkpoint_shard_files, has_file as _has_file

from patcher.compat.modeling_code import STANDS_FOR, unrebound
from patcher.patterns import inside

#: What of `PreTrainedModel` says something of one class, and not of what it loads.
_OF_ONE_CLASS = ("config_class", "_auto_class", "model_tags")

#: The keyword arguments of `from_pretrained` that say where in the hub a file is.
_PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "token")

#: Whether a program is exported. Releases of torch before 2.7 don't tell it from one that is compiled.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

#: On a replaced module: the class that it was built for. transformers decides by class in many places.
ORIGINAL = "_patcher_original"


def make_from_config(model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """A model as `from_config` of the Auto classes makes it, of a class or of what `super()` gives for one."""
    return model_class._from_config(*args, **kwargs)


def named_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """As torch's with `remove_duplicate=False`, whose nested generators take long: every load asks several times."""
    waiting = [(path, module)]
    while waiting:
        path, module = waiting.pop()
        yield path, module
        if module._modules:
            head = inside(path)
            waiting += [(head + name, child) for name, child in reversed(module._modules.items()) if child is not None]


def named_parameters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """As torch's with `remove_duplicate=False`, for the same reason."""
    for owner, part in named_modules(module, path):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield inside(owner) + name, parameter


def add_load_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Have a function change the state dict that is loaded, as torch's own, which is given the module, does.

    That one holds a weak reference, by which a shallow copy whose original is gone can't be loaded.
    """
    module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def remove_state_dict_hooks(module: nn.Module, is_meant: Callable[[Any], bool]) -> None:
    """Take off the functions that are called where the module is loaded from a state dict, or gives one."""
    for table in (module._load_state_dict_pre_hooks, module._state_dict_hooks):
        for key, hook in list(table.items()):
            if is_meant(getattr(hook, "hook", hook)):
                del table[key]


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a state dict holds, without torch's hooks and copies: parameters and persistent buffers, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, module in named_modules(model):
        held = {**module._parameters, **module._buffers}
        for name, value in held.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                found[inside(path) + name] = value
    return found


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module was built in place of, if it is a replacement."""
    return module.__dict__.get(ORIGINAL)


def mark_original_class(module: nn.Module, original: type[nn.Module]) -> None:
    module.__dict__[ORIGINAL] = unrebound(original)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has without patchers: neither replaced nor fused, its functions those of its file."""
    return original_class(module) or unrebound(type(module))


def kernel_name(cls: type) -> str:
    """Under which name transformers looks for a kernel for the modules of a class, "" if for none."""
    return getattr(cls, "kernel_layer_name", "")


def chooses_kernel(cls: type, original: type) -> bool:
    """Whether a class names its kernel itself, and doesn't inherit it from one that it is in the place of."""
    own = (each for each in cls.__mro__ if each not in original.__mro__)
    return bool(kernel_name(cls)) and any("kernel_layer_name" in vars(each) for each in own)


def kernel_functions(module: nn.Module) -> dict[str, Any]:
    """Name -> function, of those that a module calls and transformers looks for a kernel for."""
    found: dict[str, Any] = module.__dict__.get("_kernel_funcs", {})
    return found


def functions_alone(module: nn.Module) -> Any:
    """A module as what looks for kernels is to see one that keeps its forward."""
    return SimpleNamespace(_kernel_funcs=kernel_functions(module))


class ModelView:
    """A model with other values of some attributes. Nothing is written to the model, which others may be running."""

    def __init__(self, model: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def as_stock(model: Any) -> Any:
    """The model as conversions are found for it, which go by class: replaced sub-models pass for what they replace.

    Those that `fully_shard` has split have a class of another name, too.
    """

    shown: dict[int, Any] = {}
    for _, module in named_modules(model):
        if isinstance(module, PreTrainedModel):
            cls = original_class(module) or unsplit_class(module)
            if cls is not type(module):
                shown[id(module)] = _seen_as(module, cls)

    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((name, shown.get(id(module), module)) for name, module in model.named_modules(*args, **kwargs))

    return ModelView(model, named_modules=named) if shown else model


def named_as(model: Any, model_class: type[nn.Module]) -> Any:
    """The model, as one of a class of another name: transformers writes that name into the config that it saves."""
    if type(model).__name__.removeprefix("FSDP") == model_class.__name__:
        return model
    namespace = {"__module__": model_class.__module__, STANDS_FOR: model_class}
    return _seen_as(model, type(model_class.__name__, (type(model),), namespace))


def _seen_as(model: nn.Module, cls: type[nn.Module]) -> Any:
    """The same attributes, with the methods of a class."""
    shown = object.__new__(cls)
    object.__setattr__(shown, "__dict__", model.__dict__)
    return shown


def has_adapters(model: Any) -> bool:
    """Whether adapters were loaded into a model, of which transformers then saves nothing else."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def ties(model: PreTrainedModel) -> dict[str, str]:
    """Parameter -> the one that it is tied to, so that it doesn't come from a checkpoint."""
    known = getattr(model, "all_tied_weights_keys", None)
    if known is None and isinstance(model, PreTrainedModel):  # it is being constructed
        known = model.get_expanded_tied_weights_keys(all_submodels=True)
    return dict(known or {})


def state_to_save(model: PreTrainedModel) -> dict[str, Any]:
    """The state dict that `save_pretrained` begins with: as a quantizer has it, without what isn't saved."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    found = quantizer.get_state_dict_and_metadata(model)[0] if quantizer is not None else None
    state_dict = model.state_dict() if found is None else found
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: value for name, value in state_dict.items() if name not in ignored}


def without_tied(model: PreTrainedModel, state_dict: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a state dict under which `save_pretrained` saves its tensors, each once.

    Args:
        state_dict: tensors; those on the meta device, and those that are split, are one if they are one parameter.
        own: what the modules of the model hold.
    """

    def place(value: Any) -> Any:
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta
        return value.untyped_storage().data_ptr() if is_plain else None

    places = {name: place(value) for name, value in state_dict.items()}
    sharing = Counter(places.values())
    # Transformers takes long over thousands, of which hardly any are concerned.
    shown = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, DTensor)
        else value
        for name, value in state_dict.items()
        if places[name] is None or sharing[places[name]] > 1
    }
    view: Any = ModelView(model, get_parameter_or_buffer={**state_dict, **own}.__getitem__)
    left = set(shown).difference(remove_tied_weights_from_state_dict(dict(shown), view)) if shown else set()
    return [name for name in state_dict if name not in left]


def settle_keys(model: PreTrainedModel, info: Any) -> None:
    """Take from the missing and the unexpected keys what transformers doesn't mind, as a load does at its end."""
    model.mark_tied_weights_as_initialized(info)  # type: ignore[no-untyped-call]
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)


@contextmanager
def unreported(
    model: PreTrainedModel, info: Any, *, missing: Iterable[str], unexpected: Iterable[str]
) -> Iterator[None]:
    """Have a load that ends inside the block log no such key as missing or unexpected; `info` keeps them all."""
    declared = {"missing_keys": set(missing), "unexpected_keys": set(unexpected)}
    left_out: dict[str, set[str]] = {}

    def adjust(found: Any) -> None:  # the last that a load does before it logs
        type(model)._adjust_missing_and_unexpected_keys(model, found)
        for name, keys in declared.items():
            left_out[name] = keys & getattr(found, name)
            setattr(found, name, getattr(found, name) - keys)

    model.__dict__["_adjust_missing_and_unexpected_keys"] = adjust
    try:
        yield
    finally:
        del model.__dict__["_adjust_missing_and_unexpected_keys"]
        for name, keys in left_out.items():
            setattr(info, name, getattr(info, name) | keys)


def has_file(path: str | os.PathLike[str], name: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder, or a repo on the hub, has a file; of the hub nothing else is requested.

    Args:
        options: the keyword arguments of `from_pretrained`, some of which say where the file is.
    """
    below = f"{options['subfolder']}/{name}" if options.get("subfolder") else name
    return bool(_has_file(path, below, **{key: options[key] for key in _PLACES if options.get(key) is not None}))


def shards_of_index(index: Path) -> dict[str, list[str]]:
    """The files that an index names, in the order in which a load reads them, and the keys in each.

    Raises:
        Exception: what a load raises where it isn't an index.
    """
    _, found = get_checkpoint_shard_files(str(index.parent), str(index))  # type: ignore[no-untyped-call]
    shards: dict[str, list[str]] = {name: [] for name in sorted(set(found["weight_map"].values()))}
    for key, name in found["weight_map"].items():
        shards[name].append(key)
    return shards


def remote_class(reference: str, repo: str, **places: Any) -> type[PreTrainedModel]:
    """The class that a repo brings, by its reference in the config: its code is run."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # imports much

    found: type[PreTrainedModel] = get_class_from_dynamic_module(reference, repo, **places)
    return found


def class_in(auto_class: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The model class that an Auto class has for a config."""
    mapping: Any = getattr(auto_class, "_model_mapping", {})
    found: Any = mapping.get(type(config), None)
    listed: list[type[PreTrainedModel] | None] = list(found) if isinstance(found, tuple) else [found]
    return next((cls for cls in listed if cls and cls.__name__ in (config.architectures or ())), listed[0])


def cache_argument(model: nn.Module) -> str | None:
    """What a model calls the cache that it takes and returns, `cache` from 5.24 on; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def renamed_parameters(function: Any) -> dict[str, str]:
    """The parameters of a function that transformers has renamed, old name -> new one, as its decorator for that says
    (`deprecate_kwarg`, which takes the old names too)."""
    found: dict[str, str] = {}
    while function is not None:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if {"old_name", "new_name"} <= {*names}:
            values = dict(zip(names, function.__closure__, strict=True))
            if (new := values["new_name"].cell_contents) is not None:
                found[values["old_name"].cell_contents] = new
        function = getattr(function, "__wrapped__", None)
    return found


def is_of_experts_decorator(function: Any) -> bool:
    """Whether `use_experts_implementation` has put a function around `__init__` or `forward` of a class."""
    return getattr(function, "__globals__", None) is vars(moe)


def kept_in_fp32(model: PreTrainedModel, key: str) -> tuple[bool, bool]:
    """Whether a parameter stays in float32 when a model is loaded as float16, and as bfloat16."""
    names = model._keep_in_fp32_modules or (), model._keep_in_fp32_modules_strict or ()
    # As the load's own plan: a name, or an expression, that is found anywhere in the key.
    weak, strict = (any(re.search(name.replace("*", ".*"), key) for name in listed) for listed in names)
    return weak or strict, strict


def inherit_loading_attributes(model: nn.Module, original: type[nn.Module]) -> None:
    """Give a replaced model, on the instance, what its class lacks and the class that it replaces says.

    That is how it is loaded, saved and generates: the values that `PreTrainedModel` has for its subclasses to change.
    """
    replacement = type(model)
    if issubclass(replacement, original) or not issubclass(original, PreTrainedModel):
        return
    for name, default in vars(PreTrainedModel).items():
        if name.startswith("__") or name in _OF_ONE_CLASS or callable(default) or hasattr(default, "__get__"):
            continue
        mine, theirs = getattr(replacement, name, default), getattr(original, name, default)
        if mine is default and theirs is not default and not isinstance(theirs, property):
            model.__dict__[name] = deepcopy(theirs)


def follow_no_split_names(models: Iterable[PreTrainedModel], replaced: Iterable[tuple[type, type]]) -> None:
    """Where a device map may not split an original class, it may not split the replacement."""
    names = {(original.__name__, replacement.__name__) for original, replacement in replaced}
    for model in models:
        if listed := model._no_split_modules:
            model._no_split_modules = {*listed, *(mine for theirs, mine in names if theirs in listed)}


def forget_no_split_names(model: PreTrainedModel, replaced: Iterable[tuple[type, type]]) -> None:
    """The reverse, for a model in which the originals are."""
    names = {replacement.__name__ for original, replacement in replaced if original.__name__ != replacement.__name__}
    if listed := model._no_split_modules:
        model._no_split_modules = type(listed)(name for name in listed if name not in names)


def implementation(model: PreTrainedModel, of: str) -> str | None:
    """What a model has chosen to compute "attn" with (sdpa, eager, ...), or "experts" (grouped_mm, ...); or None."""
    chosen: str | None = getattr(model.config, f"_{of}_implementation", None)
    return chosen


def choose_experts_implementation(model: PreTrainedModel, name: str) -> None:
    model.config._experts_implementation = name


def mark_initialized(tensor: Any) -> None:
    """Keep transformers' initialisation away from a tensor that has its value, or from a module's own part in it."""
    tensor._is_hf_initialized = True


def is_initialized(tensor: torch.Tensor | nn.Module) -> bool:
    return bool(getattr(tensor, "_is_hf_initialized", False))


def forget_initialized(tensor: torch.Tensor) -> None:
    tensor.__dict__.pop("_is_hf_initialized", None)


# --- recorders of outputs --------------------------------------------------------------------------------------------


def output_recorders(model: PreTrainedModel) -> list[tuple[str, output_capturing.OutputRecorder]]:
    """What the model's class records, as (output name, recorder) pairs."""
    if type(output_capturing._CAN_RECORD_REGISTRY) is dict:  # up to 5.17
        entries = dict.get(output_capturing._CAN_RECORD_REGISTRY, str(model.__class__)) or {}
    else:
        entries = output_capturing._CAN_RECORD_REGISTRY.get(model) or {}
    recorders = []
    for key, specs in entries.items():
        for spec in specs if isinstance(specs, list) else [specs]:
            if not isinstance(spec, output_capturing.OutputRecorder):
                is_name = isinstance(spec, str)
                spec = output_capturing.OutputRecorder(
                    target_class=None if is_name else spec,  # type: ignore[arg-type]
                    index=0 if "hidden_states" in key else 1,
                    class_name=spec if is_name else None,
                )
            recorders.append((key, spec))
    return recorders


def mark_recorded(model: PreTrainedModel) -> None:
    """Let transformers know that the hooks are installed."""
    model._output_capturing_hooks_installed = True  # type: ignore[assignment]


def output_hook(key: str, index: int, capture_initial_hidden_state: bool) -> Any:
    """The forward hook with which transformers records an output."""
    taken: list[Any] = []
    # No module: one that is made while `torch.compile` looks on would break its graph.
    bearer: Any = SimpleNamespace(register_forward_hook=taken.append)
    output_capturing.install_output_capuring_hook(bearer, key, index, capture_initial_hidden_state)
    return taken[0]


def record_replacements(model: nn.Module, replacement_of: Callable[[str], type[nn.Module] | None]) -> None:
    """Have the recorders of a model and its sub-models, on the instances, look for replacements of classes."""

    def changed(recorder: Any) -> Any:
        if isinstance(recorder, output_capturing.OutputRecorder):
            target: type[nn.Module] | None = recorder.target_class  # None where the path decides
            name = recorder.class_name if target is None else target.__name__
            replacement = replacement_of(name) if name else None
            return recorder if replacement is None else replace(recorder, target_class=replacement)
        return replacement_of(recorder if isinstance(recorder, str) else recorder.__name__) or recorder

    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None)
        if isinstance(recorders, dict):
            module.__dict__["_can_record_outputs"] = {
                output: [changed(item) for item in value] if isinstance(value, list) else changed(value)
                for output, value in recorders.items()
            }


def forget_recorded(module: nn.Module) -> None:
    """Take the hooks off that record the outputs of a module: they are installed anew when recording is requested."""
    for key, hook in list(module._forward_hooks.items()):
        if getattr(getattr(hook, "_hook", hook), "__module__", None) == output_capturing.__name__:
            del module._forward_hooks[key]
    module.__dict__.pop("_output_capturing_hooks_installed", None)


# --- models on several processes -------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Among how many processes a load shares what: tensors, experts, batches, stages of a pipeline."""

    tensors: int
    experts: int
    batches: int
    stages: int


def sizes(config: Any) -> Sizes:
    """What a `DistributedConfig` asks for, or a mapping that says one, or None."""

    def size(name: str) -> int:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return int(value) if value else 1

    return Sizes(size("tp_size"), size("ep_size"), size("fsdp_size") * size("dp_replicate_size"), size("pp_size"))


def in_plan(name: str) -> str:
    """What plans call a module or parameter: with `*` for the numbers in its name."""
    return str(tensor_parallel.replace_layer_number_by_wildcard(name))  # type: ignore[attr-defined]


def set_plans(model: PreTrainedModel, tensors: dict[str, str], experts: dict[str, str] | None) -> None:
    """Give a model its plans."""
    model._tp_plan = tensors
    if experts is not None:
        model._ep_plan = experts


def unsplit_class(module: nn.Module) -> type[Any]:
    """The class of a module, without what `fully_shard` has made of it."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls
