"""Private attributes of models, modules and parameters in transformers and torch, and a few of this package."""

from __future__ import annotations

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
from patcher.source.reading import signature_of

#: Attributes of `PreTrainedModel` that a replacement doesn't inherit from the original.
_OF_ONE_CLASS = ("config_class", "_auto_class", "model_tags")

#: The keyword arguments of `from_pretrained` that locate a file on the hub.
_PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "token")

#: torch < 2.7 doesn't distinguish exporting from compiling.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

#: Attribute of a replaced module: the original class, by which transformers makes many decisions.
ORIGINAL = "_patcher_original"


def make_from_config(model_class: Any, *args: Any, **kwargs: Any) -> Any:
    return model_class._from_config(*args, **kwargs)


def named_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Iterate as torch's with `remove_duplicate=False`, without its slow nested generators."""
    pending = [(path, module)]
    while pending:
        path, module = pending.pop()
        yield path, module
        if module._modules:
            prefix = inside(path)
            children = reversed(module._modules.items())
            pending += [(prefix + name, child) for name, child in children if child is not None]


def named_parameters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate as torch's with `remove_duplicate=False`, faster."""
    return _named_members(module, path, "_parameters")


def named_buffers(module: nn.Module, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate as torch's with `remove_duplicate=False`, faster."""
    return _named_members(module, path, "_buffers")


def _named_members(module: nn.Module, path: str, table: str) -> Iterator[tuple[str, Any]]:
    for owner, part in named_modules(module, path):
        for name, member in getattr(part, table).items():
            if member is not None:
                yield inside(owner) + name, member


def add_load_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a hook that isn't passed the module.

    torch's public hook has a weak reference to the module, with which a shallow copy can't be loaded once the original
    is collected.
    """
    module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def remove_state_dict_hooks(module: nn.Module, predicate: Callable[[Any], bool]) -> None:
    """Remove hooks with a predicate that run when a state dict is loaded or returned."""
    for table in (module._load_state_dict_pre_hooks, module._state_dict_hooks):
        for key, hook in list(table.items()):
            if predicate(getattr(hook, "hook", hook)):
                del table[key]


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, without the hooks and copies of `state_dict()`."""
    return {
        inside(path) + name: value
        for path, module in named_modules(model)
        for name, value in {**module._parameters, **module._buffers}.items()
        if value is not None and name not in module._non_persistent_buffers_set
    }


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or a view of it, was written to in place."""
    return tensor._version


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module replaces, if any."""
    return module.__dict__.get(ORIGINAL)


def mark_original_class(module: nn.Module, original: type[nn.Module]) -> None:
    module.__dict__[ORIGINAL] = unrebound(original)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has without patchers."""
    return original_class(module) or unrebound(type(module))


def kernel_name(cls: type) -> str:
    """Return the name by which transformers looks for a kernel for a class, "" if it doesn't."""
    return getattr(cls, "kernel_layer_name", "")


def chooses_kernel(cls: type, original: type) -> bool:
    """Whether a replacement declares a kernel itself, rather than inheriting it from the original."""
    own_bases = (base for base in cls.__mro__ if base not in original.__mro__)
    return bool(kernel_name(cls)) and any("kernel_layer_name" in vars(base) for base in own_bases)


def functions_alone(module: nn.Module) -> Any:
    """Return a stand-in of a module for which `kernels` replaces functions, but not the forward."""
    return SimpleNamespace(_kernel_funcs=module.__dict__.get("_kernel_funcs", {}))


class ModelView:
    """A model with other values of some attributes, without writing to the model, which may be in use."""

    def __init__(self, model: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def as_stock(model: Any) -> Any:
    """Return the model with the original classes of its sub-models, by which transformers looks up conversions.

    Of sub-models that `fully_shard` has split, whose classes have other names, too.
    """

    views: dict[int, Any] = {}
    for _, module in named_modules(model):
        if isinstance(module, PreTrainedModel):
            cls = original_class(module) or unsplit_class(module)
            if cls is not type(module):
                views[id(module)] = _view_as(module, cls)

    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((name, views.get(id(module), module)) for name, module in model.named_modules(*args, **kwargs))

    return ModelView(model, named_modules=named) if views else model


def named_as(model: Any, model_class: type[nn.Module]) -> Any:
    """Return the model with the class name of `model_class`, which transformers writes into the config."""
    if type(model).__name__.removeprefix("FSDP") == model_class.__name__:
        return model
    namespace = {"__module__": model_class.__module__, STANDS_FOR: model_class}
    return _view_as(model, type(model_class.__name__, (type(model),), namespace))


def _view_as(model: nn.Module, cls: type[nn.Module]) -> Any:
    """Return an object of a class with the attributes of the model."""
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def has_adapters(model: Any) -> bool:
    """Whether adapters were loaded into a model, of which transformers then saves only these."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def ties(model: PreTrainedModel) -> dict[str, str]:
    """Return parameter -> the one that it is tied to, instead of being loaded."""
    keys = getattr(model, "all_tied_weights_keys", None)
    if keys is None and isinstance(model, PreTrainedModel):  # it is being constructed
        keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return dict(keys or {})


def state_to_save(model: PreTrainedModel) -> dict[str, Any]:
    """Return the state dict with which `save_pretrained` begins: of the quantizer, without ignored keys."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    state_dict = quantizer.get_state_dict_and_metadata(model)[0] if quantizer is not None else None
    state_dict = model.state_dict() if state_dict is None else state_dict
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: value for name, value in state_dict.items() if name not in ignored}


def without_tied(model: PreTrainedModel, state_dict: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of a state dict that `save_pretrained` saves, one for each tensor.

    Args:
        state_dict: tensors; meta and sharded tensors are the same if they are the same parameter.
        own: the tensors of the model's modules.
    """

    def pointer(value: Any) -> Any:
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta
        return value.untyped_storage().data_ptr() if is_plain else None

    pointers = {name: pointer(value) for name, value in state_dict.items()}
    counts = Counter(pointers.values())
    # Only those that may be shared, as transformers is slow for thousands.
    candidates = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, DTensor)
        else value
        for name, value in state_dict.items()
        if pointers[name] is None or counts[pointers[name]] > 1
    }
    view: Any = ModelView(model, get_parameter_or_buffer={**state_dict, **own}.__getitem__)
    kept = remove_tied_weights_from_state_dict(dict(candidates), view) if candidates else {}
    return [name for name in state_dict if name not in candidates or name in kept]


def settle_keys(model: PreTrainedModel, info: Any) -> None:
    """Remove tied and ignored keys from the missing and unexpected ones, as a load does at its end."""
    model.mark_tied_weights_as_initialized(info)  # type: ignore[no-untyped-call]
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)


@contextmanager
def unreported(
    model: PreTrainedModel, info: Any, *, missing: Iterable[str], unexpected: Iterable[str]
) -> Iterator[None]:
    """Exclude keys from the log of a load that ends inside the block, and add them to `info` again."""
    excluded = {"missing_keys": set(missing), "unexpected_keys": set(unexpected)}
    removed: dict[str, set[str]] = {}

    def adjust(loading_info: Any) -> None:  # called right before the load logs
        type(model)._adjust_missing_and_unexpected_keys(model, loading_info)
        for name, keys in excluded.items():
            removed[name] = keys & getattr(loading_info, name)
            setattr(loading_info, name, getattr(loading_info, name) - keys)

    model.__dict__["_adjust_missing_and_unexpected_keys"] = adjust
    try:
        yield
    finally:
        del model.__dict__["_adjust_missing_and_unexpected_keys"]
        for name, keys in removed.items():
            setattr(info, name, getattr(info, name) | keys)


def has_file(path: str | os.PathLike[str], name: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder or a repo on the hub has a file, with the keyword arguments of `from_pretrained`."""
    below = f"{options['subfolder']}/{name}" if options.get("subfolder") else name
    return bool(_has_file(path, below, **{key: options[key] for key in _PLACES if options.get(key) is not None}))


def shards_of_index(index: Path) -> dict[str, list[str]]:
    """Return the files of an index, in the order in which a load reads them, and the keys of each."""
    _, metadata = get_checkpoint_shard_files(str(index.parent), str(index))  # type: ignore[no-untyped-call]
    shards: dict[str, list[str]] = {name: [] for name in sorted(set(metadata["weight_map"].values()))}
    for key, name in metadata["weight_map"].items():
        shards[name].append(key)
    return shards


def remote_class(reference: str, repo: str, **places: Any) -> type[PreTrainedModel]:
    """Load a class of a repo's code by its reference in the config."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # slow to import

    cls: type[PreTrainedModel] = get_class_from_dynamic_module(reference, repo, **places)
    return cls


def class_in(auto_class: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class that an Auto class has for a config."""
    mapping: Any = getattr(auto_class, "_model_mapping", {})
    value: Any = mapping.get(type(config), None)
    classes: list[type[PreTrainedModel] | None] = list(value) if isinstance(value, tuple) else [value]
    return next((cls for cls in classes if cls and cls.__name__ in (config.architectures or ())), classes[0])


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the cache argument of a model, `cache` from 5.24 on, None if it has none."""
    parameters = signature_of(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def renamed_parameters(function: Any) -> dict[str, str]:
    """Return old -> new names of the parameters that `deprecate_kwarg` of transformers renames."""
    new_names: dict[str, str] = {}
    while function is not None:
        variables = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if {"old_name", "new_name"} <= {*variables}:
            cells = dict(zip(variables, function.__closure__, strict=True))
            if (new := cells["new_name"].cell_contents) is not None:
                new_names[cells["old_name"].cell_contents] = new
        function = getattr(function, "__wrapped__", None)
    return new_names


def is_of_experts_decorator(function: Any) -> bool:
    """Whether a function is a wrapper of `use_experts_implementation`."""
    return getattr(function, "__globals__", None) is vars(moe)


def kept_in_fp32(model: PreTrainedModel, key: str) -> tuple[bool, bool]:
    """Whether a parameter stays in float32 when a model is loaded as float16, and as bfloat16."""
    patterns = model._keep_in_fp32_modules or (), model._keep_in_fp32_modules_strict or ()
    # As in a load, a name or an expression that is found anywhere in the key.
    weak, strict = (any(re.search(name.replace("*", ".*"), key) for name in names) for names in patterns)
    return weak or strict, strict


def inherit_loading_attributes(model: nn.Module, original: type[nn.Module]) -> None:
    """Set attributes of `PreTrainedModel` that the original class overrides and the replacement doesn't."""
    replacement = type(model)
    if issubclass(replacement, original) or not issubclass(original, PreTrainedModel):
        return
    for name, default in vars(PreTrainedModel).items():
        if name.startswith("__") or name in _OF_ONE_CLASS or callable(default) or hasattr(default, "__get__"):
            continue
        new, old = getattr(replacement, name, default), getattr(original, name, default)
        if new is default and old is not default and not isinstance(old, property):
            model.__dict__[name] = deepcopy(old)


def follow_no_split_names(models: Iterable[PreTrainedModel], replaced: Iterable[tuple[type, type]]) -> None:
    """Add replacements of classes that a device map must not split to `_no_split_modules`."""
    names = {(original.__name__, replacement.__name__) for original, replacement in replaced}
    for model in models:
        if no_split := model._no_split_modules:
            model._no_split_modules = {*no_split, *(new for old, new in names if old in no_split)}


def forget_no_split_names(model: PreTrainedModel, replaced: Iterable[tuple[type, type]]) -> None:
    """Remove the names of replacements, when a model has its original classes again."""
    names = {replacement.__name__ for original, replacement in replaced if original.__name__ != replacement.__name__}
    if no_split := model._no_split_modules:
        model._no_split_modules = type(no_split)(name for name in no_split if name not in names)


def implementation(model: PreTrainedModel, of: str) -> str | None:
    """Return the implementation of "attn" (sdpa, eager, ...) or "experts" (grouped_mm, ...), if any."""
    name: str | None = getattr(model.config, f"_{of}_implementation", None)
    return name


def choose_experts_implementation(model: PreTrainedModel, name: str) -> None:
    model.config._experts_implementation = name


def mark_initialized(tensor: Any) -> None:
    """Exclude a tensor, or the direct tensors of a module, from the initialization of transformers."""
    tensor.__dict__["_is_hf_initialized"] = True  # a module's own way to set attributes is slow


def is_initialized(tensor: torch.Tensor | nn.Module) -> bool:
    return bool(getattr(tensor, "_is_hf_initialized", False))


def forget_initialized(tensor: torch.Tensor) -> None:
    tensor.__dict__.pop("_is_hf_initialized", None)


# --- recorders of outputs --------------------------------------------------------------------------------------------


def output_recorders(model: PreTrainedModel) -> list[tuple[str, output_capturing.OutputRecorder]]:
    """Return the (output name, recorder) pairs of the model's class."""
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
    """Mark the recording hooks as installed."""
    model._output_capturing_hooks_installed = True  # type: ignore[assignment]


def output_hook(key: str, index: int, capture_initial_hidden_state: bool) -> Any:
    """Return the forward hook with which transformers records an output."""
    hooks: list[Any] = []
    # Not a module, whose construction would break the graph of `torch.compile`.
    module: Any = SimpleNamespace(register_forward_hook=hooks.append)
    output_capturing.install_output_capuring_hook(module, key, index, capture_initial_hidden_state)
    return hooks[0]


def record_replacements(model: nn.Module, replacement_of: Callable[[str], type[nn.Module] | None]) -> None:
    """Set recorders for the replacements of classes on a model and its sub-models."""

    def replaced(recorder: Any) -> Any:
        if isinstance(recorder, output_capturing.OutputRecorder):
            target: type[nn.Module] | None = recorder.target_class  # None if the path decides
            name = recorder.class_name if target is None else target.__name__
            replacement = replacement_of(name) if name else None
            return recorder if replacement is None else replace(recorder, target_class=replacement)
        return replacement_of(recorder if isinstance(recorder, str) else recorder.__name__) or recorder

    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None)
        if isinstance(recorders, dict):
            module.__dict__["_can_record_outputs"] = {
                output: [replaced(item) for item in value] if isinstance(value, list) else replaced(value)
                for output, value in recorders.items()
            }


def forget_recorded(module: nn.Module) -> None:
    """Remove the recording hooks of a module, which are installed again when recording is requested."""
    for key, hook in list(module._forward_hooks.items()):
        if getattr(getattr(hook, "_hook", hook), "__module__", None) == output_capturing.__name__:
            del module._forward_hooks[key]
    module.__dict__.pop("_output_capturing_hooks_installed", None)


# --- models on several processes -------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The number of processes that share tensors, experts, batches, and stages of a pipeline."""

    tensors: int
    experts: int
    batches: int
    stages: int


def sizes(config: Any) -> Sizes:
    """Return the sizes in a `DistributedConfig`, a mapping with its fields, or None."""

    def size(name: str) -> int:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return int(value) if value else 1

    return Sizes(size("tp_size"), size("ep_size"), size("fsdp_size") * size("dp_replicate_size"), size("pp_size"))


def in_plan(name: str) -> str:
    """Return the name of a module or parameter in plans, with `*` for numbers."""
    return str(tensor_parallel.replace_layer_number_by_wildcard(name))  # type: ignore[attr-defined]


def set_plans(model: PreTrainedModel, tensors: dict[str, str], experts: dict[str, str] | None) -> None:
    """Set the plans of tensor and expert parallelism."""
    model._tp_plan = tensors
    if experts is not None:
        model._ep_plan = experts


def unsplit_class(module: nn.Module) -> type[Any]:
    """Return the class that a module had before `fully_shard`."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls
