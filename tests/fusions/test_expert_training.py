"""Training experts that are listed: what has no tokens has a gradient of zero, as in a stack, and never none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher import Patcher, report
from patcher.compat.conversions import stock_revert
from patcher.loading.saving import saved_state_dict
from tests.support.processes import two_processes
from tests.support.tiny import tiny_jamba_config, tiny_mixtral_config
from tests.support.tiny_experts import (
    eager_and_listed,
    experts_of,
    tiny_gpt_oss_config,
    tiny_jetmoe_config,
    tiny_llama4_config,
    tiny_longcat_config,
    tiny_nemotron_h_config,
)

LISTED = Patcher(fusions="sequential_experts")
#: so many experts that a few tokens leave some without any
STARVING = tiny_mixtral_config(num_local_experts=12)
IDS = torch.tensor([[3, 4, 5]])

CASES = [
    pytest.param(STARVING, id="Mixtral"),
    pytest.param(tiny_jamba_config(num_experts=12), id="Jamba"),
    pytest.param(tiny_gpt_oss_config(num_local_experts=12), id="gpt-oss"),
    pytest.param(tiny_llama4_config(), id="Llama 4"),
    pytest.param(tiny_nemotron_h_config(), id="Nemotron-H"),
    pytest.param(tiny_jetmoe_config(), id="JetMoe"),
    pytest.param(tiny_longcat_config(), id="LongCat"),
]


def layers_of(experts: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in experts.named_modules() if isinstance(layer, nn.Linear)}


def called(model: PreTrainedModel, run: Callable[[], Any]) -> dict[str, list[int]]:
    """How many rows the layers of the first experts got, call by call."""
    rows: dict[str, list[int]] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: rows.setdefault(name, []).append(given[0].shape[0])
        )
        for name, layer in layers_of(experts_of(model)[0]).items()
    ]
    run()
    for handle in handles:
        handle.remove()
    return rows


@pytest.mark.parametrize("config", CASES)
def test_every_expert_has_a_gradient(config: PretrainedConfig) -> None:
    _, model = eager_and_listed(config, LISTED)
    model(IDS, use_cache=False).logits.square().mean().backward()

    assert [name for name, value in model.named_parameters() if ".experts." in name and value.grad is None] == []


@pytest.mark.parametrize(
    "config", [STARVING, tiny_longcat_config()], ids=["Mixtral", "LongCat, layers that never run"]
)
def test_training_goes_as_with_stacks(config: PretrainedConfig) -> None:
    """AdamW decays and moves what has a gradient of zero, and leaves alone what has none."""
    stock, model = eager_and_listed(config, LISTED, torch.float64)  # rounding is told from what is wrong
    generator = torch.Generator().manual_seed(1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.1) for each in (stock, model)]
    for _ in range(20):
        ids = torch.randint(3, 100, (1, 2), generator=generator)
        for each, optimizer in zip((stock, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

    expected = stock.state_dict()
    found = Patcher().apply(model).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)


def test_without_gradients_experts_without_tokens_are_left_out() -> None:
    stock, model = eager_and_listed(STARVING, LISTED)
    with torch.no_grad():
        rows = called(model, lambda: model(IDS))
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, atol=1e-5, rtol=0)
    trained = called(model, lambda: model(IDS))

    assert 0 < len(rows) <= 3 * 2 * 3  # tokens, choices, projections
    assert all(count > 0 for counts in rows.values() for count in counts)
    assert len(trained) == 12 * 3
    assert {name: counts for name, counts in trained.items() if counts != [0]} == rows


def test_frozen_experts_are_left_out_too() -> None:
    _, model = eager_and_listed(STARVING, LISTED)
    for experts in experts_of(model):
        experts.requires_grad_(False)

    assert all(count > 0 for counts in called(model, lambda: model(IDS)).values() for count in counts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    _, model = eager_and_listed(STARVING, LISTED)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.2x
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(IDS, use_cache=False).logits.square().mean().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if ".experts." in name})

    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


# --- several processes -----------------------------------------------------------------------------------------------


def _batch(rank: int) -> torch.Tensor:
    """Other tokens in every process, so that other experts have some."""
    return torch.tensor([[3, 4]]) if rank == 0 else torch.tensor([[50, 60]])


def _shard_layers(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


def _shard_every_linear(model: nn.Module) -> nn.Module:
    """Each is gathered by itself: a process that leaves one out would wait for another one's."""
    from torch.distributed.fsdp import fully_shard

    for path, _, _ in report(model).fused:  # type: ignore[arg-type]
        for layer in layers_of(model.get_submodule(path)).values():
            fully_shard(layer)
    return _shard_layers(model)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP, layers": _shard_layers,
    "FSDP, every projection": _shard_every_linear,
}


def _train_each(folder: Path, rank: int) -> None:
    for kind, wrap in WRAPPED.items():
        _, model = eager_and_listed(STARVING, LISTED)
        wrapped = wrap(model)
        with torch.no_grad():
            wrapped(input_ids=_batch(rank), use_cache=False)
        wrapped(input_ids=_batch(rank), use_cache=False).logits.square().mean().backward()
        gradients = {}
        for name, value in wrapped.named_parameters():
            gradient: Any = value.grad
            assert gradient is not None, f"{kind}: {name}"
            gradients[name.removeprefix("module.")] = (
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            )
        if rank == 0:
            torch.save(gradients, folder / f"{kind}.pt")


@pytest.mark.process
def test_processes_with_other_tokens_train_together(tmp_path: Path) -> None:
    two_processes(partial(_train_each, tmp_path), tmp_path)

    stock, model = eager_and_listed(STARVING, LISTED)
    loss = sum(stock(_batch(rank), use_cache=False).logits.square().mean() for rank in range(2)) / 2
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    expected = stock_revert(stock, {name: value.grad for name, value in stock.named_parameters()})
    for kind in WRAPPED:
        found = saved_state_dict(model, torch.load(tmp_path / f"{kind}.pt"))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3, msg=f"{kind}: {name}")
