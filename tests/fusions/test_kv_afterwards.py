"""A model with `kv` in the hands of other tools: state dicts, adapters, training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BartForConditionalGeneration

import patcher
from patcher import Patcher
from tests.support import shared
from tests.support.cross_attention import CASES, save, text

ALONE = Patcher(fusions="kv")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("Bart", tmp_path_factory.mktemp("bart") / "checkpoint")


def test_either_layout_is_loaded_and_a_part_takes_values(bart: Path) -> None:
    stock = shared.stock(bart, BartForConditionalGeneration)
    model = BartForConditionalGeneration._from_config(CASES["Bart"].config(), patcher=Patcher(fusions=["qkv", "kv"]))
    model.eval().load_state_dict(stock.state_dict())
    inputs = CASES["Bart"].inputs
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)

    new = nn.Linear(64, 64)
    stock.model.decoder.layers[1].encoder_attn.v_proj = new
    model.model.decoder.layers[1].encoder_attn.v_proj = copy.deepcopy(new)
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    original = patcher.original_state_dict(model)
    assert all(torch.equal(original[key], value) for key, value in stock.state_dict().items())
    parts = patcher.fused_parameters(model)["model.decoder.layers.1.encoder_attn.kv_proj.weight"]
    assert [(part.name.rpartition("encoder_attn.")[2], part.start, part.length) for part in parts] == [
        ("k_proj.weight", 0, 64),
        ("v_proj.weight", 64, 64),
    ]


@pytest.mark.libraries
@pytest.mark.parametrize("settings", [{}, {"target_modules": ["v_proj", "q_proj"], "use_rslora": True}], ids=str)
def test_an_adapter_of_the_stock_layers_computes_the_same(
    settings: dict[str, Any], bart: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    asked = {"target_modules": ["k_proj", "v_proj"], "r": 4, "rank_pattern": {"v_proj": 2}} | settings
    stock = peft.get_peft_model(BartForConditionalGeneration.from_pretrained(bart), peft.LoraConfig(**asked)).eval()
    with torch.no_grad():
        for name, value in stock.named_parameters():
            if "lora_" in name:
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
    stock.save_pretrained(tmp_path / "adapter")
    inputs = CASES["Bart"].inputs
    model = BartForConditionalGeneration.from_pretrained(bart, patcher=Patcher(fusions=["qkv", "kv"]))
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()

    assert not any("encoder_attn.kv_proj" in name for name, _ in adapted.named_parameters())
    torch.testing.assert_close(adapted(**inputs).logits, stock(**inputs).logits, atol=1e-4, rtol=0)
    adapted.save_pretrained(tmp_path / "again")
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.libraries
def test_an_adapter_of_the_joined_layer_is_for_the_joined_layer(bart: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = BartForConditionalGeneration.from_pretrained(bart, patcher=ALONE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["kv_proj"], r=4)).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
    inputs = CASES["Bart"].inputs
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    assert all("encoder_attn.kv_proj." in key for key in load_file(tmp_path / "adapter_model.safetensors"))

    again = BartForConditionalGeneration.from_pretrained(bart, patcher=ALONE)
    found = peft.PeftModel.from_pretrained(again, tmp_path).eval()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"Target modules .*kv_proj.* not found"):
        peft.PeftModel.from_pretrained(BartForConditionalGeneration.from_pretrained(bart), tmp_path)


def test_it_trains_as_stock_and_its_optimizer_has_the_state_of_stock(bart: Path) -> None:
    found = []
    for asked in (Patcher(), Patcher(fusions=["qkv", "kv"])):
        model = BartForConditionalGeneration.from_pretrained(bart, patcher=asked)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for number in range(3):
            torch.manual_seed(number)
            model(input_ids=text(9), labels=torch.randint(3, 100, (2, 4))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = patcher.original_optimizer_state_dict(model, optimizer)["state"]
        found.append(
            (patcher.original_state_dict(model), {key: value["momentum_buffer"] for key, value in state.items()})
        )

    (weights, moments), (ours, our_moments) = found
    assert weights.keys() == ours.keys()
    assert moments.keys() == our_moments.keys()
    assert "model.decoder.layers.0.encoder_attn.v_proj.weight" in moments
    for theirs, mine in ((weights, ours), (moments, our_moments)):
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, atol=1e-5, rtol=1e-4)
