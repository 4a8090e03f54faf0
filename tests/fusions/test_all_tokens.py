"""`SequentialExperts(all_tokens=True)`: every expert computes every token, and nothing depends on the data."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from patcher import InvalidPatcherError, Patcher
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.sequential_experts import SequentialExperts
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import build_tiny, save_tiny, tiny_jamba_config, tiny_mixtral_config
from tests.support.tiny_experts import (
    eager_and_listed,
    experts_of,
    tiny_gpt_oss_config,
    tiny_jetmoe_config,
    tiny_llama4_config,
    tiny_longcat_config,
    tiny_nemotron_h_config,
    tiny_qwen3_moe_config,
)

ALL_TOKENS = Patcher(fusions=[SequentialExperts(all_tokens=True)])
IDS, OTHERS = torch.arange(3, 13).view(2, 5), torch.arange(60, 70).view(2, 5)

CASES = [
    pytest.param(tiny_mixtral_config(), id="Mixtral"),
    pytest.param(tiny_qwen3_moe_config(), id="Qwen3-MoE"),
    pytest.param(tiny_jamba_config(), id="Jamba"),
    pytest.param(tiny_gpt_oss_config(), id="gpt-oss"),
    pytest.param(tiny_llama4_config(), id="Llama 4"),
    pytest.param(tiny_nemotron_h_config(), id="Nemotron-H"),
    pytest.param(tiny_longcat_config(), id="LongCat"),
]
EXPORTED = [case for case in CASES if case.id in ("Mixtral", "Qwen3-MoE")]


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = model(ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("config", CASES)
def test_outputs_and_gradients_are_those_of_stock(config: PretrainedConfig) -> None:
    stock, model = eager_and_listed(config, ALL_TOKENS)
    outputs = [logits(each) for each in (stock, model)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    for output in outputs:
        output.square().mean().backward()

    gradients: dict[str, Any] = {name: value.grad for name, value in model.named_parameters()}
    assert None not in gradients.values()
    for experts in experts_of(model):
        assert type(experts).__name__.startswith("AllTokens")
    with torch.no_grad():  # saved as the weights are, gradients are those of the stacks
        for value in model.parameters():
            value.copy_(value.grad)
    found = Patcher().apply(model).state_dict()
    for name, value in stock.named_parameters():
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("training", [False, True], ids=["calibration", "training"])
@pytest.mark.parametrize("config", CASES)
def test_layers_of_every_expert_see_every_token(config: PretrainedConfig, training: bool) -> None:
    stock, model = eager_and_listed(config, ALL_TOKENS)
    seen: dict[nn.Module, list[int]] = {}
    hooks = []
    for experts in experts_of(model):
        whole = max(len(list(expert.children())) for expert in experts)
        for expert in experts:
            # LongCat has weights for experts that do nothing, and some of those are no whole expert.
            for layer in expert.children() if len(list(expert.children())) == whole else ():
                assert type(layer) is nn.Linear
                seen[layer] = []
                hooks.append(layer.register_forward_hook(lambda layer, given, _: seen[layer].append(len(given[0]))))
    model.train(training)
    with torch.set_grad_enabled(training):
        found = logits(model)
    torch.testing.assert_close(found, logits(stock.train(training)), atol=1e-5, rtol=0)

    assert seen
    assert set(map(tuple, seen.values())) == {(IDS.numel(),)}
    for hook in hooks:
        hook.remove()
    logits(model)
    assert set(map(len, seen.values())) == {1}


@pytest.mark.parametrize("config", CASES[:3])
def test_padding_is_seen_too_and_changes_no_output(config: PretrainedConfig) -> None:
    """It is a token as others are: who calibrates with padding, counts it."""
    stock, model = eager_and_listed(config, ALL_TOKENS)
    rows: list[int] = []
    experts_of(model)[0][3].down_proj.register_forward_hook(lambda _, given, output: rows.append(len(given[0])))
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    with torch.no_grad():
        found, expected = (each(IDS, attention_mask=mask, use_cache=False).logits for each in (model, stock))

    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    assert rows == [IDS.numel()]


@pytest.mark.libraries
@pytest.mark.parametrize("config", EXPORTED)
def test_it_compiles_as_one_graph(config: PretrainedConfig) -> None:
    stock, model = eager_and_listed(config, ALL_TOKENS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for ids in (IDS, OTHERS):
        torch.testing.assert_close(logits(compiled, ids), logits(stock, ids), atol=1e-5, rtol=0)


@pytest.mark.libraries
@pytest.mark.parametrize("config", EXPORTED)
def test_it_is_exported(config: PretrainedConfig) -> None:
    stock, model = eager_and_listed(config, ALL_TOKENS)
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        shapes = {"input_ids": {0: auto, 1: auto}, "use_cache": None}
        program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, dynamic_shapes=shapes)
        for ids in (OTHERS, torch.arange(40, 61).view(3, 7)):
            found = program.module()(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, logits(stock, ids), atol=1e-5, rtol=0)


def test_what_overflows_in_an_expert_that_was_not_chosen_weighs_nothing() -> None:
    _, model = eager_and_listed(tiny_mixtral_config(num_local_experts=12), ALL_TOKENS)
    first = experts_of(model)[0]
    ids = torch.tensor([[3]])
    chosen: set[int] = set()
    first.register_forward_pre_hook(lambda _, given: chosen.update(given[1].flatten().tolist()))
    with torch.no_grad():
        expected = logits(model, ids)
        for number, expert in enumerate(first):
            if number not in chosen:
                expert.down_proj.weight.fill_(torch.inf)
        torch.testing.assert_close(logits(model, ids), expected, atol=0, rtol=0)
    assert 0 < len(chosen) < 12


def test_it_is_loaded_and_saved_as_the_checkpoint(tmp_path: Path) -> None:
    save_tiny(tiny_mixtral_config(), tmp_path / "checkpoint")
    for name, options in {"stock": {}, "listed": {"patcher": ALL_TOKENS}}.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", **options)
        model.save_pretrained(tmp_path / name)

    assert same_checkpoint(tmp_path / "listed", tmp_path / "stock")


def test_the_option_is_said_and_read(tmp_path: Path) -> None:
    assert repr(ALL_TOKENS) == "Patcher(fusions=[SequentialExperts(all_tokens=True)])"
    assert Patcher.from_fusion_config({"sequential_experts": {"all_tokens": True}}) == ALL_TOKENS
    with pytest.raises(InvalidPatcherError, match="all_tokens is True or False, found 'false'"):
        Patcher.from_fusion_config({"sequential_experts": {"all_tokens": "false"}})
    assert Patcher.from_fusion_config({"sequential_experts": True}) == Patcher(fusions="sequential_experts")
    assert Patcher(fusions="sequential_experts") != ALL_TOKENS
    assert pickle.loads(pickle.dumps(ALL_TOKENS)) == ALL_TOKENS


def test_the_model_is_pickled_and_copied() -> None:
    _, model = eager_and_listed(tiny_gpt_oss_config(), ALL_TOKENS)
    expected = logits(model)

    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again.model.layers[0].mlp.experts) is type(experts_of(model)[0])
        torch.testing.assert_close(logits(again), expected, atol=0, rtol=0)


def test_the_source_says_what_runs() -> None:
    cls: Any = fused_class_of(SequentialExperts(all_tokens=True), experts_in(tiny_mixtral_config()))
    source = inspect.getsource(cls.forward)

    assert "for expert_idx in range(len(self)):\n" in source
    assert "one_hot" not in source
    assert "nonzero" not in source


def test_tokens_that_the_caller_chooses_are_refused() -> None:
    experts = build_tiny(tiny_jetmoe_config()).model.layers[0].mlp.input_linear
    reason = SequentialExperts(all_tokens=True).refusal(experts)

    assert not SequentialExperts().refusal(experts)
    assert reason == "all_tokens=True: the caller chooses the tokens of each expert"


def experts_in(config: PretrainedConfig) -> Any:
    return build_tiny(config).model.layers[0].mlp.experts
