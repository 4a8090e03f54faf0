"""Families of fusions, presets, and checkpoints that are quantized already."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from patcher import Patcher, export
from patcher.fusions import QKV, Fusion, Layout, Rows, Split
from tests.project.advice import Place, Steps, advice, load, same
from tests.project.advice.loads import changed
from tests.project.advice.models import command
from tests.support.tiny import save_tiny, tiny_gpt2_config


class Scaled(nn.Module):
    """A linear layer whose weight is called `rows`."""

    def __init__(self, linear: nn.Linear, *, scaled: bool) -> None:
        super().__init__()
        self.rows = nn.Parameter(linear.weight.new_empty(linear.weight.shape))
        if scaled:
            self.scale = nn.Parameter(linear.weight.new_empty(1))

    @classmethod
    def from_module(cls, linear: nn.Linear) -> Scaled:
        return cls(linear, scaled=False)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.rows)


class TooMuch(Scaled):
    @classmethod
    def from_module(cls, linear: nn.Linear) -> Scaled:
        return cls(linear, scaled=True)


class Down(Fusion):
    target_modules_patterns = (r"\.down_proj$",)
    becomes: Any = Scaled

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        return [Rows("weight", "rows")]

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        made: type[nn.Module] = self.becomes
        return made


class DownWithScale(Down):
    becomes = TooMuch


class Overridden(MixtralExperts):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class Redeclared(Overridden):
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def forward(self, *args: Any) -> Any:
        return super().forward(*args)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@advice(
    "Decorate the class that has it with use_experts_implementation of transformers, or set has_gate, has_bias, "
    "is_transposed and is_concatenated in its body and define _apply_gate(self, gate_up)"
)
def experts_with_another_forward_than_they_declare(at: Place) -> Steps:
    experts = Patcher(fusions="sequential_experts")

    def read(cls: Any) -> Any:
        model = MixtralForCausalLM.from_pretrained(at.moe)
        for layer in model.model.layers:
            layer.mlp.experts.__class__ = cls
        return model

    yield lambda: experts.apply(read(Overridden))
    for cls in (use_experts_implementation(type("Decorated", (Overridden,), {})), Redeclared):
        assert same(experts.apply(read(cls)), at.moe)


@advice("Take a checkpoint that has them: transformers can't convert this one either.")
def an_expert_that_is_missing(at: Place) -> Steps:
    """transformers can't convert such a checkpoint either."""
    state = load_file(at.moe / "model.safetensors")
    experts = Patcher(fusions="sequential_experts")

    def read(**state: torch.Tensor) -> Any:
        config = AutoConfig.from_pretrained(at.moe)
        return MixtralForCausalLM.from_pretrained(None, config=config, state_dict=state, patcher=experts)

    gone = next(key for key in state if "experts.2.w3" in key)
    yield lambda: read(**{key: value for key, value in state.items() if key != gone})
    assert same(read(**state), at.moe)


@advice("Say what each parameter of a {} becomes.")
def a_fused_module_with_more_parameters(at: Place) -> Steps:
    yield lambda: load(at.llama, Patcher(fusions=DownWithScale()))
    assert same(load(at.llama, Patcher(fusions=Down())), at.llama)


class NoModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()


class Model(LlamaForCausalLM):
    pass


@advice("derive it from {} or from PreTrainedModel, and call super().__init__(config).")
def a_root_that_is_no_model(at: Place) -> Steps:
    yield lambda: load(at.llama, Patcher({"LlamaForCausalLM": NoModel}))
    assert issubclass(Model, PreTrainedModel)
    assert same(load(at.llama, Patcher({"LlamaForCausalLM": Model})), at.llama)


@advice("Load the full-precision checkpoint with the patcher, and quantize that while it loads.")
def a_checkpoint_that_is_quantized(at: Place) -> Steps:
    config = BitsAndBytesConfig(load_in_8bit=True)
    load(at.llama, quantization_config=config).save_pretrained(at.tmp / "int8")
    scale = {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}
    scaled = changed(at.llama, at.tmp / "scaled", lambda tensors: tensors.update(scale))
    for folder in (at.tmp / "int8", scaled):
        yield lambda folder=folder: load(folder, Patcher(fusions="qkv"))  # type: ignore[misc]
    model = load(at.llama, Patcher(fusions="qkv"), quantization_config=config)
    assert type(model.model.layers[0].self_attn.qkv_proj).__name__ == "Linear8bitLt"


@advice("Export the full-precision checkpoint, and quantize that while it loads.")
def an_export_of_a_quantized_checkpoint(at: Place) -> Steps:
    config = BitsAndBytesConfig(load_in_8bit=True)
    load(at.llama, quantization_config=config).save_pretrained(at.tmp / "int8")
    yield lambda: export(at.tmp / "int8", Patcher(fusions="qkv"), at.tmp / "file", verify=False)
    assert not (at.tmp / "file").exists()
    folder = export(at.llama, Patcher(fusions="qkv"), at.tmp / "file", verify=False).folder
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, trust_remote_code=True)
    assert type(model.model.layers[0].self_attn.qkv_proj).__name__ == "Linear8bitLt"


@advice("Load the full-precision checkpoint with the patcher, and quantize that while it loads.")
def a_replaced_layer_of_a_quantized_checkpoint(at: Place) -> Steps:
    class OwnLinear(nn.Linear):
        """No layer that the quantizer takes."""

    config, patcher = (
        BitsAndBytesConfig(load_in_8bit=True),
        Patcher(module_mapping={"model.layers.0.mlp.up_proj": OwnLinear}),
    )
    load(at.llama, quantization_config=config).save_pretrained(at.tmp / "int8")
    yield lambda: load(at.tmp / "int8", patcher)
    layer = load(at.llama, patcher, quantization_config=config).model.layers[0].mlp.up_proj
    assert (type(layer), layer.weight.is_floating_point()) == (OwnLinear, True)


@advice("If the checkpoint is quantized, fuse the full-precision one, and quantize that while it loads.")
def a_checkpoint_that_can_not_be_dequantized(at: Place) -> Steps:
    def halved(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            tensors[f"{key}_scale_inv"] = torch.ones(5, 5)  # no grid of these shapes
            tensors[key] = tensors[key].to(torch.float8_e4m3fn)

    folder = changed(at.llama, at.tmp / "float8", halved)
    config = AutoConfig.from_pretrained(at.llama)
    blocks = {"weight_block_size": [16, 16], "activation_scheme": "dynamic", "dequantize": True}
    config.quantization_config = {"quant_method": "fp8", "fmt": "e4m3"} | blocks
    config.save_pretrained(folder)
    yield lambda: load(folder, Patcher(fusions="qkv"))
    load(at.llama, Patcher(fusions="qkv"), quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@advice("Name those instead, or leave these modules out of the patcher.")
def parts_of_which_a_quantizer_shall_leave_one_alone(at: Place) -> Steps:
    def left_alone(names: list[str], fusion: Any = "qkv") -> set[str]:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[*names, "lm_head"])
        model = load(at.llama, Patcher(fusions=fusion), quantization_config=config)
        return {path for path, module in model.named_modules() if type(module) is nn.Linear and path != "lm_head"}

    said = yield lambda: left_alone(["0.self_attn.k_proj"])
    found = re.search(r"k_proj: part of (\S+)\n", said)
    assert found
    assert left_alone([found[1]]) == {"model.layers.0.self_attn.qkv_proj"}
    assert left_alone(["0.self_attn.k_proj"], QKV(modules="model.layers.1.**")) == {"model.layers.0.self_attn.k_proj"}


class NamesConfig(QuantizationConfigMixin):
    def __init__(self, **settings: Any) -> None:
        self.quant_method: Any = "names"
        self.settings = settings


class NamesQuantizer(HfQuantizer):
    """Has a way of its own to look for names."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True


@advice("Name those instead, or leave these modules out of the patcher.")
def a_name_for_a_quantizer_that_nobody_knows(at: Place) -> Steps:
    AUTO_QUANTIZER_MAPPING["names"], AUTO_QUANTIZATION_CONFIG_MAPPING["names"] = NamesQuantizer, NamesConfig
    try:
        yield lambda: load(at.llama, Patcher(fusions="qkv"), quantization_config=NamesConfig(bits={"k_proj": 4}))
        assert same(load(at.llama, Patcher(fusions="qkv"), quantization_config=NamesConfig()), at.llama)
        config = NamesConfig(bits={"k_proj": 4})
        assert same(load(at.llama, Patcher(fusions="gate_up"), quantization_config=config), at.llama)
    finally:
        del AUTO_QUANTIZER_MAPPING["names"], AUTO_QUANTIZATION_CONFIG_MAPPING["names"]


@advice("one that isn't a preset), and pin what was found by patcher.replace(fingerprints={...}).")
def code_that_has_changed(at: Place) -> Steps:
    source = "from patcher import Patcher\nPATCHER = Patcher(fusions='gate_up', fingerprints={'LlamaMLP': '0'})\n"
    (at.tmp / "advised_pins.py").write_text(source)
    with contextlib.chdir(at.tmp):
        sys.path.append(str(at.tmp))
        import advised_pins  # type: ignore[import-not-found]

        said = yield lambda: load(at.llama, advised_pins.PATCHER)
        words = said.partition("`patcher ")[2].partition("`")[0].replace("MODEL", str(at.llama))
        (own,) = re.findall(r"\((--patcher \S+) for one", said)
    with contextlib.chdir(at.tmp):
        own = own.replace("MODULE:CONSTANT", "advised_pins:PATCHER")
        command(*words.replace("--preset NAME", own).split(), "--quick")
    sys.path.remove(str(at.tmp))
    (found,) = re.findall(r"LlamaMLP: pinned 0, found (\w+)", said)
    assert same(load(at.llama, advised_pins.PATCHER.replace(fingerprints={"LlamaMLP": found})), at.llama)


def split_gpt2(at: Place, fusion: Any = "split") -> Any:
    folder = save_tiny(tiny_gpt2_config(), at.tmp / "gpt2")
    return AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=[fusion]))


@advice("Split: parts={} maps no packed layer to its parts; write Split({'qkv': ['q_proj', 'k_proj', 'v_proj']}).")
def parts_of_no_layer(at: Place) -> Steps:
    said = yield lambda: Split(["q_proj", "k_proj", "v_proj"])  # type: ignore[arg-type]
    written = said.partition("write ")[2].rstrip(".").replace("'qkv'", "'c_attn'")
    split_gpt2(at, eval(written, {"Split": Split}))


@advice("Split: {} has the parts {}; write the names of two or more, each once, without dots.")
def parts_without_names(at: Place) -> Steps:
    yield lambda: Split({"c_attn": ["attn.q_proj", "attn.k_proj", "attn.v_proj"]})
    split_gpt2(at, Split({"c_attn": ["q_proj", "k_proj", "v_proj"]}))
