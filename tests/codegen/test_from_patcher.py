"""The file of a runtime Patcher, over architectures and fusions: it computes and saves as the Patcher's models do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter

from patcher import CodegenError, PatchConstructionError, Patcher, forward_of, like
from patcher.codegen import PatchConfig
from tests.codegen.models import (
    BOTH_SIDES,
    ENCODER_DECODER,
    EXPERTS,
    GPT_OSS,
    IMAGE,
    IMAGES,
    LATENT,
    PAIRS,
    SOUND,
    T5,
    TOKENS,
    clip,
    text_config,
)
from tests.codegen.split_parts import Negated, Parts, SplitMLP
from tests.support import tiny
from tests.support.comparing import assert_equal_models, logits
from tests.support.sampling import sampled
from tests.support.small_configs import small_configs


def small(name: str) -> Callable[[], PretrainedConfig]:
    return lambda: next(small_configs(getattr(transformers, name)))


#: case -> model class, config, what is fused, and the inputs where token ids are not enough
CASES: dict[str, tuple[str, Callable[[], PretrainedConfig], list[str], dict[str, Any] | None]] = {
    # projections of one input
    "Llama": ("LlamaForCausalLM", lambda: text_config("LlamaConfig"), ["qkv"], None),
    "Llama, gate and up": ("LlamaForCausalLM", lambda: text_config("LlamaConfig"), ["gate_up"], None),
    "Llama, all, biases": (
        "LlamaForCausalLM",
        lambda: text_config("LlamaConfig", attention_bias=True, mlp_bias=True),
        ["qkv", "gate_up"],
        None,
    ),
    "Qwen2, biases of q, k and v": ("Qwen2ForCausalLM", lambda: text_config("Qwen2Config"), ["qkv", "gate_up"], None),
    "Qwen3, norms of q and k": (
        "Qwen3ForCausalLM",
        lambda: text_config("Qwen3Config", head_dim=16),
        ["qkv", "gate_up"],
        None,
    ),
    "Gemma": ("GemmaForCausalLM", lambda: text_config("GemmaConfig", head_dim=16), ["qkv", "gate_up"], None),
    "Phi": ("PhiForCausalLM", lambda: text_config("PhiConfig"), ["qkv"], None),
    "OPT": (
        "OPTForCausalLM",
        lambda: transformers.OPTConfig(
            vocab_size=128,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        ["qkv"],
        None,
    ),
    "BERT": ("BertForMaskedLM", tiny.tiny_bert_config, ["qkv"], None),
    "T5": ("T5ForConditionalGeneration", lambda: transformers.T5Config(**T5), ["qkv"], BOTH_SIDES),
    "T5 1.1, gate and up": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        ["gate_up"],
        BOTH_SIDES,
    ),
    "T5 1.1, all": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        ["qkv", "gate_up"],
        BOTH_SIDES,
    ),
    "NomicBERT, which stock takes apart": (
        "NomicBertForMaskedLM",
        lambda: next(small_configs(transformers.NomicBertConfig)),
        ["qkv", "gate_up"],
        None,
    ),
    "xLSTM, classes behind a guard": (
        "xLSTMForCausalLM",
        lambda: next(small_configs(transformers.xLSTMConfig)),
        ["qkv", "gate_up"],
        {"input_ids": TOKENS, "use_cache": False},
    ),
    "BART": (
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=64),
        ["qkv"],
        BOTH_SIDES,
    ),
    "Whisper, no bias of k": (
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(**ENCODER_DECODER, max_source_positions=32, max_target_positions=64),
        ["qkv"],
        SOUND,
    ),
    "BART, and cross attention": (
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=64),
        ["qkv", "kv"],
        BOTH_SIDES,
    ),
    "Whisper, cross attention alone": (
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(**ENCODER_DECODER, max_source_positions=32, max_target_positions=64),
        ["kv"],
        SOUND,
    ),
    # patches of images
    "ViT": ("ViTForImageClassification", lambda: transformers.ViTConfig(**IMAGES), ["patch_embeddings"], IMAGE),
    "ViT, and qkv": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(**IMAGES),
        ["patch_embeddings", "qkv"],
        IMAGE,
    ),
    "CLIP": ("CLIPModel", clip, ["patch_embeddings", "qkv"], PAIRS),
    "SigLIP": (
        "SiglipVisionModel",
        lambda: transformers.SiglipVisionConfig(**IMAGES),
        ["patch_embeddings", "qkv"],
        IMAGE,
    ),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", tiny.tiny_qwen2_vl_config, ["patch_embeddings"], None),
    "Qwen2-VL, and its text": (
        "Qwen2VLForConditionalGeneration",
        tiny.tiny_qwen2_vl_config,
        ["patch_embeddings", "qkv", "gate_up"],
        None,
    ),
    "PVT, one of several lines": (
        "PvtV2ForImageClassification",
        small("PvtV2Config"),
        ["patch_embeddings"],
        {"pixel_values": torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))},
    ),
    "VideoMAE, a comma behind the arguments": (
        "VideoMAEModel",
        small("VideoMAEConfig"),
        ["patch_embeddings"],
        {"pixel_values": torch.randn(2, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))},
    ),
    "JetMoE, experts of one layer": ("JetMoeForCausalLM", small("JetMoeConfig"), ["sequential_experts"], None),
    "Llama 4, experts in equal parts": ("Llama4ForCausalLM", small("Llama4TextConfig"), ["sequential_experts"], None),
    # models in a model, which an Auto class builds
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", small("Qwen3VLConfig"), ["qkv", "gate_up"], None),
    "Qwen3-VL, all": (
        "Qwen3VLForConditionalGeneration",
        small("Qwen3VLConfig"),
        ["patch_embeddings", "qkv", "gate_up"],
        None,
    ),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        tiny.tiny_qwen3_vl_moe_config,
        ["sequential_experts"],
        None,
    ),
    # experts
    "Mixtral": ("MixtralForCausalLM", tiny.tiny_mixtral_config, ["sequential_experts"], None),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", tiny.tiny_qwen2_moe_config, ["sequential_experts"], None),
    "Qwen3-MoE, and qkv": (
        "Qwen3MoeForCausalLM",
        lambda: text_config("Qwen3MoeConfig", **EXPERTS),
        ["sequential_experts", "qkv"],
        None,
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        lambda: text_config("DeepseekV3Config", **LATENT),
        ["sequential_experts", "gate_up"],
        None,
    ),
    "OLMoE": (
        "OlmoeForCausalLM",
        lambda: text_config("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
        ["sequential_experts"],
        None,
    ),
    "gpt-oss, transposed, biases": (
        "GptOssForCausalLM",
        lambda: text_config("GptOssConfig", **GPT_OSS),
        ["sequential_experts", "qkv"],
        None,
    ),
}


# One of each kind.
SHORT = {"Llama, all, biases", "Qwen2, biases of q, k and v", "BERT", "T5 1.1, all", "CLIP", "Qwen2-VL, and its text"}
SHORT |= {"Mixtral", "Qwen3-MoE, and qkv", "VideoMAE, a comma behind the arguments"}


@pytest.mark.parametrize("case", sampled(CASES, SHORT))
def test_the_file_of_fusions_computes_and_saves_what_the_patcher_does(
    case: str, imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    name, make, fusions, inputs = CASES[case]
    cls: type[PreTrainedModel] = getattr(transformers, name)
    patcher, config = Patcher(fusions=fusions), make()
    folder = tiny.save_tiny(config, tmp_path / "checkpoint", model_class=cls)
    described = PatchConfig.from_patcher(patcher, cls, config=config)
    generated: Any = getattr(imported(described), name)
    models = [cls.from_pretrained(folder, patcher=patcher), generated.from_pretrained(folder)]
    assert type(models[1]) is generated
    expected = {name: value.shape for name, value in models[0].named_parameters()}
    assert {name: value.shape for name, value in models[1].named_parameters()} == expected

    stock = cls.from_pretrained(folder)
    assert_equal_models(models, stock, tmp_path / "saved", inputs)
    torch.testing.assert_close(logits(models[1], inputs), logits(stock, inputs), atol=1e-4, rtol=0)


def test_layers_that_are_built_by_a_table_of_classes_are_refused() -> None:
    built = r"git\.encoder\.layer\.0\.attention\.self by the name of its class, GitSelfAttention, which a file would"
    with pytest.raises(CodegenError, match=rf"no line of GitAttention\.__init__ builds {built} change\. Load with"):
        PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.GitForCausalLM, config=small("GitConfig")())


class OtherNorm(torch.nn.RMSNorm):
    """Stands in for a norm."""


def scaled(states, weight, eps):
    return torch.nn.functional.rms_norm(states, weight.shape, weight, eps)


class NormLayer(torch.nn.Module):
    def forward(self, hidden_states):
        return scaled(hidden_states, self.weight, self.variance_epsilon) * 2


class InferenceLayer(NormLayer):
    has_backward = False


class GatedLayer(torch.nn.Module):
    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


class OtherParametersLayer(torch.nn.Module):
    def forward(self, hidden_states, residual):
        return hidden_states + residual


def test_a_layers_forward_is_written_into_the_class(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    cls = transformers.MistralForCausalLM
    folder = tiny.save_tiny(text_config("MistralConfig", head_dim=16), tmp_path / "checkpoint")
    patcher = Patcher({like("LlamaRMSNorm"): forward_of(NormLayer), "MistralMLP": forward_of(GatedLayer)})
    module: Any = imported(PatchConfig.from_patcher(patcher, cls))
    models = [cls.from_pretrained(folder, patcher=patcher), module.MistralForCausalLM.from_pretrained(folder)]
    assert_equal_models(models, cls.from_pretrained(folder), tmp_path / "saved")
    assert (logits(models[1]) - logits(cls.from_pretrained(folder))).abs().max() > 1e-3
    assert not hasattr(module.MistralRMSNorm, "kernel_layer_name")


def test_a_layer_with_other_parameters_is_refused_as_in_a_load() -> None:
    patcher = Patcher({"MistralRMSNorm": forward_of(OtherParametersLayer)})
    with pytest.raises(PatchConstructionError, match="has other parameters than MistralRMSNorm"):
        PatchConfig.from_patcher(patcher, transformers.MistralForCausalLM)


#: what no file of one module can do: the patcher, the model, and what is said
REFUSED: dict[str, tuple[Patcher, str, str]] = {
    "a part of another module": (
        Patcher(fusions="patch_embeddings"),
        "LlavaForConditionalGeneration",
        r"model\.vision_tower around it is built by from_config\(\) .* Call from_patcher\(\) with CLIPVisionModel",
    ),
    "what a layer can't do": (
        Patcher({"LlamaRMSNorm": forward_of(InferenceLayer)}),
        "LlamaForCausalLM",
        r"forward_of\(InferenceLayer\), has a layer with has_backward = False, which a file can't refuse",
    ),
    "a class that is made for each shape": (
        Patcher(fusions="split"),
        "GPTNeoXForCausalLM",
        r"Split\(\) makes a \w+ of gpt_neox\.layers\.0\.attention\.query_key_value, and a file has the layers of qkv",
    ),
}


def test_a_replaced_part_of_a_part_that_an_auto_class_builds(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    cls = transformers.Qwen3VLForConditionalGeneration
    folder = tiny.save_tiny(small("Qwen3VLConfig")(), tmp_path / "checkpoint", model_class=cls)
    patcher = Patcher({"Qwen3VLTextRMSNorm": OtherNorm})
    described = PatchConfig.from_patcher(patcher, cls)
    models = [
        cls.from_pretrained(folder, patcher=patcher),
        imported(described).__dict__[cls.__name__].from_pretrained(folder),
    ]
    assert type(models[1].model.language_model).__module__ == type(models[1]).__module__
    assert type(models[1].model.language_model.norm).__mro__[1] is torch.nn.RMSNorm
    assert_equal_models(models, cls.from_pretrained(folder), tmp_path / "saved")


def test_an_operation_that_reads_parameters_of_the_model(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    """In a load of the file it is given the model of the file, as the patched one in a load with the patcher."""
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    conversion = WeightConverter(["mlp.gate_up_proj.weight"], parts, operations=[Negated(Parts())])
    patcher = Patcher({"Phi3MLP": SplitMLP}, extra_weight_conversions=conversion)
    folder = tiny.save_tiny(text_config("Phi3Config"), tmp_path / "checkpoint")
    stock = transformers.Phi3ForCausalLM.from_pretrained(folder)
    patched = transformers.Phi3ForCausalLM.from_pretrained(folder, patcher=patcher)
    module: Any = imported(PatchConfig.from_patcher(patcher, transformers.Phi3ForCausalLM))
    mine = module.Phi3ForCausalLM.from_pretrained(folder)
    assert_equal_models([patched, mine], stock, tmp_path / "saved")
    torch.testing.assert_close(logits(mine), logits(stock), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_file_of_the_module_can_do_is_refused(case: str) -> None:
    patcher, name, message = REFUSED[case]
    cls: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(CodegenError, match=message):
        PatchConfig.from_patcher(patcher, cls, config=next(small_configs(cls.config_class)))


def test_a_part_that_the_checkpoint_lacks_is_initialised(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    config = clip()
    folder = tiny.save_tiny(config, tmp_path / "checkpoint", model_class=transformers.CLIPModel)
    weights = load_file(folder / "model.safetensors")
    lacking = "text_model.encoder.layers.0.mlp.fc1.weight"
    del weights[lacking]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    described = PatchConfig.from_patcher(Patcher(fusions="qkv"), transformers.CLIPModel, config=config)
    model: Any = imported(described).CLIPModel.from_pretrained(folder)
    stock = transformers.CLIPModel.from_pretrained(folder)
    deviations = [float(one.state_dict()[lacking].std()) for one in (model, stock)]
    assert deviations[0] == pytest.approx(deviations[1], rel=0.1)


def test_rows_of_padding_are_zero_where_stock_zeroes_them(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    """In new models, and where a checkpoint has no embeddings."""
    model_class, config = transformers.XLMRobertaForMaskedLM, text_config("XLMRobertaConfig", pad_token_id=1)
    module = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), model_class, config=config))
    stock, own = (each(config) for each in (model_class, module.XLMRobertaForMaskedLM))
    kept = {key: value for key, value in stock.state_dict().items() if "embeddings" not in key}
    stock.save_pretrained(tmp_path / "whole", state_dict=kept)
    for model in (own, module.XLMRobertaForMaskedLM.from_pretrained(tmp_path / "whole")):
        weight = model.get_input_embeddings().weight
        assert weight[1].count_nonzero() == 0
        assert weight[0].count_nonzero() > 0


def test_all_modules_that_imports_bind_to_one_name_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Any
) -> None:
    (tmp_path / "of_two_modules.py").write_text(
        "import xml.dom\nimport xml.sax\n\n\ndef rotate_half(x):\n    assert xml.dom, xml.sax\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    replaced: Any = importlib.import_module("of_two_modules")
    patcher = Patcher(function_mapping={"rotate_half": replaced.rotate_half})
    module = imported(PatchConfig.from_patcher(patcher, transformers.LlamaForCausalLM))
    assert {"import xml.dom", "import xml.sax"} <= {*Path(module.__file__).read_text().splitlines()}


def test_a_guarded_import_from_the_package_of_a_replacement_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: Any
) -> None:
    package = tmp_path / "guarded_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "constants.py").write_text("FACTOR = 2.0\n")
    guarded = "try:\n    from .constants import FACTOR\nexcept ImportError:\n    FACTOR = 1.0\n"
    (package / "functions.py").write_text(f"{guarded}\n\ndef rotate_half(x):\n    return x * FACTOR\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    replaced: Any = importlib.import_module("guarded_package.functions")
    patcher = Patcher(function_mapping={"rotate_half": replaced.rotate_half})
    module = imported(PatchConfig.from_patcher(patcher, transformers.LlamaForCausalLM))
    assert module.FACTOR == 2.0
    assert "from guarded_package.constants import FACTOR" in Path(module.__file__).read_text()


def test_a_base_class_that_is_a_variable_of_a_function_is_copied(imported: Any) -> None:
    class Weighted(torch.nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    class Norm(Weighted):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.weight * hidden_states

    module = imported(PatchConfig.from_patcher(Patcher({"LlamaRMSNorm": Norm}), transformers.LlamaForCausalLM))
    assert module.LlamaRMSNorm.__bases__ == (module.Weighted,)
