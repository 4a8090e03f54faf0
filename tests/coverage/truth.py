"""What can be fused, by what the stock model does: not by what the fusions say.

`qkv`, `gate_up`: projections of one module that receive the very same tensor object whenever they are called.
`kv`: those of keys and values, where queries receive another one.
`patch_embeddings`: a convolution whose output is that of separate patches, each multiplied with the flattened weight.
`sequential_experts`: a parameter of as many matrices as the config says that there are experts, of which one is a
factor of a product, or all are the factors of one batched product.
`split`: a linear layer with the name of a packed one. What its parts are to what is computed tells whether they are
what they are called: see `roles`.

What has its weights at a second place of the model is not fusable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

__all__ = ["Calls", "calls_of", "modules_with_tied_weights", "packed_layers", "patch_projections", "roles", "stacks"]

#: module -> projection -> its calls, each (which call of the module, which tensor)
Calls = dict[str, dict[str, list[tuple[int, int]]]]


def _run(run: Callable[[], Any], hooks: Iterable[Any]) -> None:
    """Run a model that has these hooks, and take them off."""
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()


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
    _run(run, handles)
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


# --- packed layers -------------------------------------------------------------------------------------------------

_PACKED = re.compile(
    r"(.*\.)?([wW]?qkv(_proj|_linear)?|query_key_value|c_attn|att_proj|(to_)?kv(_proj)?|gate_up_proj)"
)


def packed_layers(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """The linear layers with names of packed ones that are called while the model runs."""
    called: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))  # type: ignore[misc]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and _PACKED.fullmatch(path)
    ]
    _run(run, handles)
    return called


def roles(model: nn.Module, packed: str, run: Callable[[], Any]) -> str:
    """What the parts of a split layer are to what the module around it computes: "confirmed", "unknown", or what is
    wrong with their names.

    What attention gives is linear in its values and in nothing else, and a gated layer in what is gated. A query
    changes what is computed for its own token; a key what is computed for others.
    """
    parts = dict(model.get_submodule(packed).named_children())
    if any(part not in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") for part in parts):
        return "unknown"
    before = _computed(model, packed, run)
    bent, reached = {}, {}
    for part in parts:
        once, twice = (_computed(model, packed, run, part, by) - before for by in (0.5, 1.0))
        if not once.abs().max() > 1e-4:
            return "unknown"
        bent[part] = ((twice - 2 * once).abs().max() / once.abs().max()).item()
        one_token = _computed(model, packed, run, part, 0.5, tokens=1)
        reached[part] = int(((one_token - before).flatten(0, -2).abs() > 1e-6).any(-1).sum())
    linear = [part for part, amount in bent.items() if amount < 1e-3]
    if len(linear) != 1:
        return "unknown"
    if linear[0] not in ("v_proj", "up_proj"):
        return f"{packed}: linear in {linear[0]}"
    if "q_proj" not in parts:
        return "confirmed"
    if reached["q_proj"] > reached["k_proj"]:
        return f"{packed}: q_proj of one token reaches {reached['q_proj']}, its k_proj {reached['k_proj']}"
    return "confirmed" if reached["q_proj"] < reached["k_proj"] else "unknown"


def _computed(
    model: nn.Module, packed: str, run: Callable[[], Any], part: str = "", by: float = 0.0, tokens: int | None = None
) -> torch.Tensor:
    """What the module around a split layer gives when it is first called, with the output of one part changed."""
    owner, found = model.get_submodule(packed.rpartition(".")[0]), []

    def change(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if found:
            return None
        rows = output.clone().view(-1, output.shape[-1])
        rows[:tokens] += by * torch.linspace(-1, 1, rows.shape[-1], dtype=rows.dtype).roll(rows.shape[-1] // 3)
        return rows.view(output.shape)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.append((output if isinstance(output, torch.Tensor) else next(iter(output))).detach().clone())

    handles = [owner.register_forward_hook(keep)]
    if part:
        handles.append(model.get_submodule(f"{packed}.{part}").register_forward_hook(change))
    _run(run, handles)
    return found[0]
