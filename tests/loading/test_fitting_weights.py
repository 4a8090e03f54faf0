"""Every weight of a replaced module comes from the checkpoint, and every one of the checkpoint's is used (row 10)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)
from transformers.core_model_loading import Concatenate, WeightConverter
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.llama import modeling_llama

from patcher import PatchedWeightsError, Patcher
from patcher.layouts.transforms import describe
from tests.support import shared
from tests.support.replacements import JOIN, JOINED, OWN, Both, OwnMLP, With, Without, classes, same_output
from tests.support.tiny import save_tiny, tiny_bert_config, tiny_llama_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_bert_config())


def load(folder: Path, patcher: Patcher, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options)


# --- weights that don't fit ----------------------------------------------------------------------------------------


class Wide(OwnMLP):
    """Wants a weight in another shape."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.up_proj = nn.Linear(config.hidden_size + 1, config.intermediate_size, bias=False)


def line_to_add(error: Exception) -> dict[str, Any]:
    """The keyword arguments in "If they are meant to be new, add to the Patcher: ..."."""
    (line,) = re.findall(r"If they are meant to be [ a-z]+, add to the Patcher: (.*)", str(error))
    added = eval(f"dict({line})")
    assert isinstance(added, dict)
    return added


@pytest.mark.parametrize(
    ("replacement", "options", "listed", "added"),
    [
        (
            With,
            {},
            [
                "Not in the checkpoint, so these would keep their initial values:",
                "  model.layers.{0..1}.mlp.adapter.bias",
                "  model.layers.{0..1}.mlp.adapter.weight",
                "  model.layers.{0..1}.mlp.scales.{0..2}",
            ],
            {"new_weights": [r"\.adapter\.bias$", r"\.adapter\.weight$", r"\.scales\.\d+$"]},
        ),
        (
            Without,
            {},
            ["In the checkpoint, and unused:", "  model.layers.{0..1}.mlp.up_proj.weight"],
            {"dropped_weights": [r"\.up_proj\.weight$"]},
        ),
        (
            Wide,
            {"ignore_mismatched_sizes": True},
            [
                "Of another shape than in the model:",
                "  model.layers.{0..1}.mlp.up_proj.weight: the checkpoint has (96, 64), the model has (96, 65)",
            ],
            {"new_weights": [r"\.up_proj\.weight$"]},
        ),
        (
            Both,
            {},
            ["  model.layers.{0..1}.mlp.upper.weight", "  model.layers.{0..1}.mlp.up_proj.weight"],
            {"new_weights": [r"\.upper\.weight$"], "dropped_weights": [r"\.up_proj\.weight$"]},
        ),
    ],
    ids=["missing", "left over", "mismatched", "both"],
)
def test_weights_that_do_not_fit_are_listed_and_the_line_to_add_is_all_that_it_takes(
    replacement: Any, options: dict[str, Any], listed: list[str], added: dict[str, Any], llama: Path
) -> None:
    patcher = Patcher({"LlamaMLP": replacement})
    with pytest.raises(PatchedWeightsError, match="replaced modules and the checkpoint don't fit together") as caught:
        load(llama, patcher, **options)
    lines = str(caught.value).splitlines()
    assert [line for line in lines if line in listed] == listed
    *_, conversion, declaration = [line for line in lines if "ignore_mismatched_sizes" not in line]
    assert "extra_weight_conversions=[WeightConverter(" in conversion
    assert declaration.startswith("If they are meant to be ")
    assert line_to_add(caught.value) == added
    model = load(llama, patcher.replace(**line_to_add(caught.value)), **options)
    assert type(model.model.layers[0].mlp) is replacement
    with pytest.raises(PatchedWeightsError, match="don't fit together"), patcher.applied():
        LlamaForCausalLM.from_pretrained(llama, **options)


def test_a_shape_that_differs_is_our_error_where_stock_raises_its_own(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError, match=r"mlp\.up_proj\.weight: the checkpoint has \(96, 64\), the model"):
        load(llama, Patcher({"LlamaMLP": Wide}))
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        load(llama, Patcher({"LlamaMLP": Wide}, new_weights="up_proj"))


class TooWide(OwnMLP):
    """Takes a joined weight of two projections for three."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.gate_proj, self.up_proj
        self.gate_up_proj = nn.Linear(config.hidden_size, 3 * config.intermediate_size, bias=False)


def test_a_conversion_that_makes_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    """To correct it is offered before declaring the weight new, which would leave it random."""
    with pytest.raises(PatchedWeightsError) as caught:
        load(llama, Patcher({"LlamaMLP": TooWide}, extra_weight_conversions=JOIN))
    assert str(caught.value) == (
        "The replaced modules and the checkpoint don't fit together.\n"
        "Of another shape than in the model:\n"
        f"  model.layers.{{0..1}}.mlp.gate_up_proj.weight: {describe(JOIN)} makes (192, 64), the model has (288, 64)\n"
        "Correct the conversion, or give the parameter the shape that the conversion makes.\n"
        r"If they are meant to be new, add to the Patcher: new_weights=['\\.gate_up_proj\\.weight$']"
        "\nWhere shapes differ, load with ignore_mismatched_sizes=True as well."
    )


class WithExtra(modeling_llama.LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.extra = nn.Parameter(torch.ones(2))


def with_tensors(folder: Path, to: Path, **tensors: torch.Tensor) -> Path:
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_weight_that_one_layer_lacks_is_named_so_that_no_other_is_meant(llama: Path, tmp_path: Path) -> None:
    folder = with_tensors(llama, tmp_path, **{"model.layers.0.self_attn.extra": torch.full((2,), 5.0)})
    patcher = Patcher({"LlamaAttention": WithExtra})
    with pytest.raises(PatchedWeightsError, match=r"\n  model\.layers\.1\.self_attn\.extra\n") as caught:
        load(folder, patcher)
    added = line_to_add(caught.value)
    (expression,) = added["new_weights"]
    assert not re.search(expression, "model.layers.0.self_attn.extra")
    assert not re.search(expression, "model.layers.11.self_attn.extra")
    model = load(folder, patcher.replace(**added))
    assert [layer.self_attn.extra[0].item() for layer in model.model.layers] == [5, 1]


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_declared_is_neither_missing_nor_left_over(strict: bool, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Both}, new_weights="upper", dropped_weights="up_proj", strict=strict)
    assert type(load(llama, patcher).model.layers[0].mlp) is Both


class WithFresh(modeling_llama.LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if layer_idx == 1:
            self.fresh = nn.Parameter(torch.ones(2))


def test_only_replaced_modules_are_judged(llama: Path, tmp_path: Path) -> None:
    folder = with_tensors(llama, tmp_path, **{"model.layers.1.self_attn.extra": torch.ones(1)})
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert classes(load(folder, OWN))["OwnMLP"] == 2
    with pytest.raises(PatchedWeightsError, match=r"  model\.layers\.1\.self_attn\.fresh"):
        load(folder, Patcher({"LlamaAttention": WithFresh}))  # there, what stock misses and ignores is not listed


def test_a_missing_weight_of_a_joined_module_is_not_silently_random(llama: Path) -> None:
    """Row 10: without the conversion the joined weight would be random, and the load would say so in a table."""
    with pytest.raises(PatchedWeightsError) as caught:
        load(llama, JOINED.replace(extra_weight_conversions=()))
    text = str(caught.value)
    assert "model.layers.{0..1}.mlp.gate_up_proj.weight" in text
    assert "model.layers.{0..1}.mlp.gate_proj.weight" in text
    assert "model.layers.{0..1}.mlp.up_proj.weight" in text
    assert same_output(load(llama, JOINED), LlamaForCausalLM.from_pretrained(llama))


def test_a_conversion_that_fails_is_named_with_its_cause(llama: Path) -> None:
    wrong = WeightConverter(
        ["mlp.gate_proj.weight", "mlp.down_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[Concatenate(dim=0)]
    )
    text = (
        r"(?s)mlp\.gate_proj\.weight, mlp\.down_proj\.weight -> mlp\.gate_up_proj\.weight "
        r"\[Concatenate\(dim=0\)\] failed for model\.layers\.0\.mlp\.gate_up_proj\.weight, "
        r".*Sizes of tensors must match.*Check the patterns"
    )
    with pytest.raises(PatchedWeightsError, match=text):
        load(llama, JOINED.replace(extra_weight_conversions=wrong))


# --- what the unpatched load would miss or ignore as well ----------------------------------------------------------


class SubLlama(LlamaForCausalLM):
    pass


class SubClassifier(LlamaForSequenceClassification):
    pass


class SubModel(LlamaModel):
    pass


class OwnAttention(modeling_llama.LlamaAttention):
    pass


def with_old_buffers(folder: Path, to: Path) -> Path:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    return with_tensors(folder, to, **buffers)


def test_a_tied_head_of_a_replaced_root_is_not_missing(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder, Patcher({"LlamaForCausalLM": SubLlama}))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("mapping", [{"LlamaAttention": OwnAttention}, {"LlamaForCausalLM": SubLlama}])
def test_old_buffers_of_a_checkpoint_are_not_left_over(mapping: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    folder = with_old_buffers(llama, tmp_path)
    assert same_output(load(folder, Patcher(mapping)), LlamaForCausalLM.from_pretrained(llama))


def test_a_new_head_is_not_missing_and_an_old_one_not_left_over(llama: Path) -> None:
    patcher = Patcher({"LlamaForSequenceClassification": SubClassifier})
    model = AutoModelForSequenceClassification.from_pretrained(llama, patcher=patcher)
    assert type(model) is SubClassifier
    assert model.score.weight.isfinite().all()
    assert type(LlamaModel.from_pretrained(llama, patcher=Patcher({"LlamaModel": SubModel}))) is SubModel


@pytest.mark.parametrize("model_class", [BertForMaskedLM, BertForSequenceClassification, BertModel])
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_checkpoint_may_carry_or_lack_the_prefix_of_the_base_model(
    model_class: type[PreTrainedModel], prefixed: bool, bert: Path, tmp_path: Path
) -> None:
    folder = bert
    if not prefixed:
        folder = tmp_path / "base"
        BertModel.from_pretrained(bert).save_pretrained(folder)
    model: Any = model_class.from_pretrained(folder, patcher=Patcher({"BertIntermediate": OwnIntermediate}))
    base = getattr(model, "bert", model)
    stock = shared.stock(bert, BertModel)
    for layer, other in zip(base.encoder.layer, stock.encoder.layer, strict=True):
        assert type(layer.intermediate) is OwnIntermediate
        assert torch.equal(layer.intermediate.dense.weight, other.intermediate.dense.weight)
    with pytest.raises(PatchedWeightsError) as caught:
        model_class.from_pretrained(folder, patcher=Patcher({"BertIntermediate": Renaming}))
    text = str(caught.value)
    prefix = "bert." if model_class is not BertModel else ""
    assert f"  {prefix}encoder.layer.{{0..1}}.intermediate.dens.weight" in text
    assert "encoder.layer.{0..1}.intermediate.dense.weight" in text
    added = line_to_add(caught.value)
    assert set(added) == {"new_weights", "dropped_weights"}
    model_class.from_pretrained(folder, patcher=Patcher({"BertIntermediate": Renaming}, **added))


class OwnIntermediate(BertIntermediate):
    pass


class Renaming(BertIntermediate):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dens = self.dense
        del self.dense
