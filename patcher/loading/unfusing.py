"""Fused modules become those of transformers again, where they are and on the storage of the joined weights.

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

#: Why an adapter un-fuses a module, for the report.
ADAPTED = "an adapter names its layers"
#: Whether a fused module, at a path and with what it carries, is to be un-fused.
Wanted = Callable[[str, ModuleLayouts], bool]
#: The hooks of a module that run with it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def unfuse(model: nn.Module, wanted: Wanted, reason: str, replacements: Collection[type] = ()) -> list[str]:
    """Give fused modules their class and their layers back; all of them are checked before one is changed.

    Args:
        reason: why, for the report.
        replacements: classes derived from fused ones that the caller takes off as well.

    Returns:
        The paths of the modules.
    """
    fused = fused_modules(model)
    chosen = {id(module) for path, module, carried in fused if wanted(path, carried)}
    fused = [each for each in fused if id(each[1]) in chosen]  # at all their paths
    for path, module, carried in fused:
        _check(path, module, carried, replacements)
    made: dict[int, nn.Module] = {}
    for path, module, carried in reversed(fused):  # the inner ones first
        if id(module) not in made:
            made[id(module)] = _stock_module(module, carried)
        if (new := made[id(module)]) is not module:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = new
    paths = [path for path, *_ in fused]
    for path, part in named_modules(model) if paths else ():
        if (record := record_of(part)) is not None:
            own = {each.removeprefix(inside(path)) for each in paths if each.startswith(inside(path))}
            part.__dict__[RECORD] = without(record, own, reason)
    return paths


def without(record: PatchRecord, paths: Collection[str], reason: str) -> PatchRecord:
    """A record of a model in which some modules aren't fused any more."""
    gone = {each.path: each.fusion for each in record.modules if each.fusion is not None and each.path in paths}
    return replace(
        record,
        modules=tuple(each for each in record.modules if each.path not in gone),
        refused={**record.refused, **dict.fromkeys(sorted(gone), reason)},
        unfused={**record.unfused, **gone},
    )


def _check(path: str, module: nn.Module, carried: ModuleLayouts, replacements: Collection[type]) -> None:
    def cannot(why: str) -> InvalidPatcherError:
        return InvalidPatcherError(
            f"{path} is fused, and its layers are needed one by one ({', '.join(sorted(carried.stock)[:3])}): {why}. "
            "Load the model with a patcher that leaves this module out: modules=... of the fusion says which it takes."
        )

    if not isinstance(module, FusedModule) and not hasattr(module, "to_module"):
        raise cannot(f"{type(module).__qualname__} has no to_module(), which would make it")
    for name in carried.fused:
        owner, _, last = name.rpartition(".")
        try:
            at = module.get_submodule(owner)
        except AttributeError:
            raise cannot(f"{name} is gone") from None
        value = at._parameters.get(last)
        if value is None or is_quantized(value):  # quantized first: its shape is another one
            raise cannot(f"{name} is {'gone' if value is None else 'quantized, so its rows can not be taken apart'}")
        if isinstance(value, DTensor):
            raise cannot(f"{name} is shared by processes")
        if value.is_meta and hasattr(at, "_hf_hook"):
            raise cannot(f"{name} is offloaded")
        if not owner:
            continue
        if type(at) not in (nn.Linear, nn.Module):
            raise cannot(f"{owner} is a {type(at).__qualname__} now")
        if any(getattr(at, hooks, None) for hooks in HOOKS) or ("forward" in vars(at) and not hasattr(at, "_hf_hook")):
            raise cannot(f"{owner} has hooks, which belong to none of these layers")
        held = {**at._parameters, **at._buffers, **at._modules}
        if added := [key for key, each in held.items() if each is not None and f"{owner}.{key}" not in carried.fused]:
            raise cannot(f"{owner}.{added[0]} was added to it")
    cls = unrebound(type(module))
    if isinstance(module, FusedModule) and "_made_by" not in vars(cls) and cls not in replacements:
        raise cannot(f"its class {cls.__qualname__} was derived from the fused one, and would be lost")


def _stock_module(module: nn.Module, carried: ModuleLayouts) -> nn.Module:
    """The module of transformers with the values of a fused one: the same object, if its class was rewritten."""
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
        own = [module.get_parameter(name) for name in layout.fused]
        has_values = all(is_initialized(module.get_submodule(name.rpartition(".")[0])) for name in layout.fused)
        for name, part in zip(layout.stock, layout.separate([each.detach() for each in own]), strict=True):
            owner, _, last = name.rpartition(".")
            at = _layer(new, owner, part, hooks) if owner else new
            new.__dict__.pop(name, None)  # which holds its values
            if owner and has_values:
                mark_initialized(at)
            at._parameters[last] = nn.Parameter(by_itself(part.contiguous()), any(each.requires_grad for each in own))
    if new is module:
        _take_off(module, carried, owners)
        module.__class__ = carried.original or type(module)
        if module.__dict__.get(ORIGINAL) is unrebound(type(module)):
            del module.__dict__[ORIGINAL]
        carry(module, ModuleLayouts(converted=carried.converted) if carried.converted else None)
    return new


def copy_hooks(new: nn.Module, module: nn.Module) -> None:
    """Have a module that takes the place of another one run the hooks of that one."""
    for name, value in vars(module).items():
        if name.startswith(HOOKS[:4]) and value:
            new.__dict__[name] = value


def _take_off(module: nn.Module, carried: ModuleLayouts, owners: Collection[str]) -> None:
    """Take the joined layers and parameters off, and put what is there into the order of transformers."""
    for owner in sorted(owners, key=lambda each: -each.count(".")):
        parent, _, last = owner.rpartition(".")
        module.get_submodule(parent)._modules.pop(last)
        module.__dict__.pop(f"{owner}_sizes", None)
    for top in {owner.partition(".")[0] for owner in owners}:
        if (left := module._modules.get(top)) is not None and not list(left.parameters()):
            del module._modules[top]  # an expert
    for name in carried.fused - carried.stock:
        module._parameters.pop(name, None)
    place = {name.partition(".")[0]: number for number, name in reversed(list(enumerate(carried.names)))}
    held: Any
    for held in (module._modules, module._parameters):
        ordered = sorted(held.items(), key=lambda item: place.get(item[0], len(place)))
        held.clear()
        held.update(ordered)


def _layer(module: nn.Module, owner: str, part: torch.Tensor, hooks: list[Any]) -> nn.Module:
    """The linear layer of a part: linear layers are what fusions join."""
    parent, _, last = owner.rpartition(".")
    holder = module.get_submodule(parent)
    if (layer := holder._modules.get(last)) is None:
        columns = part.shape[-1] if part.dim() == 2 else 1
        layer = holder._modules[last] = nn.Linear(columns, part.shape[0], bias=False, device="meta")
        layer.train(module.training)
        if hooks:  # of accelerate, that move inputs to the device of the layer
            add_hook_to_module(layer, copy.copy(hooks[0]))
    return layer
