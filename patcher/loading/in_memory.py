"""Change the modules of a model in memory: restore those that were fused, and replace others by new ones.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from patcher import Patcher
>>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
>>> model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), patcher=Patcher(fusions="qkv"))
>>> unfuse(model, lambda path, carried: True, "as an example")
['model.layers.0.self_attn']
>>> model.model.layers[0].self_attn.q_proj
Linear(in_features=8, out_features=8, bias=False)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from transformers import PretrainedConfig, PreTrainedModel

from patcher.compat.attributes import left_behind
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import (
    ORIGINAL,
    is_initialized,
    mark_initialized,
    named_modules,
    named_parameters,
    state_tensors,
)
from patcher.errors import InvalidPatcherError
from patcher.fusions.fused_module import FusedModule
from patcher.fusions.old_names import fused_of
from patcher.layouts.carried import ModuleLayouts, carry, fused_modules, is_quantized
from patcher.layouts.layouts import by_itself, memory_of, partly_frozen, unlike_parts
from patcher.loading.record import RECORD, patched_now
from patcher.patterns import compress, inside, parents

#: Why an adapter unfuses a module, for the report.
ADAPTED = "an adapter names its layers"
#: The hooks of a module that run with it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
#: Beginnings of the names of what a forward and a backward pass run, and how.
_OF_PASSES = (*HOOKS[:4], "_is_full_backward_hook")


def unfuse(
    model: nn.Module, predicate: Callable[[str, ModuleLayouts], bool], reason: str, replacements: Collection[type] = ()
) -> list[str]:
    """Restore the class and the layers of fused modules, after all of them have been checked; return their paths.

    Args:
        predicate: whether to unfuse the module at a path that carries these layouts.
        reason: why, for the report.
        replacements: classes derived from fused ones that the caller removes as well.
    """
    fused = fused_modules(model)
    chosen = {id(module) for path, module, carried in fused if predicate(path, carried)}
    fused = [carrier for carrier in fused if id(carrier.module) in chosen]  # at all their paths
    for path, module, carried in fused:
        _check(path, module, carried, replacements)
    restored: dict[int, nn.Module] = {}
    shared: dict[Any, Any] = {}
    for path, module, carried in reversed(fused):  # the inner ones first
        if id(module) not in restored:
            restored[id(module)] = _restore(module, carried, shared)
        if (new := restored[id(module)]) is not module:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = new
    fusions = {path: carried.fusion for path, _, carried in fused}
    for path, part in named_modules(model) if fusions else ():
        if RECORD in vars(part) and (record := patched_now(part)) is not None:
            prefix = inside(path)
            unfused = {name.removeprefix(prefix): fusions[name] for name in sorted(fusions) if name.startswith(prefix)}
            refused = {**record.refused, **dict.fromkeys(unfused, reason)}
            part.__dict__[RECORD] = replace(record, refused=refused, unfused={**record.unfused, **unfused})
    return list(fusions)


def _check(path: str, module: nn.Module, carried: ModuleLayouts, replacements: Collection[type]) -> None:
    def refusal(why: str) -> InvalidPatcherError:
        return InvalidPatcherError(
            f"{path} is fused, and its layers are needed one by one ({', '.join(sorted(carried.stock)[:3])}): {why}. "
            "Load the model with a patcher that leaves this module out: modules=... of the fusion says which it takes."
        )

    if not isinstance(module, FusedModule) and not hasattr(module, "to_module"):
        raise refusal(f"{type(module).__qualname__} has no to_module(), which would make it")
    for name in carried.fused:
        owner, _, last = name.rpartition(".")
        try:
            layer = module.get_submodule(owner)
        except AttributeError:
            raise refusal(f"{name} is gone") from None
        value = layer._parameters.get(last)
        if value is None or is_quantized(value):  # quantized first: its shape is another one
            raise refusal(f"{name} is {'gone' if value is None else 'quantized, so its rows can not be taken apart'}")
        if isinstance(value, DTensor):
            raise refusal(f"{name} is shared by processes")
        if value.is_meta and hasattr(layer, "_hf_hook"):
            raise refusal(f"{name} is offloaded")
    for name in sorted(name for name in module._modules if fused_of(module, name)):
        raise refusal(f"{name} was put into its _modules, where its forward doesn't look for it")
    if reason := unlike_parts((layout.fused for layout in carried.layouts), module):
        raise refusal(reason)
    kinds = {nn.Linear, nn.Module, *(layout.container for layout in carried.layouts)}
    for owner in sorted({path for name in carried.fused for path in parents(name)} - {""}):
        layer = module.get_submodule(owner)
        if type(layer) not in kinds:
            raise refusal(f"{owner} is a {type(layer).__qualname__} now")
        has_hooks = any(getattr(layer, hooks, None) for hooks in HOOKS)
        if has_hooks or ("forward" in vars(layer) and not hasattr(layer, "_hf_hook")):
            raise refusal(f"{owner} has hooks, which belong to none of these layers")
        members = {**layer._parameters, **layer._buffers, **layer._modules}
        for key, member in members.items():
            is_known = any(inside(name).startswith(inside(f"{owner}.{key}")) for name in carried.fused)
            if member is not None and not is_known:
                raise refusal(f"{owner}.{key} was added to it")
    cls = unrebound(type(module))
    if isinstance(module, FusedModule) and "_made_by" not in vars(cls) and cls not in replacements:
        raise refusal(f"its class {cls.__qualname__} was derived from the fused one, and would be lost")


def _restore(module: nn.Module, carried: ModuleLayouts, shared: dict[Any, Any]) -> nn.Module:
    """Return the stock module with the values of a fused one: the same object, if its class was rewritten.

    Args:
        shared: collects the parts of each parameter, which other modules may share.
    """
    new: nn.Module = module
    if not isinstance(module, FusedModule):
        with torch.device("meta"):
            new = module.to_module()  # type: ignore[operator]
        new.train(module.training)
        copy_hooks(new, module)
        if is_initialized(module):
            mark_initialized(new)
    owners = {name.rpartition(".")[0] for name in carried.fused if "." in name}
    hooks = [hook for owner in owners if (hook := getattr(module.get_submodule(owner), "_hf_hook", None)) is not None]
    for layout in carried.layouts:
        fused = [module.get_parameter(name) for name in layout.fused]
        requires_grad = any(parameter.requires_grad for parameter in fused)
        has_values = all(is_initialized(module.get_submodule(name.rpartition(".")[0])) for name in layout.fused)
        key = (*map(id, fused), *layout.stock_shapes)
        if key not in shared:
            parts = layout.separate([parameter.detach() for parameter in fused])
            shared[key] = fused, [nn.Parameter(by_itself(part), requires_grad) for part in parts]
        for name, part in zip(layout.stock, shared[key][1], strict=True):
            owner, _, last = name.rpartition(".")
            layer = _layer(new, owner, part, hooks) if owner else new
            new.__dict__.pop(name, None)  # an attribute with its values
            if owner and has_values:
                mark_initialized(layer)
            layer._parameters[last] = part
    if new is module:
        _remove_fused(module, carried, owners)
        module.__class__ = carried.original or type(module)
        if module.__dict__.get(ORIGINAL) is unrebound(type(module)):
            del module.__dict__[ORIGINAL]
        carry(module, ModuleLayouts(converted=carried.converted) if carried.converted else None)
    return new


def copy_hooks(new: nn.Module, module: nn.Module) -> None:
    """Have a module run the hooks of the one that it replaces, in the same dicts: handles know a hook by them."""
    for name, value in vars(module).items():
        if name.startswith(_OF_PASSES) and (value or not vars(new)[name]):
            new.__dict__[name] = value


def _remove_fused(module: nn.Module, carried: ModuleLayouts, owners: Collection[str]) -> None:
    """Remove the joined layers and parameters, and put the others into the order of the stock module."""
    for owner in sorted(owners, key=lambda owner: -owner.count(".")):
        parent, _, last = owner.rpartition(".")
        module.get_submodule(parent)._modules.pop(last)
        module.__dict__.pop(f"{owner}_sizes", None)
    for name in {owner.partition(".")[0] for owner in owners}:
        if (child := module._modules.get(name)) is not None and not list(child.parameters()):
            del module._modules[name]  # an expert
    for name in carried.fused - carried.stock:
        module._parameters.pop(name, None)
    places = {name.partition(".")[0]: index for index, name in reversed(list(enumerate(carried.names)))}
    members: Any
    for members in (module._modules, module._parameters):
        ordered = sorted(members.items(), key=lambda item: places.get(item[0], len(places)))
        members.clear()
        members.update(ordered)


def _layer(module: nn.Module, owner: str, part: torch.Tensor, hooks: list[Any]) -> nn.Module:
    """Return the linear layer of a part, creating it if needed: fusions only join linear layers."""
    parent, _, name = owner.rpartition(".")
    children = module.get_submodule(parent)._modules
    if (layer := children.get(name)) is None:
        columns = part.shape[-1] if part.dim() == 2 else 1
        layer = children[name] = nn.Linear(columns, part.shape[0], bias=False, device="meta")
        layer.train(module.training)
        if hooks:  # of accelerate, which move inputs to the device of the layer
            add_hook_to_module(layer, copy.copy(hooks[0]))
    return layer


# --- new modules -----------------------------------------------------------------------------------------------------


#: The attributes that torch and transformers keep on every module.
_COMMON = {*vars(nn.Module()), "_is_hf_initialized", "_no_split_modules"}
_MISSING: Any = object()
#: The advice for a module that isn't as its config says.
_PATCH_FIRST = "Undo that, apply the patcher, and change the result."


class Weights:
    """The parameters and persistent buffers of new modules: the objects of the model, except if they are converted.

    Args:
        model: the model whose tensors they take.
        converted: the values of those that aren't tensors of the same name in the model.
        origins: the names of these, and of the parameters from which they are converted, if known.
    """

    def __init__(
        self, model: nn.Module, converted: Mapping[str, torch.Tensor], origins: Mapping[str, Iterable[str]]
    ) -> None:
        self.state, self.converted, self.origins = state_tensors(model), converted, origins
        self._by_memory = {memory_of(tensor): tensor for tensor in self.state.values()}

    def assign(self, path: str, module: nn.Module, old: nn.Module) -> None:
        """Assign the tensors of one module, which is the replacement of `old` or a part of it."""
        device = next((parameter.device for parameter in old.parameters()), None)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                name = inside(path) + key
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                if name in self.converted:
                    table[key] = self._converted(name, isinstance(tensor, nn.Parameter), old)
                elif name in self.state and self.state[name].shape == tensor.shape:
                    table[key] = self.state[name]  # type: ignore[assignment]
                elif tensor.is_meta:
                    raise InvalidPatcherError(
                        f"Patcher.apply finds no weights for {name}: nothing in the model makes it. Load the model "
                        "again with the patcher that it is to have."
                    )
                elif device is not None:
                    tensor.data = tensor.data.to(device)

    def _converted(self, name: str, is_parameter: bool, old: nn.Module) -> Any:
        value = self.converted[name]
        if (same := self._by_memory.get(memory_of(value))) is not None:  # it was only renamed
            return same
        value = by_itself(value.detach())
        return nn.Parameter(value, self._requires_grad(name, old)) if is_parameter else value

    def _requires_grad(self, name: str, old: nn.Module) -> bool:
        """Whether a converted parameter is trained: as those from which it is converted."""
        parts = {part: self.state[part] for part in self.origins.get(name, ()) if part in self.state}
        flags = {part: value.requires_grad for part, value in (parts or dict(named_parameters(old))).items()}
        if len(set(flags.values())) > 1:
            frozen = [part for part, is_trained in flags.items() if not is_trained]
            what = partly_frozen(frozen, compress(list(flags)))
            raise _refusal(", ".join(compress(frozen)), what, "Freeze all of them or none.")
        return any(flags.values())


def move_attributes(model: PreTrainedModel, base: PreTrainedModel, source: PreTrainedModel) -> None:
    """Move the attributes of modules that changed since their construction to those that will replace them, or raise.

    `base` is constructed like `model`, on the meta device, and `source` with the new modules. An attribute that is as
    in the base stays that of the new module. A changed one is moved if the new module has it as the base does.
    """
    for path in _outermost(model, source):
        try:
            old, base_module = model.get_submodule(path), base.get_submodule(path)
        except AttributeError:
            raise _refusal(path, "was added to the model, or taken out of it", _PATCH_FIRST) from None
        new = source.get_submodule(path)
        olds, expected, news = (dict(named_modules(module, path)) for module in (old, base_module, new))
        for name in sorted(expected.keys() | olds.keys()):
            _check_as_constructed(name, olds.get(name), expected.get(name))
        for name, module in expected.items():
            _move(name, olds[name], module, news.get(name))
        for name, module in news.items():
            module.training = olds.get(name, old).training


def transplant(model: PreTrainedModel, source: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """Replace modules of a model by those of `source`, after `move_attributes`, and return the model."""
    before, result, outermost = list(named_parameters(model)), model, _outermost(model, source)
    places: dict[nn.Module, list[str]] = {}
    #: id of a parameter -> its names, in the modules that are replaced or in its own
    owners: dict[int, set[tuple[nn.Module, str]]] = {}
    for path, module in named_modules(model):
        places.setdefault(module, []).append(path)
        around = next((place for place in outermost if inside(path).startswith(inside(place))), path)
        owner = model.get_submodule(around)
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), set()).add((owner, (inside(path) + key).removeprefix(inside(around))))
    modules = [*named_modules(model), *named_modules(source)]
    for path in outermost:
        old, new = model.get_submodule(path), source.get_submodule(path)
        if old not in places:  # one module at several paths
            continue
        for name, module in named_modules(new, path):
            weights.assign(name, module, old)
        for place in places.pop(old):
            parent, _, key = place.rpartition(".")
            if not place:
                result = new  # type: ignore[assignment]
            elif (children := model.get_submodule(parent)._modules).get(key) is old:
                children[key] = new
    prefixes = tuple(map(inside, outermost))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in weights.origins if not name.startswith(prefixes)):
        weights.assign(path, model.get_submodule(path), model.get_submodule(path))
    after = dict(named_parameters(result))
    for name, parameter in before:
        if len(owners[id(parameter)]) > 1 and after.get(name) is not parameter:
            raise _refusal(name, "is tied to another parameter", "Untie it, and tie the result.")
    attribute, place = left_behind(modules, named_modules(result))
    if attribute:
        raise _refusal(attribute, f"refers to {place}", _PATCH_FIRST)
    return result


def _outermost(*models: nn.Module) -> list[str]:
    """Return the paths of modules that are patched in one of the models, without those below another one."""
    paths = [path for model in models for path, module in named_modules(model) if ORIGINAL in vars(module)]
    outermost: list[str] = []
    for path in sorted(paths, key=lambda path: (path != "", path.count("."))):
        if path not in outermost and not path.startswith(tuple(map(inside, outermost))):
            outermost.append(path)
    return outermost


def _refusal(name: str, what: str, advice: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"Patcher.apply: {name} {what}, which would be lost, because a module there is replaced. {advice}"
    )


def _check_as_constructed(name: str, module: nn.Module | None, base: nn.Module | None) -> None:
    """Raise for submodules, parameters and hooks that a model doesn't have from its config."""
    cls, expected_cls = type(module), type(base)
    if any(parent.__name__ == "BaseTunerLayer" for parent in cls.__mro__):
        raise _refusal(name, "has an adapter", "Merge it or unload it, or apply the patcher first.")
    if module is None or base is None or _kind(module) != _kind(base):
        what = f"is a {cls.__qualname__} (its config says {expected_cls.__qualname__})"
        raise _refusal(name, what, _PATCH_FIRST)
    for hooks in HOOKS[:4]:
        if len(getattr(module, hooks)) > len(getattr(base, hooks)):
            raise _refusal(name, f"has hooks ({hooks})", "Remove them, and register them on the result.")
    for key in sorted(base._parameters.keys() | module._parameters.keys()):
        parameters = [item._parameters.get(key) for item in (module, base)]
        shape, expected = (None if parameter is None else tuple(parameter.shape) for parameter in parameters)
        if shape != expected:
            what = "isn't a parameter" if shape is None else f"has the shape {shape}"
            what += f" (its config says {expected})"
            raise _refusal(inside(name) + key, what, _PATCH_FIRST)


def _kind(module: nn.Module) -> tuple[type[nn.Module], bool]:
    """Return the class of a module, and whether it is parametrized: then torch makes a class for each one."""
    return type_before_parametrizations(module), is_parametrized(module)


def _move(path: str, old: nn.Module, base: nn.Module, new: nn.Module | None) -> None:
    """Move the changed attributes and buffers of a module to the one that replaces it."""
    for key in sorted({*vars(old), *vars(base), *old._non_persistent_buffers_set} - _COMMON):
        value, base_value, new_value = (getattr(module, key, _MISSING) for module in (old, base, new))
        if isinstance(value, PretrainedConfig):
            if new is not None and isinstance(new_value, PretrainedConfig):
                new.__dict__[key] = value  # some modules copy the config of the model
        elif not key.startswith("_patcher"):
            is_method = isinstance(value, MethodType) or callable(getattr(type(new), key, None))
            is_changed = not _equal(value, base_value)
            fits = new is not None and not is_method and _equal(base_value, new_value)
            if is_changed and not fits:
                raise _refusal(inside(path) + key, "was changed since the model was constructed", _PATCH_FIRST)
            if new is None or not fits:
                continue
            if key in new._buffers:
                new._buffers[key] = value
            elif is_changed and value is _MISSING:
                new.__dict__.pop(key, None)
            elif is_changed:
                new.__dict__[key] = value


def _equal(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether the values of an attribute of two modules are equal."""
    equals: Any = getattr(type(first), "__eq__")  # noqa: B009
    if first is second or isinstance(first, nn.Module):
        return first is second or isinstance(second, nn.Module)
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        if first.is_meta or second.is_meta:
            return first.is_meta is second.is_meta and first.shape == second.shape
        return (
            first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second.to(first.device))
        )
    if isinstance(first, MethodType | FunctionType):
        return first.__code__ is second.__code__
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key], depth) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_equal(*pair, depth) for pair in zip(first, second, strict=True))
    if equals is not object.__eq__:
        equal = first == second
        return bool(equal.all() if hasattr(equal, "all") else equal)  # arrays compare item by item
    if depth > 5 or not hasattr(first, "__dict__"):
        return True
    return _equal(vars(first), vars(second), depth + 1)
