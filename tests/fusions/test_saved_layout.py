"""`save_original_format=False`: the fused layout in a file, named in its config, and never read as anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    pipeline,
)

from patcher import PatchConflictError, PatchedWeightsError, Patcher, report
from patcher.fusions import QKV
from tests.support import fresh, shared
from tests.support.checkpoints import same_checkpoint
from tests.support.replacements import OwnNorm
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen2_vl_config,
    tiny_qwen3_vl_moe_config,
    tiny_tokenizer,
)

BOTH = Patcher(fusions=["qkv", "gate_up"])


def written(folder: Path) -> Any:
    """What `config.json` says of fusions."""
    return json.loads((folder / "config.json").read_text()).get("fusion_config")


def say(folder: Path, fusion_config: Any) -> None:
    """Have `config.json` say something of fusions."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fusion_config": fusion_config}))


def equal(one: Any, other: Any) -> bool:
    inputs = tiny_inputs(tiny_llama_config())
    with torch.no_grad():
        return torch.equal(one(**inputs)[0], other(**inputs)[0])


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def fused(stock: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(stock, patcher=BOTH)


@pytest.fixture(scope="module")
def layout(fused: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    fused.save_pretrained(folder, save_original_format=False)
    return folder


@pytest.fixture(scope="module")
def base_layout(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    AutoModel.from_pretrained(layout).save_pretrained(folder, save_original_format=False)
    return folder


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (tiny_llama_config(), ["qkv", "gate_up"]),
        (tiny_mixtral_config(), ["sequential_experts"]),
        (tiny_qwen2_moe_config(), ["gate_up", "sequential_experts", "qkv"]),
        (tiny_qwen2_vl_config(), ["patch_embeddings"]),
        (tiny_qwen3_vl_moe_config(), ["patch_embeddings", "qkv", "gate_up", "sequential_experts"]),
    ],
    ids=["llama", "mixtral", "qwen2_moe", "qwen2_vl", "all four at once"],
)
def test_every_family_is_loaded_by_its_name(
    config: PretrainedConfig, names: list[str], max_shard_size: str, tmp_path: Path
) -> None:
    model_class = type(build_tiny(config))
    save_tiny(config, tmp_path / "checkpoint")
    fused = model_class.from_pretrained(tmp_path / "checkpoint", patcher=Patcher(fusions=names))
    fused.save_pretrained(tmp_path / "layout", save_original_format=False, max_shard_size=max_shard_size)

    again = model_class.from_pretrained(tmp_path / "layout")

    assert written(tmp_path / "layout") == {"patcher": names}
    assert report(again).fused == report(fused).fused
    assert all(torch.equal(value, fused.state_dict()[name]) for name, value in again.state_dict().items())
    # And from there to either format, as if it had never been anything else.
    model_class.from_pretrained(tmp_path / "checkpoint").save_pretrained(tmp_path / "stock")
    again.save_pretrained(tmp_path / "back")
    assert same_checkpoint(tmp_path / "back", tmp_path / "stock")
    assert written(tmp_path / "back") is None
    again.save_pretrained(tmp_path / "twice", save_original_format=False, max_shard_size=max_shard_size)
    assert same_checkpoint(tmp_path / "twice", tmp_path / "layout")
    assert written(tmp_path / "twice") == {"patcher": names}


def test_the_names_are_in_the_file_not_on_the_model(fused: Any, layout: Path) -> None:
    for model in (fused, AutoModelForCausalLM.from_pretrained(layout)):
        assert not hasattr(model.config, "fusion_config")


class Mine(QKV):
    """A family of one's own."""


LOADS: dict[str, Callable[[Path], Any]] = {
    "by an Auto class": AutoModelForCausalLM.from_pretrained,
    "with the same patcher": lambda path: LlamaForCausalLM.from_pretrained(path, patcher=BOTH),
    "with a part of it": lambda path: LlamaForCausalLM.from_pretrained(path, patcher=Patcher(fusions=QKV())),
    "with a class mapping": lambda path: LlamaForCausalLM.from_pretrained(
        path, patcher=Patcher({"LlamaRMSNorm": OwnNorm})
    ),
    # What is given says what is wanted; it can't say how the weights lie.
    "with its config": lambda path: LlamaForCausalLM.from_pretrained(path, config=AutoConfig.from_pretrained(path)),
    "with another config": lambda path: LlamaForCausalLM.from_pretrained(path, config=tiny_llama_config()),
    "with the path of a config": lambda path: LlamaForCausalLM.from_pretrained(path, config=str(path)),
    "with another config, by an Auto class": lambda path: AutoModelForCausalLM.from_pretrained(
        path, config=tiny_llama_config()
    ),
    "with an empty fusion_config": lambda path: LlamaForCausalLM.from_pretrained(path, fusion_config={}),
    "with fusion_config=None": lambda path: AutoModelForCausalLM.from_pretrained(path, fusion_config=None),
    "with another config and an empty fusion_config": lambda path: LlamaForCausalLM.from_pretrained(
        path, config=tiny_llama_config(), fusion_config={}
    ),
    "with another fusion_config, by an Auto class": lambda path: AutoModelForCausalLM.from_pretrained(
        path, fusion_config={"patcher": []}
    ),
    "with the name of the variant": lambda path: LlamaForCausalLM.from_pretrained(path, variant="patcher"),
    "from a folder in a folder": lambda path: AutoModelForCausalLM.from_pretrained(path.parent, subfolder=path.name),
    "from a folder in a folder, with another config": lambda path: LlamaForCausalLM.from_pretrained(
        path.parent, subfolder=path.name, config=tiny_llama_config()
    ),
    "from its tensors": lambda path: LlamaForCausalLM.from_pretrained(
        None, config=AutoConfig.from_pretrained(path), state_dict=load_file(path / "model.patcher.safetensors")
    ),
    "by a pipeline": lambda path: pipeline("text-generation", str(path), tokenizer=tiny_tokenizer()).model,
    "by a subclass": lambda path: type("Mine", (LlamaForCausalLM,), {}).from_pretrained(path),
    "with a device map": lambda path: AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"}),
    "safetensors alone": lambda path: AutoModelForCausalLM.from_pretrained(path, use_safetensors=True),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_it_is_loaded_fused_however_it_is_loaded(load: Callable[[Path], Any], layout: Path, fused: Any) -> None:
    model = load(layout)

    assert report(model).fused == report(fused).fused
    assert equal(model, fused)


def test_a_fusion_of_a_part_of_what_is_fused_is_a_conflict(layout: Path) -> None:
    with pytest.raises(PatchConflictError, match=r"'qkv' both claim model\.layers\.0\.self_attn; use one"):
        LlamaForCausalLM.from_pretrained(layout, patcher=Patcher(fusions=Mine()))


def test_a_fusion_that_transformers_does_not_know_is_its_own_error(layout: Path) -> None:
    with pytest.raises(ValueError, match="Unknown fusion type: qkv"):
        LlamaForCausalLM.from_pretrained(layout, fusion_config={"qkv": False})


def test_inside_of_a_block_it_meets_what_the_block_asks_for(layout: Path, fused: Any) -> None:
    with Patcher({"LlamaRMSNorm": OwnNorm}).applied():
        model = AutoModelForCausalLM.from_pretrained(layout)

    assert type(model.model.norm) is OwnNorm
    assert report(model).fused == report(fused).fused
    assert equal(model, fused)


def test_a_base_model_is_taken_out_of_it_and_put_into_a_head(layout: Path, base_layout: Path, fused: Any) -> None:
    base = AutoModel.from_pretrained(base_layout)
    whole = AutoModelForCausalLM.from_pretrained(base_layout)

    assert written(base_layout) == {"patcher": ["qkv", "gate_up"]}
    assert len(report(base).fused) == len(report(whole).fused) == 4
    assert equal(base, fused.model)
    assert equal(whole.model, fused.model)


def test_names_may_be_asked_for_by_an_argument(stock: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(stock, fusion_config={"patcher": ["qkv"]})

    assert {path for path, _, _ in report(model).fused} == {f"model.layers.{index}.self_attn" for index in (0, 1)}


def test_it_is_not_in_force_for_the_next_load(stock: Path, layout: Path) -> None:
    AutoModelForCausalLM.from_pretrained(layout)

    plain = shared.stock(stock)

    assert not report(plain).fused
    assert isinstance(plain.model.layers[0].self_attn.q_proj, nn.Linear)


@pytest.mark.parametrize("made", ["applied to a model in memory", "made without a checkpoint"])
def test_a_model_that_was_not_loaded_is_saved_in_it_as_well(made: str, stock: Path, tmp_path: Path) -> None:
    if made == "made without a checkpoint":
        model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=BOTH)
    else:
        model = BOTH.apply(AutoModelForCausalLM.from_pretrained(stock))
    model.save_pretrained(tmp_path, save_original_format=False)

    assert written(tmp_path) == {"patcher": ["qkv", "gate_up"]}
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("made", ["by from_config", "by hand", "by taking the fusions back"])
def test_a_stock_model_made_from_its_config_says_nothing_of_fusions(made: str, layout: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(layout)
    if made == "by from_config":
        model = AutoModelForCausalLM.from_config(config)
    elif made == "by hand":
        model = LlamaForCausalLM(config)
    else:
        model = Patcher().apply(AutoModelForCausalLM.from_pretrained(layout))
    for original_format in (True, False):
        model.save_pretrained(tmp_path, save_original_format=original_format)
        assert written(tmp_path) is None
    assert not report(AutoModelForCausalLM.from_pretrained(tmp_path)).fused


QUANTIZATIONS = {"8 bits": {"load_in_8bit": True}, "4 bits": {"load_in_4bit": True}}


@pytest.mark.libraries
@pytest.mark.parametrize("bits", QUANTIZATIONS)
def test_what_is_quantized_can_be_saved_so(bits: str, tmp_path: Path) -> None:
    """In the original format it can't: nothing can split the scales of a quantized matrix."""
    # Rows of whole blocks of 64: where the CPU has avx512_bf16, bitsandbytes packs them anew and supports no others.
    save_tiny(tiny_mixtral_config(intermediate_size=128), tmp_path / "checkpoint")
    patcher = Patcher(fusions=["sequential_experts", "qkv"])
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", patcher=patcher, quantization_config=BitsAndBytesConfig(**QUANTIZATIONS[bits])
    )
    with pytest.raises(PatchedWeightsError, match=r"is quantized.*save_original_format=False"):
        quantized.save_pretrained(tmp_path / "original")
    quantized.save_pretrained(tmp_path / "layout", save_original_format=False)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "layout")

    linear = [module for path, module in again.named_modules() if isinstance(module, nn.Linear) and path != "lm_head"]
    assert len(linear) == 2 * (1 + 1 + 4 * 3)  # qkv, out; experts
    assert all(module.weight.dtype in (torch.int8, torch.uint8) for module in linear)
    assert equal(again, quantized)


# --- who can't read it, refuses it -----------------------------------------------------------------------------------

WITHOUT = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
path = sys.argv[1]
given = LlamaConfig.from_pretrained(path)
del given.fusion_config
for options in (
    {},
    {"config": AutoConfig.from_pretrained(path)},
    {"config": given},
    {"fusion_config": {}},
    {"fusion_config": {"qkv": False}},
    {"config": given, "use_safetensors": False},
    {"config": given, "use_safetensors": True},
    {"config": given, "variant": "fp16"},
):
    for load in (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained):
        try:
            load(path, **options)
        except OSError as error:  # and not a model with a table of what is missing
            print(str(error).split(" found in")[0])
assert "patcher" not in sys.modules
import patcher
patcher.install()
print(type(AutoModelForCausalLM.from_pretrained(path).model.layers[0].self_attn).__name__)
"""


@pytest.mark.process
def test_stock_transformers_refuses_it_and_the_hook_loads_it(layout: Path) -> None:
    *refused, fused = fresh.run(WITHOUT, layout).stdout.splitlines()

    assert len(refused) == 16
    assert all(
        line.startswith(("Error no file named model.", "Error no file named pytorch_model.")) for line in refused
    )
    assert fused == "FusedLlamaAttention"


def changed(layout: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(layout / "model.patcher.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.patcher.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((layout / "config.json").read_text())
    return folder


def test_a_fused_weight_that_the_file_lacks_is_an_error(layout: Path, tmp_path: Path) -> None:
    folder = changed(layout, tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.qkv_proj.weight"))
    with pytest.raises(PatchedWeightsError, match=r"layers\.1\.self_attn\.qkv_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_what_is_left_over_in_a_fused_module_is_an_error(layout: Path, tmp_path: Path) -> None:
    added = {"model.layers.1.self_attn.qkv_proj.bias": torch.ones(8)}
    folder = changed(layout, tmp_path, lambda tensors: tensors.update(added))
    with pytest.raises(PatchedWeightsError, match=r"layers\.1\.self_attn\.qkv_proj\.bias"):
        AutoModelForCausalLM.from_pretrained(folder)
