"""The state of an optimizer that can't be had in another layout is refused with the reason, and nothing is changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    fused_parameters,
    load_original_optimizer_state_dict,
    original_optimizer_state_dict,
)
from patcher.fusions import Fusion, Layout
from tests.compatibility.outcomes import EXACT, compared
from tests.support.beside import LINEAR_EXPERTS
from tests.support.interleaved import SCALED
from tests.support.processes import one_process
from tests.support.resuming import train
from tests.support.tiny import tiny_inputs, tiny_llama_config, tiny_qwen2_moe_config

QKV, STOCK = Patcher(fusions="qkv"), Patcher()
CONFIG = tiny_llama_config(
    num_hidden_layers=1, hidden_size=16, intermediate_size=24, attention_bias=True, mlp_bias=True
)
SMALL = tiny_llama_config(num_hidden_layers=2, hidden_size=32, intermediate_size=24)
INPUTS = tiny_inputs(CONFIG) | {"labels": tiny_inputs(CONFIG)["input_ids"]}


def built(patcher: Patcher = STOCK, config: Any = CONFIG) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, patcher=patcher)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def test_a_conversion_that_scales_is_refused() -> None:
    stock = built(config=SMALL)
    model = SCALED.apply(stock)
    torch.testing.assert_close(model(**INPUTS).loss, stock(**INPUTS).loss)
    with pytest.raises(InvalidPatcherError, match=r"gate_up_proj\.weight \[Doubled\] isn't known to only move values"):
        original_optimizer_state_dict(model, adamw(model))
    frozen = optim.AdamW(model.lm_head.parameters())  # trains nothing of it
    assert original_optimizer_state_dict(model, frozen)["param_groups"][0]["params"] == ["lm_head.weight"]


def test_parameters_of_a_checkpoint_that_transformers_has_not_are_no_state_of_stock() -> None:
    """Where a filter has dropped the conversion that stacks them."""
    model, stock = (built(patcher, tiny_qwen2_moe_config()) for patcher in (LINEAR_EXPERTS, STOCK))
    state = original_optimizer_state_dict(model, adamw(model))
    message = r"only in the optimizer: .*experts\.down_proj.*; only in the state: .*experts\..*gate_proj\.weight"
    with pytest.raises(PatchedWeightsError, match=message):
        load_original_optimizer_state_dict(stock, adamw(stock), state)


class Halves(nn.Module):
    """A linear layer without bias that computes its output in two halves."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.upper = nn.Parameter(torch.empty(out_features // 2, in_features))
        self.lower = nn.Parameter(torch.empty(out_features // 2, in_features))

    @classmethod
    def from_module(cls, linear: nn.Linear) -> Halves:
        return cls(linear.in_features, linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self.upper.T, x @ self.lower.T], dim=-1)


class Cut(Layout):
    """Rows of one layer, in two."""

    def fuse(self, tensors: Any) -> list[torch.Tensor]:
        return list(tensors[0].chunk(2))

    def separate(self, tensors: Any) -> list[torch.Tensor]:
        return [torch.cat(tuple(tensors))]


class InHalves(Fusion):
    target_modules_patterns = (r"\.down_proj$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear and module.bias is None

    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        return [Cut("weight", ("upper", "lower"))]

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return Halves


def test_a_layout_of_a_user_is_not_known_to_only_move_values() -> None:
    model = built(Patcher(fusions=[InHalves()]), SMALL)
    with pytest.raises(InvalidPatcherError, match=r"weight -> .*upper, .*lower \[\w+\] isn't known to only move val"):
        original_optimizer_state_dict(model, adamw(model))


def test_a_piece_of_what_was_one_parameter_is_refused() -> None:
    model = built(Patcher(fusions="sequential_experts"), tiny_qwen2_moe_config())
    absent = "model.layers.0.mlp.experts.0.up_proj.weight"
    optimizer = optim.AdamW([parameter for name, parameter in model.named_parameters() if name != absent])
    text = rf"experts\.gate_up_proj is made of .*, and of these the optimizer lacks {absent}\. Parts of one"
    with pytest.raises(PatchedWeightsError, match=text):
        original_optimizer_state_dict(model, optimizer)


def test_flat_parameters_are_refused() -> None:
    with one_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        model = FullyShardedDataParallel(built(QKV), device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(InvalidPatcherError, match=r"FullyShardedDataParallel flattens parameters"):
            original_optimizer_state_dict(model, adamw(model))
        with pytest.raises(InvalidPatcherError, match=r"FullyShardedDataParallel flattens parameters"):
            fused_parameters(model)


def test_optimizers_of_others_are_refused_before_they_step() -> None:
    from transformers.optimization import Adafactor

    model = built(QKV)
    parameters = list(model.parameters())
    for optimizer in (optim.SparseAdam(parameters), optim.LBFGS(parameters), Adafactor(parameters)):
        with pytest.raises(InvalidPatcherError, match=rf"{type(optimizer).__name__} isn't known to treat each value"):
            original_optimizer_state_dict(model, optimizer)


@pytest.mark.libraries
def test_quantized_state_is_refused() -> None:
    model = built(QKV)
    optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(model.parameters())
    with pytest.raises(InvalidPatcherError, match="AdamW8bit isn't known to treat each value by itself"):
        original_optimizer_state_dict(model, optimizer)


# --- what can't be joined --------------------------------------------------------------------------------------------

ATTENTION = "model.layers.0.self_attn."


def state_of(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    model = built()
    optimizer = adamw(model)
    train(model, optimizer, INPUTS, 2)
    state = copy.deepcopy(original_optimizer_state_dict(model, optimizer))
    change(state)
    return state


def in_two_groups(state: dict[str, Any]) -> None:
    (group,) = state["param_groups"]
    name = f"{ATTENTION}k_proj.weight"
    state["param_groups"].append({**group, "params": [name], "lr": 1.0, "weight_decay": 0.0})
    group["params"].remove(name)


def without_k(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].remove(f"{ATTENTION}k_proj.weight")
    del state["state"][f"{ATTENTION}k_proj.weight"]


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "groups": (
        in_two_groups,
        r"qkv_proj\.weight is made of .*q_proj\.weight and .*k_proj\.weight, and in the state these differ: "
        r"lr is 0\.01 and 1\.0; weight_decay is 0\.01 and 0\.0\. Parts",
    ),
    "absent": (without_k, r"only in the optimizer: .*k_proj\.weight; only in the state: none\. Make"),
    "no state": (
        lambda state: state["state"].pop(f"{ATTENTION}k_proj.weight"),
        r"made of .*q_proj\.weight and .*k_proj\.weight, and in the state these differ: step is 2\.0 and missing; "
        r"exp_avg is a tensor and missing",
    ),
    "steps": (
        lambda state: state["state"][f"{ATTENTION}v_proj.weight"]["step"].add_(1),
        r"q_proj\.weight and .*v_proj\.weight, and in the state these differ: step is 2\.0 and 3\.0\. Parts",
    ),
    "shapes": (
        lambda state: state["state"][f"{ATTENTION}q_proj.weight"].update(exp_avg=torch.zeros(3, 4)),
        r"exp_avg of .*attn\.q_proj\.weight is \(3, 4\) in the state, and the parameter is \(16, 16\)\.",
    ),
    "unknown": (
        lambda state: state["param_groups"][0]["params"].append("model.other"),
        r"only in the optimizer: none; only in the state: model\.other\. Make",
    ),
    "unknown state": (lambda state: state["state"].update(other={}), r"only in the state: other\. Make"),
    "other groups": (
        lambda state: state["param_groups"].append(
            {**state["param_groups"][0], "lr": 1.0, "params": [state["param_groups"][0]["params"].pop()]}
        ),
        r"Group 0 of the optimizer holds model\.embed_tokens.* and lm_head\.weight, of groups of the state that "
        r"differ: lr is 0\.01 and 1\.0\. Make the groups",
    ),
    "no names": (
        lambda state: state["param_groups"][0].update(params=[0, 1, 2]),
        r"The state doesn't list the names of parameters",
    ),
    "another form": (lambda state: state.pop("param_groups"), r"The state doesn't list the names of parameters"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_can_not_be_loaded_changes_nothing(change: Callable[[Any], object], message: str) -> None:
    model = built(QKV)
    optimizer = adamw(model)
    train(model, optimizer, INPUTS, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PatchedWeightsError, match=message):
        load_original_optimizer_state_dict(model, optimizer, state_of(change))
    assert compared(optimizer.state_dict(), before) == EXACT


def test_parameters_that_are_not_in_the_model_are_an_error() -> None:
    model = built(QKV)
    other = adamw(built(QKV))
    with pytest.raises(PatchedWeightsError, match=r"15 of the 15 parameters of the optimizer aren't in the model"):
        original_optimizer_state_dict(model, other)
