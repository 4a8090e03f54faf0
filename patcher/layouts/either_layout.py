"""State dicts in either layout: a module that was fused or converted reads the tensors of transformers too.

What a module needs for that it carries itself, so it does so wherever it goes: copied, pickled, in another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patcher.compat.models import add_load_hook, remove_state_dict_hooks
from patcher.layouts.carried import CARRIED, ModuleLayouts, is_quantized
from patcher.layouts.layouts import Layout, by_itself, named_parameter
from patcher.layouts.sharded import distribute_like, whole


def carry(module: nn.Module, carried: ModuleLayouts | None) -> None:
    """Have a module carry layouts, and `load_state_dict` take the parameters of transformers for it; None for neither.

    What `load_state_dict` calls holds the tables of the module and not the module itself, which it would keep alive:
    so it goes with copies of the module, shallow ones too.
    """
    remove_state_dict_hooks(module, lambda hook: isinstance(hook, _JoinParts) or hook is _mark_layout)
    if carried is None:
        module.__dict__.pop(CARRIED, None)
        return
    module.__dict__[CARRIED] = carried
    layouts = (*carried.converted, *carried.layouts)  # what is converted may be fused then
    add_load_hook(module, _JoinParts(layouts, module._parameters, module._modules))
    if any(map(_ambiguous, layouts)):
        module.register_state_dict_post_hook(_mark_layout)  # type: ignore[no-untyped-call]


#: Whether the state dict that is being loaded is known to be in the layout of transformers.
_ORIGINAL: ContextVar[bool] = ContextVar("patcher_original_layout", default=False)
#: In the metadata of a state dict, where a module says that its parameters lie as the patched module has them.
_MARK = "patcher"


@contextmanager
def in_original_layout() -> Iterator[None]:
    """Names that both layouts have are those of transformers in state dicts that are loaded in the block."""
    token = _ORIGINAL.set(True)
    try:
        yield
    finally:
        _ORIGINAL.reset(token)


def is_in_original_layout() -> bool:
    """Whether the state dict that is being loaded is known to be in the layout of transformers."""
    return _ORIGINAL.get()


def _mark_layout(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[_MARK] = True


def _ambiguous(layout: Layout) -> list[str]:
    """The names of parameters that have the same shape in both layouts."""
    if set(layout.stock).isdisjoint(layout.fused):
        return []
    fused = dict(zip(layout.fused, layout.fused_shapes(), strict=True))
    return [name for name, shape in zip(layout.stock, layout.stock_shapes, strict=True) if fused.get(name) == shape]


class _JoinParts:
    """Puts the parameters of a module into a state dict, in the place of those of transformers that it has.

    What doesn't fit is reported as torch does.
    """

    def __init__(self, layouts: tuple[Layout, ...], parameters: Any, modules: Any) -> None:
        self.layouts, self._parameters, self._modules = layouts, parameters, modules

    def __call__(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        for layout in self.layouts:
            unclear = [] if _ORIGINAL.get() else [n for n in _ambiguous(layout) if f"{prefix}{n}" in state_dict]
            if unclear and not local_metadata.get(_MARK):
                error_msgs.append(
                    f"{prefix}{unclear[0]} has the same name and shape before and after {layout}, and the "
                    "state dict doesn't say which it is. For the layout of transformers use "
                    "patcher.load_original_state_dict(model, state_dict); for that of the patched model the state "
                    "dict that its state_dict() gave."
                )
            parts = {} if unclear else _take_parts(layout, prefix, state_dict)
            both = [name for name in layout.fused if f"{prefix}{name}" in state_dict] if parts else []
            if both:
                error_msgs.append(
                    f"{prefix}{next(iter(parts))} and {prefix}{both[0]} are both in the state dict, and one is made "
                    "of the other: which is meant can't be known. Take one of them out. Where a tool has filled in "
                    "what the model has (set_model_state_dict of torch.distributed.checkpoint with "
                    "full_state_dict=True), use patcher.load_original_state_dict(model, state_dict), with a state "
                    "dict that has not been filled in."
                )
            elif parts:
                current = {name: named_parameter(self, name) for name in layout.fused}
                made = _made(layout, parts, prefix, current, missing_keys, error_msgs, assign=assign)
                # A parameter that stays what it is isn't missing: the parts are, or an error says why.
                state_dict.update({f"{prefix}{name}": value for name, value in made.items() if value is not None})


def _take_parts(layout: Layout, prefix: str, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of transformers that a state dict has for a layout, which are taken out of it."""
    fused = {} if _ORIGINAL.get() else dict(zip(layout.fused, layout.fused_shapes(), strict=True))
    held = {name: state_dict.get(f"{prefix}{name}") for name in layout.stock}
    # A name that both have is that of a part, if the shape is.
    parts = {name: each for name, each in held.items() if each is not None and each.shape != fused.get(name)}
    return {name: state_dict.pop(f"{prefix}{name}") for name in parts}


def _made(
    layout: Layout,
    parts: Mapping[str, torch.Tensor],
    prefix: str,
    current: Mapping[str, nn.Parameter | None],
    missing_keys: list[str],
    error_msgs: list[str],
    *,
    assign: bool,
) -> Mapping[str, Any]:
    """What parts make of the parameters of a module, which stay what they are where the parts don't fit."""
    fitting = {}
    for name, shape in zip(layout.stock, layout.stock_shapes, strict=True):
        if name not in parts:
            missing_keys.append(f"{prefix}{name}")
        elif parts[name].shape == shape:
            fitting[name] = parts[name]
        else:
            error_msgs.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {parts[name].shape} from "
                f"checkpoint, the shape in current model is {torch.Size(shape)}."
            )
    try:
        return _fused(layout, fitting, current, assign) if fitting else current
    except Exception as error:  # of a layout or an operation: reported with the others, as torch does
        error_msgs.append(f"{prefix}{', '.join(fitting)} can't be written into {layout}: {error}")
        return current


@torch.no_grad()
def _fused(
    layout: Layout, parts: Mapping[str, torch.Tensor], current: Mapping[str, nn.Parameter | None], assign: bool
) -> dict[str, torch.Tensor]:
    """The parameters of a module with the values of some or all of their parts."""
    for name, parameter in current.items():
        if parameter is None or is_quantized(parameter):
            kind = "gone" if parameter is None else f"quantized ({type(parameter).__name__} of {parameter.dtype})"
            raise ValueError(f"{name} is {kind}. Load the model again with from_pretrained(..., patcher=...)")
    is_split = any(isinstance(each, DTensor) for each in current.values())
    if is_split and not _ORIGINAL.get() and not all(isinstance(part, DTensor) for part in parts.values()):
        raise ValueError(
            "these are whole tensors, and the parameter is split over processes. Use "
            "patcher.load_original_state_dict(model, state_dict), in every process with all tensors"
        )
    parts = {name: whole(part) for name, part in parts.items()}
    tensors = dict(parts)
    if absent := [name for name in layout.stock if name not in parts]:
        own = [parameter.detach() for parameter in current.values() if parameter is not None]
        kinds = {(part.dtype, part.device) for part in parts.values()}
        if own[0].is_meta or (assign and kinds != {(own[0].dtype, own[0].device)}):
            raise ValueError(
                f"the values of {', '.join(absent)} aren't there in the type and on the device of the others. Give "
                "all parts of a tensor in one state dict, or leave out assign=True"
            )
        rest = dict(zip(layout.stock, layout.separate([whole(parameter) for parameter in own]), strict=True))
        tensors = {name: parts[name].to(own[0].device) if name in parts else rest[name] for name in layout.stock}
    elif assign and len({part.dtype for part in parts.values()}) > 1:
        raise ValueError("with assign=True the parts of one tensor need one dtype")
    fused = layout.fuse([tensors[name].detach() for name in layout.stock])
    made = {name: tensor for name, tensor in zip(layout.fused, fused, strict=True) if name in current}
    if assign:  # nothing else may lie in the storage of a parameter
        made = {name: by_itself(tensor) for name, tensor in made.items()}
    return {name: distribute_like(tensor, current[name]) for name, tensor in made.items()}
