"""A patcher together with the other arguments of a load: each does what it does without the patcher."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertForSequenceClassification, LlamaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

import patcher
from patcher import PatchedWeightsError, Patcher
from tests.support import shared
from tests.support.beside import FUSED_QKV, LINEAR_EXPERTS, JoinedBertAttention, count, joined
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits
from tests.support.replacements import OwnMLP
from tests.support.tiny import save_tiny, tiny_bert_config, tiny_inputs, tiny_llama_config, tiny_qwen2_moe_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_qwen2_moe_config())


# --- implementations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_replaced_attention_follows_attn_implementation(implementation: str, llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV, attn_implementation=implementation)
    stock = LlamaForCausalLM.from_pretrained(llama, attn_implementation=implementation)
    assert model.model.layers[0].self_attn.config._attn_implementation == implementation
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-6, rtol=1e-5)
    if implementation == "eager":  # the one that has attention weights to show
        inputs = tiny_inputs(model.config) | {"output_attentions": True}
        for ours, theirs in zip(model(**inputs).attentions, stock(**inputs).attentions, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_replaced_attention_follows_an_attention_that_somebody_has_registered(llama: Path) -> None:
    called: list[str] = []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(module).__name__)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("counted", counted)
    try:
        model = LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV, attn_implementation="counted")
        logits(model)
        assert called == ["FusedAttention", "FusedAttention"]
        model.set_attn_implementation("sdpa")
        logits(model)
        assert len(called) == 2
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["counted"]


class OwnExperts(Qwen2MoeExperts):
    pass


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementation_is_what_it_is_without_the_patcher(implementation: str, moe: Path) -> None:
    own = Patcher({"Qwen2MoeExperts": OwnExperts})
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=own, experts_implementation=implementation)
    stock = AutoModelForCausalLM.from_pretrained(moe, experts_implementation=implementation)
    assert count(model, "OwnExperts") == 2
    assert model.config._experts_implementation == stock.config._experts_implementation == implementation
    assert torch.equal(logits(model), logits(stock))


def test_a_replacement_of_the_experts_is_called_as_experts_implementation_says(moe: Path) -> None:
    called: list[str] = []

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__)
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](self, *args, **kwargs)

    ALL_EXPERTS_FUNCTIONS.register("counted", counted)
    try:
        own = Patcher({"Qwen2MoeExperts": OwnExperts})
        logits(AutoModelForCausalLM.from_pretrained(moe, patcher=own, experts_implementation="counted"))
        assert called == ["OwnExperts", "OwnExperts"]
        # Plain linear layers have one way of computing: asking for another is no error, as for other dense layers.
        logits(AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, experts_implementation="counted"))
        assert len(called) == 2
    finally:
        del ALL_EXPERTS_FUNCTIONS._global_mapping["counted"]


# --- dtype ---------------------------------------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", ["auto", None, "bfloat16", torch.float16, torch.float32, torch.float64], ids=str)
def test_parameters_have_the_dtype_that_they_have_without_the_patcher(
    saved_as: torch.dtype, dtype: Any, tmp_path: Path
) -> None:
    save_tiny(tiny_llama_config(num_hidden_layers=1), tmp_path / "stock", dtype=saved_as)
    options = {} if dtype is None else {"dtype": dtype}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "stock", patcher=FUSED_QKV, **options)
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "stock", **options)
    expected = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == expected.get(name.replace("qkv_proj", "q_proj")).dtype, name
    assert model.dtype == stock.dtype == (saved_as if dtype in ("auto", None) else stock.dtype)
    assert model.config.dtype == stock.config.dtype
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "theirs")
    assert same_checkpoint(tmp_path / "ours", tmp_path / "theirs")


# --- where the weights lie -----------------------------------------------------------------------------------------


class OwnLayer(LlamaDecoderLayer):
    """Refuses to be split: its parts have to lie where it lies."""


@pytest.mark.parametrize(
    "patched",
    [
        FUSED_QKV,
        Patcher({"LlamaDecoderLayer": OwnLayer}),
        Patcher({"LlamaMLP": OwnMLP}),
        FUSED_QKV | Patcher({"LlamaMLP": OwnMLP}),
    ],
    ids=["fused qkv", "layer", "MLP", "both"],
)
def test_an_automatic_device_map_with_disk_offload_is_the_same_and_computes_the_same(
    patched: Patcher, llama: Path, tmp_path: Path
) -> None:
    options = {"device_map": "auto", "max_memory": {"cpu": 300_000}}
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patched, offload_folder=tmp_path / "ours", **options)
    stock = LlamaForCausalLM.from_pretrained(llama, offload_folder=tmp_path / "theirs", **options)
    assert set(stock.hf_device_map.values()) == {"cpu", "disk"}
    assert model.hf_device_map == stock.hf_device_map
    assert not any(".layers.0." in place or ".layers.1." in place for place in model.hf_device_map)
    offloaded = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    assert any("layers.1" in name for name in offloaded)
    assert not any("layers.0" in name for name in offloaded)
    torch.testing.assert_close(logits(model), logits(LlamaForCausalLM.from_pretrained(llama)), atol=1e-6, rtol=1e-5)


def test_computed_buffers_are_right_when_some_experts_are_offloaded_to_disk(moe: Path, tmp_path: Path) -> None:
    options = {"device_map": "auto", "max_memory": {"cpu": 300_000}, "offload_folder": tmp_path}
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, **options)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(moe)), atol=1e-5, rtol=1e-5)


def test_an_offloaded_model_saves_the_original_checkpoint(llama: Path, tmp_path: Path) -> None:
    options = {"device_map": "auto", "max_memory": {"cpu": 300_000}, "offload_folder": tmp_path / "offload"}
    model = LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV, **options)
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        model.save_pretrained(tmp_path / "saved")
    assert same_checkpoint(tmp_path / "saved", llama)


# --- the checkpoint ------------------------------------------------------------------------------------------------


def renamed_checkpoint(folder: Path, target: Path, old: str, new: str) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    renamed = {key.replace(old, new): tensor for key, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_key_mapping_runs_before_the_conversions_of_the_patcher(llama: Path, tmp_path: Path) -> None:
    # Only after the key mapping the keys are what the patcher's conversion looks for.
    odd = renamed_checkpoint(llama, tmp_path / "odd", "self_attn", "focus")
    model = LlamaForCausalLM.from_pretrained(odd, patcher=FUSED_QKV, key_mapping={r"\.focus\.": ".self_attn."})
    assert torch.equal(logits(model), logits(LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV)))
    model.save_pretrained(tmp_path / "ours")
    stock = LlamaForCausalLM.from_pretrained(odd, key_mapping={r"\.focus\.": ".self_attn."})
    stock.save_pretrained(tmp_path / "theirs")
    assert same_checkpoint(tmp_path / "ours", tmp_path / "theirs")


def test_key_mapping_is_never_filtered(moe: Path, tmp_path: Path) -> None:
    # The filter is found in the key mapping's target, `mlp.experts`, as well as in the stock conversions.
    odd = renamed_checkpoint(moe, tmp_path / "odd", "mlp.experts.", "mlp.specialists.")
    model, info = AutoModelForCausalLM.from_pretrained(
        odd,
        patcher=LINEAR_EXPERTS,
        key_mapping={r"mlp\.specialists\.": "mlp.experts."},
        output_loading_info=True,
    )
    assert not info["unexpected_keys"]
    expected = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    dropped = patcher.report(model).conversions_dropped
    assert dropped
    assert not any("specialists" in text for text, _ in dropped)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_bert_config(num_labels=3)
    return shared.checkpoint(config, model_class=BertForSequenceClassification)


def test_ignore_mismatched_sizes_makes_a_new_head_and_loads_the_rest(classifier: Path) -> None:
    options = {"num_labels": 7, "ignore_mismatched_sizes": True, "output_loading_info": True}
    patched = joined("BertSelfAttention", JoinedBertAttention)
    model, info = BertForSequenceClassification.from_pretrained(classifier, patcher=patched, **options)
    stock, expected = BertForSequenceClassification.from_pretrained(classifier, **options)
    assert {name for name, *_ in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    assert info["mismatched_keys"] == expected["mismatched_keys"]
    assert model.classifier.weight.shape == (7, 64)
    assert model.classifier.weight.isfinite().all()
    inputs = tiny_inputs(model.config)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().bert(**inputs)[0], stock.eval().bert(**inputs)[0])


def test_without_it_a_new_head_is_the_same_error_as_without_the_patcher(classifier: Path) -> None:
    with pytest.raises(RuntimeError, match="You set `ignore_mismatched_sizes` to `False`"):
        BertForSequenceClassification.from_pretrained(
            classifier, num_labels=7, patcher=joined("BertSelfAttention", JoinedBertAttention)
        )


class WiderMLP(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.down_proj = nn.Linear(config.intermediate_size, 2 * config.hidden_size, bias=False)


def test_a_mismatch_in_a_replaced_module_is_an_error_even_with_ignore_mismatched_sizes(llama: Path) -> None:
    with pytest.raises(
        PatchedWeightsError, match=r"(?s)layers\.\{0\.\.1\}\.mlp\.down_proj.*has \(64, 96\), the model has \(128, 96\)"
    ):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": WiderMLP}), ignore_mismatched_sizes=True)
    declared = Patcher({"LlamaMLP": WiderMLP}, new_weights=r"mlp\.down_proj")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=declared, ignore_mismatched_sizes=True)
    assert model.model.layers[0].mlp.down_proj.weight.shape == (128, 96)


@pytest.mark.parametrize("prefix", ["", "model."], ids=["all keys with prefix", "keys of the base model without"])
def test_a_state_dict_without_a_folder_is_converted_as_a_checkpoint_is(prefix: str, llama: Path) -> None:
    given = {key.removeprefix(prefix): tensor for key, tensor in load_file(llama / "model.safetensors").items()}
    before = {key: tensor.clone() for key, tensor in given.items()}
    model = LlamaForCausalLM.from_pretrained(
        None, config=AutoConfig.from_pretrained(llama), state_dict=given, patcher=FUSED_QKV
    )
    assert torch.equal(logits(model), logits(LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV)))
    assert given.keys() == before.keys()
    assert all(torch.equal(given[key], tensor) for key, tensor in before.items())


def test_output_loading_info_says_what_it_says_without_the_patcher(llama: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(llama, tmp_path / "odd")
    tensors = load_file(odd / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(3)
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    model, info = LlamaForCausalLM.from_pretrained(odd, patcher=FUSED_QKV, output_loading_info=True)
    _, expected = LlamaForCausalLM.from_pretrained(odd, output_loading_info=True)
    assert count(model, "FusedAttention") == 2
    assert info["missing_keys"] == {"model.norm.weight"}
    assert info["unexpected_keys"] == {"model.extra"}
    assert info == expected


class GatedMLP(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.strength = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.strength)


def test_output_loading_info_lists_new_weights(llama: Path) -> None:
    model, info = LlamaForCausalLM.from_pretrained(
        llama, patcher=Patcher({"LlamaMLP": GatedMLP}, new_weights=r"mlp\.strength"), output_loading_info=True
    )
    assert info["missing_keys"] == {f"model.layers.{index}.mlp.strength" for index in (0, 1)}
    assert torch.equal(logits(model), logits(LlamaForCausalLM.from_pretrained(llama)))
