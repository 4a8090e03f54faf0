"""`patcher.verify`: right patchers pass, and each way to be wrong fails at its stage, with the module named."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import re
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    CLIPImageProcessor,
    Concatenate,
    EsmConfig,
    LlamaForCausalLM,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WeightConverter,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.core_model_loading import ConversionOps
from transformers.models.bert.modeling_bert import BertSelfOutput
from transformers.models.esm.modeling_esm import EsmContactPredictionHead
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.utils import logging as transformers_logging

from patcher import InvalidPatcherError, Patcher, Verification, VerificationError, verify
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from patcher.patterns import inside
from patcher.verification.inputs import NoInputsError, chosen_passes
from patcher.verification.numerics import call_gaps, first_difference
from patcher.verification.processors import processed, processor_of
from patcher.verification.progress import progress
from tests.support.offloaded import DEVICE_MAPS
from tests.support.replacements import JOINED, OWN, JoinedMLP, With
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_bert_config,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
)

T5 = T5Config(
    vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, is_gated_act=True, pad_token_id=0,
    decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"],
)  # fmt: skip
WHISPER = WhisperConfig(
    vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=64,
    max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    suppress_tokens=None, begin_suppress_tokens=None, architectures=["WhisperForConditionalGeneration"],
)  # fmt: skip
VIT = ViTConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
    architectures=["ViTForImageClassification"],
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


# --- what is right -------------------------------------------------------------------------------------------------

RIGHT: dict[str, tuple[Any, Patcher, set[str]]] = {
    "a class": (tiny_llama_config(), OWN, {"windows"}),
    "an encoder": (tiny_bert_config(), Patcher(fusions="qkv"), {"windows", "generation"}),
    "encoder and decoder": (T5, Patcher(fusions=["qkv", "gate_up"]), {"windows"}),
    "vision": (VIT, Patcher(fusions=["qkv", "patch_embeddings"]), {"windows", "generation"}),
}


@pytest.mark.parametrize(("config", "patcher", "unchecked"), RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_passes_at_every_stage(config: Any, patcher: Patcher, unchecked: set[str]) -> None:
    found = verify(config, patcher)

    assert found.failures == ()
    assert found.passed
    assert found.replaced > 0
    found.raise_on_failure()
    assert [stage.name for stage in found.stages] == STAGES
    assert {stage.name for stage in found.stages if not stage.checked} == unchecked


STAGES = "load outputs arguments recorded windows precision generation gradients training save reload".split()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_offloaded_weights_of_one_model_are_not_those_of_another(llama: Path, tmp_path: Path) -> None:
    """Each model that is loaded on the way writes its own: under the same names, and some in another type."""
    options = {"device_map": DEVICE_MAPS["a layer on disk"], "offload_folder": tmp_path}
    found = verify(llama, Patcher(fusions=["qkv", "gate_up"]), **options)
    found.raise_on_failure()
    assert {stage.name for stage in found.stages if not stage.checked} == {"windows", "gradients", "training"}


def test_half_precision_is_compared_module_by_module(llama: Path) -> None:
    found = verify(llama, JOINED | Patcher({"LlamaRMSNorm": NormAsShipped}), dtype=torch.bfloat16)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 2.0), ("of", 2.0))


def test_in_half_precision_all_towers_are_reached() -> None:
    found = verify(tiny_llava_config(), Patcher(fusions=["qkv", "patch_embeddings"]), **HALF)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 3.0), ("of", 3.0))


def test_in_half_precision_inputs_are_too() -> None:
    """Whisper takes sounds as they are; most other models cast what they are given."""
    found = verify(WHISPER, Patcher(fusions="qkv"), **HALF)

    assert found.failures == ()
    assert found.replaced > 0


def test_what_is_in_force_around_it_is_not_in_stock(llama: Path) -> None:
    with Patcher({"LlamaRMSNorm": NoNorm}).applied():
        inside = verify(llama, OWN)
    register_patch_mapping({"LlamaRMSNorm": NoNorm})
    try:
        registered = verify(llama, OWN)
    finally:
        clear_patch_mapping()

    for found in (inside, registered):
        with pytest.raises(VerificationError, match=r"outputs: .* begins in .*input_layernorm \(NoNorm in place of"):
            found.raise_on_failure()
    assert verify(llama, OWN).passed


# --- what is wrong -------------------------------------------------------------------------------------------------


class NormAsShipped(LlamaRMSNorm):
    pass


class KeysForQueries(LlamaAttention):
    """q and k swapped."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries, self.q_proj = self.q_proj, _Repeated(self.k_proj, self.num_key_value_groups)
        keys, self.k_proj = self.k_proj, _First(queries, self.num_key_value_groups)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self.q_proj, self.k_proj = queries, keys


class _Repeated(nn.Module):
    def __init__(self, linear: nn.Module, times: int) -> None:
        super().__init__()
        self.linear, self.times = linear, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat_interleave(self.times, -1)


class _First(_Repeated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[..., :: self.times]


class NoNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


class Scaled(LlamaAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scaling *= 1.01


class OneHeadMoved(LlamaAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_proj.register_forward_hook(self._move)

    def _move(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        heads = output.unflatten(-1, (-1, self.head_dim))
        return heads[..., [1, 0, *range(2, heads.shape[-2])], :].flatten(-2)


class NoBias(BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(nn.functional.linear(hidden_states, self.dense.weight) + input_tensor)


class OneLayerOff(LlamaDecoderLayer):
    """The last layer isn't what the others are."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.off = layer_idx == 1

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(hidden_states, *args, **kwargs)
        return hidden_states if self.off else found


class ExpertsMoved(MixtralExperts):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        return super().forward(hidden_states, (top_k_index + 1) % self.num_experts, top_k_weights)


class StaleBuffer(LlamaRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.angles = nn.Buffer(self.inv_freq * 0.9, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = (position_ids[..., None].float() * self.angles).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LostUpcast(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class LostUpcastOfSoftmax(LlamaAttention):
    """Written out, where stock uses sdpa."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if (cache := kwargs.get("past_key_values")) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        length = k.shape[-2]
        places = torch.arange(length)
        later = places > places[length - q.shape[-2] :, None]
        scores = (q @ k.transpose(-1, -2) * self.scaling).masked_fill(later, torch.finfo(q.dtype).min)
        if (mask := kwargs.get("attention_mask")) is not None:
            scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min)
        exponents = (scores - scores.amax(-1, keepdim=True)).exp()
        found = exponents / exponents.sum(-1, keepdim=True) @ v
        return self.o_proj(found.transpose(1, 2).flatten(2)), None


class NoGradient(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach() + x * 0


class NeverCalled(EsmContactPredictionHead):
    """Wrong, where no output tells: ESM has a method of its own that calls it, which isn't `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * 2


class RaisesOnSteps(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 1:
            raise ValueError("made for prompts only")
        return super().forward(x)


class ForgetsOnSteps(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.5 if x.shape[1] == 1 else 1)


class LooksAtPadding(LlamaAttention):
    """Without a mask sdpa is causal, and padding is a token as any other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **{**kwargs, "attention_mask": None})


class WrongReverse(Concatenate):
    """Joins as it should, and takes apart in the other order."""

    @property
    def reverse_op(self) -> ConversionOps:
        return SwappedHalves()


class SwappedHalves(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        first, second = tensor.chunk(2)
        return {target_patterns[0]: [second.contiguous()], target_patterns[1]: [first.contiguous()]}

    @property
    def reverse_op(self) -> ConversionOps:
        return WrongReverse(0)


LLAMA, MIXTRAL, BERT = tiny_llama_config(), tiny_mixtral_config(), tiny_bert_config()
ESM = EsmConfig(vocab_size=33, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
                architectures=["EsmForMaskedLM"])  # fmt: skip
WRONG_ORDER = Patcher(
    {"LlamaMLP": JoinedMLP},
    extra_weight_conversions=WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[WrongReverse(dim=0)]
    ),
)
HALF = {"dtype": torch.bfloat16}

#: config, patcher, options, what is said
WRONG: dict[str, tuple[Any, Patcher, dict[str, Any], str]] = {
    "queries and keys swapped": (LLAMA, Patcher({"LlamaAttention": KeysForQueries}), {},
        r"outputs: on a short row .* it begins in model\.layers\.0\.self_attn \(KeysForQueries in place of"),
    "a norm left out": (LLAMA, Patcher({"LlamaRMSNorm": NoNorm}), {},
        r"outputs: .* it begins in model\.layers\.0\.input_layernorm \(NoNorm in place of LlamaRMSNorm\)"),
    "scaling off by 1 %": (LLAMA, Patcher({"LlamaAttention": Scaled}), {},
        r"outputs: .* it begins in model\.layers\.0\.self_attn \(Scaled in place of LlamaAttention\)"),
    "one head moved": (LLAMA, Patcher({"LlamaAttention": OneHeadMoved}), {},
        r"outputs: .* it begins in model\.layers\.0\.self_attn\.q_proj "),
    "a bias dropped": (BERT, Patcher({"BertSelfOutput": NoBias}), {},
        r"outputs: .* it begins in bert\.encoder\.layer\.0\.attention\.output \(NoBias"),
    "one layer off": (LLAMA, Patcher({"LlamaDecoderLayer": OneLayerOff}), {},
        r"outputs: .* it begins in model\.layers\.1 \(OneLayerOff in place of LlamaDecoderLayer\)"),
    "experts in another order": (MIXTRAL, Patcher({"MixtralExperts": ExpertsMoved}), {},
        r"outputs: .* it begins in model\.layers\.0\.mlp\.experts \(ExpertsMoved in place of MixtralExperts\)"),
    "a stale buffer": (LLAMA, Patcher({"LlamaRotaryEmbedding": StaleBuffer}), {},
        r"outputs: .* it begins in model\.rotary_emb \(StaleBuffer"),
    "an upcast lost": (LLAMA, Patcher({"LlamaRMSNorm": LostUpcast}), HALF,
        r"precision: .*rsqrt in torch\.bfloat16.* it begins in model\.layers\.0\.input_layernorm \(LostUpcast"),
    "an upcast of softmax lost": (LLAMA, Patcher({"LlamaAttention": LostUpcastOfSoftmax}), HALF,
        r"precision: .*exp, sum in .*bfloat16.* it begins in model\.layers\.0\.self_attn \(LostUpcastOfSoftmax"),
    "no gradient": (LLAMA, Patcher({"LlamaMLP": NoGradient}), {},
        r"gradients: on a short row they differ for .*model\.layers\.\{0\.\.1\}\.mlp\.down_proj\.weight"),
    "wrong order on save": (LLAMA, WRONG_ORDER, {},
        r"save: model\.layers\.\{0\.\.1\}\.mlp\.gate_proj\.weight differs; .*up_proj\.weight differs\n  reload: "),
    "only prompts work": (LLAMA, Patcher({"LlamaMLP": RaisesOnSteps}), {},
        r"outputs: on a row of 1 token the patched model raises ValueError: made for prompts only"),
    "steps are wrong": (LLAMA, Patcher({"LlamaMLP": ForgetsOnSteps}), {},
        r"outputs: on a row of 1 token .* it begins in model\.layers\.0\.mlp \(ForgetsOnSteps"),
    "padding is looked at": (LLAMA, Patcher({"LlamaAttention": LooksAtPadding}), {},
        r"outputs: on a padded batch .* it begins in model\.layers\.0\.self_attn \(LooksAtPadding"),
    "never called": (ESM, Patcher({"EsmContactPredictionHead": NeverCalled}), {},
        r"outputs: no input .* reaches esm\.contact_head, so it wasn't compared"),
    "it does not load": (LLAMA, Patcher({"LlamaMLP": With}), {},
        r"load: PatchedWeightsError: (.|\n)*adapter"),
    "nothing is matched": (LLAMA, Patcher({"LlamaMPL": OWN.class_mapping["LlamaMLP"]}), {},
        r"load: UnmatchedPatchError: (.|\n)*LlamaMLP"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("config", "patcher", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_fails_and_says_where(config: Any, patcher: Patcher, options: Any, message: str) -> None:
    found = verify(config, patcher, **options)

    assert not found.passed
    with pytest.raises(VerificationError, match=message):
        found.raise_on_failure()
    assert "NOT the same as stock" in str(found)
    for stage in found.stages:
        if not stage.passed and stage.layers is not None:
            begins = stage.layers.begins or ""
            assert f"it begins in {begins or 'the model itself'} (" in stage.message
            off = [path for path, error in stage.layers.errors if error > stage.layers.allowed]
            assert off[0] == begins or begins.startswith(inside(off[0]))


def test_a_lost_upcast_is_within_the_tolerance_of_half_precision() -> None:
    """Which is why modules are compared one by one there."""
    stages = {
        stage.name: stage
        for stage in verify(LLAMA, Patcher({"LlamaRMSNorm": LostUpcast}), dtype=torch.bfloat16).stages
    }

    assert stages["outputs"].passed
    assert not stages["precision"].passed


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_what_is_wrong_little_by_little_is_put_down_to_the_module_that_adds_most() -> None:
    stock = nn.Sequential(*(Times(1) for _ in range(4)))
    ours = nn.Sequential(*(Times(1 + part) for part in (1e-6, 7e-6, 2e-6, 2e-6)))
    x = torch.linspace(-2, 2, 9)

    assert first_difference(call_gaps(ours, stock, lambda model: model(x)), 1e-5) == "1"
    assert first_difference(call_gaps(stock, stock, lambda model: model(x)), 1e-5) is None


# --- what lies beside a checkpoint ---------------------------------------------------------------------------------

WORDS = {word: number for number, word in enumerate(["<pad>", "<unk>", "<image>", "What", "is", "it?"])}


def tiny_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", **special)


def passes_of(model: PreTrainedModel, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [one.arguments for one in chosen_passes(model, processed(model, processor_of(folder, {})))]


def test_an_image_goes_through_the_image_processor(tmp_path: Path) -> None:
    """Stock takes one size here, which the config doesn't tell."""
    model = build_tiny(copy.deepcopy(VIT), model_class=ViTForImageClassification)
    model.config.image_size = 32
    with pytest.raises(NoInputsError):
        chosen_passes(model)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)

    (arguments,) = passes_of(model, tmp_path)
    assert arguments["pixel_values"].shape == (1, 3, 16, 16)


def test_a_sound_goes_through_the_feature_extractor(tmp_path: Path) -> None:
    WHISPER.save_pretrained(tmp_path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400, hop_length=125).save_pretrained(tmp_path)

    (arguments,) = passes_of(build_tiny(WHISPER, model_class=WhisperForConditionalGeneration), tmp_path)
    assert arguments["input_features"].shape == (1, 16, 128)
    assert "decoder_input_ids" in arguments


def test_an_image_with_its_tokens_goes_through_the_processor(tmp_path: Path) -> None:
    config = tiny_llava_config(image_token_index=WORDS["<image>"])
    images = CLIPImageProcessor(size={"height": 28, "width": 28}, crop_size={"height": 28, "width": 28})
    tokenizer = tiny_tokenizer(extra_special_tokens={"image_token": "<image>"})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)

    arguments, *_ = passes_of(build_tiny(config), tmp_path)
    assert arguments["input_ids"].tolist() == [[WORDS[word] for word in ["<image>"] * 4 + ["What", "is", "it?"]]]
    assert arguments["pixel_values"].shape == (1, 3, 28, 28)


def test_where_nothing_lies_beside_it_inputs_are_guessed(tmp_path: Path) -> None:
    save_tiny(VIT, tmp_path, model_class=ViTForImageClassification)
    assert processor_of(tmp_path, {}) is None
    assert processor_of(VIT, {}) is None
    (arguments,) = passes_of(build_tiny(VIT, model_class=ViTForImageClassification), tmp_path)
    assert arguments["pixel_values"].shape == (2, 3, 16, 16)


# --- what it leaves behind -----------------------------------------------------------------------------------------


class Careless(LlamaMLP):
    """Draws from every random state there is, and changes what is global."""

    raises: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3), random.random(), numpy.random.rand(3)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        if self.raises is not None:
            raise self.raises
        return super().forward(x)


class Interrupted(Careless):
    raises = KeyboardInterrupt


@pytest.fixture
def _drawn_from() -> None:
    torch.manual_seed(5)
    torch.rand(3)


def global_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in numpy.random.get_state(legacy=False).items()],
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "verbosity": transformers_logging.get_verbosity(),
        "progress bars": transformers_logging.is_progress_bar_enabled(),
    }


@pytest.mark.usefixtures("_drawn_from")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_it_changes_no_global_state(llama: Path, mode: Any) -> None:
    with mode():
        before = global_state()
        found = verify(llama, OWN)
        assert global_state() == before
        assert found.failures == ()
        assert all(stage.checked for stage in found.stages if stage.name == "gradients")
        assert verify(tiny_llama_config(), OWN).passed
        assert global_state() == before


@pytest.mark.usefixtures("_drawn_from")
@pytest.mark.parametrize("replacement", [Careless, Interrupted])
def test_nor_does_a_replacement_that_changes_some(llama: Path, replacement: type[nn.Module]) -> None:
    before = global_state()
    with contextlib.suppress(KeyboardInterrupt):
        verify(llama, Patcher({"LlamaMLP": replacement}))
        assert replacement is Careless
    assert global_state() == before


@pytest.mark.usefixtures("_drawn_from")
def test_nor_one_that_cannot_be_verified(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    before = global_state()
    with pytest.raises(Exception, match="header"):
        verify(tmp_path, OWN)
    assert global_state() == before


# --- the value -----------------------------------------------------------------------------------------------------


def test_it_is_a_value_that_goes_to_json(llama: Path) -> None:
    found = verify(llama, OWN)

    with pytest.raises(dataclasses.FrozenInstanceError):
        found.model = "another"  # type: ignore[misc]
    assert hash(found) == hash(dataclasses.replace(found))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["passed"] is True
    assert data["failures"] == []
    assert data["checkpoint"] == str(llama)
    assert [stage["name"] for stage in data["stages"]] == STAGES
    layers = data["stages"][1]["layers"]
    assert layers["errors"] == {
        "model.embed_tokens": 0.0,
        "model.rotary_emb": 0.0,
        "model.layers.0": 0.0,
        "model.layers.1": 0.0,
        "model.norm": 0.0,
        "lm_head": 0.0,
    }
    assert (layers["inputs"], layers["begins"]) == ("a short row", None)
    assert "<script" not in found._repr_html_()
    assert "equal byte for byte" in found._repr_html_()


def test_two_runs_measure_the_same(llama: Path) -> None:
    one, other = (verify(llama, JOINED, seed=3) for _ in range(2))

    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)


def test_nothing_is_not_passed() -> None:
    assert not Verification("M", "", "", "float32").passed


def test_progress_is_on_stderr_and_only_if_asked_for(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verify(llama, OWN)
    assert capfd.readouterr().err == ""
    verify(llama, OWN, progress=True)
    shown = capfd.readouterr()
    assert "verifying" in shown.err
    assert shown.out == ""


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], moment: float = 0, bars: bool = True
) -> str:
    """What is written to stderr where that is a terminal."""
    monkeypatch.setattr(transformers_logging.hf_hub_utils, "enable_progress_bars", lambda: None)  # tests forbid it
    monkeypatch.setattr(transformers_logging, "_tqdm_active", bars)
    monkeypatch.setattr("patcher.verification.progress.MOMENT", moment)
    monkeypatch.setattr("patcher.verification.progress.TICK", 0.02)
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    with open(terminal, "w") as stderr, monkeypatch.context() as patched:  # noqa: PTH123 - no path
        patched.setattr(sys, "stderr", stderr)
        with ThreadPoolExecutor(1) as reader:
            written = reader.submit(everything, screen)
            run()
            stderr.close()
            return written.result()


def test_a_terminal_shows_a_bar_that_is_gone_afterwards(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, lambda: verify(llama, OWN))

    assert "verifying: training (9 of 11) |" in text
    assert re.search(r"about \d+ s left", text)
    assert text.rpartition("\r")[0].rpartition("\r")[2].strip() == ""
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("shown", "options"),
    [(None, {"moment": 1000}), (None, {"bars": False}), (False, {})],
    ids=["in a moment", "bars are off", "not asked for"],
)
def test_a_terminal_shows_no_bar_that_nobody_needs(
    monkeypatch: pytest.MonkeyPatch, shown: bool | None, options: dict[str, Any]
) -> None:
    def run() -> None:
        with progress("verifying", {"load": 1, "outputs": 1}, shown) as step:
            for stage in ("load", "outputs"):
                step(stage)
                time.sleep(0.05)

    assert on_a_terminal(monkeypatch, run, **options) == ""


def everything(file: int) -> str:
    """What is written to a terminal until it is closed."""
    parts = []
    with contextlib.suppress(OSError):  # it is closed
        while part := os.read(file, 65536):
            parts.append(part)
    os.close(file)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA, None), r"verify takes a patcher.Patcher, found None \(NoneType\); write verify\(model, Patcher\("),
        ((LLAMA, OWN, torch.int8), r"dtype=torch\.int8 can't be compared; write one of torch\.float64"),
        ((LlamaForCausalLM, OWN), r"a model is named by its repo, its folder or its config"),
    ],
    ids=["no patcher", "dtype", "no model"],
)
def test_wrong_use_raises(arguments: Any, message: str) -> None:
    model, patcher, *dtype = arguments
    with pytest.raises(InvalidPatcherError, match=message):
        verify(model, patcher, **({"dtype": dtype[0]} if dtype else {}))
