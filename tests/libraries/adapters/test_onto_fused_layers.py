"""Adapters of the layers of transformers on a fused model: they compute what they do on the stock one, and are saved
as they were."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher, PatcherError
from tests.support.adapters import (
    LOADS,
    SEVEN,
    Load,
    adapted_layers,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    by_load_adapter,
    new_adapter,
    tensors_of,
)
from tests.support.comparing import logits

pytestmark = pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor")  # of a bias: it has one dimension
FUSED = Patcher(fusions=["qkv", "gate_up"])
ADAPTERS: dict[str, dict[str, Any]] = {
    "seven": {"target_modules": SEVEN},
    "some of the parts": {"target_modules": ["q_proj", "v_proj", "up_proj"], "lora_alpha": 16},
    "one of the parts": {"target_modules": ["k_proj"]},
    "ranks and alphas": {
        "target_modules": SEVEN,
        "rank_pattern": {"q_proj": 8, "v_proj": 2},
        "alpha_pattern": {"k_proj": 12, "up_proj": 3},
    },
    "rsLoRA": {"target_modules": SEVEN, "use_rslora": True, "rank_pattern": {"q_proj": 8, "v_proj": 3}},
    "DoRA": {"target_modules": SEVEN, "use_dora": True, "rank_pattern": {"v_proj": 2}},
    "DoRA of some": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "bias": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "bias of the adapted": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "biases of its own": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "alpha_pattern": {"q_proj": 3}},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*layers\.1\.(self_attn\.(q|v)_proj|mlp\.up_proj)"},
    "some layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
    "excluded": {"target_modules": SEVEN, "exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
    "a head to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}

#: Whether transformers reads what `modules_to_save` has saved: some releases drop that, and says nothing.
READS_SAVED_MODULES = "AuxiliaryTrainingWrapper" in inspect.getsource(inspect.unwrap(PreTrainedModel.load_adapter))


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Name -> the folder of an adapter of the stock model, and what it computes with it."""
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for name, settings in ADAPTERS.items():
        folder = root / name
        found[name] = folder, new_adapter(base(llama), folder, **settings)
        if name == "bias of the adapted":  # peft saves no others, and computed with all of them
            found[name] = folder, logits(as_peft_model(llama, folder))
    return found


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("name", ADAPTERS)
def test_it_computes_the_same_and_is_saved_as_it_was(
    name: str, load: Load, llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    folder, expected = adapters[name]
    if name == "a head to save" and load in LOADS[2:] and not READS_SAVED_MODULES:
        with pytest.raises(PatchedWeightsError, match=r"has no place:\n  lm_head\.weight"):
            load(llama, folder, patcher=FUSED)
        return
    model = load(llama, folder, patcher=FUSED)
    assert any(path.endswith("qkv_proj") for path, part in model.named_modules() if hasattr(part, "lora_A"))
    assert_close(logits(model), expected)
    assert not torch.allclose(logits(base(llama)), expected, atol=1e-2)
    model.save_pretrained(tmp_path / "ours")
    # transformers itself loses the magnitudes of DoRA where it loads an adapter
    stock = (as_peft_model if "DoRA" in name else load)(llama, folder)
    stock.save_pretrained(tmp_path / "stock")
    assert_same_files(tmp_path / "ours", tmp_path / "stock") if "DoRA" not in name else None
    assert {key: value.tolist() for key, value in tensors_of(tmp_path / "ours").items()} == {
        key: value.tolist() for key, value in tensors_of(folder).items()
    }


@pytest.mark.parametrize("options", [{}, {"autocast_adapter_dtype": False}], ids=["float32", "as the model"])
def test_in_half_precision_the_types_are_those_of_stock(
    options: dict[str, Any], llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    found = []
    for patcher in (FUSED, None):
        model = base(llama, patcher=patcher, dtype=torch.bfloat16)
        adapted = PeftModel.from_pretrained(model, adapters["ranks and alphas"][0], **options)
        adapted.save_pretrained(tmp_path / str(patcher is None))
        kinds = {value.dtype for name, value in adapted.named_parameters() if "lora_" in name}
        found.append((kinds, logits(adapted).float()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=0.15, rtol=0.05)
    assert_same_files(tmp_path / "True", tmp_path / "False")


def test_rows_that_no_dora_changes_are_those_of_the_weight_in_half_precision_too(
    llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]]
) -> None:
    for load in (as_peft_model, by_load_adapter):
        model = load(llama, adapters["DoRA of some"][0], patcher=FUSED, dtype=torch.bfloat16)
        layer = next(part for path, part in model.named_modules() if path.endswith("layers.0.self_attn.qkv_proj"))
        kind = layer.lora_A["default"].weight.dtype
        expected = torch.linalg.norm(layer.base_layer.weight.to(kind), dim=1).to(kind)
        assert torch.equal(layer.lora_magnitude_vector["default"].weight[64:], expected[64:])


def test_a_file_of_pickles(llama: Path, tmp_path: Path) -> None:
    expected = new_adapter(base(llama), tmp_path, target_modules=SEVEN)
    torch.save(tensors_of(tmp_path), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    for load in LOADS:
        assert_close(logits(load(llama, tmp_path, patcher=FUSED)), expected)


def test_only_some_layers_are_fused(llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]]) -> None:
    from patcher.fusions import QKV

    folder, expected = adapters["ranks and alphas"]
    model = as_peft_model(llama, folder, patcher=Patcher(fusions=QKV(modules="model.layers.0.self_attn")))
    assert adapted_layers(model) == 2 * 7 - 2
    assert_close(logits(model), expected)


UNPLACED = "The adapter has tensors for which LlamaForCausalLM has no place:\n  model.layers.0.self_attn.k_proj.lora_A"


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_a_tensor_without_a_place_is_an_error(
    load: Load, llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    shutil.copytree(adapters["some of the parts"][0], tmp_path, dirs_exist_ok=True)
    weights = tensors_of(tmp_path)
    weights["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = torch.zeros(4, 64)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(PatchedWeightsError, match=UNPLACED):
        load(llama, tmp_path, patcher=FUSED)
    with pytest.warns(UserWarning, match=UNPLACED):
        model = load(llama, tmp_path, patcher=FUSED.replace(strict=False))
    assert_close(logits(model), adapters["some of the parts"][1])


def test_a_model_that_refuses_an_adapter_is_as_it_was(
    llama: Path, adapters: dict[str, tuple[Path, torch.Tensor]]
) -> None:
    model = base(llama, patcher=FUSED)
    before = [(name, id(part)) for name, part in model.named_modules()]
    folder = adapters["seven"][0]
    with pytest.raises(InvalidPatcherError, match="Joined they compute the same, but training would fill the zeros"):
        PeftModel.from_pretrained(model, folder, is_trainable=True)
    with pytest.raises(InvalidPatcherError, match="Joined they compute the same, but training would fill the zeros"):
        model.load_adapter(str(folder), is_trainable=True)
    assert [(name, id(part)) for name, part in model.named_modules()] == before
    assert not hasattr(model, "peft_config")


def test_an_adapter_of_a_users_class_is_not_guessed_at(llama: Path, tmp_path: Path) -> None:
    from tests.support.beside import FUSED_QKV

    plain = tmp_path / "plain"
    new_adapter(base(llama), plain, target_modules=["q_proj", "o_proj"])
    for load in LOADS:
        with pytest.raises(PatcherError, match=r"\n?.* model.layers.\{0..1\}.self_attn.q_proj"):
            load(llama, plain, patcher=FUSED_QKV)


def test_a_config_that_names_layers_it_has_no_tensors_for(llama: Path, tmp_path: Path) -> None:
    expected = new_adapter(base(llama), tmp_path, target_modules=["q_proj", "v_proj"])
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text("utf-8")) | {"target_modules": ["q_proj", "k_proj", "v_proj"]}
    file.write_text(json.dumps(settings), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in map(partial, LOADS):
            assert_close(logits(load(llama, tmp_path, patcher=FUSED)), expected)
