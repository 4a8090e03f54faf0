"""What is run on a few layers of a deep model: it is as sure to be seen there, and what is right stays right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)

from patcher import Patcher, verify
from patcher.verification.comparing import Pair, Reference
from patcher.verification.modules import precision_stage
from patcher.verification.passes import Pass
from patcher.verification.texts import reactions
from tests.support.tiny import DECODER_SIZES, build_tiny, tiny_bert_config, tiny_llama_config
from tests.verification.wrong_patches import kept, off

LAYERS = 7
DEEP = tiny_llama_config(num_hidden_layers=LAYERS)


def deep(patcher: Patcher | None = None, config: Any = DEEP) -> Any:
    torch.manual_seed(0)
    with nullcontext() if patcher is None else patcher.applied():
        return build_tiny(config)


def probe(**more: Any) -> Pass:
    return Pass("forward", {"input_ids": torch.arange(6)[None]} | more)


def left(ours: PreTrainedModel, stock: PreTrainedModel | None = None, name: str = "layers") -> list[int]:
    """The numbers of the layers that are run."""
    pair = Pair(stock or deep(config=ours.config), ours)
    before = {id(model): list(model.named_parameters()) for model in (pair.stock, pair.ours)}
    with pair.layers(few=True):
        found = [
            [int(key) for path, part in model.named_modules() if path.endswith(name) for key in part._modules]
            for model in (pair.stock, pair.ours)
        ]
    assert found[0] == found[1]
    assert bool(pair.stacks) == (len(found[0]) < pair.stock.config.num_hidden_layers)
    for model in (pair.stock, pair.ours):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in before[id(model)]]
    return found[0]


class Gated(LlamaMLP):
    """As stock."""


class OwnLayer(LlamaDecoderLayer):
    """As stock."""


class OwnModel(LlamaModel):
    """As stock."""


ALL, FEW = list(range(LAYERS)), [0, 1, 3, 6]
GEMMA3 = Gemma3TextConfig(**DECODER_SIZES | {"num_hidden_layers": 12, "head_dim": 16, "sliding_window": 8})


@pytest.mark.parametrize(
    ("patcher", "config", "expected"),
    [
        pytest.param(Patcher(fusions=["qkv", "gate_up"]), DEEP, FEW, id="fused"),
        pytest.param(Patcher({"LlamaMLP": Gated}), DEEP, FEW, id="a part"),
        pytest.param(Patcher({"LlamaDecoderLayer": OwnLayer}), DEEP, FEW, id="the layers"),
        pytest.param(Patcher({"LlamaModel": OwnModel}), DEEP, ALL, id="what runs the layers"),
        pytest.param(Patcher(fusions=["qkv"]), GEMMA3, [0, 1, 5, 6, 10, 11], id="two kinds of attention"),
    ],
)
def test_of_each_kind_the_first_two_the_middle_and_the_last_are_run(
    patcher: Patcher, config: Any, expected: list[int]
) -> None:
    assert left(deep(patcher, config)) == expected


def test_layers_of_encoders_too() -> None:
    config = tiny_bert_config(num_hidden_layers=LAYERS)
    assert left(deep(Patcher(fusions=["qkv"]), config), name="encoder.layer") == FEW


VALUES = st.sampled_from([None, True, 1, 100, 200, 2.5, "text", (1, 2), [3], {"a": 1}, torch.float32])


@settings(max_examples=30, deadline=None)
@example([100, 100, 100, 100, 200, 100, 100], "mlp")
@given(st.lists(VALUES, min_size=LAYERS, max_size=LAYERS), st.sampled_from(["mlp", "self_attn.o_proj", ""]))
def test_layers_of_other_settings_are_of_another_kind(values: list[Any], path: str) -> None:
    """Every kind is among those that are run, whatever it is that layers have of their own."""
    ours = deep(Patcher({"LlamaMLP": Gated}))
    for layer, value in zip(ours.model.layers, values, strict=True):
        layer.get_submodule(path).setting = value
    run = left(ours)
    kinds = [(type(value), value) for value in values]
    for kind in kinds:
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        assert {numbers[0], numbers[-1]} <= set(run)
    assert len(run) <= 4 * len([kind for number, kind in enumerate(kinds) if kind not in kinds[:number]])


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param(lambda layer: setattr(layer.mlp, "note", torch.ones(3)), id="a tensor"),
        pytest.param(lambda layer: setattr(layer.mlp, "note", lambda: None), id="a function"),
        pytest.param(lambda layer: setattr(layer.mlp, "forward", layer.mlp.forward), id="a forward of its own"),
        pytest.param(lambda layer: layer.mlp.register_forward_hook(lambda *_: None), id="a hook"),
        pytest.param(lambda layer: layer.mlp.up_proj.requires_grad_(False), id="a frozen weight"),
        pytest.param(lambda layer: layer.mlp.register_buffer("note", torch.ones(3)), id="a buffer"),
        pytest.param(lambda layer: layer.mlp.double(), id="a type"),
        pytest.param(lambda layer: layer.mlp.train(), id="a mode"),
        pytest.param(lambda layer: setattr(layer.mlp.act_fn, "__class__", nn.Tanh), id="a part"),
    ],
)
def test_what_cannot_be_told_to_be_alike_is_run(unlike: Any) -> None:
    """Of both models, and whichever of them it is."""
    for which in (0, 1):
        models = [deep(), deep(Patcher({"LlamaMLP": Gated}))]
        unlike(models[which].model.layers[5])
        assert 5 in left(models[1], models[0])


def test_what_stock_cannot_run_on_a_few_it_runs_on_all() -> None:
    pair = Pair(deep(), deep(Patcher({"LlamaMLP": Gated})))
    for model in (pair.stock, pair.ours):
        model.__class__ = Picky
    assert [one.few for one in pair.references([probe(), BATCH])] == [True, False]
    assert [one.few for one in pair.references([probe()], few=False)] == [False]
    assert not list(pair.references([probe(position_ids=torch.ones(7, 7))]))  # stock raises
    assert "RuntimeError" in pair.refusal


class Picky(LlamaForCausalLM):
    """For a batch, and for logits of some tokens, it asks something of layer 5."""

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        if len(input_ids) > 1 or logits_to_keep:
            assert self.model.layers[5].self_attn.layer_idx == 5
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)


BATCH = Pass("forward", {"input_ids": torch.arange(12).view(2, 6)})


@pytest.mark.parametrize(
    ("wrong", "references"),
    [
        pytest.param(
            off(nn.Linear, lambda m, x, k: len(x) > 1),
            lambda pair: pair.references([probe(), BATCH]),
            id="a text",
        ),
        pytest.param(
            off(nn.Linear, lambda m, x, k: x.shape[1] < 6),
            lambda pair: reactions(pair, probe()),
            id="an argument",
        ),
    ],
)
def test_what_stock_refuses_on_a_few_only_is_checked_on_all(
    wrong: type[nn.Module], references: Callable[[Pair], Iterator[Reference]]
) -> None:
    """And not left out, as what it refuses on all is."""
    pair = Pair(deep(), deep())
    pair.ours.lm_head.__class__ = wrong
    for model in (pair.stock, pair.ours):
        model.__class__ = Picky
    with torch.no_grad():
        assert "it begins in lm_head" in pair.compare("outputs", references(pair), 1e-5).message


def test_all_layers_are_there_again_after_an_error() -> None:
    pair = Pair(deep(), deep(Patcher({"LlamaMLP": Gated})))
    with pytest.raises(ValueError, match="exactly one"), pair.layers(few=True):  # noqa: PT012
        assert len(pair.ours.model.layers) == len(FEW)
        pair.ours(no_such_argument=1)
    assert [len(model.model.layers) for model in (pair.ours, pair.stock)] == [LAYERS, LAYERS]


def test_modules_by_themselves_get_inputs_in_whatever_layer_they_are() -> None:
    pair = Pair(deep().bfloat16(), deep(Patcher({"LlamaMLP": Gated})).bfloat16())
    for paths in (["model.layers.0.mlp"], ["model.layers.5.mlp"], ["model.layers.0.mlp", "model.layers.5.mlp"]):
        with torch.no_grad():
            stage = precision_stage(pair, lambda dtype: pair, paths, [probe()], torch.bfloat16, tolerance=1e-4)
        assert stage.passed
        assert dict(stage.figures)["modules compared with float64"] == len(paths)


class OnAll(LlamaDecoderLayer):
    """As stock, if it is called with all others: it knows how many were called before it."""

    before: ClassVar[list[int]] = []

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.number = layer_idx

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.number == 0:
            self.before.clear()
        assert len(self.before) == self.number
        self.before.append(self.number)
        return super().forward(*args, **kwargs)


class DropoutInOne(LlamaAttention):
    """In training one layer drops, which nothing marks but its number."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found, *others = super().forward(*args, **kwargs)
        return nn.functional.dropout(found, 0.1, self.training and self.layer_idx == 5), *others


def marked(condition: Callable[[Any, torch.Tensor], bool]) -> Patcher:
    """Layer 5 is wrong where the condition holds, and has a setting that says so."""

    class Marked(off(LlamaDecoderLayer, lambda m, x, k: m.marked and condition(m, x))):
        def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.marked = layer_idx == 5

    return Patcher({"LlamaDecoderLayer": Marked})


@pytest.mark.parametrize(
    ("patcher", "says"),
    [
        pytest.param(Patcher({"LlamaDecoderLayer": OnAll}), "", id="right on all layers only"),
        pytest.param(
            Patcher({"LlamaMLP": off(LlamaMLP, lambda m, x, k: m.training and x.shape[1] > 100)}),
            r"training: on a row of 128 tokens .* it begins in model\.layers\.0\.mlp \(.*Off",
            id="long rows in training",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Patcher({"LlamaAttention": DropoutInOne}),
            r"training: on a padded batch .*model\.layers\.5\.self_attn",
            id="training in one layer",
        ),
        pytest.param(
            marked(lambda m, x: m.training and x.shape[1] > 100),
            r"training: on a row of 128 tokens .*model\.layers\.5 ",
            id="a marked layer, long rows in training",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            marked(lambda m, x: x.shape[1] == 1 and m.calls > 38),
            r"outputs: on a prompt, then token by token .*model\.layers\.5 ",
            id="a marked layer, late steps",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Patcher({"LlamaAttention": off(LlamaAttention, lambda m, x, k: m.layer_idx == 5 and kept(k) > 40)}),
            r"outputs: on a prompt in chunks .*model\.layers\.5\.self_attn ",
            id="a full cache in one layer",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_deep_model_is_seen(patcher: Patcher, says: str) -> None:
    found = verify(DEEP, patcher)
    if not says:
        found.raise_on_failure()
    else:
        assert not found.passed
        assert any(re.search(says, text) for text in found.failures), found.failures
