"""Device maps: they name the layers that the patched model has; names of their parts are refused."""

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


class Renamed(LlamaMLP):
    """Its projections have names of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lower, self.upper = self.gate_proj, self.up_proj
        del self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.lower(x)) * self.upper(x))


RENAMINGS = [WeightRenaming("mlp.gate_proj", "mlp.lower"), WeightRenaming("mlp.up_proj", "mlp.upper")]
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


JOINED_NAMES = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


def in_names_of(model: Any, device_map: dict[str, Any]) -> dict[str, Any]:
    """The map with the joined layers in the place of their parts."""
    known = {name for name, _ in model.named_modules()}
    return {next((path for path in known if is_part(key, path)), key): device for key, device in device_map.items()}


def is_part(key: str, path: str) -> bool:
    parts = next((parts for joined, parts in JOINED_NAMES.items() if path.endswith(joined)), ())
    return any(key == f"{path.rpartition('.')[0]}.{part}" for part in parts)


@pytest.mark.parametrize("asked", [BOTH, JOINED], ids=["fusions", "a conversion"])
def test_joined_layers_are_named_as_they_are(asked: Patcher, llama: Path, tmp_path: Path) -> None:
    patched = AutoModelForCausalLM.from_pretrained(llama, patcher=asked)
    stock_map = of_stock(llama, "0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "0.mlp.gate", "0.mlp.up")
    device_map = in_names_of(patched, stock_map)
    model = load(llama, asked, device_map, offload_folder=tmp_path)
    computes_as(model, llama)
    on_disk = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert on_disk == {f"{path}.weight" for path, device in device_map.items() if device == "disk"}
    assert "model.layers.0.mlp.gate_up_proj.weight" in on_disk


@pytest.mark.parametrize("whole", ["model.layers.1", "model.layers.1.self_attn"])
def test_modules_that_hold_them_are_named_as_ever(whole: str, llama: Path, tmp_path: Path) -> None:
    device_map = in_names_of(AutoModelForCausalLM.from_pretrained(llama, patcher=BOTH), of_stock(llama))
    device_map = {key: device for key, device in device_map.items() if not key.startswith(f"{whole}.")}
    model = load(llama, BOTH, device_map | {whole: "disk"}, offload_folder=tmp_path)
    computes_as(model, llama)
    assert model.model.layers[1].self_attn.qkv_proj.weight.is_meta


@pytest.mark.parametrize("asked", [BOTH, JOINED, RENAMED], ids=["fusions", "a conversion", "renamings"])
def test_names_of_parts_are_refused_before_anything_is_read(asked: Patcher, llama: Path, tmp_path: Path) -> None:
    device_map = of_stock(llama, "gate_proj")
    given = dict(device_map)
    unreadable = shutil.copytree(llama, tmp_path / "unreadable")
    (unreadable / "model.safetensors").write_bytes(b"no weights")
    joined = "mlp.lower" if asked is RENAMED else "mlp.gate_up_proj"
    text = (
        "device_map names layers that are parts of others in the patched model:\n"
        f"(?s:.*)  model.layers.{{0..1}}.mlp.gate_proj: part of model.layers.{{0..1}}.{joined}\n(?s:.*)"
        "Name those instead, or leave these modules out of the patcher."
    )
    pattern = (
        re.escape(text).replace(re.escape("(?s:.*)"), "(?s:.*)").replace(r"mlp\.\{lower,upper\}", ".*lower.*upper")
    )
    with pytest.raises(InvalidPatcherError, match=f"^{pattern}$"):
        load(unreadable, asked, device_map, dtype=torch.float32, offload_folder=tmp_path)
    assert not any("layers" in path.name for path in tmp_path.iterdir())
    assert device_map == given


def test_one_part_beside_the_joined_layer_is_refused_too(llama: Path, tmp_path: Path) -> None:
    device_map = in_names_of(AutoModelForCausalLM.from_pretrained(llama, patcher=BOTH), of_stock(llama))
    device_map["model.layers.1.self_attn.k_proj"] = "disk"
    with pytest.raises(InvalidPatcherError, match=r"layers\.1\.self_attn\.k_proj: part of .*1\.self_attn\.qkv_proj\n"):
        load(llama, BOTH, device_map, offload_folder=tmp_path)


def test_stacks_of_experts_are_named_by_their_layers(moe: Path, tmp_path: Path) -> None:
    """`experts.gate_up_proj` is a parameter of stock."""
    device_map = of_stock(moe, "1.mlp.experts.gate_up_proj")
    with pytest.raises(
        InvalidPatcherError, match=r"part of model\.layers\.\{0\.\.1\}\.mlp\.experts\.\{0\.\.3\}\.gate"
    ):
        load(moe, Patcher(fusions="sequential_experts"), device_map, offload_folder=tmp_path)


def test_a_bias_that_stays_by_itself_goes_with_its_module(tmp_path: Path) -> None:
    """Of Whisper's projections two have a bias: these are parameters of the attention, which moves as a whole."""
    sizes = ENCODER_DECODER_SIZES | {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4}
    config = WhisperConfig(**sizes)
    folder = save_tiny(config, tmp_path / "stock", model_class=WhisperForConditionalGeneration)
    stock = shared.stock(folder, WhisperForConditionalGeneration)
    inputs = {"input_features": torch.randn(1, 4, 16), "decoder_input_ids": torch.tensor([[3, 4, 5]])}
    first = "model.encoder.layers.0.self_attn"
    device_map = {key: at for key, at in places(stock, lambda path: False).items() if "attn." not in key}
    attentions = [path for path, _ in stock.named_modules() if path.endswith("attn")]
    device_map |= {path: "disk" if path == first else "cpu" for path in attentions}
    model = WhisperForConditionalGeneration.from_pretrained(
        folder, patcher=Patcher(fusions="qkv"), device_map=device_map, offload_folder=tmp_path / "disk"
    )
    assert model.hf_device_map[first] == "disk"
    torch.testing.assert_close(logits(model, inputs), logits(stock, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")  # what newer accelerates say
def test_names_that_nothing_has_are_passed_over_as_stock_does(llama: Path, tmp_path: Path) -> None:
    for asked in (BOTH, JOINED):
        patched = AutoModelForCausalLM.from_pretrained(llama, patcher=asked)
        device_map = in_names_of(patched, of_stock(llama, "layers.1")) | {"model.vision_tower": "cpu"}
        model = load(llama, asked, device_map, offload_folder=tmp_path)
        computes_as(model, llama)
        assert model.hf_device_map["model.vision_tower"] == "cpu"


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")  # what newer accelerates say
def test_the_name_of_a_weight_that_was_dropped_is_passed_over(llama: Path, tmp_path: Path) -> None:
    asked = Patcher({"LlamaMLP": Without}, dropped_weights="up_proj")
    model = load(llama, asked, of_stock(llama, "up_proj", "layers.1"), offload_folder=tmp_path)
    assert model.model.layers[1].mlp.gate_proj.weight.is_meta


def test_a_plan_meets_the_map_as_a_load_does(llama: Path) -> None:
    found = patcher.plan(llama, BOTH, device_map=of_stock(llama, "gate_proj"))
    assert not found.ok
    assert "device_map names layers that are parts of others" in str(found)
