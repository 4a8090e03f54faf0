"""Adapters of experts: of stacks, which peft adapts as parameters, and of the layers of single experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from transformers import GptOssConfig, Llama4TextConfig, Qwen3MoeConfig

from patcher import InvalidPatcherError, Patcher
from tests.support import shared
from tests.support.adapters import (
    LOADS,
    SEVEN,
    Load,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    config,
    new_adapter,
    tensors_of,
    train,
    trained,
)
from tests.support.comparing import logits
from tests.support.tiny import DECODER_SIZES, save_tiny, tiny_jamba_config, tiny_mixtral_config, tiny_qwen2_moe_config

# peft says it of the ranks of parameters, its own too
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
EXPERTS = Patcher(fusions="sequential_experts")
ALL = Patcher(fusions=["sequential_experts", "qkv"])
CONFIGS = {
    "mixtral": tiny_mixtral_config(),
    "qwen2_moe": tiny_qwen2_moe_config(),
    "qwen3_moe": Qwen3MoeConfig(
        **DECODER_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    # its stacks have the input on the left, and gate and up take turns
    "gpt_oss": GptOssConfig(**DECODER_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    # its stacks have the input on the left as well, and don't say so to peft
    "llama4": Llama4TextConfig(
        **DECODER_SIZES, intermediate_size_mlp=96, head_dim=16, num_local_experts=4, num_experts_per_tok=1
    ),
}
#: Of it peft knows the layers of experts as they were before transformers 5, under the names that they have here.
LISTED_BEFORE = "qwen3_moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared.checkpoint(each) for name, each in CONFIGS.items()}


def experts_with_an_adapter(model: Any) -> int:
    return sum("experts." in path and hasattr(part, "lora_A") for path, part in model.named_modules())


@pytest.mark.parametrize("targets", [SEVEN, ["experts.1.up_proj", "q_proj"]], ids=["seven", "one"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_experts_that_are_named_have_an_adapter_each(
    name: str, targets: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"target_modules": targets}
    model = trained(folders[name], tmp_path / "ours", EXPERTS, **settings)
    assert experts_with_an_adapter(model) == (2 if targets[0].startswith("experts") else 2 * 4 * 3)
    assert any("experts.1.up_proj" in key for key in tensors_of(tmp_path / "ours"))
    for load in LOADS:
        again = load(folders[name], tmp_path / "ours", patcher=EXPERTS)
        assert experts_with_an_adapter(again) == experts_with_an_adapter(model)
        assert_close(logits(again), logits(model))
        again.save_pretrained(tmp_path / load.__name__)
        assert_same_files(tmp_path / "ours", tmp_path / load.__name__)
    if name == LISTED_BEFORE and targets is SEVEN:
        assert_close(logits(as_peft_model(folders[name], tmp_path / "ours")), logits(model))
    again = PeftModel.from_pretrained(base(folders[name], patcher=EXPERTS), tmp_path / "ours", is_trainable=True)
    assert torch.equal(logits(train(again)), logits(train(model)))


@pytest.mark.parametrize(
    "targets",
    [
        ["gate_proj", "up_proj"],
        r".*\.(gate|down)_proj",
        r".*experts\.\d+\.(gate|up|down)_proj",
        ["gate_proj", "q_proj"],
    ],
    ids=str,
)
def test_so_it_is_when_it_is_read_again_with_more_names_than_peft_keeps(targets: Any, tmp_path: Path) -> None:
    folder = save_tiny(tiny_mixtral_config(num_local_experts=12), tmp_path / "base")
    model = trained(folder, tmp_path / "adapter", EXPERTS, target_modules=targets)
    assert experts_with_an_adapter(model) >= 2 * 12
    for load in LOADS:
        again = load(folder, tmp_path / "adapter", patcher=EXPERTS)
        assert experts_with_an_adapter(again) == experts_with_an_adapter(model)
        assert_close(logits(again), logits(model))


def test_an_adapter_of_stock_with_the_names_of_layers_of_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    """On stock these names have found attention only."""
    expected = new_adapter(base(folders["mixtral"]), tmp_path / "stock", target_modules=SEVEN)
    for load in LOADS:
        model = load(folders["mixtral"], tmp_path / "stock", patcher=EXPERTS)
        assert not experts_with_an_adapter(model)
        assert_close(logits(model), expected)
        model.save_pretrained(tmp_path / load.__name__)
        assert_same_files(tmp_path / load.__name__, tmp_path / "stock")


@pytest.mark.parametrize("name", CONFIGS)
def test_one_of_single_experts_is_not_loaded_without_them(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """PEFT would load what fits, and leave the weights of all experts out."""
    model = trained(folders[name], tmp_path, EXPERTS, target_modules=SEVEN)
    for load in LOADS:
        if name == LISTED_BEFORE:  # it stacks them
            assert_close(logits(load(folders[name], tmp_path)), logits(model))
            continue
        with pytest.raises(InvalidPatcherError, match=r"single experts .*experts.* trained with, such as Patcher\("):
            load(folders[name], tmp_path, patcher=Patcher(fusions="qkv"))


def test_numbers_of_layers_would_be_numbers_of_experts(folders: dict[str, Path]) -> None:
    model = base(folders["mixtral"], patcher=EXPERTS)
    with pytest.raises(
        InvalidPatcherError, match=r"layers_to_transform=\[1\] would be indices of experts there\. Leave"
    ):
        get_peft_model(model, config(target_modules=["gate_proj"], layers_to_transform=[1]))


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (r".*layers\.1\..*gate_proj", {(1, expert, "gate_proj") for expert in range(4)}),
        (r".*\.(?:experts\.0|1)\..*(?:gate|up)_proj", None),
        (r".*\.1\.(?:up_proj|q_proj)|.*0\.mlp\..*down_proj", None),
        (r".*gate_proj", {(layer, expert, "gate_proj") for layer in range(2) for expert in range(4)}),
    ],
)
def test_an_expression_adapts_no_other_experts(
    targets: str, chosen: set[tuple[int, int, str]] | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = base(folders["mixtral"], patcher=EXPERTS)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    expected = {name for name in layers if re.fullmatch(targets, name)}
    if chosen is not None:
        assert expected == {f"model.layers.{layer}.mlp.experts.{expert}.{name}" for layer, expert, name in chosen}
    get_peft_model(model, config(target_modules=targets)).save_pretrained(tmp_path)
    for adapted in (model, base(folders["mixtral"], patcher=EXPERTS)):
        if adapted is not model:
            adapted.load_adapter(tmp_path)
        found = {name for name, module in adapted.named_modules() if isinstance(module, BaseTunerLayer)}
        assert found == expected
    error = InvalidPatcherError if chosen is not None else (InvalidPatcherError, ValueError)
    with pytest.raises(error, match=r"layers of single experts|not found in the base"):
        base(folders["mixtral"]).load_adapter(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_linear_is_what_it_is_on_stock(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Where the stacks of experts are parameters, and no linear layers."""
    settings: dict[str, Any] = {"target_modules": "all-linear"}
    if name == "llama4":  # its router is an nn.Linear that gives two tensors, which peft can't adapt
        settings["exclude_modules"] = ["router"]
    ours, theirs = (base(folders[name], patcher=patcher) for patcher in (ALL, None))
    new_adapter(ours, tmp_path / "ours", **settings)
    new_adapter(theirs, tmp_path / "theirs", **settings)
    assert experts_with_an_adapter(ours) == experts_with_an_adapter(theirs)
    assert_close(logits(ours), logits(theirs))
    assert tensors_of(tmp_path / "ours").keys() == tensors_of(tmp_path / "theirs").keys()
    assert_close(logits(as_peft_model(folders[name], tmp_path / "ours")), logits(ours))
    assert_close(logits(as_peft_model(folders[name], tmp_path / "theirs", patcher=ALL)), logits(theirs))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_of_the_stacks_gives_the_stacks_back(
    name: str, load: Load, folders: dict[str, Path], tmp_path: Path
) -> None:
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    settings = {"target_modules": ["q_proj", "v_proj"], "target_parameters": parameters, "lora_alpha": 6}
    expected = new_adapter(base(folders[name]), tmp_path / "stock", **settings)
    model = load(folders[name], tmp_path / "stock", patcher=ALL)
    assert not any("experts.3" in path for path, _ in model.named_modules())
    assert_close(logits(model), expected)
    model.save_pretrained(tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
    ours, theirs = (
        PeftModel.from_pretrained(base(folders[name], patcher=patcher), tmp_path / "stock", is_trainable=True)
        for patcher in (ALL, None)
    )
    assert_close(logits(train(ours)), logits(train(theirs)))


def test_a_stack_and_a_joined_layer_of_one_name(tmp_path: Path) -> None:
    """Jamba has an MLP in every other layer, whose gate and up are joined under the name of a stack."""
    folder = save_tiny(tiny_jamba_config(), tmp_path / "base")
    patched = Patcher(fusions=["qkv", "gate_up", "sequential_experts"])
    settings = {"target_modules": "all-linear", "rank_pattern": {"q_proj": 5, "feed_forward.gate_proj": 2}}
    model = trained(folder, tmp_path / "adapter", patched, **settings)
    assert_close(logits(as_peft_model(folder, tmp_path / "adapter")), logits(model))
    for load in LOADS:
        assert_close(logits(load(folder, tmp_path / "adapter", patcher=patched)), logits(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_only_one_of_the_stacks(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = new_adapter(base(folders[name]), tmp_path, target_modules=[], target_parameters=["experts.down_proj"])
    for load in LOADS:
        assert_close(logits(load(folders[name], tmp_path, patcher=EXPERTS)), expected)


def test_one_that_was_made_for_experts_one_by_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """As it was done before transformers 5: `w1`, `w2` and `w3` of each expert of Mixtral."""
    settings = config(target_modules=["w1", "w2", "w3", "q_proj"], base_model_name_or_path=str(folders["mixtral"]))
    settings.inference_mode = True
    settings.save_pretrained(tmp_path)
    sizes = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
    weights = {}
    for layer in range(2):
        start = f"base_model.model.model.layers.{layer}."
        weights |= pair(f"{start}self_attn.q_proj", 64, 64)
        for expert in range(4):
            for each, (inputs, outputs) in sizes.items():
                weights |= pair(f"{start}block_sparse_moe.experts.{expert}.{each}", inputs, outputs)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    expected = logits(as_peft_model(folders["mixtral"], tmp_path))
    assert not torch.allclose(expected, logits(base(folders["mixtral"])), atol=1e-2)
    for load in LOADS:
        assert_close(logits(load(folders["mixtral"], tmp_path, patcher=ALL)), expected)


def pair(path: str, inputs: int, outputs: int, rank: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"{path}.lora_A.weight": torch.randn(rank, inputs) * 0.2,
        f"{path}.lora_B.weight": torch.randn(outputs, rank) * 0.2,
    }


def test_its_state_is_set_again(folders: dict[str, Path], tmp_path: Path) -> None:
    model = trained(folders["qwen3_moe"], tmp_path, EXPERTS, target_modules=SEVEN)
    expected = logits(model)
    state = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    train(model)
    assert not torch.equal(logits(model), expected)
    assert not set_peft_model_state_dict(model, state).unexpected_keys
    assert torch.equal(logits(model), expected)


def test_what_peft_has_not_for_stacks_it_has_for_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    for settings in ({"use_dora": True}, {"rank_pattern": {"experts.1.gate_proj": 8}}):
        model = trained(folders["mixtral"], tmp_path / "adapter", EXPERTS, target_modules=SEVEN, **settings)
        assert_close(logits(as_peft_model(folders["mixtral"], tmp_path / "adapter", patcher=EXPERTS)), logits(model))


def test_an_adapter_is_merged_and_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    model = get_peft_model(base(folders["mixtral"], patcher=ALL), config(target_modules=SEVEN))
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    assert_close(logits(base(tmp_path)), expected)
