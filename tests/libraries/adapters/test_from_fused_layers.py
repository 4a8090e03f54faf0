"""Adapters that were trained on a fused model: saved for the layers of transformers, and taken up again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Trainer

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher
from tests.support.adapters import (
    LOADS,
    Load,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    config,
    new_adapter,
    settings_of,
    tensors_of,
    train,
    trained,
)
from tests.support.comparing import logits
from tests.support.tiny import save_tiny, tiny_qwen2_vl_config
from tests.support.trainer import FIRST_IS_BEST, MIDDLE, trainer

WEIGHTS = "adapter_model.safetensors"
FUSED = Patcher(fusions=["qkv", "gate_up"])
JOINED = ["qkv_proj", "gate_up_proj", "o_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": JOINED},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*\.(qkv_proj|down_proj)"},
    "ranks and alphas": {
        "target_modules": JOINED,
        "rank_pattern": {"qkv_proj": 2},
        "alpha_pattern": {r"layers\.1\.mlp\.gate_up_proj": 32},
    },
    "DoRA, rsLoRA": {"target_modules": JOINED, "use_dora": True, "use_rslora": True},
    "biases": {"target_modules": ["qkv_proj"], "bias": "all", "lora_bias": True},
    "some layers": {"target_modules": JOINED, "layers_to_transform": [0], "exclude_modules": ["o_proj"]},
}


@pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor")  # of a bias, that it has one dimension
@pytest.mark.parametrize("name", SETTINGS)
def test_it_goes_to_stock_and_back(name: str, llama: Path, tmp_path: Path) -> None:
    model = trained(llama, tmp_path / "ours", FUSED, **SETTINGS[name])
    expected = logits(model)
    assert not any("qkv_proj" in key or "gate_up_proj" in key for key in tensors_of(tmp_path / "ours"))
    stock = as_peft_model(llama, tmp_path / "ours")
    assert_close(logits(stock), expected)
    stock.save_pretrained(tmp_path / "stock")
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
    again = PeftModel.from_pretrained(base(llama, patcher=FUSED), tmp_path / "stock", is_trainable=True)
    ranks = {path: part.r["default"] for path, part in again.named_modules() if hasattr(part, "lora_A")}
    assert ranks == {path: part.r["default"] for path, part in model.named_modules() if hasattr(part, "lora_A")}
    torch.testing.assert_close(logits(again), expected, atol=0, rtol=0)
    again.save_pretrained(tmp_path / "again")
    assert_same_files(tmp_path / "ours", tmp_path / "again")
    torch.testing.assert_close(logits(train(again)), logits(train(model)), atol=0, rtol=0)


def test_names_are_kept_short_where_they_say_it(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, tmp_path, FUSED, target_modules=JOINED)
    saved = settings_of(tmp_path)
    assert saved["target_modules"] == ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert not saved["rank_pattern"]
    assert model.peft_config["default"].target_modules == set(JOINED)  # in memory it is what was asked for


def test_transformers_adds_and_saves_one(llama: Path, tmp_path: Path) -> None:
    model = base(llama, patcher=FUSED)
    model.add_adapter(config(target_modules=JOINED))
    expected = logits(train(model))
    model.save_pretrained(tmp_path)
    assert settings_of(tmp_path)["target_modules"] == ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    for load in LOADS:
        assert_close(logits(load(llama, tmp_path)), expected)
        assert_close(logits(load(llama, tmp_path, patcher=FUSED)), expected)


def test_it_resumes_in_trainer(llama: Path, tmp_path: Path) -> None:
    def run(patcher: Patcher | None, folder: Path, **arguments: Any) -> tuple[Any, Trainer]:
        torch.manual_seed(0)
        model = get_peft_model(base(llama, patcher=patcher), config(target_modules=JOINED, init_lora_weights=True))
        return model, trainer(model, folder, **arguments)

    whole, runner = run(FUSED, tmp_path)
    runner.train()
    checkpoint = tmp_path / MIDDLE
    assert not any("qkv_proj" in key for key in tensors_of(checkpoint))
    resumed, again = run(FUSED, tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(logits(resumed), logits(whole), atol=1e-5, rtol=1e-5)
    best, third = run(FUSED, tmp_path / "best", **FIRST_IS_BEST)
    third.train()
    assert_close(logits(best), logits(as_peft_model(llama, tmp_path / "best" / MIDDLE)))
    stock = as_peft_model(llama, checkpoint)
    assert not torch.allclose(logits(stock), logits(whole), atol=1e-4)


def test_it_is_a_state_dict_of_transformers_that_is_set_again(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, tmp_path, FUSED, target_modules=JOINED)
    state = {key: torch.randn_like(value) for key, value in get_peft_model_state_dict(model).items()}
    shared = {key: value for key, value in state.items() if "k_proj.lora_A" in key or "gate_proj.lora_A" in key}
    for key, value in shared.items():
        for other in ("q_proj", "v_proj") if "k_proj" in key else ("up_proj",):
            state[key.replace("k_proj", other).replace("gate_proj", other)] = value
    found = []
    for each in (model, as_peft_model(llama, tmp_path)):
        result = set_peft_model_state_dict(each, state)
        assert not result.unexpected_keys
        found.append(logits(each))
    assert_close(*found)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_a_file_with_the_names_of_joined_layers(load: Load, llama: Path, tmp_path: Path) -> None:
    """As others may have written it."""
    model = trained(llama, tmp_path, FUSED, target_modules=JOINED)
    raw = {key.replace(".default", ""): value for key, value in model.state_dict().items() if "lora_" in key}
    save_file(raw, tmp_path / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(tmp_path)
    assert_close(logits(load(llama, tmp_path, patcher=FUSED)), logits(model))
    with pytest.raises(InvalidPatcherError, match=r"is for model\.layers\.\{0\.\.1\}\.mlp\.gate_up_proj, model\.lay"):
        load(llama, tmp_path)  # in what order they are joined it doesn't say


def test_an_adapter_of_another_making_does_not_fit_into_it(llama: Path, tmp_path: Path) -> None:
    model = trained(llama, tmp_path / "ours", FUSED, target_modules=JOINED)
    new_adapter(base(llama), tmp_path / "stock", target_modules=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(PatchedWeightsError, match="has an adapter 'default' of rank 4 of its own"):
        model.load_adapter(tmp_path / "stock", "default")
    model.load_adapter(tmp_path / "stock", "another")
    model.set_adapter("another")
    assert_close(logits(model), logits(as_peft_model(llama, tmp_path / "stock")))


def test_a_convolution_of_patches(tmp_path: Path) -> None:
    folder = save_tiny(tiny_qwen2_vl_config(), tmp_path / "base")
    load = AutoModelForImageTextToText.from_pretrained
    settings = config(target_modules=["patch_embed.proj", "q_proj"], task_type=None, rank_pattern={"q_proj": 2})
    adapted = get_peft_model(load(folder), settings)
    adapted.save_pretrained(tmp_path / "adapter")
    patched = Patcher(fusions=["patch_embeddings", "qkv"])
    for read in (PeftModel.from_pretrained, by_hand):
        model = read(load(folder, patcher=patched), tmp_path / "adapter")
        assert any(path.endswith("patch_embed.proj.linear.lora_A") for path, _ in model.named_modules())
        assert_close(logits(model), logits(adapted))
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        model.save_pretrained(tmp_path / "saved")
        assert_same_tensors(tmp_path / "saved", tmp_path / "adapter")
    new = get_peft_model(load(folder, patcher=patched), config(target_modules=["patch_embed.proj.linear"]))
    new.save_pretrained(tmp_path / "new")
    assert_close(logits(PeftModel.from_pretrained(load(folder), tmp_path / "new")), logits(new))


def by_hand(model: Any, adapter: Path) -> Any:
    model.load_adapter(str(adapter))
    return model


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
