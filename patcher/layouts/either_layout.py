"""State dicts in either layout: a module that was fused or converted also loads the tensors of transformers.

The module itself carries the layouts for that, so it works for copies, after pickling, and in other models.
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
from patcher.layouts.sharded import distribute_like, full_tensor


def carry(module: nn.Module, carried: ModuleLayouts | None) -> None:
    """Have a module carry layouts, and load state dicts in the layout of transformers; None reverts that.

    The load hook refers to the tables of the module and not to the module itself, which it would keep alive. So it
    also works for shallow copies of the module.
    """
    remove_state_dict_hooks(module, lambda hook: isinstance(hook, _JoinParts) or hook is _mark_layout)
    if carried is None:
        module.__dict__.pop(CARRIED, None)
        return
    module.__dict__[CARRIED] = carried
    layouts = (*carried.converted, *carried.layouts)  # converted tensors may be fused afterwards
    add_load_hook(module, _JoinParts(layouts, module._parameters, module._modules))
    if any(map(_ambiguous_names, layouts)):
        module.register_state_dict_post_hook(_mark_layout)  # type: ignore[no-untyped-call]


#: Whether the state dict that is being loaded is known to be in the layout of transformers.
_ORIGINAL: ContextVar[bool] = ContextVar("patcher_original_layout", default=False)
#: In the metadata of a state dict, where a module says that its parameters are those of the patched module.
_MARK = "patcher"


@contextmanager
def in_original_layout() -> Iterator[None]:
    """State dicts that are loaded in the block are in the layout of transformers, also by names that both have."""
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


def _ambiguous_names(layout: Layout) -> list[str]:
    """Return the names of parameters that have the same shape in both layouts."""
    if set(layout.stock).isdisjoint(layout.fused):
        return []
    fused = dict(zip(layout.fused, layout.fused_shapes(), strict=True))
    return [name for name, shape in zip(layout.stock, layout.stock_shapes, strict=True) if fused.get(name) == shape]


class _JoinParts:
    """A load hook that replaces stock parameters in a state dict by those of the module.

    Parameters that don't fit are reported like torch's.
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
            names = [] if _ORIGINAL.get() else _ambiguous_names(layout)
            ambiguous = [name for name in names if f"{prefix}{name}" in state_dict]
            if ambiguous and not local_metadata.get(_MARK):
                error_msgs.append(
                    f"{prefix}{ambiguous[0]} has the same name and shape before and after {layout}, and the "
                    "state dict doesn't say which it is. For the layout of transformers use "
                    "patcher.load_original_state_dict(model, state_dict); for that of the patched model the state "
                    "dict that its state_dict() gave."
                )
            parts = {} if ambiguous else _pop_parts(layout, prefix, state_dict)
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
                fused = _fuse_parts(layout, parts, prefix, current, missing_keys, error_msgs, assign=assign)
                # A parameter that is left as it is isn't missing: its parts are, or an error was reported.
                state_dict.update({f"{prefix}{name}": value for name, value in fused.items() if value is not None})


def _pop_parts(layout: Layout, prefix: str, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Pop the stock parameters of a layout from a state dict."""
    fused = {} if _ORIGINAL.get() else dict(zip(layout.fused, layout.fused_shapes(), strict=True))
    values = {name: state_dict.get(f"{prefix}{name}") for name in layout.stock}
    # A name that both layouts have is that of a part if it has the shape of one.
    parts = {name: value for name, value in values.items() if value is not None and value.shape != fused.get(name)}
    return {name: state_dict.pop(f"{prefix}{name}") for name in parts}


def _fuse_parts(
    layout: Layout,
    parts: Mapping[str, torch.Tensor],
    prefix: str,
    current: Mapping[str, nn.Parameter | None],
    missing_keys: list[str],
    error_msgs: list[str],
    *,
    assign: bool,
) -> Mapping[str, Any]:
    """Return the parameters of a module made from parts, or the current ones if the parts don't fit."""
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
        return _fuse(layout, fitting, current, assign) if fitting else current
    except Exception as error:  # of a layout or an operation: reported with the others, as torch does
        error_msgs.append(f"{prefix}{', '.join(fitting)} can't be written into {layout}: {error}")
        return current


@torch.no_grad()
def _fuse(
    layout: Layout, parts: Mapping[str, torch.Tensor], current: Mapping[str, nn.Parameter | None], assign: bool
) -> dict[str, torch.Tensor]:
    """Fuse parts; those that are absent are taken from the current parameters."""
    for name, parameter in current.items():
        if parameter is None or is_quantized(parameter):
            kind = "gone" if parameter is None else f"quantized ({type(parameter).__name__} of {parameter.dtype})"
            raise ValueError(f"{name} is {kind}. Load the model again with from_pretrained(..., patcher=...)")
    is_split = any(isinstance(parameter, DTensor) for parameter in current.values())
    if is_split and not _ORIGINAL.get() and not all(isinstance(part, DTensor) for part in parts.values()):
        raise ValueError(
            "these are whole tensors, and the parameter is split over processes. Use "
            "patcher.load_original_state_dict(model, state_dict), in every process with all tensors"
        )
    parts = {name: full_tensor(part) for name, part in parts.items()}
    tensors = dict(parts)
    if absent := [name for name in layout.stock if name not in parts]:
        values = [parameter.detach() for parameter in current.values() if parameter is not None]
        kinds = {(part.dtype, part.device) for part in parts.values()}
        if values[0].is_meta or (assign and kinds != {(values[0].dtype, values[0].device)}):
            raise ValueError(
                f"the values of {', '.join(absent)} aren't there in the type and on the device of the others. Give "
                "all parts of a tensor in one state dict, or leave out assign=True"
            )
        rest = dict(zip(layout.stock, layout.separate([full_tensor(value) for value in values]), strict=True))
        tensors = {name: parts[name].to(values[0].device) if name in parts else rest[name] for name in layout.stock}
    elif assign and len({part.dtype for part in parts.values()}) > 1:
        raise ValueError("with assign=True the parts of one tensor need one dtype")
    fused = layout.fuse([tensors[name].detach() for name in layout.stock])
    result = {name: tensor for name, tensor in zip(layout.fused, fused, strict=True) if name in current}
    if assign:  # a parameter doesn't share its storage
        result = {name: by_itself(tensor) for name, tensor in result.items()}
    return {name: distribute_like(tensor, current[name]) for name, tensor in result.items()}
