"""A plan says what the load then does, and reads no weight to know it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    LlamaForCausalLM,
)
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaAttention

import patcher as package
from patcher import Patcher, PatcherError, PatcherWarning, Plan, plan
from tests.replacements import JOINED, OWN, Both, JoinedMLP, OwnLayer, OwnMLP, OwnNorm, With, joining
from tests.tiny import (
    save_tiny,
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_jamba_config,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen2_vl_config,
)

MODELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "llama": (tiny_llama_config, AutoModelForCausalLM),
    "tied": (lambda: tiny_llama_config(tie_word_embeddings=True), AutoModelForCausalLM),
    "moe": (tiny_qwen2_moe_config, AutoModelForCausalLM),
    "mixtral": (tiny_mixtral_config, AutoModelForCausalLM),
    "jamba": (tiny_jamba_config, AutoModelForCausalLM),
    "bert": (tiny_bert_config, AutoModelForMaskedLM),
    "gpt2": (tiny_gpt2_config, AutoModelForCausalLM),
    "llava": (tiny_llava_config, AutoModelForImageTextToText),
    "qwen2_vl": (tiny_qwen2_vl_config, AutoModelForImageTextToText),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the folder of a tiny model, saved when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config, _ = MODELS[name]
            made[name] = save_tiny(config(), tmp_path_factory.mktemp(name), max_shard_size="150KB")
        return made[name]

    return folder


def held(folder: Path, auto: Any, patcher: Patcher, **options: Any) -> tuple[Plan, Any]:
    """The plan, held against the load: whatever one of them says of modules and weights the other says as well."""
    planned = plan(folder, patcher, model_class=auto, **options)
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, info = auto.from_pretrained(folder, patcher=patcher, output_loading_info=True, **options)
        except (PatcherError, RuntimeError) as raised:
            error = raised
    if error is not None:
        assert not planned.ok
        assert planned.problems[0] == str(error) or isinstance(error, RuntimeError)
        assert ("transformers would raise a RuntimeError" in planned.problems[0]) == isinstance(error, RuntimeError)
        return planned, error
    assert planned.ok, planned.problems
    report = package.report(model)
    assert planned.model == report.model
    for name in ("patchers", "replaced", "fused", "refused", "conversions_dropped", "warnings"):
        assert getattr(planned, name) == getattr(report, name), name
    assert planned.warnings == tuple(str(each.message) for each in caught if each.category is PatcherWarning)
    assert tuple(text for text, _ in planned.conversions_added) == report.conversions_added
    fired = {text for text, _ in report.conversions_fired}
    assert {text for text, keys in (*planned.conversions_added, *planned.conversions_kept) if keys} <= fired
    assert {text for text, keys in planned.conversions_added if not keys}.isdisjoint(fired)
    assert set(planned.missing) == set(info["missing_keys"])
    assert set(planned.left_over) == set(info["unexpected_keys"])
    assert (planned.new_weights, planned.dropped_weights) == (report.new_weights, report.dropped_weights)
    return planned, model


class OwnAttention(LlamaAttention):
    pass


CASES: dict[str, tuple[str, Patcher]] = {
    "nothing": ("llama", Patcher()),
    "own": ("llama", OWN),
    "tied": ("tied", OWN),
    "root": ("llama", Patcher({"LlamaForCausalLM": type("OwnLlama", (LlamaForCausalLM,), {})})),
    "joined": ("llama", JOINED),
    "expression": ("llama", Patcher({"^Llama.*Norm$": OwnNorm})),
    "misspelt": ("llama", OWN | Patcher({"LlamaMPL": OwnMLP})),
    "misspelt, loosely": ("llama", Patcher({"LlamaMPL": OwnMLP}, strict=False)),
    "new and left over": ("llama", Patcher({"LlamaMLP": Both})),
    "new and left over, loosely": ("llama", Patcher({"LlamaMLP": Both}, strict=False)),
    "declared": ("llama", Patcher({"LlamaMLP": Both}, new_weights="upper", dropped_weights="up_proj")),
    "new": ("llama", Patcher({"LlamaMLP": With}, new_weights=["adapter", "scales"])),
    "some new": ("llama", Patcher({"LlamaMLP": With}, new_weights="adapter")),
    "no conversion": ("llama", Patcher({"LlamaMLP": JoinedMLP})),
    "wrong conversion": ("llama", Patcher({"LlamaMLP": JoinedMLP}, (), joining("mlp.gate_proj.weight"))),
    "failing conversion": (
        "llama",
        Patcher({"LlamaMLP": JoinedMLP}, (), joining("mlp.gate_proj.weight", "self_attn.q_proj.weight")),
    ),
    "joined in another dimension": (
        "llama",
        Patcher(
            {"LlamaMLP": JoinedMLP},
            (),
            WeightConverter(
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], [Concatenate(dim=1)]
            ),
        ),
    ),
    "joined in another dimension, loosely": (
        "llama",
        Patcher(
            {"LlamaMLP": JoinedMLP},
            (),
            WeightConverter(
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], [Concatenate(dim=1)]
            ),
            strict=False,
        ),
    ),
    "conversion that takes nothing": ("llama", OWN.replace(extra_weight_conversions=joining("nothing", "nowhere"))),
    "renaming": ("llama", OWN.replace(extra_weight_conversions=WeightRenaming("mlp.up_proj", "mlp.upper"))),
    "filter": ("moe", Patcher({}, "gate_up_proj")),
    "filter, declared": ("moe", Patcher({}, "gate_up_proj", new_weights="gate_up_proj", strict=False)),
    "filter that finds nothing": ("llama", Patcher({}, "experts")),
    "namesake": (
        "llava",
        Patcher(
            {"LlamaAttention": OwnAttention},
            (),
            WeightConverter(["q_proj.weight", "k_proj.weight"], ["qk.weight"], [Concatenate(dim=0)]),
        ),
    ),
    "tower": ("llava", OWN),
    "qkv": ("llama", Patcher(fusions="qkv")),
    "qkv twice": ("llama", Patcher({"LlamaAttention": OwnAttention}, fusions="qkv")),
    "qkv where it is joined already": ("gpt2", Patcher(fusions="qkv")),
    "qkv of an encoder": ("bert", Patcher(fusions="qkv")),
    "fusions of experts": ("moe", Patcher(fusions=["qkv", "gate_up", "sequential_experts"])),
    "fusions of some layers": ("jamba", Patcher(fusions=["qkv", "gate_up"])),
    "listed experts": ("mixtral", Patcher(fusions="sequential_experts")),
    "patch embeddings": ("qwen2_vl", Patcher(fusions="patch_embeddings")),
    "a layer": ("llama", Patcher({"LlamaDecoderLayer": OwnLayer}, fusions="gate_up")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_says_what_the_load_does(case: str, folders: Callable[[str], Path]) -> None:
    name, patcher = CASES[case]
    held(folders(name), MODELS[name][1], patcher)


def test_the_cases_are_good_and_bad(folders: Callable[[str], Path]) -> None:
    verdicts = {plan(folders(name), patcher).ok for name, patcher in CASES.values() if name == "llama"}
    assert verdicts == {True, False}
