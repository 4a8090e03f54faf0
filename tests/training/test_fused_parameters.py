"""What fused parameters are made of: slices of one dimension, in order."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter, WeightRenaming

from patcher import InvalidPatcherError, Part, Patcher, fused_parameters, original_state_dict
from tests.compatibility.rows import ROWS, Row
from tests.support.beside import FUSED_QKV
from tests.support.interleaved import TURNS
from tests.support.replacements import OWN, JoinedMLP, OwnMLP
from tests.support.tiny import (
    build_tiny,
    randomize,
    save_tiny,
    tiny_bert_config,
    tiny_llama_config,
    tiny_qwen2_moe_config,
)


def check(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """Each part has the values of the original, and all of them are all of the parameter."""
    found, originals = fused_parameters(model), original_state_dict(model)
    parameters = dict(model.named_parameters())
    for name, parts in found.items():
        end = 0
        for part in parts:
            assert part.start == end
            end += part.length
            rows = parameters[name].detach().narrow(part.dim, part.start, part.length)
            assert torch.equal(rows.flatten(), originals[part.name].flatten())
        assert end == parameters[name].shape[parts[0].dim]
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parts_are_where_they_are_said_to_be(row: Row) -> None:
    model = row.patched()
    found = check(model)
    assert fused_parameters(row.stock()) == {}
    expected = {"class mapping": 0, "`sequential_experts`": 0, "`patch_embeddings`": 1}.get(row.name, 2)
    assert len(found) == expected


@pytest.mark.parametrize(
    ("config", "fusions"), [(tiny_bert_config(), "qkv"), (tiny_qwen2_moe_config(), ["qkv", "gate_up"])]
)
def test_biases_have_parts_too(config: Any, fusions: Any) -> None:
    found = check(Patcher(fusions=fusions).apply(build_tiny(config)))
    assert any(name.endswith(".bias") for name in found)
    assert all(len(parts) in (2, 3) for parts in found.values())


def test_a_conversion_joins_in_the_order_of_its_patterns() -> None:
    """A checkpoint has k before q."""
    found = check(FUSED_QKV.apply(build_tiny(tiny_llama_config())))
    parts = found["model.layers.1.self_attn.qkv_proj.weight"]
    assert [(part.name.rpartition("attn.")[2], part.start, part.length) for part in parts] == [
        ("q_proj.weight", 0, 64),
        ("k_proj.weight", 64, 32),
        ("v_proj.weight", 96, 32),
    ]


class BesideMLP(JoinedMLP):
    """Gate and up beside each other: the transposed of a joined layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.gate_up_proj
        self.both = nn.Parameter(torch.zeros(config.intermediate_size, 2 * config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ half.T for half in self.both.chunk(2, dim=1))
        return self.down_proj(nn.functional.silu(gate) * up)


class OtherNameMLP(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate, self.turned = self.gate_proj, nn.Parameter(torch.zeros_like(self.up_proj.weight.T))
        del self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate(x)) * (x @ self.turned))


def test_parts_may_lie_in_another_dimension() -> None:
    conversion = WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.both"], operations=[Concatenate(-1)]
    )
    patcher = Patcher({"LlamaMLP": BesideMLP}, extra_weight_conversions=conversion)
    found = check(patcher.apply(build_tiny(tiny_llama_config())))
    assert found["model.layers.0.mlp.both"][1] == Part("model.layers.0.mlp.up_proj.weight", 1, 64, 64)


def test_all_of_one_original_is_its_one_part() -> None:
    patcher = Patcher(
        {"LlamaMLP": OtherNameMLP},
        extra_weight_conversions=[
            WeightRenaming("mlp.gate_proj.weight", "mlp.gate.weight"),
            WeightConverter(["mlp.up_proj.weight"], ["mlp.turned"], operations=[Transpose(0, 1)]),
        ],
    )
    found = fused_parameters(patcher.apply(build_tiny(tiny_llama_config(num_hidden_layers=1))))
    assert found == {
        "model.layers.0.mlp.gate.weight": (Part("model.layers.0.mlp.gate_proj.weight", 0, 0, 96),),
        "model.layers.0.mlp.turned": (Part("model.layers.0.mlp.up_proj.weight", 0, 0, 64),),
    }


def test_what_takes_turns_is_no_slice() -> None:
    model = TURNS.apply(build_tiny(tiny_llama_config()))
    with pytest.raises(InvalidPatcherError, match=r"gate_up_proj\.weight is made of .* these aren't slices of it"):
        fused_parameters(model)


def test_a_model_without_a_checkpoint_and_wrappers() -> None:
    with FUSED_QKV.applied():
        model = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1))
    randomize(model)
    (name,) = check(model)
    assert name == "model.layers.0.self_attn.qkv_proj.weight"

    around = nn.Sequential(model, nn.Linear(2, 2))
    assert list(check(around)) == [f"0.{name}"]
    assert fused_parameters(around)[f"0.{name}"][0].name == "0.model.layers.0.self_attn.q_proj.weight"
    assert list(check(model.model.layers[0])) == ["self_attn.qkv_proj.weight"]

    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert list(check(model)) == ["model.layers.0._checkpoint_wrapped_module.self_attn.qkv_proj.weight"]


def test_a_module_at_two_paths_is_listed_once(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=OWN | Patcher(fusions="qkv"))
    model.model.layers[1] = model.model.layers[0]
    copied = copy.deepcopy(model)
    assert list(fused_parameters(copied)) == ["model.layers.0.self_attn.qkv_proj.weight"]
    assert all(re.match(r"model\.layers\.0\.", part.name) for parts in check(model).values() for part in parts)
