"""Fusions asked for in every way: several at once, beside a class mapping, from a mapping of options, in conflict."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm

from patcher import InvalidPatcherError, PatchConflictError, Patcher, UnmatchedPatchError, report
from patcher.fusions import QKV, Fusion, PatchEmbeddings, SequentialExperts
from patcher.loading.saving import saved_state_dict
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_vl_config,
    tiny_qwen3_vl_moe_config,
)

FAMILIES = ("patch_embeddings", "qkv", "gate_up", "sequential_experts")


class OwnNorm(Qwen3VLMoeTextRMSNorm):
    pass


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    save_tiny(tiny_qwen3_vl_moe_config(), folder / "checkpoint")
    Qwen3VLMoeForConditionalGeneration.from_pretrained(folder / "checkpoint").save_pretrained(folder / "stock")
    return folder


def inputs_of(model: Any) -> dict[str, Any]:
    return tiny_inputs(tiny_qwen2_vl_config() if "vision_config" in model.config.sub_configs else model.config)


def close(one: Any, other: Any) -> None:
    inputs = inputs_of(other)
    torch.testing.assert_close(one(**inputs).logits, other(**inputs).logits, atol=1e-5, rtol=0)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """An expert that no token went to has none: that is zeros."""
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in model.named_parameters()
    }


# --- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_all_families_and_a_class_mapping_in_one_load(attention: str, vision: Path, tmp_path: Path) -> None:
    patcher = Patcher({"Qwen3VLMoeTextRMSNorm": OwnNorm}, fusions=FAMILIES)
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    stock = Qwen3VLMoeForConditionalGeneration.from_pretrained(vision / "checkpoint", **options)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(vision / "checkpoint", patcher=patcher, **options)
    model.save_pretrained(tmp_path)

    assert {(path.removeprefix("model."), was) for path, was, _ in report(model).fused} == {
        ("visual.patch_embed.proj", "Conv3d"),
        ("language_model.layers.0.self_attn", "Qwen3VLMoeTextAttention"),
        ("language_model.layers.1.self_attn", "Qwen3VLMoeTextAttention"),
        ("language_model.layers.0.mlp.experts", "Qwen3VLMoeTextExperts"),
        ("language_model.layers.1.mlp", "Qwen3VLMoeTextMLP"),
    }
    assert {was for _, was, _ in report(model).replaced} == {"Qwen3VLMoeTextRMSNorm"}
    close(model, stock)
    assert same_checkpoint(tmp_path, vision / "stock")

    for each in (model, stock):
        each(**inputs_of(each)).logits.square().mean().backward()
    gradients = [
        {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in each.named_parameters()
        }
        for each in (model, stock)
    ]
    found, expected = (saved_state_dict(each, given) for each, given in zip((model, stock), gradients, strict=True))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_the_order_of_the_families_means_nothing(vision: Path) -> None:
    config = tiny_qwen3_vl_moe_config()
    resolutions = [
        Patcher(fusions=names).resolve(Qwen3VLMoeForConditionalGeneration, config) for names in permutations(FAMILIES)
    ]
    for resolution in resolutions:
        assert dict(resolution.fused) == dict(resolutions[0].fused)
        assert dict(resolution.refused) == dict(resolutions[0].refused)
    backwards = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        vision / "checkpoint", patcher=Patcher(fusions=reversed(FAMILIES))
    )
    close(backwards, Qwen3VLMoeForConditionalGeneration.from_pretrained(vision / "checkpoint"))


WAYS = {
    "in one patcher": (Patcher(), Patcher(fusions=["qkv", "gate_up"])),
    "in two that are combined": (Patcher(), Patcher(fusions="qkv") | Patcher(fusions=["gate_up", "qkv"])),
    "in a block and an argument": (Patcher(fusions="qkv"), Patcher(fusions="gate_up")),
    "twice": (Patcher(fusions=["qkv", "gate_up"]), Patcher(fusions=["gate_up", QKV()])),
}


@pytest.mark.parametrize(("outer", "inner"), WAYS.values(), ids=WAYS.keys())
def test_wherever_they_are_asked_for_they_add_up(outer: Patcher, inner: Patcher, llama: Path, tmp_path: Path) -> None:
    with outer.applied():
        model = AutoModelForCausalLM.from_pretrained(llama, patcher=inner)
    model.save_pretrained(tmp_path)

    assert len(report(model).fused) == 4
    close(model, AutoModelForCausalLM.from_pretrained(llama))
    assert same_checkpoint(tmp_path, llama)


class Subclassed(Fusion):
    """Modules at some places, built as a subclass that says so and computes the same."""

    def __init__(self, pattern: str) -> None:
        self.target_modules_patterns = (pattern,)

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type(f"Sub{original_cls.__name__}", (original_cls,), {})


INSIDE = {
    "a converted module inside of a built one": [Subclassed(r"layers\.\d+$"), "qkv"],
    "the same, asked for the other way round": ["qkv", Subclassed(r"layers\.\d+$")],
    "a built one inside of a built one": [Subclassed(r"layers\.\d+$"), Subclassed("^model$")],
    "three deep": [Subclassed(r"\.self_attn$"), Subclassed("^model$"), Subclassed(r"layers\.\d+$"), "gate_up"],
}


@pytest.mark.parametrize("fusions", INSIDE.values(), ids=INSIDE.keys())
def test_a_module_inside_of_a_fused_one_is_fused_as_well(fusions: list[Any], llama: Path, tmp_path: Path) -> None:
    patcher = Patcher(fusions=fusions)
    model = AutoModelForCausalLM.from_pretrained(llama, patcher=patcher)
    model.save_pretrained(tmp_path)

    planned = patcher.resolve(LlamaForCausalLM, tiny_llama_config()).fused
    assert {path: is_ for path, _, is_ in report(model).fused} == {
        path: cls.__qualname__ for path, cls in planned.items()
    }
    close(model, AutoModelForCausalLM.from_pretrained(llama))
    assert same_checkpoint(tmp_path, llama)


class MyMLP(LlamaMLP):
    pass


class MyLayer(LlamaDecoderLayer):
    pass


class MyModel(LlamaForCausalLM):
    pass


@pytest.mark.parametrize(
    ("mapping", "fused"),
    [
        ({"LlamaMLP": MyMLP}, ["qkv"]),
        ({"LlamaDecoderLayer": MyLayer}, ["qkv", "gate_up"]),
        ({"LlamaDecoderLayer": MyLayer, "LlamaMLP": MyMLP}, ["qkv"]),
        ({"LlamaForCausalLM": MyModel}, ["qkv", "gate_up"]),
    ],
    ids=["beside", "inside", "inside and beside", "inside of the root"],
)
def test_fusions_beside_and_inside_of_replaced_modules(
    mapping: dict[str, type[nn.Module]], fused: list[str], llama: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher(mapping, fusions=fused))
    model.save_pretrained(tmp_path)

    assert {cls.__name__ for cls in mapping.values()} <= {type(module).__name__ for module in model.modules()}
    assert len(report(model).fused) == 2 * len(fused)
    close(model, LlamaForCausalLM.from_pretrained(llama))
    assert same_checkpoint(tmp_path, llama)


# --- in conflict -----------------------------------------------------------------------------------------------------


class MyQKV(QKV):
    pass


class MyExperts(SequentialExperts):
    pass


class MyPatches(PatchEmbeddings):
    pass


LLAMA, MIXTRAL, VISION = tiny_llama_config(), tiny_mixtral_config(), tiny_qwen2_vl_config()
CONFLICTS: list[tuple[PretrainedConfig, list[Any], str]] = [
    (LLAMA, ["qkv", MyQKV()], r"'qkv' and MyQKV\(\) both claim model\.layers\.0\.self_attn; use one"),
    (LLAMA, [Subclassed(r"\.mlp$"), "gate_up"], r"and 'gate_up' both claim model\.layers\.0\.mlp; use one"),
    (MIXTRAL, ["sequential_experts", MyExperts()], r"both claim model\.layers\.0\.mlp\.experts; use one"),
    (VISION, ["patch_embeddings", MyPatches()], r"both claim model\.visual\.patch_embed\.proj; use one"),
    (VISION, ["patch_embeddings", PatchEmbeddings("**")], r"both claim model\.visual\.patch_embed\.proj; use one"),
]


@pytest.mark.parametrize(
    ("config", "fusions", "message"), CONFLICTS, ids=[str(fusions) for _, fusions, _ in CONFLICTS]
)
def test_two_fusions_that_claim_one_module_conflict(
    config: PretrainedConfig, fusions: list[Any], message: str, tmp_path: Path
) -> None:
    model_class = type(build_tiny(config))
    save_tiny(config, tmp_path)
    before = {cls: dict(vars(cls)) for cls in (LlamaAttention, LlamaMLP, nn.Conv3d)}
    one, other = (Patcher(fusions=fusion) for fusion in fusions)
    for conflict in (one | other, Patcher(fusions=fusions)):
        with pytest.raises(PatchConflictError, match=message):
            conflict.resolve(model_class, config)
        with pytest.raises(PatchConflictError, match=message):
            model_class.from_pretrained(tmp_path, patcher=conflict)
    with pytest.raises(PatchConflictError, match=r"both claim .*; use one"), one.applied():
        model_class.from_pretrained(tmp_path, patcher=other)

    assert {cls: dict(vars(cls)) for cls in before} == before
    assert report(model_class.from_pretrained(tmp_path, patcher=one)).fused  # nothing of it is left behind


def test_a_fusion_that_claims_a_replaced_module_conflicts(llama: Path) -> None:
    message = r"'gate_up' claims model\.layers\.0\.mlp, which the class mapping replaces by MyMLP; take one"
    patcher = Patcher({"LlamaMLP": MyMLP}, fusions="gate_up")

    with pytest.raises(PatchConflictError, match=message):
        patcher.resolve(LlamaForCausalLM, tiny_llama_config())
    with pytest.raises(PatchConflictError, match=message):
        AutoModelForCausalLM.from_pretrained(llama, patcher=patcher)


def test_one_of_several_that_finds_nothing_is_an_error(llama: Path) -> None:
    with pytest.raises(UnmatchedPatchError, match=r"'patch_embeddings' found no module that it can fuse"):
        AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher(fusions=["qkv", "patch_embeddings"]))


# --- from a mapping of options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"patch_embeddings": True}, Patcher(fusions="patch_embeddings")),
        ({"qkv": True, "gate_up": {}}, Patcher(fusions=["qkv", "gate_up"])),
        ({"qkv": False, "gate_up": True}, Patcher(fusions="gate_up")),
        ({"patch_embeddings": {"modules": "visual"}}, Patcher(fusions=PatchEmbeddings("visual"))),
        ({"qkv": {"modules": ["a.*", "b"]}}, Patcher(fusions=QKV(["b", "a.*"]))),
        (dict.fromkeys(FAMILIES, True), Patcher(fusions=FAMILIES)),
        ({"qkv": False}, Patcher()),
        ({}, Patcher()),
    ],
)
def test_a_fusion_config_becomes_a_patcher(config: dict[str, Any], expected: Patcher) -> None:
    assert Patcher.from_fusion_config(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"qkvs": True}, r"'qkvs' isn't a fusion; did you mean 'qkv'\?"),
        ({"qkvs": False}, r"'qkvs' isn't a fusion; did you mean 'qkv'\?"),
        ({"patcher": ["qkv"]}, r"'patcher' isn't a fusion; "),
        ({3: True}, r"3 isn't a fusion; write a name \('gate_up'"),
        ({"qkv": "yes"}, r"'qkv' takes True, False or a mapping of options, found 'yes'"),
        ({"qkv": None}, r"'qkv' takes True, False or a mapping of options, found None"),
        ({"qkv": 1}, r"'qkv' takes True, False or a mapping of options, found 1"),
        ({"qkv": {"heads": 3}}, r"'qkv' doesn't take the options \{'heads': 3\}"),
        (["qkv"], r"maps names of fusions to True, False or options, found \['qkv'\]"),
    ],
)
def test_a_fusion_config_that_means_nothing_is_refused(config: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher.from_fusion_config(config)
