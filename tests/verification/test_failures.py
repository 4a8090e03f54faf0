"""Each way to be wrong fails at its stage, with the module named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from patcher import Patcher, VerificationError, verify
from patcher.patterns import inside
from patcher.verification.layers import layer_errors
from tests.support.replacements import OWN, With
from tests.support.sampling import sampled
from tests.verification.models import BERT, ESM, LLAMA, MIXTRAL
from tests.verification.plainly_wrong import (
    WRONG_ORDER,
    ExpertsMoved,
    ForgetsOnSteps,
    KeysForQueries,
    LooksAtPadding,
    NeverCalled,
    NoBias,
    NoGradient,
    OneHeadMoved,
    OneLayerOff,
    RaisesOnSteps,
    Scaled,
    StaleBuffer,
)
from tests.verification.wrong_classes import HalfSoftmax, LostUpcast, NoNorm

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
    "an upcast of softmax lost": (LLAMA, Patcher({"LlamaAttention": HalfSoftmax}), HALF,
        r"precision: .*exp, sum in .*bfloat16.* it begins in model\.layers\.0\.self_attn \(HalfSoftmax"),
    "no gradient": (LLAMA, Patcher({"LlamaMLP": NoGradient}), {},
        r"gradients: on a short row they differ for .*model\.layers\.\{0\.\.1\}\.mlp\.down_proj\.weight"),
    "wrong order on save": (LLAMA, WRONG_ORDER, {},
        r"raises PatchedWeightsError: model\.layers\.0\.mlp\.gate_proj\.weight can't be saved in the original"),
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


@pytest.mark.parametrize("name", sampled(WRONG, [*WRONG][::3]))
def test_what_is_wrong_fails_and_says_where(name: str) -> None:
    config, patcher, options, message = WRONG[name]
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
    """Which is why modules are compared one by one there. (With torch 2.6, which rounds otherwise, both see it.)"""
    stages = {
        stage.name: stage
        for stage in verify(LLAMA, Patcher({"LlamaRMSNorm": LostUpcast}), dtype=torch.bfloat16).stages
    }

    assert stages["outputs"].passed or torch.__version__.startswith("2.6.")
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

    assert layer_errors(ours, stock, lambda model: model(x), "x", 1e-5).begins == "1"
    assert layer_errors(stock, stock, lambda model: model(x), "x", 1e-5).begins is None
