"""Muon, which treats a matrix as a whole, on a model with fused projections: it is given the parts one by one.

    python examples/muon.py

The model is a tiny random Llama, made here, so that this runs anywhere in seconds; copy `muon` for a real one.
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


def muon(model: nn.Module, chosen: Callable[..., bool] = is_hidden_matrix, **options: Any) -> torch.optim.Muon:
    """Muon over the chosen matrices; a part of a joined one is a parameter of its own, in the same memory.

    Make it when the model is where it trains. Between steps, clear gradients with `model.zero_grad()`.
    """
    joined, matrices, views = fused_parameters(model), [], []
    for name, whole in model.named_parameters():
        if not chosen(name, whole):
            continue
        for part in joined.get(name, ()):
            view = nn.Parameter(whole.detach().narrow(part.dim, part.start, part.length))
            views.append((view, whole, part))
            matrices.append((part.name, view))
        if name not in joined:
            matrices.append((name, whole))
    optimizer = torch.optim.Muon(matrices, **options)

    def lend_gradients(*_: Any) -> None:
        for view, whole, part in views:
            view.grad = None if whole.grad is None else whole.grad.narrow(part.dim, part.start, part.length)

    def take_them_back(*_: Any) -> None:
        for view, whole, _ in views:
            view.grad = whole.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(take_them_back)
    return optimizer


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for what is left."""
    rest = [parameter for name, parameter in model.named_parameters() if not is_hidden_matrix(name, parameter)]
    return [muon(model, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]


def train(model: PreTrainedModel, all_of_it: list[torch.optim.Optimizer], steps: int) -> None:
    ids = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        for optimizer in all_of_it:
            optimizer.step()


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest one between their weights, in the layout of transformers."""
    found, expected = original_state_dict(one), original_state_dict(other)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def main() -> None:
    torch.set_default_dtype(torch.float64)  # so that a difference is no rounding
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
    print(f"one seed, the weights of stock: {difference(parts, stock) == 0}")

    stocks_own = optimizers(stock)
    train(stock, stocks_own, 10)
    train(parts, optimizers(parts), 10)
    matrices = [parameter for name, parameter in whole.named_parameters() if is_hidden_matrix(name, parameter)]
    rest = [parameter for name, parameter in whole.named_parameters() if not is_hidden_matrix(name, parameter)]
    train(whole, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)], 10)
    print(f"after 10 steps, given the parts: {difference(parts, stock):.0e} from stock")
    print(f"after 10 steps, given what is joined: {difference(whole, stock):.0e} from stock")

    load_original_state_dict(parts, original_state_dict(stock))
    resumed = optimizers(parts)
    for optimizer, other in zip(resumed, stocks_own, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))  # of the same matrices, in the same order
    train(parts, resumed, 10)
    train(stock, stocks_own, 10)
    print(f"10 more, resumed with fusions: {difference(parts, stock):.0e} from the run without")


if __name__ == "__main__":
    main()
