"""Device maps in the names of the stock model: they hold for what its layers have become, or are refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, WhisperConfig, WhisperForConditionalGeneration
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import InvalidPatcherError, Patcher
from tests.compatibility.outcomes import EXACT, compared
from tests.support import shared
from tests.support.comparing import logits
from tests.support.offloaded import places
from tests.support.replacements import JOINED, Without
from tests.support.tiny import ENCODER_DECODER_SIZES, save_tiny, tiny_llama_config, tiny_qwen2_moe_config

BOTH = Patcher(fusions=["qkv", "gate_up"])
PARTS = "The device map puts parts of one layer on different devices"


class Renamed(LlamaMLP):
    """Its projections have names of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lower, self.upper = self.gate_proj, self.up_proj
        del self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.lower(x)) * self.upper(x))


RENAMINGS = [WeightRenaming("mlp.gate_proj", "mlp.lower"), WeightRenaming("mlp.up_proj", "mlp.upper")]
OLD_NAMES = (("gate", "low"), ("up", "upp"))
RENAMED = Patcher({"LlamaMLP": Renamed}, extra_weight_conversions=RENAMINGS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_qwen2_moe_config())


def load(folder: Path, asked: Patcher, device_map: dict[str, Any], **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=asked, device_map=device_map, **options)


def of_stock(folder: Path, *on_disk: str) -> dict[str, Any]:
    """A map of the layers that the stock model has."""
    stock = shared.stock(folder)
    return places(stock, lambda path: any(part in path for part in on_disk))


def computes_as(model: Any, folder: Path) -> None:
    stock = shared.stock(folder)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=1e-5)
    assert compared(patcher.original_state_dict(model), dict(stock.state_dict()), rounding=0) == EXACT


@pytest.mark.parametrize("asked", [BOTH, JOINED, RENAMED], ids=["fusions", "a conversion", "renamings"])
def test_what_the_parts_agree_on_holds_for_the_layer(asked: Patcher, llama: Path, tmp_path: Path) -> None:
    device_map = of_stock(llama, "0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "0.mlp.gate", "0.mlp.up")
    model = load(llama, asked, device_map, offload_folder=tmp_path)
    computes_as(model, llama)
    on_disk = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    expected = {
        "fusions": {"self_attn.qkv_proj", "mlp.gate_up_proj"},
        "a conversion": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_up_proj"},
        "renamings": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.lower", "mlp.upper"},
    }[{BOTH: "fusions", JOINED: "a conversion", RENAMED: "renamings"}[asked]]
    assert on_disk == {f"model.layers.0.{name}.weight" for name in expected}
    known = {name for name, _ in model.named_modules()}
    assert model.hf_device_map.keys() <= known
    assert device_map == of_stock(llama, "0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "0.mlp.gate", "0.mlp.up")


def test_experts_follow_the_stack_that_they_are_of(moe: Path, tmp_path: Path) -> None:
    """`experts.gate_up_proj` is a parameter of stock, and there accelerate can't move it by itself."""
    device_map = of_stock(moe, "1.mlp.experts.gate_up_proj")
    model = load(moe, Patcher(fusions="sequential_experts"), device_map, offload_folder=tmp_path)
    on_disk = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    gates = {
        f"model.layers.1.mlp.experts.{number}.{name}.weight"
        for number in range(4)
        for name in ("gate_proj", "up_proj")
    }
    assert on_disk == gates
    stock = shared.stock(moe)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-6, rtol=1e-5)


def test_a_fused_name_is_as_good_as_those_of_its_parts(llama: Path, tmp_path: Path) -> None:
    device_map = of_stock(llama, "layers.1.self_attn")
    for part in "qkv":
        del device_map[f"model.layers.1.self_attn.{part}_proj"]
    device_map["model.layers.1.self_attn.qkv_proj"] = "disk"
    model = load(llama, BOTH, device_map, offload_folder=tmp_path)
    assert model.model.layers[1].self_attn.qkv_proj.weight.is_meta
    assert model.hf_device_map["model.layers.1.self_attn.qkv_proj"] == "disk"
    # Both may be there, and then they have to agree.
    both = device_map | {f"model.layers.1.self_attn.{part}_proj": "disk" for part in "qkv"}
    assert load(llama, BOTH, both, offload_folder=tmp_path).model.layers[1].self_attn.qkv_proj.weight.is_meta
    both = device_map | {f"model.layers.1.self_attn.{part}_proj": "cpu" for part in "qkv"}
    with pytest.raises(InvalidPatcherError, match=rf"{PARTS}:\n.*v_proj.weight on cpu, qkv_proj.weight on disk\n"):
        load(llama, BOTH, both, offload_folder=tmp_path)


@pytest.mark.parametrize("asked", [BOTH, JOINED], ids=["fusions", "a conversion"])
def test_parts_on_different_devices_are_refused_before_anything_is_read(
    asked: Patcher, llama: Path, tmp_path: Path
) -> None:
    device_map = of_stock(llama, "gate_proj")
    unreadable = shutil.copytree(llama, tmp_path / "unreadable")
    (unreadable / "model.safetensors").write_bytes(b"no weights")
    text = re.escape(
        f"{PARTS}:\n"
        "  model.layers.{0..1}.mlp.gate_up_proj.weight: gate_proj.weight on disk, up_proj.weight on cpu\n"
        "Name these modules in it, model.layers.{0..1}.mlp.gate_up_proj, each with one device, in the place of "
        "model.layers.{0..1}.mlp.gate_proj, model.layers.{0..1}.mlp.up_proj."
    )
    with pytest.raises(InvalidPatcherError, match=f"^{text}$"):
        load(unreadable, asked, device_map, dtype=torch.float32, offload_folder=tmp_path)
    assert not any("layers" in path.name for path in tmp_path.iterdir())


def test_a_part_that_is_nowhere_is_named(llama: Path, tmp_path: Path) -> None:
    device_map = of_stock(llama, "layers.1")
    del device_map["model.layers.1.self_attn.k_proj"]
    with pytest.raises(InvalidPatcherError, match=r"q_proj\.weight on disk, k_proj\.weight nowhere, v_proj"):
        load(llama, BOTH, device_map, offload_folder=tmp_path)


def test_a_bias_that_stays_by_itself_goes_with_its_module(tmp_path: Path) -> None:
    """Of Whisper's projections two have a bias: these are parameters of the attention, which moves as a whole."""
    sizes = ENCODER_DECODER_SIZES | {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4}
    config = WhisperConfig(**sizes)
    folder = save_tiny(config, tmp_path / "stock", model_class=WhisperForConditionalGeneration)
    stock = shared.stock(folder, WhisperForConditionalGeneration)
    inputs = {"input_features": torch.randn(1, 4, 16), "decoder_input_ids": torch.tensor([[3, 4, 5]])}
    asked = Patcher(fusions="qkv")

    def loaded(*on_disk: str) -> Any:
        device_map = places(stock, lambda path: any(part in path for part in on_disk))
        return WhisperForConditionalGeneration.from_pretrained(
            folder, patcher=asked, device_map=device_map, offload_folder=tmp_path / "disk"
        )

    first = "model.encoder.layers.0.self_attn"
    projections = [f"{first}.{name}_proj" for name in ("q", "k", "v")]
    text = rf"{PARTS}:\n  {first}\.q_proj_bias: disk, and beside it out_proj\.weight on cpu, out_proj\.bias on cpu\n"
    with pytest.raises(
        InvalidPatcherError, match=rf"{text}.*\nName these modules in it, {first}, .*{first}\.out_proj"
    ):
        loaded(*projections)
    model = loaded(first)
    assert model.hf_device_map[first] == "disk"
    torch.testing.assert_close(logits(model, inputs), logits(stock, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")  # what newer accelerates say
def test_names_that_nothing_has_are_passed_over_as_stock_does(llama: Path, tmp_path: Path) -> None:
    device_map = of_stock(llama, "layers.1") | {"model.vision_tower": "cpu"}
    for asked in (BOTH, JOINED):
        model = load(llama, asked, device_map, offload_folder=tmp_path)
        computes_as(model, llama)
        assert model.hf_device_map["model.vision_tower"] == "cpu"


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")  # what newer accelerates say
def test_the_name_of_a_weight_that_was_dropped_is_passed_over(llama: Path, tmp_path: Path) -> None:
    asked = Patcher({"LlamaMLP": Without}, dropped_weights="up_proj")
    model = load(llama, asked, of_stock(llama, "up_proj", "layers.1"), offload_folder=tmp_path)
    assert model.model.layers[1].mlp.gate_proj.weight.is_meta


@pytest.mark.parametrize("layer", [0, 1])
def test_a_name_that_has_become_nobody_knows_what_is_refused(layer: int, llama: Path, tmp_path: Path) -> None:
    """The conversions of the replacement go by the names that one checkpoint has, and the map by those of stock."""
    asked = Patcher(
        {"LlamaMLP": Renamed},
        extra_weight_conversions=[
            WeightRenaming("mlp.gate_old", "mlp.lower"),
            WeightRenaming("mlp.up_old", "mlp.upper"),
        ],
    )
    device_map = of_stock(llama, "gate_proj")
    for part in ("gate_proj", "up_proj"):  # of the other layer nothing is named
        del device_map[f"model.layers.{1 - layer}.mlp.{part}"]
    mlp = rf"model\.layers\.{layer}\.mlp"
    text = rf"names '{mlp}\.gate_proj', the replacement has no such part.*Name the whole module in it: '{mlp}'"
    with pytest.raises(InvalidPatcherError, match=text):
        load(llama, asked, device_map, offload_folder=tmp_path)


def test_a_plan_meets_the_map_as_a_load_does(llama: Path) -> None:
    found = patcher.plan(llama, BOTH, device_map=of_stock(llama, "gate_proj"))
    assert not found.ok
    assert PARTS in str(found)
