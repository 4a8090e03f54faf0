"""Experts whose layers somebody has quantized: saved under the names of the checkpoint, and read from it again.

The layers are of a class of the tests', as that of somebody who writes a quantizer: in the place of the weight of a
`nn.Linear` it has tensors of its own.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from patcher import Patcher, load_original_state_dict, original_state_dict
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.fusions import SequentialExperts
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits
from tests.support.replacements import OWN
from tests.support.tiny import save_tiny, tiny_jamba_config, tiny_llama_config, tiny_mixtral_config
from tests.support.tiny_experts import (
    experts_of,
    tiny_gpt_oss_config,
    tiny_llama4_config,
    tiny_longcat_config,
    tiny_nemotron_h_config,
    tiny_qwen3_moe_config,
)

ALL_TOKENS = Patcher(fusions=[SequentialExperts(all_tokens=True)])
KINDS = ("weight_packed", "weight_scale", "weight_shape")
#: Their checkpoints have a tensor for each weight of each expert.
CONFIGS = {
    "Mixtral": tiny_mixtral_config(),
    "Qwen3-MoE": tiny_qwen3_moe_config(),
    "Jamba": tiny_jamba_config(),
    "Nemotron-H": tiny_nemotron_h_config(),
    "LongCat": tiny_longcat_config(),
}
MIXTRAL = "model.layers.{}.block_sparse_moe.experts.{}.{}"


class PackedLinear(nn.Module):
    """Four numbers of eight bits in an int32, and one scale for a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_packed", (weight / scale).round().to(torch.int8).view(torch.int32))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_shape", torch.tensor(weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed: Any = self.weight_packed
        return nn.functional.linear(x, packed.view(torch.int8) * self.weight_scale)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared.checkpoint(config) for name, config in CONFIGS.items()}


def load(folder: Path, patcher: Patcher | None = ALL_TOKENS, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, **options)


def layers_of_experts(model: nn.Module) -> dict[str, nn.Linear]:
    inside = {id(layer) for experts in experts_of(model) for layer in experts.modules()}
    return {
        path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and id(layer) in inside
    }


class Int8Linear(nn.Module):
    """Integers under the name of the weight, and one scale for a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("weight_scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.weight_scale)


LAYERS = {cls.__name__: cls for cls in (PackedLinear, Int8Linear)}


def pack(model: nn.Module, paths: Iterable[str], kind: str = "PackedLinear") -> None:
    """As quantizers do it: by the paths of linear layers, one after the other."""
    for path in paths:
        model.set_submodule(path, LAYERS[kind](model.get_submodule(path)))  # type: ignore[arg-type]


def saved(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder, **options)
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("share", "dtype"),
    [(1.0, torch.float32), (0.5, torch.bfloat16), (0.1, torch.float32)],
    ids=["all", "half of them, bfloat16", "few"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_beside_a_weight_is_saved_beside_its_name_and_read_from_there(
    name: str, share: float, dtype: torch.dtype, folders: dict[str, Path], tmp_path: Path
) -> None:
    original = saved(load(folders[name], None, dtype=dtype), tmp_path / "stock")
    model, other = load(folders[name], dtype=dtype), load(folders[name], dtype=dtype)
    layers = layers_of_experts(model)
    chosen = random.Random(name).sample(sorted(layers), max(1, round(share * len(layers))))
    # The weights are random, so each is known by its values.
    key_of = {
        path: next(key for key, value in original.items() if torch.equal(value, layers[path].weight))
        for path in chosen
    }
    pack(model, chosen)
    found = saved(model, tmp_path / "packed", max_shard_size="30KB")

    beside = {f"{key_of[path]}_{kind[7:]}": (path, kind) for path in chosen for kind in KINDS}
    assert found.keys() == (original.keys() - set(key_of.values())) | beside.keys()
    for key, value in found.items():
        path, kind = beside.get(key, ("", ""))
        assert torch.equal(value, getattr(model.get_submodule(path), kind) if kind else original[key])

    pack(other, chosen)
    for read in (other.load_state_dict, lambda state_dict: load_original_state_dict(other, state_dict)):
        for value in other.state_dict().values():
            value.zero_()
        assert not any(read(found))  # type: ignore[operator]
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(other), logits(model))


class Observer(nn.Module):
    """What a quantizer puts into a linear layer to measure its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.rand(()))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_quantizer_puts_into_a_layer_is_saved_below_its_name(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    original = saved(load(folders[name], None), tmp_path / "stock")
    model = load(folders[name])
    layer_of = {
        next(key for key, value in original.items() if torch.equal(value, layer.weight)).removesuffix("weight"): layer
        for layer in list(layers_of_experts(model).values())[::2]
    }
    for layer in layer_of.values():
        layer.input_quantizer = Observer()

    found = saved(model, tmp_path / "observed")

    below = {f"{key}input_quantizer.amax": layer.input_quantizer.amax for key, layer in layer_of.items()}
    expected = original | below
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("config", [tiny_gpt_oss_config(), tiny_llama4_config()], ids=["gpt-oss", "Llama 4"])
def test_a_checkpoint_of_stacks_has_no_place_for_it(config: PretrainedConfig, tmp_path: Path) -> None:
    model = load(save_tiny(config, tmp_path / "original"))
    pack(model, list(layers_of_experts(model))[-1:])

    with pytest.raises(PatchedWeightsError, match=r"weight_packed can't be saved.*the checkpoint has no place for it"):
        model.save_pretrained(tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


def test_copies_and_pickles_are_saved_alike(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(folders["Mixtral"])
    pack(model, layers_of_experts(model))
    model.save_pretrained(tmp_path / "first")

    for number, again in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        assert torch.equal(logits(again), logits(model))
        again.save_pretrained(tmp_path / str(number))
        assert same_checkpoint(tmp_path / str(number), tmp_path / "first")


def test_hooks_may_stay_while_it_is_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    model, calls = load(folders["Mixtral"]), []
    for path, layer in layers_of_experts(model).items():
        layer.register_forward_hook(lambda *_, path=path: calls.append(path))
    logits(model)
    model.save_pretrained(tmp_path / "with hooks")
    load(folders["Mixtral"], None).save_pretrained(tmp_path / "stock")

    assert sorted(calls) == sorted(layers_of_experts(model))
    assert same_checkpoint(tmp_path / "with hooks", tmp_path / "stock")


# --- other checkpoints -----------------------------------------------------------------------------------------------


def test_weights_in_full_precision_are_not_taken_for_layers_that_are_quantized(folders: dict[str, Path]) -> None:
    model = load(folders["Mixtral"])
    packed = [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in (1, 3)]
    pack(model, packed)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint = load_file(folders["Mixtral"] / "model.safetensors")
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()

    found = model.load_state_dict(checkpoint, strict=False)

    assert sorted(found.missing_keys) == [f"{path}.{kind}" for path in packed for kind in KINDS]
    assert sorted(found.unexpected_keys) == [MIXTRAL.format(1, expert, "w3.weight") for expert in (1, 3)]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key] if key not in found.missing_keys else torch.zeros_like(value)), key
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*experts\.1\.up_proj\.weight_packed"):
        model.load_state_dict(checkpoint)


def test_all_of_them_in_full_precision_are_an_error(folders: dict[str, Path]) -> None:
    model = load(folders["Mixtral"])
    pack(model, layers_of_experts(model))

    with pytest.raises(RuntimeError, match=r"gate_proj\.weight is gone\. Load the model again with from_pretrained"):
        model.load_state_dict(load_file(folders["Mixtral"] / "model.safetensors"))


def test_of_what_is_quantized_there_is_no_state_dict_of_stacks(folders: dict[str, Path]) -> None:
    model = load(folders["Mixtral"])
    pack(model, layers_of_experts(model))

    with pytest.raises(PatchedWeightsError, match=r"experts\.0\.\w+\.weight_packed can't be saved"):
        original_state_dict(model)


# --- a quantizer that reads them -------------------------------------------------------------------------------------


class PackedConfig(QuantizationConfigMixin):
    def __init__(self, layers: Sequence[str] = (), kind: str = "PackedLinear", **_: Any) -> None:
        self.quant_method = "packed"  # type: ignore[assignment]
        self.layers, self.kind = layers, kind


class PackedQuantizer(HfQuantizer):
    """Replaces layers before weights are read, as that of compressed-tensors does."""

    is_trainable = False
    requires_calibration = True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        pack(model, self.quantization_config.layers, self.quantization_config.kind)  # type: ignore[attr-defined]

    def is_serializable(self) -> bool:
        return True


@pytest.mark.crossed
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1], ids=["all", "half of them", "few"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_load_reads_them_into_what_a_quantizer_has_made(
    name: str, share: float, kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "packed", PackedQuantizer)
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "packed", PackedConfig)
    model = load(folders[name])
    layers = sorted(layers_of_experts(model))
    chosen = random.Random(name).sample(layers, max(1, round(share * len(layers))))
    pack(model, chosen, kind)
    model.config.quantization_config = PackedConfig(chosen, kind).to_dict()
    model.save_pretrained(tmp_path / "packed")

    again = load(tmp_path / "packed")
    assert {path for path, layer in again.named_modules() if type(layer) is LAYERS[kind]} == set(chosen)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert same_checkpoint(tmp_path / "again", tmp_path / "packed")


# --- weights in full precision that a load makes of them -------------------------------------------------------------


@pytest.mark.libraries  # torch 2.6 raises when transformers looks for an accelerator, where there is none
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_four_bits_are_dequantized_into_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """As those of gpt-oss on the hub: the operation looks up the dtype of a stack that isn't in the model."""
    config, generator = tiny_gpt_oss_config(num_experts_per_tok=4), torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in load_file(shared.checkpoint(config) / "model.safetensors").items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = value
            continue
        experts, inputs, outputs = value.shape
        shape = experts, outputs, inputs // 32
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{key}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path / "packed")
    save_file(tensors, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})

    stock, model = (load(tmp_path / "packed", patcher, dtype=dtype) for patcher in (None, ALL_TOKENS))
    assert {layer.weight.dtype for layer in layers_of_experts(model).values()} == {dtype}
    found, expected = original_state_dict(model), stock.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for name, each in {"stock": stock, "ours": model}.items():
        each.save_pretrained(tmp_path / name)
    assert same_checkpoint(tmp_path / "ours", tmp_path / "stock")
    precision = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logits(model), logits(stock), atol=precision, rtol=precision)


# --- another patcher for it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patcher", [Patcher(), ALL_TOKENS, Patcher(fusions="qkv")], ids=["none", "same", "other"])
def test_apply_makes_no_weights_of_quantized_experts(patcher: Patcher, folders: dict[str, Path]) -> None:
    model = load(folders["Mixtral"])
    pack(model, layers_of_experts(model))

    with pytest.raises(InvalidPatcherError, match=r"mlp\.experts is fused, .* needed one by one .* gone"):
        patcher.apply(model)


def test_a_layer_that_was_replaced_stays(tmp_path: Path) -> None:
    model = load(save_tiny(tiny_llama_config(), tmp_path), None)
    pack(model, ["model.layers.1.mlp.up_proj"])

    fused = Patcher(fusions="qkv").apply(model)
    assert isinstance(fused.model.layers[1].mlp.up_proj, PackedLinear)
    assert torch.allclose(logits(fused), logits(model), atol=1e-5)
    with pytest.raises(InvalidPatcherError, match=r"1\.mlp\.up_proj is a PackedLinear \(its config says Linear\)"):
        OWN.apply(model)
