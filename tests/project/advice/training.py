"""Optimizers: their state in the layout of transformers, and what parameters are made of."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from patcher import (
    Patcher,
    fused_parameters,
    load_original_optimizer_state_dict,
    original_optimizer_state_dict,
)
from tests.project.advice import Place, Steps, advice, load
from tests.support.interleaved import TURNS
from tests.support.processes import one_process
from tests.support.replacements import JOINED
from tests.support.resuming import train
from tests.support.tiny import tiny_inputs

QKV = Patcher(fusions="qkv")
K = "model.layers.1.self_attn.k_proj.weight"


def trained(model: Any, optimizer: optim.Optimizer) -> None:
    inputs = tiny_inputs(model.config)
    train(model, optimizer, inputs | {"labels": inputs["input_ids"]}, 1)


def adamw(model: nn.Module, *groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups or model.parameters(), lr=1e-3)  # type: ignore[arg-type]


@advice(
    "Parts of one parameter are trained together: put them into one group, or load the model without the fusion or "
    "conversion that joins them"
)
def parts_in_two_groups(at: Place) -> Steps:
    stock = load(at.llama)
    apart = [each for name, each in stock.named_parameters() if name == K]
    rest = [each for name, each in stock.named_parameters() if name != K]
    optimizer = adamw(stock, {"params": rest}, {"params": apart, "lr": 1.0})
    trained(stock, optimizer)
    state = original_optimizer_state_dict(stock, optimizer)
    fused, other = load(at.llama, QKV), load(at.llama)
    yield lambda: load_original_optimizer_state_dict(fused, adamw(fused), state)
    again = [[each for name, each in other.named_parameters() if (name == K) is is_k] for is_k in (False, True)]
    load_original_optimizer_state_dict(other, adamw(other, *({"params": held} for held in again)), state)

    together = adamw(stock)
    trained(stock, together)
    load_original_optimizer_state_dict(fused, adamw(fused), original_optimizer_state_dict(stock, together))


@advice(
    "With the same patcher as before use optimizer.state_dict() and optimizer.load_state_dict(state)",
    "{}, so its state can't be converted between {} and {}. {}.",
)
def an_optimizer_of_whole_matrices(at: Place) -> Steps:
    model, other = load(at.llama, QKV), load(at.llama, QKV)
    optimizer, resuming = optim.Adafactor(model.parameters()), optim.Adafactor(other.parameters())
    trained(model, optimizer)
    yield lambda: original_optimizer_state_dict(model, optimizer)
    resuming.load_state_dict(optimizer.state_dict())
    assert len(resuming.state) == len(optimizer.state)


@advice("The state doesn't list the names of parameters, as that of original_optimizer_state_dict(model, ")
def a_state_without_names(at: Place) -> Steps:
    model, other = load(at.llama, QKV), load(at.llama, QKV)
    optimizer, resuming = adamw(model), adamw(other)
    trained(model, optimizer)
    yield lambda: load_original_optimizer_state_dict(other, resuming, optimizer.state_dict())
    resuming.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    load_original_optimizer_state_dict(other, resuming, original_optimizer_state_dict(model, optimizer))


@advice("Use torch.distributed.fsdp.fully_shard instead.")
def parameters_that_are_flattened(at: Place) -> Steps:
    with one_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        flat = FullyShardedDataParallel(load(at.llama, QKV), device_id=torch.device("cpu"), use_orig_params=True)
        yield lambda: original_optimizer_state_dict(flat, adamw(flat))
        torch.distributed.init_device_mesh("cpu", (1,))
        sharded: Any = fully_shard(load(at.llama, QKV))
        optimizer = adamw(sharded)
        trained(sharded, optimizer)
        state = original_optimizer_state_dict(sharded, optimizer)
        assert state["state"][K]["exp_avg"].shape == (32, 64)
        load_original_optimizer_state_dict(sharded, optimizer, state)
        trained(sharded, optimizer)


@advice("Make the optimizer of model.parameters(), after whatever changes the model.")
def an_optimizer_of_another_model(at: Place) -> Steps:
    model = load(at.llama)
    before = adamw(model)
    model = QKV.apply(model)
    yield lambda: original_optimizer_state_dict(model, before)
    assert original_optimizer_state_dict(model, adamw(model))["param_groups"][0]["params"]


@advice("Make the optimizer of the parameters that were trained; ")
def a_state_of_other_parameters(at: Place) -> Steps:
    stock, model, other = load(at.llama), load(at.llama, QKV), load(at.llama)
    optimizer = adamw(stock.model.layers)
    trained(stock, optimizer)
    state = original_optimizer_state_dict(stock, optimizer)
    yield lambda: load_original_optimizer_state_dict(model, adamw(model), state)
    load_original_optimizer_state_dict(model, adamw(model.model.layers), state)

    only = optim.AdamW([stock.get_parameter(K)])
    trained(stock, only)
    state = original_optimizer_state_dict(stock, only)
    fused = model.get_parameter(K.replace("k_proj", "qkv_proj"))
    yield lambda: load_original_optimizer_state_dict(model, optim.AdamW([fused]), state)
    load_original_optimizer_state_dict(other, optim.AdamW([other.get_parameter(K)]), state)


@advice("Make the groups of the optimizer as they were.")
def a_state_of_other_groups(at: Place) -> Steps:
    stock, model = load(at.llama), load(at.llama, QKV)

    def groups(of: Any) -> list[dict[str, Any]]:
        return [{"params": list(of.model.parameters()), "lr": 1e-4}, {"params": list(of.lm_head.parameters())}]

    optimizer = adamw(stock, *groups(stock), {"params": []})
    trained(stock, optimizer)
    state = original_optimizer_state_dict(stock, optimizer)
    yield lambda: load_original_optimizer_state_dict(model, adamw(model), state)
    load_original_optimizer_state_dict(model, adamw(model, *groups(model), {"params": []}), state)


@advice("Concatenate(dim=...), or take the patcher off with Patcher().apply(model).", "aren't slices of it")
def parts_that_are_no_slices(at: Place) -> Steps:
    model = load(at.llama, TURNS)
    yield lambda: fused_parameters(model)
    assert len(fused_parameters(load(at.llama, JOINED))) == 2
    assert fused_parameters(Patcher().apply(model)) == {}
