"""What a load says of mistakes that names and shapes betray, and what it doesn't say of what was declared."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM, ResNetConfig, WeightConverter
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    PatcherWarning,
    UnmatchedPatchError,
    plan,
    report,
)
from patcher.loading.routes import unfit_error
from tests.support import shared
from tests.support.replacements import JOIN, JOINED, OWN, Both, JoinedMLP, With, joining
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def load(folder: Path, patcher: Patcher, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options)


# --- declarations that match nothing -------------------------------------------------------------------------------

DECLARED = Patcher({"LlamaMLP": Both}, new_weights="upper", dropped_weights="up_proj")
IDLE = [
    ({"new_weights": ["upper", "lower_"]}, r"new_weights: 'lower_' matches no parameter; "),
    (
        {"dropped_weights": ["up_proj", "up_prj"]},
        r"dropped_weights: 'up_prj' matches no key of the checkpoint; nearest: model\.layers",
    ),
]


@pytest.mark.parametrize(("changes", "text"), IDLE)
def test_a_declaration_that_matches_nothing_is_an_error(changes: dict[str, Any], text: str, llama: Path) -> None:
    load(llama, DECLARED)
    wrong = DECLARED.replace(**changes)
    with pytest.raises(UnmatchedPatchError, match=text) as caught:
        load(llama, wrong)
    assert plan(llama, wrong).problems == (str(caught.value),)
    with pytest.warns(PatcherWarning, match=text):
        load(llama, wrong.replace(strict=False))
    with pytest.raises(UnmatchedPatchError, match=text), wrong.applied():
        LlamaForCausalLM.from_pretrained(llama)


class NoExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states


NO_EXPERTS = Patcher({"MixtralExperts": NoExperts}, dropped_weights=[r"mlp\.experts\.gate_up", r"experts\.down_proj$"])


@pytest.mark.parametrize(
    ("config", "patcher"),
    [(tiny_llama_config(), DECLARED), (tiny_mixtral_config(), NO_EXPERTS)],
    ids=["mlp", "experts"],
)
def test_dropped_weights_may_be_gone_from_what_the_patched_model_has_saved(
    config: Any, patcher: Patcher, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(shared.checkpoint(config), patcher=patcher).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    assert plan(tmp_path, patcher).ok
    wrong = patcher.replace(dropped_weights=[*patcher.dropped_weights, "up_prj"])
    with pytest.raises(UnmatchedPatchError, match="dropped_weights: 'up_prj' matches no key of the checkpoint"):
        AutoModelForCausalLM.from_pretrained(tmp_path, patcher=wrong)


def test_dropped_weights_are_judged_only_where_a_checkpoint_was_read(llama: Path) -> None:
    wrong = DECLARED.replace(dropped_weights="nothing")
    with wrong.applied():
        LlamaForCausalLM(tiny_llama_config())
    LlamaForCausalLM._from_config(tiny_llama_config(), patcher=wrong)  # type: ignore[call-arg]
    with pytest.raises(UnmatchedPatchError, match="'nothing_new' matches no parameter"):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=wrong.replace(new_weights="nothing_new"))  # type: ignore[call-arg]


def test_a_declaration_is_matched_by_any_model_of_a_block(llama: Path, tmp_path: Path) -> None:
    patcher = Patcher({"LlamaMLP": With}, new_weights=["adapter", "scales", r"experts\.down_proj"])
    moe = save_tiny(tiny_mixtral_config(), tmp_path)
    with patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)
        MixtralForCausalLM.from_pretrained(moe)
    with pytest.raises(UnmatchedPatchError, match="experts"), patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)


# --- conversions ---------------------------------------------------------------------------------------------------


class ManyLinears(nn.Module):
    conversion_mapping = WeightConverter(["*.w1.weight", "*.w3.weight"], ["both.*.weight"], [Concatenate(0)])

    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.hidden_size, 2 * config.intermediate_size
        self.both = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(config.num_local_experts))


def test_a_target_of_several_parameters_of_which_the_operations_make_one() -> None:
    text = (
        r"both\.\*\.weight \[Concatenate\(dim=0\)\] failed .* both\.\*\.weight stands for several parameters, and its"
    )
    patcher = Patcher({"MixtralExperts": ManyLinears}, dropped_weights="w2")
    with pytest.raises(PatchedWeightsError, match=text) as caught:
        AutoModelForCausalLM.from_pretrained(shared.checkpoint(tiny_mixtral_config()), patcher=patcher)
    assert "twice" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "sources"),
    [
        (tiny_llama_config(), "LlamaMLP", ["gate_proj.weight", "up_proj.weight"]),
        (tiny_mixtral_config(), "MixtralExperts", ["*.w1.weight", "*.w3.weight"]),
    ],
)
def test_operations_that_leave_the_sources_apart(config: Any, name: str, sources: list[str]) -> None:
    """MergeModulelist stacks the tensors of each source, and gives one stack for each."""
    conversion = WeightConverter(sources, "both", [MergeModulelist(dim=0)])
    layer = type("Layer", (ManyLinears,), {"conversion_mapping": conversion, "__init__": stacks_of_two})
    patcher = Patcher({name: layer}, dropped_weights=r"w2|down_proj")
    text = rf"don't join {re.escape(', '.join(sources))}: end with Concatenate\(dim=0\)"
    with pytest.raises(PatchedWeightsError, match=text) as caught:
        AutoModelForCausalLM.from_pretrained(shared.checkpoint(config), patcher=patcher)
    assert "twice" not in str(caught.value)
    layer.conversion_mapping = WeightConverter(sources, "both", [MergeModulelist(dim=0), Concatenate(dim=0)])
    AutoModelForCausalLM.from_pretrained(shared.checkpoint(config), patcher=patcher)


class Negated(ConversionOps):
    """Names its result as the tensor is named, or, as transformers does, by the target."""

    def __init__(self, by_target: bool) -> None:
        self.by_target = by_target

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        ((name, (tensor,)),) = input_dict.items()
        return {target_patterns[0] if self.by_target else name: -tensor}


def test_an_operation_that_leaves_the_name_of_the_source() -> None:
    folder, layer = shared.checkpoint(tiny_llama_config()), type("Layer", (LlamaMLP,), {})
    patcher = Patcher({"LlamaMLP": layer})
    text = r"its operations return \^up_proj\.weight, which is not in target_patterns"
    layer.conversion_mapping = WeightConverter("^up_proj.weight", "up_proj.weight", [Negated(by_target=False)])
    with pytest.raises(PatchedWeightsError, match=text):
        AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)
    layer.conversion_mapping = WeightConverter("^up_proj.weight", "up_proj.weight", [Negated(by_target=True)])
    AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)


def stacks_of_two(self: Any, config: Any) -> None:
    nn.Module.__init__(self)
    count = getattr(config, "num_local_experts", 1)
    self.both = nn.Parameter(torch.empty(2 * count, config.intermediate_size, config.hidden_size))


@pytest.mark.parametrize("target", ["mlp.gate_up_prj.weight", "mlp.gate_up.weight", "gate_up_projj.weight"])
def test_a_misspelt_target_is_said_to_be_one(target: str, llama: Path) -> None:
    wrong = joining("mlp.gate_proj.weight", "mlp.up_proj.weight", target=target)
    patcher = JOINED.replace(extra_weight_conversions=wrong)
    text = r"makes model\.layers\.\{0\.\.1\}\.\S+, which the model doesn't have; nearest: .*mlp\.gate_up_proj\.weight"
    with pytest.raises(UnmatchedPatchError, match=text) as caught:
        load(llama, patcher)
    assert "took no tensor" not in str(caught.value)


def test_a_source_that_took_nothing_leaves_over_what_it_was_for(llama: Path) -> None:
    wrong = joining("mlp.gate_prj.weight", "mlp.up_proj.weight")
    text = r"(?s)makes \(96, 64\), the model has \(192, 64\).*unused:\n  model\.layers\.\S+\.mlp\.gate_proj\.weight"
    with pytest.raises(PatchedWeightsError, match=text):
        load(llama, JOINED.replace(extra_weight_conversions=wrong))


@pytest.mark.parametrize(
    ("sources", "target", "text"),
    [
        (
            "gate_up_proj",
            "both",
            r"took no tensor: .*replaces; it has \{0\.\.3\}\.w1\.weight, .*w2\.weight, .*w3\.weight",
        ),
        ("block_sparse_moe.experts.*.w1.weight", "both", r"took no tensor: .*; nearest: \{0\.\.3\}\.w1\.weight"),
        ("*.w1.weight", "bot", r"makes bot, which the model doesn't have; nearest: both$"),
        ("*.w1.weight", "mlp.experts.both", r"makes mlp\.experts\.both, which .* have; nearest: both$"),
    ],
)
def test_a_conversion_of_a_class_is_said_what_is_in_the_module(sources: str, target: str, text: str) -> None:
    """The checkpoint has single experts, and stock's parameters are their stacks."""
    conversion = WeightConverter(sources, target, [MergeModulelist(dim=0)])
    layer = type("Layer", (nn.Module,), {"conversion_mapping": conversion, "__init__": stacks_of_two})
    with pytest.raises(UnmatchedPatchError, match=rf"(?m)Layer\.conversion_mapping: .* {text}"):
        MixtralForCausalLM.from_pretrained(
            shared.checkpoint(tiny_mixtral_config()), patcher=Patcher({"MixtralExperts": layer}, dropped_weights="w")
        )


def test_a_conversion_of_which_another_takes_the_tensors(llama: Path) -> None:
    conversion = joining("gate_proj.weight", "up_proj.weight", target="gate_up_proj.weight")
    also = type("Also", (JoinedMLP,), {"conversion_mapping": conversion})
    text = r"Also\.conversion_mapping: .* took no tensor: another conversion takes them"
    with pytest.raises(UnmatchedPatchError, match=text):
        load(llama, JOINED.replace(class_mapping={"LlamaMLP": also}))


def test_a_conversion_of_a_class_that_names_the_module_is_said_to(llama: Path) -> None:
    """Its names would be found, and what they make there is: the reason is where it is written."""
    named = type("NamedMLP", (JoinedMLP,), {"conversion_mapping": [JOIN]})
    text = r"took no tensor: names in the conversion_mapping of a class begin inside of the module that it replaces"
    with pytest.raises(UnmatchedPatchError, match=rf"NamedMLP\.conversion_mapping: .* {text}"):
        load(llama, Patcher({"LlamaMLP": named}))
    inside = type(
        "NamedMLP",
        (JoinedMLP,),
        {"conversion_mapping": [joining("gate_proj.weight", "up_proj.weight", target="gate_up_proj.weight")]},
    )
    load(llama, Patcher({"LlamaMLP": inside}))


def test_a_report_says_that_swapped_sources_are_not_seen(llama: Path) -> None:
    swapped = joining("mlp.up_proj.weight", "mlp.gate_proj.weight")
    model = load(llama, JOINED.replace(extra_weight_conversions=swapped))  # nothing tells: the shapes are the same
    assert "patcher.verify(model, patcher)" in " ".join(str(report(model)).split())
    for right in (OWN, Patcher(fusions="gate_up")):
        assert not report(load(llama, right)).unchecked


# --- fusions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fusion", "text"),
    [
        ("patch_embeddings", "no module of the model has a convolution in two or three dimensions"),
        ("sequential_experts", "no module of the model has weights of experts that are stacked"),
    ],
)
def test_a_fusion_that_finds_nothing_says_what_it_looked_for(fusion: str, text: str, llama: Path) -> None:
    with pytest.raises(UnmatchedPatchError, match=f"'{fusion}' found no module that it can fuse: {text}"):
        load(llama, Patcher(fusions=["qkv", fusion]))


def test_a_fusion_that_finds_nothing_says_what_was_replaced(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=JOIN, fusions="gate_up")
    with pytest.raises(
        UnmatchedPatchError, match=r"gate_proj, up_proj; .*; mappings have replaced LlamaMLP by JoinedMLP"
    ):
        load(llama, patcher)


def test_a_fusion_that_finds_nothing_says_why_it_left_alone_what_it_found() -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    (problem,) = plan(config, Patcher(fusions="patch_embeddings")).problems
    assert "found no module that it can fuse; it refused resnet." in problem
    assert "resnet.embedder.embedder.convolution (its patches overlap" in problem


# --- the log -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
def test_declared_weights_are_not_logged(declared: bool, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    patcher = DECLARED if declared else DECLARED.replace(new_weights=(), dropped_weights=(), strict=False)
    try:
        if declared:
            _, info = load(llama, patcher, output_loading_info=True)
            assert info["missing_keys"]  # who asks is told
        else:
            with pytest.warns(PatcherWarning):
                load(llama, patcher)
    finally:
        logger.removeHandler(caplog.handler)
    assert ("MISSING" in caplog.text) is not declared
    assert ("UNEXPECTED" in caplog.text) is not declared


def test_of_many_keys_the_rest_is_counted() -> None:
    many = [f"{name}.weight" for name in "abcdefghijkl"]
    assert "\n  j.weight\n  and 2 more\nLoad" in str(unfit_error({"quantized": many}))
    assert "more" not in str(unfit_error({"quantized": ["a.weight"]}))


# --- what takes a model ----------------------------------------------------------------------------------------------

OPTIMIZER = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "checkpoint_weights": lambda model: list(patcher.checkpoint_weights(model)),
    "checkpoint_metadata": patcher.checkpoint_metadata,
    "load_checkpoint_weights": lambda model: patcher.load_checkpoint_weights(model, {}),
    "original_state_dict": patcher.original_state_dict,
    "load_original_state_dict": lambda model: patcher.load_original_state_dict(model, {}),
    "fused_parameters": patcher.fused_parameters,
    "original_optimizer_state_dict": lambda model: patcher.original_optimizer_state_dict(model, OPTIMIZER),
    "load_original_optimizer_state_dict": lambda model: patcher.load_original_optimizer_state_dict(
        model, OPTIMIZER, {}
    ),
    "save_new_weights": lambda model: patcher.save_new_weights(model, "folder"),
    "load_new_weights": lambda model: patcher.load_new_weights(model, "folder"),
}


@pytest.mark.parametrize("name", OF_A_MODEL)
@pytest.mark.parametrize(
    ("given", "found"), [(None, r"None \(NoneType\)"), ("gpt2", r"'gpt2' \(str\)"), ({}, r"\{\} \(dict\)")]
)
def test_what_is_no_model_is_refused_by_what_takes_one(name: str, given: Any, found: str) -> None:
    with pytest.raises(InvalidPatcherError, match=rf"The model must be an nn\.Module, found {found}\."):
        OF_A_MODEL[name](given)
