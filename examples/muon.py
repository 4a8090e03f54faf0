"""Muon, which orthogonalizes whole matrices, on a model with fused projections: it gets the parts one by one.

    python examples/muon.py

The model is a tiny random Llama, so that this runs anywhere in seconds; copy `muon` for a real one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from patcher import Patcher, fused_parameters, load_original_state_dict, original_state_dict


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def muon(model: nn.Module, selected: Callable[..., bool] = is_hidden_matrix, **options: Any) -> torch.optim.Muon:
    """Return Muon over the selected matrices; parts of a fused one are parameters that share its memory.

    Create it after moving the model to its device. Between steps, clear gradients with `model.zero_grad()`.
    """
    fused, matrices, views = fused_parameters(model), [], []
    for name, parameter in model.named_parameters():
        if not selected(name, parameter):
            continue
        for part in fused.get(name, ()):
            view = nn.Parameter(parameter.detach().narrow(part.dim, part.start, part.length))
            views.append((view, parameter, part))
            matrices.append((part.name, view))
        if name not in fused:
            matrices.append((name, parameter))
    optimizer = torch.optim.Muon(matrices, **options)

    def set_gradients(*_: Any) -> None:
        for view, parameter, part in views:
            view.grad = None if parameter.grad is None else parameter.grad.narrow(part.dim, part.start, part.length)

    def clear_gradients(*_: Any) -> None:
        for view, parameter, _ in views:
            view.grad = parameter.grad = None

    optimizer.register_step_pre_hook(set_gradients)
    optimizer.register_step_post_hook(clear_gradients)
    return optimizer


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for all other parameters."""
    others = [parameter for name, parameter in model.named_parameters() if not is_hidden_matrix(name, parameter)]
    return [muon(model, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]


def train(model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    ids = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the weights of two models, in the layout of transformers."""
    weights, expected = original_state_dict(model), original_state_dict(other)
    return max(float((weights[name] - value).abs().max()) for name, value in expected.items())


def main() -> None:
    torch.set_default_dtype(torch.float64)  # so that differences aren't due to rounding
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    models = []
    for patcher in (Patcher(), Patcher(fusions=["qkv", "gate_up"]), Patcher(fusions=["qkv", "gate_up"])):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config, dtype=torch.float64, patcher=patcher))
    stock, parts, whole = models
    print(f"same initial weights as stock: {difference(parts, stock) == 0}")

    stock_optimizers = optimizers(stock)
    train(stock, stock_optimizers, 10)
    train(parts, optimizers(parts), 10)
    matrices = [parameter for name, parameter in whole.named_parameters() if is_hidden_matrix(name, parameter)]
    others = [parameter for name, parameter in whole.named_parameters() if not is_hidden_matrix(name, parameter)]
    train(whole, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)], 10)
    print(f"after 10 steps on the parts: {difference(parts, stock):.0e} from stock")
    print(f"after 10 steps on the fused matrices: {difference(whole, stock):.0e} from stock")

    load_original_state_dict(parts, original_state_dict(stock))
    resumed = optimizers(parts)
    for optimizer, other in zip(resumed, stock_optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))  # the same matrices in the same order
    train(parts, resumed, 10)
    train(stock, stock_optimizers, 10)
    print(f"after 10 more, resumed with fusions: {difference(parts, stock):.0e} from the stock run")


if __name__ == "__main__":
    main()
