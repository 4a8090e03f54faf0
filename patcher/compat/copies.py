"""What torch keeps besides values: storages under a deep copy, hooks of gradients, compiled calls."""

from __future__ import annotations

from typing import Any

from torch import nn


def share_storage(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Have a deep copy with this memo take another parameter on the same storage, and views of it for its views."""
    memo[id(parameter)] = new = nn.Parameter(parameter.detach(), parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    storage = parameter.untyped_storage()
    memo.setdefault("torch", {})[storage._cdata] = storage  # type: ignore[call-overload]


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a function runs when a parameter gets its gradient. No copy of a parameter has it."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has made something of a module itself."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
