"""Of a patcher with several members the one that is wrong is named, in about the time of a quick verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Concatenate, WeightConverter
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from patcher import Patcher, VerificationError, verify
from patcher.verification.sides import Side
from tests.support import shared
from tests.support.replacements import JoinedMLP
from tests.support.sampling import sampled
from tests.verification.plainly_wrong import (
    KeysForQueries,
    NoGradient,
    OneLayerOff,
    RaisesOnSteps,
    Scaled,
    StaleBuffer,
)
from tests.verification.wrong_classes import LostUpcast, NoNorm
from tests.verification.wrong_patches import LLAMA, WRONG as WRONG_PATCHES


def same(base: Any) -> Any:
    return type(f"Same{base.__name__}", (base,), {})


def rope(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def half_rope(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin * 0.9, unsqueeze_dim)


#: What computes as stock does, each by one member.
RIGHT = {
    "model": Patcher({"LlamaModel": same(LlamaModel)}),
    "layers": Patcher({"LlamaDecoderLayer": same(LlamaDecoderLayer)}),
    "norms": Patcher({"LlamaRMSNorm": same(LlamaRMSNorm)}),
    "angles": Patcher({"LlamaRotaryEmbedding": same(LlamaRotaryEmbedding)}),
    "attention": Patcher(fusions=["qkv"]),
    "mlp": Patcher(fusions=["gate_up"]),
    "function": Patcher(function_mapping={"apply_rotary_pos_emb": rope}),
}
#: What isn't right: which right ones it takes the place of, and where it begins.
WRONG: dict[str, tuple[Patcher, set[str], str | None]] = {
    "a norm": (Patcher({"LlamaRMSNorm": NoNorm}), {"norms"}, "model.layers.0.input_layernorm"),
    "angles": (Patcher({"LlamaRotaryEmbedding": StaleBuffer}), {"angles"}, "model.rotary_emb"),
    "attention": (Patcher({"LlamaAttention": KeysForQueries}), {"attention"}, "model.layers.0.self_attn"),
    "scaling": (Patcher({"LlamaAttention": Scaled}), {"attention"}, "model.layers.0.self_attn"),
    "a layer": (Patcher({"LlamaDecoderLayer": OneLayerOff}), {"layers"}, "model.layers.1"),
    "steps": (Patcher({"LlamaMLP": RaisesOnSteps}), {"mlp"}, None),
    "gradients": (Patcher({"LlamaMLP": NoGradient}), {"mlp"}, None),
    "an upcast": (Patcher({"LlamaRMSNorm": LostUpcast}), {"norms"}, None),
    "a path": (Patcher(module_mapping={"model.norm": NoNorm}), set(), "model.norm"),
    "a function": (Patcher(function_mapping={"apply_rotary_pos_emb": half_rope}), {"function"},
        "model.layers.0.self_attn"),
}  # fmt: skip


#: Wrong in a hidden way, each in one class; where it begins isn't said.
HIDDEN = {name: wrong.patcher for name, wrong in WRONG_PATCHES.items() if wrong.config is LLAMA and not wrong.options}


def with_right_ones(wrong: Patcher) -> Patcher:
    """It, and all right ones that are for other classes."""
    every = wrong
    for right in RIGHT.values():
        replaced = {"qkv": "LlamaAttention", "gate_up": "LlamaMLP"}
        if not wrong.class_mapping.keys() & {*right.class_mapping, *(replaced[each] for each in right.fusions)}:
            every |= right
    return every


def among_right_ones(name: str) -> tuple[Patcher, Patcher, str | None]:
    """All right ones with a wrong one, the wrong one, and where it begins."""
    wrong, replaces, layer = WRONG[name]
    every = Patcher()
    for key, right in RIGHT.items():
        every |= Patcher() if key in replaces else right
    return every | wrong, wrong, layer


@pytest.mark.parametrize("name", sampled(WRONG, ["a norm", "a layer", "gradients", "a path", "a function"]))
def test_the_wrong_one_among_right_ones_is_named(llama: Path, name: str) -> None:
    patcher, wrong, layer = among_right_ones(name)
    found = verify(llama, patcher)

    assert found.guilty is not None, found
    assert (found.guilty.member, found.guilty.alone, found.guilty.layer) == (repr(wrong), True, layer)
    with pytest.raises(VerificationError, match="The cause is Patcher"):
        found.raise_on_failure()
    assert found.guilty.member in str(found)
    assert found.to_dict()["guilty"]["member"] == repr(wrong)


@pytest.mark.parametrize("name", sampled(HIDDEN, [*HIDDEN][::16]))
def test_a_hidden_wrong_one_is_named_too(name: str) -> None:
    assert len(HIDDEN) + len(WRONG) > 31
    found = verify(shared.checkpoint(LLAMA), with_right_ones(HIDDEN[name]))
    assert found.guilty is not None, found
    assert (found.guilty.member, found.guilty.alone) == (repr(HIDDEN[name]), True)


@pytest.mark.parametrize("name", ["a norm", "a layer", "a path", "a function"])
def test_few_loads_tell(llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two of the verification, and one where the layer belongs to one member; else as many as halves can be made."""
    patcher, _, _ = among_right_ones(name)
    loads, load = [], Side.load
    monkeypatch.setattr(Side, "load", lambda self, *args, **more: loads.append(self) or load(self, *args, **more))
    assert verify(llama, patcher, quick=True).guilty is not None
    assert len(loads) <= 2 + 2


class Half(LlamaMLP):
    """Right where the norm before it doubles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / 2)


class Double(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 2


def test_what_is_right_only_together_is_named_by_what_is_wrong_alone(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Half}, module_mapping={"model.layers.*.post_attention_layernorm": Double})
    assert verify(llama, patcher, quick=True).passed
    found = verify(llama, patcher | RIGHT["angles"] | Patcher({"LlamaAttention": Scaled}), quick=True)
    assert found.guilty is not None
    assert "Scaled" in found.guilty.member


def test_a_class_is_named_whose_weights_are_joined_in_another_order(llama: Path) -> None:
    swapped = WeightConverter(
        ["mlp.up_proj.weight", "mlp.gate_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[Concatenate(0)]
    )
    patcher = Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=swapped)
    found = verify(llama, patcher | RIGHT["norms"] | RIGHT["attention"] | RIGHT["model"], quick=True)
    assert found.guilty is not None
    assert found.guilty.member == "Patcher(class_mapping={'LlamaMLP': JoinedMLP})"
    assert found.guilty.layer == "model.layers.0.mlp.gate_up_proj" or found.guilty.layer == "model.layers.0.mlp"
