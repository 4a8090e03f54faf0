"""What can be fused, by what the stock model does: not by what the fusions say.

`qkv`, `gate_up`: projections of one module that receive the very same tensor object whenever they are called.
`kv`: those of keys and values, where queries receive another one.
`patch_embeddings`: a convolution whose output is that of separate patches, each multiplied with the flattened weight.
`sequential_experts`: a parameter of as many matrices as the config says that there are experts, of which one is a
factor of a product, or all are the factors of one batched product.

What has its weights at a second place of the model is not fusable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Calls", "calls_of", "modules_with_tied_weights", "patch_projections", "stacks"]

#: module -> projection -> its calls, each (which call of the module, which tensor)
Calls = dict[str, dict[str, list[tuple[int, int]]]]


def calls_of(model: nn.Module, run: Callable[[], Any]) -> Calls:
    """What the linear layers of each module are called with while the model runs."""
    keep: list[Any] = []  # so that no two tensors have one id
    calls: Calls = {}
    turns: dict[str, int] = {}

    def entering(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            turns[path] = turns.get(path, 0) + 1

        return hook

    def projecting(path: str, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            keep.append(given)
            calls.setdefault(path, {}).setdefault(name, []).append((turns.get(path, 0), id(given)))

        return hook

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(entering(path), with_kwargs=True))
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                handles.append(child.register_forward_pre_hook(projecting(path, name), with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def patch_projections(model: nn.Module) -> set[str]:
    """The convolutions that compute each patch by itself."""
    found = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Conv3d) or math.prod(module.kernel_size) == 1:
            continue
        if module.weight.shape[1] != module.in_channels or module.stride != module.kernel_size:
            continue  # groups, or no separate patches
        image = torch.randn(1, module.in_channels, *(2 * size + 1 for size in module.kernel_size))
        patches = image
        for axis, size in enumerate(module.kernel_size, 2):
            patches = patches.unfold(axis, size, size)
        places, inside = "defg"[: image.dim() - 2], "xyzw"[: image.dim() - 2]
        weight = module.weight.detach()
        expected = torch.einsum(f"bc{places}{inside},oc{inside}->bo{places}", patches, weight)
        if module.bias is not None:
            expected = expected + module.bias.detach().view(1, -1, *[1] * len(places))
        with torch.no_grad():
            output = module(image)
        if output.shape == expected.shape and torch.allclose(output, expected, atol=1e-3, rtol=1e-3):
            found.add(path)
    return found


class _Watch(TorchFunctionMode):
    """Notes the parameters of three dimensions whose matrices are factors of products."""

    PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in self.PRODUCTS:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    owner = value if value._base is None else value._base
                    if isinstance(owner, nn.Parameter) and owner.dim() == 3:
                        self.seen.add(id(owner))
        return function(*args, **kwargs)


def stacks(model: Any, run: Callable[[], Any]) -> set[str]:
    """The modules whose parameters are stacks of matrices, one for each expert."""
    numbers = _numbers_of_experts(model.config)
    watch = _Watch()
    with torch.no_grad(), watch:
        run()
    return {
        path
        for path, module in model.named_modules()
        if any(
            id(parameter) in watch.seen and parameter.shape[0] in numbers
            for parameter in module.parameters(recurse=False)
        )
    }


def _numbers_of_experts(config: Any) -> set[int]:
    """What a config says of experts, the configs inside of it included."""
    said: set[int] = set()
    for name, value in vars(config).items():
        if "expert" in name and not name.startswith("_"):
            said.update(number for number in (value if isinstance(value, list) else [value]) if type(number) is int)
        elif hasattr(value, "to_dict"):
            said |= _numbers_of_experts(value)
    return said


def modules_with_tied_weights(model: nn.Module) -> set[str]:
    """The modules that have a parameter at a second place of the model."""
    places: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    return {module for found in places.values() if len(found) > 1 for module in found}
