"""Restore the stock layers of fused modules in place, on the storage of the joined weights.

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
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import ORIGINAL, is_initialized, mark_initialized, named_modules
from patcher.errors import InvalidPatcherError
from patcher.fusions.fused_module import FusedModule
from patcher.layouts.carried import ModuleLayouts, fused_modules, is_quantized
from patcher.layouts.either_layout import carry
from patcher.layouts.layouts import by_itself
from patcher.loading.record import RECORD, PatchRecord, record_of
from patcher.patterns import inside

#: Why an adapter unfuses a module, for the report.
ADAPTED = "an adapter names its layers"
#: The hooks of a module that run with it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def unfuse(
    model: nn.Module,
    predicate: Callable[[str, ModuleLayouts], bool],
    reason: str,
    replacements: Collection[type] = (),
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
    for path, module, carried in reversed(fused):  # the inner ones first
        if id(module) not in restored:
            restored[id(module)] = _restore(module, carried)
        if (new := restored[id(module)]) is not module:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = new
    paths = [path for path, *_ in fused]
    for path, part in named_modules(model) if paths else ():
        if (record := record_of(part)) is not None:
            prefix = inside(path)
            inner = {name.removeprefix(prefix) for name in paths if name.startswith(prefix)}
            part.__dict__[RECORD] = _without(record, inner, reason)
    return paths


def _without(record: PatchRecord, paths: Collection[str], reason: str) -> PatchRecord:
    """Return the record of a model in which some modules aren't fused any more."""
    unfused = {item.path: item.fusion for item in record.modules if item.fusion is not None and item.path in paths}
    return replace(
        record,
        modules=tuple(item for item in record.modules if item.path not in unfused),
        refused={**record.refused, **dict.fromkeys(sorted(unfused), reason)},
        unfused={**record.unfused, **unfused},
    )


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
        if not owner:
            continue
        if type(layer) not in (nn.Linear, nn.Module):
            raise refusal(f"{owner} is a {type(layer).__qualname__} now")
        has_hooks = any(getattr(layer, hooks, None) for hooks in HOOKS)
        if has_hooks or ("forward" in vars(layer) and not hasattr(layer, "_hf_hook")):
            raise refusal(f"{owner} has hooks, which belong to none of these layers")
        members = {**layer._parameters, **layer._buffers, **layer._modules}
        for key, member in members.items():
            if member is not None and f"{owner}.{key}" not in carried.fused:
                raise refusal(f"{owner}.{key} was added to it")
    cls = unrebound(type(module))
    if isinstance(module, FusedModule) and "_made_by" not in vars(cls) and cls not in replacements:
        raise refusal(f"its class {cls.__qualname__} was derived from the fused one, and would be lost")


def _restore(module: nn.Module, carried: ModuleLayouts) -> nn.Module:
    """Return the stock module with the values of a fused one: the same object, if its class was rewritten."""
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
        parts = layout.separate([parameter.detach() for parameter in fused])
        for name, part in zip(layout.stock, parts, strict=True):
            owner, _, last = name.rpartition(".")
            layer = _layer(new, owner, part, hooks) if owner else new
            new.__dict__.pop(name, None)  # an attribute with its values
            if owner and has_values:
                mark_initialized(layer)
            layer._parameters[last] = nn.Parameter(by_itself(part.contiguous()), requires_grad)
    if new is module:
        _remove_fused(module, carried, owners)
        module.__class__ = carried.original or type(module)
        if module.__dict__.get(ORIGINAL) is unrebound(type(module)):
            del module.__dict__[ORIGINAL]
        carry(module, ModuleLayouts(converted=carried.converted) if carried.converted else None)
    return new


def copy_hooks(new: nn.Module, module: nn.Module) -> None:
    """Have a module run the hooks of the one that it replaces."""
    for name, value in vars(module).items():
        if name.startswith(HOOKS[:4]) and value:
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
