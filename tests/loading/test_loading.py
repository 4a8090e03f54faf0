"""One load under a patcher: every way in, layers of patchers, and what the keys of a class mapping mean."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    pipeline,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import PatchConflictError, PatchConstructionError, Patcher, PatcherWarning, UnmatchedPatchError
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from tests.support import shared
from tests.support.replacements import (
    OWN,
    OtherMLP,
    OtherNorm,
    OwnLayer,
    OwnMLP,
    OwnNorm,
    ThirdMLP,
    classes,
    same_output,
)
from tests.support.tiny import build_tiny, tiny_inputs, tiny_llama_config, tiny_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


# --- every way in --------------------------------------------------------------------------------------------------


def in_applied(folder: Path) -> Any:
    with OWN.applied():
        return LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: AutoModelForCausalLM.from_pretrained(folder, patcher=OWN),
        lambda folder: AutoModel.from_pretrained(folder, patcher=OWN),
        lambda folder: LlamaForCausalLM.from_pretrained(folder, patcher=OWN),
        lambda folder: LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=folder, patcher=OWN),
        lambda folder: LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, patcher=OWN)[0],
        lambda folder: LlamaForCausalLM.from_pretrained(
            None,
            config=AutoConfig.from_pretrained(folder),
            state_dict=build_tiny(tiny_llama_config()).state_dict(),
            patcher=OWN,
        ),
        in_applied,
    ],
    ids=["auto", "auto base model", "class", "path by keyword", "loading info", "state dict", "applied"],
)
def test_every_load_builds_the_replacement_and_computes_the_same(load: Any, llama: Path) -> None:
    model = load(llama)
    assert classes(model) == {"OwnMLP": 2, "LlamaRMSNorm": 5}
    assert same_output(model, type(model).from_pretrained(llama))
    assert classes(type(model).from_pretrained(llama)) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


def by_hand() -> Any:
    with OWN.applied():
        return LlamaForCausalLM(tiny_llama_config())


def made_in_applied() -> Any:
    with OWN.applied():
        return AutoModelForCausalLM.from_config(tiny_llama_config())


@pytest.mark.parametrize(
    "make",
    [
        lambda: AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=OWN),
        lambda: AutoModelForCausalLM.from_config(tiny_llama_config(), dtype=torch.bfloat16, patcher=OWN),
        lambda: LlamaForCausalLM._from_config(tiny_llama_config(), patcher=OWN),
        made_in_applied,
        by_hand,
    ],
    ids=["auto", "auto in bf16", "class", "applied auto", "applied class"],
)
def test_a_model_from_a_config_has_the_replacement_and_real_weights(make: Any) -> None:
    model = make()
    assert classes(model) == {"OwnMLP": 2, "LlamaRMSNorm": 5}
    assert all(parameter.device.type == "cpu" and parameter.isfinite().all() for parameter in model.parameters())
    assert model(**tiny_inputs(model.config)).logits.isfinite().all()
    assert classes(LlamaForCausalLM(tiny_llama_config())) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


def test_a_pipeline_takes_a_patcher(llama: Path) -> None:
    make = {"task": "text-generation", "model": str(llama), "tokenizer": tiny_tokenizer()}
    patched = pipeline(**make, model_kwargs={"patcher": OWN})
    assert classes(patched.model) == {"OwnMLP": 2, "LlamaRMSNorm": 5}
    options = {"max_new_tokens": 4, "do_sample": False}
    assert patched("w5 w6 w7", **options) == pipeline(**make)("w5 w6 w7", **options)


class Unbuildable(nn.Module):
    def __init__(self, config: Any) -> None:
        raise ValueError(f"no {config.model_type} today")


@pytest.mark.parametrize(
    ("patcher", "error", "text"),
    [
        (Patcher({"LlamaMPL": OwnMLP}), UnmatchedPatchError, "no class of the model matches 'LlamaMPL'.*LlamaMLP"),
        (Patcher({"LlamaMLP": Unbuildable}), PatchConstructionError, "ValueError: no llama today"),
    ],
)
def test_an_error_of_ours_comes_out_of_a_pipeline_as_itself(
    patcher: Patcher, error: type[Exception], text: str, llama: Path
) -> None:
    with pytest.raises(error, match=text):
        pipeline("text-generation", str(llama), tokenizer=tiny_tokenizer(), model_kwargs={"patcher": patcher})


# --- blocks and layers ---------------------------------------------------------------------------------------------


def test_a_block_patches_all_that_is_built_in_it_and_nothing_after() -> None:
    with OWN.applied() as entered:
        assert entered is OWN
        models = [LlamaForCausalLM(tiny_llama_config()), LlamaModel(tiny_llama_config())]
    assert [classes(model)["OwnMLP"] for model in models] == [2, 2]
    assert "OwnMLP" not in classes(LlamaModel(tiny_llama_config()))


def test_a_module_built_by_itself_in_a_block_is_the_replacement() -> None:
    with OWN.applied():
        module = LlamaMLP(tiny_llama_config())
    assert type(module) is OwnMLP
    assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP


def test_the_inner_block_wins_per_key_and_the_outer_one_resumes() -> None:
    outer = Patcher({"LlamaMLP": OwnMLP, "LlamaRMSNorm": OwnNorm})
    with outer.applied():
        with Patcher({"LlamaMLP": OtherMLP}).applied():
            inner_model = LlamaForCausalLM(tiny_llama_config())
        outer_model = LlamaForCausalLM(tiny_llama_config())
    assert classes(inner_model) == {"OtherMLP": 2, "OwnNorm": 5}
    assert classes(outer_model) == {"OwnMLP": 2, "OwnNorm": 5}


def test_one_patcher_can_be_applied_within_itself() -> None:
    with OWN.applied():
        with OWN.applied():
            inner = LlamaForCausalLM(tiny_llama_config())
        outer = LlamaForCausalLM(tiny_llama_config())
    assert classes(inner) == classes(outer) == {"OwnMLP": 2, "LlamaRMSNorm": 5}
    assert classes(LlamaForCausalLM(tiny_llama_config())) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


@pytest.mark.parametrize("way", ["load", "config"])
def test_the_argument_wins_over_the_block_over_the_registry_per_key(way: str, llama: Path) -> None:
    register_patch_mapping({"LlamaMLP": ThirdMLP, "LlamaRMSNorm": OtherNorm, "LlamaDecoderLayer": OwnLayer})
    try:
        with Patcher({"LlamaMLP": OtherMLP, "LlamaRMSNorm": OwnNorm}).applied():
            if way == "load":
                model = AutoModelForCausalLM.from_pretrained(llama, patcher=OWN)
            else:
                model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=OWN)
    finally:
        clear_patch_mapping()
    assert classes(model) == {"OwnMLP": 2, "OwnNorm": 5}
    assert {type(layer).__name__ for layer in model.model.layers} == {"OwnLayer"}


def test_an_exact_name_of_an_outer_layer_gives_way_to_an_expression_of_the_inner_one() -> None:
    with Patcher({"LlamaMLP": OwnMLP}).applied(), Patcher({"Llama.*MLP": OtherMLP}).applied():
        assert classes(LlamaForCausalLM(tiny_llama_config()))["OtherMLP"] == 2


def test_another_task_of_the_same_loop_builds_stock() -> None:
    async def main() -> tuple[Any, Any]:
        entered, built = asyncio.Event(), asyncio.Event()

        async def patched() -> Any:
            with OWN.applied():
                entered.set()
                await built.wait()
                return LlamaForCausalLM(tiny_llama_config())

        async def plain() -> Any:
            await entered.wait()
            model = LlamaForCausalLM(tiny_llama_config())
            built.set()
            return model

        return await asyncio.gather(patched(), plain())

    patched, plain = asyncio.run(main())
    assert classes(patched)["OwnMLP"] == classes(plain)["LlamaMLP"] == 2


def test_an_empty_patcher_changes_nothing(llama: Path) -> None:
    assert classes(LlamaForCausalLM.from_pretrained(llama, patcher=Patcher())) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


# --- names and expressions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"^LlamaMLP$": OwnMLP}, {"OwnMLP": 2, "LlamaRMSNorm": 5}),
        ({"amaMLP|nothing": OwnMLP}, {"OwnMLP": 2, "LlamaRMSNorm": 5}),
        ({".*MLP": OwnMLP, ".*Norm": OwnNorm}, {"OwnMLP": 2, "OwnNorm": 5}),
        ({".*MLP": OwnMLP, "LlamaMLP": OtherMLP}, {"OtherMLP": 2, "LlamaRMSNorm": 5}),
        ({"LlamaMLP": OtherMLP, ".*MLP": OwnMLP}, {"OtherMLP": 2, "LlamaRMSNorm": 5}),
        ({".*MLP": OwnMLP, "Llama.LP": OwnMLP}, {"OwnMLP": 2, "LlamaRMSNorm": 5}),
    ],
    ids=["anchored", "found inside", "two", "exact second", "exact first", "two that agree"],
)
def test_keys_are_names_or_expressions(mapping: dict[str, Any], expected: dict[str, int], llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher(mapping))
    assert classes(model) == expected


def test_a_key_that_names_the_class_itself_keeps_it_stock(llama: Path) -> None:
    stock = Patcher({"LlamaMLP": LlamaMLP})
    with OWN.applied():
        assert classes(LlamaForCausalLM.from_pretrained(llama, patcher=stock)) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}
        with stock.applied():
            assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP


def test_a_name_is_never_searched_in_longer_names(llama: Path) -> None:
    with pytest.raises(UnmatchedPatchError, match="no class of the model matches 'MLP'; nearest: LlamaMLP"):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"MLP": OwnMLP}))


def test_two_expressions_that_disagree_about_a_class_are_an_error(llama: Path) -> None:
    patcher = Patcher({".*MLP": OwnMLP, "Llama.LP": OtherMLP})
    text = (
        r"'\.\*MLP' and 'Llama\.LP' both match the class LlamaMLP.*OwnMLP and OtherMLP.*add the exact name.*'LlamaMLP'"
    )
    with pytest.raises(PatchConflictError, match=text):
        LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    with pytest.raises(PatchConflictError, match=text), patcher.applied():
        LlamaForCausalLM(tiny_llama_config())


def test_expressions_that_would_disagree_about_the_classes_of_another_model_are_no_error(llama: Path) -> None:
    import transformers.models.bert.modeling_bert  # noqa: F401 - its classes are known from here on

    patcher = Patcher(
        {"Llama.*MLP": OwnMLP, "Bert(Layer|Attention)$": nn.Identity, "Bert.*Layer$": OwnMLP}, strict=False
    )
    with pytest.warns(PatcherWarning, match="Bert"):
        assert classes(LlamaForCausalLM.from_pretrained(llama, patcher=patcher))["OwnMLP"] == 2


# --- nothing is left -----------------------------------------------------------------------------------------------


def test_a_load_that_fails_while_its_scope_is_opened_leaves_no_context_entered(llama: Path) -> None:
    class Frozen(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError(f"{name} is frozen")

    # Modeling code whose class can't be covered, next to one that was covered before it.
    frozen = Frozen("LlamaFrozenMLP", (LlamaMLP,), {"__module__": "transformers_modules.frozen"})
    before = LlamaMLP.__init__
    with pytest.raises(TypeError, match="__init__ is frozen"):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"Llama.*MLP": OwnMLP}))
    assert LlamaMLP.__init__ is before
    assert torch.empty(0).device.type == "cpu"
    assert classes(LlamaForCausalLM.from_pretrained(llama)) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}
    del frozen
    gc.collect()  # the next test's expressions shall not meet it
