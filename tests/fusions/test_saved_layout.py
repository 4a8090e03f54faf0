"""`save_original_format=False`: the fused layout in a file, named in its config, and never read as anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher, UnmatchedPatchError, report
from patcher.fusions.patch_embeddings import PatchEmbeddings
from patcher.fusions.qkv import QKV
from tests.support.checkpoints import same_checkpoint
from tests.support.replacements import JOINED, OwnNorm
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen2_vl_config,
    tiny_qwen3_vl_moe_config,
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
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("stock"))


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


LOADS: dict[str, Callable[[Path], Any]] = {
    "by an Auto class": AutoModelForCausalLM.from_pretrained,
    "with the same patcher": lambda path: LlamaForCausalLM.from_pretrained(path, patcher=BOTH),
    "with a part of it": lambda path: LlamaForCausalLM.from_pretrained(path, patcher=Patcher(fusions=QKV())),
    "with a class mapping": lambda path: LlamaForCausalLM.from_pretrained(
        path, patcher=Patcher({"LlamaRMSNorm": OwnNorm})
    ),
    "with the config as an object": lambda path: LlamaForCausalLM.from_pretrained(
        path, config=AutoConfig.from_pretrained(path)
    ),
    # An argument says what is wanted; it can't say how the weights lie.
    "with another fusion_config": lambda path: LlamaForCausalLM.from_pretrained(path, fusion_config={}),
    "with another fusion_config, by an Auto class": lambda path: AutoModelForCausalLM.from_pretrained(
        path, fusion_config={"patcher": []}
    ),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_it_is_loaded_fused_however_it_is_loaded(load: Callable[[Path], Any], layout: Path, fused: Any) -> None:
    model = load(layout)

    assert report(model).fused == report(fused).fused
    assert equal(model, fused)


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

    plain = AutoModelForCausalLM.from_pretrained(stock)

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
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print("refused:", error)
assert "patcher" not in sys.modules
import patcher
patcher.install()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].self_attn).__name__)
"""


def run(code: str, *arguments: Any, **environment: str) -> list[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_stock_transformers_refuses_it_and_the_hook_loads_it(layout: Path) -> None:
    assert run(WITHOUT, layout) == ["refused: Unknown fusion type: patcher", "FusedLlamaAttention"]


EVIL = """
import sys
from pathlib import Path
Path({marker!r}).touch()
from patcher.fusions import Fusion
class Evil(Fusion):
    pass
"""
HOSTILE = """
import json, sys
from pathlib import Path
import patcher.fusions.qkv
from patcher import Patcher
from patcher.errors import PatcherError
from transformers import LlamaForCausalLM
folder, values = Path(sys.argv[1]), json.loads(sys.argv[2])
config = json.loads((folder / "config.json").read_text())
for number, value in enumerate(values):
    (folder / "config.json").write_text(json.dumps(config | {"fusion_config": value}))
    before = set(sys.modules)
    try:
        LlamaForCausalLM.from_pretrained(folder)
    except (PatcherError, ValueError) as error:
        print(type(error).__name__)
    else:
        print("loaded", value)
    if number:  # the first try imports what every load needs
        assert not any("evil" in name or "patcher" in name for name in set(sys.modules) - before)
assert "evil" not in sys.modules
"""
TRICKS = [
    {"patcher": [name]}
    for name in (
        "evil",
        "evil:Evil",
        "evil.Evil",
        "../evil.py",
        "patcher.fusions.qkv:QKV",
        "__import__('evil')",
        "qkv\n",
        "",
    )
] + [
    {"patcher": {"qkv": "evil:Evil"}},
    {"patcher": [{"qkv": {"family": "evil:Evil"}}]},
    {"patcher": "evil:Evil"},
    {"patcher": ["qkv", ["evil"]]},
    {"patcher": ["qkv"], "evil:Evil": True},
]


@pytest.mark.slow
def test_nothing_in_a_config_can_make_code_load(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    marker = tmp_path / "it_ran"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    outcomes = run(HOSTILE, tmp_path / "checkpoint", json.dumps(TRICKS), PYTHONPATH=path)

    assert outcomes == ["InvalidPatcherError"] * (len(TRICKS) - 1) + ["ValueError"]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["qvk"], r"'qvk' is no fusion; did you mean 'qkv'\?"),
        (["os.system"], r"'os.system' is no fusion"),
        ("qkv", r"holds a list of names of fusions, found 'qkv'"),
        (None, r"holds a list of names of fusions, found None"),
        (True, r"holds a list of names of fusions, found True"),
        ([None], r"holds a list of names of fusions, found \[None\]"),
        ([{"qkv": True}], r"holds a list of names of fusions"),
        ({"qkv": "patcher.fusions.qkv:QKV"}, r"holds a list of names of fusions"),
    ],
)
def test_a_config_can_name_known_fusions_and_nothing_else(value: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    say(tmp_path, {"patcher": value})

    with pytest.raises(InvalidPatcherError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_fusion_that_the_model_has_no_module_for_is_an_error(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    say(tmp_path, {"patcher": ["sequential_experts"]})

    with pytest.raises(UnmatchedPatchError, match="'sequential_experts' found no module that it can fuse"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_fused_weight_that_the_file_lacks_is_an_error(layout: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(layout / "model.safetensors")
    del tensors["model.layers.1.self_attn.qkv_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((layout / "config.json").read_text())

    with pytest.raises(PatchedWeightsError, match=r"layers\.1\.self_attn\.qkv_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --- what no name describes ------------------------------------------------------------------------------------------


class Mine(QKV):
    """A family of one's own: its name is inherited, and means another class."""


class OnlyUp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu())


class Scaled(OwnNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(()))


NAMELESS = {
    "a conversion": (JOINED, r"gate_up_proj"),
    "a conversion beside a fusion": (JOINED | Patcher(fusions="qkv"), r"gate_up_proj"),
    "a family of one's own": (Patcher(fusions=Mine()), r"Mine\(\), which no name describes"),
    "weights that are left out": (
        Patcher({"LlamaMLP": OnlyUp}, dropped_weights="gate_proj"),
        r"without model\.layers\.\{0\.\.1\}\.mlp\.gate_proj\.weight",
    ),
    "weights that are new": (
        Patcher({"LlamaRMSNorm": Scaled}, new_weights="scale", fusions="qkv"),
        r"new: model\.norm\.scale",
    ),
}


@pytest.mark.parametrize("source", ["a checkpoint", "a config"])
@pytest.mark.parametrize(("patcher", "message"), NAMELESS.values(), ids=NAMELESS.keys())
def test_a_layout_that_no_name_describes_is_not_written(
    patcher: Patcher, message: str, source: str, stock: Path, tmp_path: Path
) -> None:
    if source == "a checkpoint":
        model = LlamaForCausalLM.from_pretrained(stock, patcher=patcher)
    else:
        model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)

    with pytest.raises(
        PatchedWeightsError, match=rf"nothing can load by name: no fusion describes it\.(\n.*)*{message}"
    ):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)
    assert not (tmp_path / "layout").exists()


def test_options_of_a_family_are_no_name(tmp_path: Path) -> None:
    save_tiny(tiny_qwen2_vl_config(), tmp_path / "checkpoint")
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "checkpoint", patcher=Patcher(fusions=PatchEmbeddings(modules="visual"))
    )
    with pytest.raises(
        PatchedWeightsError, match=r"PatchEmbeddings\(modules=\('visual',\)\), which no name describes"
    ):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)


def test_a_family_as_an_object_without_options_is_its_name(stock: Path, tmp_path: Path) -> None:
    assert repr(Patcher(fusions=[QKV(), "qkv", Mine()])) == "Patcher(fusions=['qkv', Mine()])"
    model = LlamaForCausalLM.from_pretrained(stock, patcher=Patcher(fusions=QKV()))
    model.save_pretrained(tmp_path, save_original_format=False)

    assert written(tmp_path) == {"patcher": ["qkv"]}


def test_a_class_mapping_with_the_same_weights_is_no_layout(stock: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(stock, patcher=Patcher({"LlamaRMSNorm": OwnNorm}, fusions="qkv"))
    model.save_pretrained(tmp_path, save_original_format=False)

    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert written(tmp_path) == {"patcher": ["qkv"]}
    assert equal(again, model)
