"""The state of an optimizer goes from one layout to another: a run that switches fusions goes on as if it hadn't."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AlbertConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from patcher import (
    InvalidPatcherError,
    Patcher,
    fused_parameters,
    load_original_optimizer_state_dict,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
)
from patcher.training.optimizer_state import ELEMENTWISE
from tests.compatibility.outcomes import EXACT, compared
from tests.compatibility.rows import ROWS, Row
from tests.support.beside import FUSED_QKV, JoinedAlbertAttention, joined
from tests.support.processes import one_process, two_processes
from tests.support.replacements import JOINED
from tests.support.resuming import outcome, resumed, through_a_file, train, uninterrupted
from tests.support.tiny import tiny_inputs, tiny_llama_config

QKV, GATE_UP, STOCK = Patcher(fusions="qkv"), Patcher(fusions="gate_up"), Patcher()
CONFIG = tiny_llama_config(
    num_hidden_layers=1, hidden_size=16, intermediate_size=24, attention_bias=True, mlp_bias=True
)
INPUTS = tiny_inputs(CONFIG) | {"labels": tiny_inputs(CONFIG)["input_ids"]}


def built(patcher: Patcher = STOCK, config: Any = CONFIG, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, patcher=patcher)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def assert_close(found: Any, expected: Any) -> None:
    """The same structure, order and scalars; tensors within rounding."""
    compared(found, expected, rounding=1e-12)


# --- every optimizer -------------------------------------------------------------------------------------------------

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"maximize": True}],
    "Adagrad": [{"lr_decay": 0.1}, {"initial_accumulator_value": 0.2}],
    "Adam": [{"amsgrad": True}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.1, "lr": torch.tensor(1e-3)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"capturable": False, "foreach": True}, {"fused": True}],
    "Adamax": [{}],
    "ASGD": [{"t0": 1}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}, {}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "nesterov": True}],
}
CASES = [
    pytest.param(cls, options, id=f"{cls.__name__} {', '.join(options)}")
    for cls in ELEMENTWISE
    for options in OPTIONS[cls.__name__]
]


@pytest.mark.parametrize(("cls", "options"), [(cls, OPTIONS[cls.__name__][-1]) for cls in ELEMENTWISE])
def test_a_run_goes_on_with_other_fusions(cls: type[optim.Optimizer], options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return cls(model.parameters(), **copy.deepcopy(options))

    # Of float64 parameters torch reads float32 entries as float64, in a run without fusions as well.
    is_cast = cls in (optim.NAdam, optim.ASGD)
    expected = resumed(built(), built(), make, INPUTS, (2, 3)) if is_cast else uninterrupted(built(), make, INPUTS, 5)
    assert_close(resumed(built(QKV), built(GATE_UP), make, INPUTS, (2, 3)), expected)


def stepped(cls: type[optim.Optimizer], options: dict[str, Any], parts: list[int]) -> torch.Tensor:
    """Rows after three steps, as parameters of so many rows each."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(sum(parts), 5, generator=generator, dtype=torch.float64)
    parameters = [nn.Parameter(part.clone()) for part in values.split(parts)]
    optimizer = cls(parameters, **copy.deepcopy(options))
    for _ in range(3):
        gradients = torch.randn(sum(parts), 5, generator=generator, dtype=torch.float64).split(parts)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_what_counts_as_elementwise_is(cls: type[optim.Optimizer], options: dict[str, Any]) -> None:
    torch.testing.assert_close(stepped(cls, options, [7]), stepped(cls, options, [4, 2, 1]), atol=1e-14, rtol=1e-14)


#: optimizers whose step depends on the whole of a matrix; Muon came with torch 2.9
MATRICES: list[Any] = [optim.Adafactor, *([optim.Muon] if hasattr(optim, "Muon") else [])]


@pytest.mark.parametrize("cls", MATRICES)
def test_what_is_not_elementwise_is_refused(cls: type[optim.Optimizer]) -> None:
    assert (stepped(cls, {}, [7]) - stepped(cls, {}, [4, 2, 1])).abs().max() > 1e-6
    model = built(QKV)
    optimizer = cls([parameter for parameter in model.parameters() if parameter.dim() == 2])
    with pytest.raises(InvalidPatcherError, match=rf"{cls.__name__} isn't known .*between .*qkv_proj\.weight and"):
        original_optimizer_state_dict(model, optimizer)
    with pytest.raises(InvalidPatcherError, match=rf"{cls.__name__} isn't known to treat each value by itself"):
        load_original_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []})


def test_parameters_that_nothing_has_joined_may_have_any_optimizer() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return MATRICES[-1]([each for name, each in model.named_parameters() if each.dim() == 2 and "mlp" in name])

    assert_close(resumed(built(QKV), built(), make, INPUTS, (2, 2)), uninterrupted(built(), make, INPUTS, 4))


class Overridden(optim.AdamW):
    """Whatever it changes."""


def test_a_subclass_does_not_count() -> None:
    model = built(QKV)
    with pytest.raises(InvalidPatcherError, match=r"Overridden isn't known to treat each value by itself"):
        original_optimizer_state_dict(model, Overridden(model.parameters()))
    stock = built()
    assert original_optimizer_state_dict(stock, Overridden(stock.parameters()))["state"] == {}


# --- the form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_is_what_torch_gives_of_the_stock_model(row: Row) -> None:
    """Keys and groups in the same order; and torch takes it."""
    inputs = row.training_inputs()
    states = []
    for model in (row.patched(), row.stock()):
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, inputs, 1)
        states.append(original_optimizer_state_dict(model, optimizer))
    expected = get_optimizer_state_dict(model, optimizer)
    found = states[0]

    assert [list(part) for part in found["state"].values()] == [list(part) for part in expected["state"].values()]
    assert list(found["state"]) == list(expected["state"])
    assert found["param_groups"] == expected["param_groups"]
    assert_equal_states(states[1], expected)
    set_optimizer_state_dict(model, optimizer, found)
    assert_equal_states(get_optimizer_state_dict(model, optimizer), found)


def assert_equal_states(found: Any, expected: Any) -> None:
    assert compared(found, expected) == EXACT


def test_what_has_made_no_step_goes_on_as_if_it_had_not_been_saved() -> None:
    """torch's own makes one: `step` is 1 then."""
    model = built(QKV)
    assert original_optimizer_state_dict(model, adamw(model))["state"] == {}
    assert_close(resumed(model, built(), adamw, INPUTS, (0, 3)), uninterrupted(built(), adamw, INPUTS, 3))


def test_what_is_loaded_is_the_optimizers_own() -> None:
    model, other = built(), built(GATE_UP)
    optimizer, loaded = adamw(model), adamw(other)
    train(model, optimizer, INPUTS, 2)
    saved = original_optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(saved)
    load_original_optimizer_state_dict(other, loaded, saved)
    train(other, loaded, INPUTS, 2)

    assert_equal_states(saved, before)
    back = original_optimizer_state_dict(other, loaded)
    assert {float(found["step"]) for found in back["state"].values()} == {4.0}
    assert len({id(found["step"]) for found in back["state"].values()}) == len(back["state"])


def test_schedulers_and_names_of_groups_survive() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        named = list(model.named_parameters())
        norms = [pair for pair in named if "norm" in pair[0]]
        rest = [pair for pair in named if "norm" not in pair[0]]
        return optim.AdamW([{"params": rest, "lr": 1e-2}, {"params": norms, "lr": 1e-3, "weight_decay": 0.0}])

    states = []
    for patcher in (QKV, STOCK):
        model = built(patcher)
        optimizer = make(model)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        for _ in range(2):
            train(model, optimizer, INPUTS, 1)
            scheduler.step()
        states.append(original_optimizer_state_dict(model, optimizer))

    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert [group["initial_lr"] for group in states[0]["param_groups"]] == [1e-2, 1e-3]
    assert "model.layers.0.self_attn.k_proj.bias" in states[0]["param_groups"][0]["param_names"]

    other = built(GATE_UP)
    optimizer = make(other)
    load_original_optimizer_state_dict(other, optimizer, states[0])
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in states[0]["param_groups"]]
    assert "model.layers.0.mlp.gate_up_proj.weight" in optimizer.param_groups[0]["param_names"]


def test_groups_are_told_by_what_they_hold() -> None:
    def make(first: str) -> Callable[[nn.Module], optim.Optimizer]:
        def groups(model: nn.Module) -> optim.Optimizer:
            with_it = [each for name, each in model.named_parameters() if first in name]
            without = [each for name, each in model.named_parameters() if first not in name]
            rates = {"mlp": (1e-2, 1e-3), "": (1e-3, 1e-2)}["mlp" if first == "mlp" else ""]
            return optim.SGD([{"params": with_it, "lr": rates[0]}, {"params": without, "lr": rates[1]}], momentum=0.9)

        return groups

    model, other = built(QKV), built(GATE_UP)
    optimizer = make("mlp")(model)
    train(model, optimizer, INPUTS, 2)
    mlps = [each for name, each in other.named_parameters() if "mlp" in name]
    rest = [each for name, each in other.named_parameters() if "mlp" not in name]
    reversed_ = optim.SGD([{"params": rest, "lr": 1.0}, {"params": mlps, "lr": 1.0}], momentum=0.9)
    load_original_state_dict(other, original_state_dict(model))
    load_original_optimizer_state_dict(other, reversed_, original_optimizer_state_dict(model, optimizer))
    train(other, reversed_, INPUTS, 2)

    assert [group["lr"] for group in reversed_.param_groups] == [1e-3, 1e-2]
    expected = uninterrupted(built(), make("mlp"), INPUTS, 4)
    assert_close(original_state_dict(other), expected["weights"])


# --- models ----------------------------------------------------------------------------------------------------------


def test_tied_weights_have_one_state() -> None:
    config = copy.deepcopy(CONFIG)
    config.tie_word_embeddings = True
    expected = uninterrupted(built(config=config), adamw, INPUTS, 4)
    assert "lm_head.weight" not in expected["state"]
    assert_close(resumed(built(QKV, config), built(GATE_UP, config), adamw, INPUTS, (2, 2)), expected)

    model = built(QKV, config)
    optimizer = adamw(model)
    train(model, optimizer, INPUTS, 1)
    state = original_optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(state)
    for group in state["param_groups"]:  # as another tool may call it
        group["params"] = [name.replace("model.embed_tokens", "lm_head") for name in group["params"]]
    state["state"]["lm_head.weight"] = state["state"].pop("model.embed_tokens.weight")
    load_original_optimizer_state_dict(model, optimizer, state)
    assert_equal_states(original_optimizer_state_dict(model, optimizer), before)


def test_a_layer_that_is_shared_has_one_state() -> None:
    sizes = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 3}
    config = AlbertConfig(**sizes, num_attention_heads=2, intermediate_size=48, max_position_embeddings=32)
    ids = torch.arange(12).view(2, 6)
    inputs = {"input_ids": ids, "labels": ids}
    stock = AutoModelForMaskedLM.from_config(config, dtype=torch.float64)
    expected = uninterrupted(copy.deepcopy(stock).eval(), adamw, inputs, 4)
    patched = joined("AlbertAttention", JoinedAlbertAttention).apply(copy.deepcopy(stock)).eval()
    assert len(fused_parameters(patched)) == 2
    assert_close(resumed(patched, stock.eval(), adamw, inputs, (2, 2)), expected)


def wrapped_in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def with_checkpointing(model: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    return model  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> nn.Module:
    result: Any = torch.compile(model, backend="eager")
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [wrapped_in_ddp, with_checkpointing, compiled])
def test_wrappers_leave_the_names_as_they_are(wrap: Callable[[Any], nn.Module]) -> None:
    with one_process():
        model, plain = wrap(built(QKV)), built()
        optimizer, other = adamw(model), adamw(plain)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = original_optimizer_state_dict(model, optimizer)
        assert list(state["state"]) == [name for name, _ in plain.named_parameters()]
        assert list(original_optimizer_state_dict(wrap(plain), other)["param_groups"][0]["params"]) == list(
            state["state"]
        )
        load_original_optimizer_state_dict(model, optimizer, state)
        assert_equal_states(original_optimizer_state_dict(model, optimizer), state)


def test_an_optimizer_that_accelerate_has_prepared() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = built(QKV)
    model, optimizer = accelerator.prepare(model, adamw(model))
    train(model, optimizer, INPUTS, 2)
    state = original_optimizer_state_dict(model, optimizer)
    assert "model.layers.0.self_attn.q_proj.weight" in state["state"]
    load_original_optimizer_state_dict(model, optimizer, state)
    train(model, optimizer, INPUTS, 2)
    assert_close(outcome(model, optimizer), uninterrupted(built(), adamw, INPUTS, 4))


# --- conversions of a user -------------------------------------------------------------------------------------------


SMALL = tiny_llama_config(num_hidden_layers=2, hidden_size=32, intermediate_size=24)


@pytest.mark.parametrize("patcher", [JOINED, FUSED_QKV], ids=["rows", "qkv"])
def test_a_conversion_that_moves_values(patcher: Patcher) -> None:
    stock = built(config=SMALL)
    expected = uninterrupted(copy.deepcopy(stock), adamw, INPUTS, 4)
    assert_close(resumed(patcher.apply(stock), stock, adamw, INPUTS, (2, 2)), expected)
    again = built(config=SMALL)
    assert_close(resumed(again, patcher.apply(built(config=SMALL)), adamw, INPUTS, (2, 2)), expected)


# --- several processes -----------------------------------------------------------------------------------------------


def sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _switch_fusions(folder: Path, rank: int) -> None:
    model, other = sharded(built(QKV, SMALL)), built(GATE_UP, SMALL)
    optimizer = adamw(model)
    train(model, optimizer, INPUTS, 2)
    load_original_state_dict(other, original_state_dict(model))
    state = through_a_file(original_optimizer_state_dict(model, optimizer))
    resuming = adamw(sharded(other))
    load_original_optimizer_state_dict(other, resuming, state)
    train(other, resuming, INPUTS, 2)
    found = outcome(other, resuming)
    if rank == 0:
        torch.save(found, folder / "found.pt")


@pytest.mark.process
def test_what_is_sharded_is_gathered_and_sharded_again(tmp_path: Path) -> None:
    two_processes(partial(_switch_fusions, tmp_path), tmp_path)
    assert_close(torch.load(tmp_path / "found.pt"), uninterrupted(built(config=SMALL), adamw, INPUTS, 4))
