"""A load does what the patcher says, or says why not (rows 9 and 10)."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    pipeline,
)
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from patcher import PatchedWeightsError, Patcher, PatcherWarning, UnmatchedPatchError
from tests.replacements import OWN, OwnMLP, classes, same_output
from tests.test_loading import tiny_tokenizer
from tests.tiny import save_tiny, tiny_bert_config, tiny_llama_config, tiny_qwen2_moe_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_qwen2_moe_config(), tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_bert_config(), tmp_path_factory.mktemp("bert"))


class JoinedMLP(nn.Module):
    """Gate and up projection in one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


def joining(*sources: str, target: str = "mlp.gate_up_proj.weight") -> WeightConverter:
    return WeightConverter(list(sources), [target], operations=[Concatenate(dim=0)])


JOIN = joining("mlp.gate_proj.weight", "mlp.up_proj.weight")
JOINED = Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=JOIN)


def load(folder: Path, patcher: Patcher, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options)


# --- what matched nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("LlamaMPL", "no class of the model matches 'LlamaMPL'; nearest: LlamaMLP"),
        ("llamamlp", "no class of the model matches 'llamamlp'; nearest: LlamaMLP"),
        ("MLP", "no class of the model matches 'MLP'; nearest: LlamaMLP"),
        ("LlamaAttn", "no class of the model matches 'LlamaAttn'; nearest: LlamaAttention"),
        ("^Llama.*Norm2$", r"no class of the model matches '\^Llama\.\*Norm2\$'; nearest: LlamaRMSNorm"),
        ("Xyz", r"no class of the model matches 'Xyz'; it has Embedding, Linear, LlamaAttention, "),
        ("Linear", "no class of the model matches 'Linear': the model has it, but not from modeling code: "),
        ("^Embedding", r"no class of the model matches '\^Embedding': the model has it, but not from modeling code"),
    ],
)
def test_a_class_key_that_matches_nothing_is_named_with_what_was_meant(key: str, text: str, llama: Path) -> None:
    patcher = OWN | Patcher({key: OwnMLP})
    with pytest.raises(UnmatchedPatchError, match=rf"(?s)asks for what it can't do in LlamaForCausalLM:\n.*{text}"):
        load(llama, patcher)
    with pytest.raises(UnmatchedPatchError, match=text):
        AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    with pytest.raises(UnmatchedPatchError, match=text), patcher.applied():
        LlamaForCausalLM(tiny_llama_config())


def test_a_class_key_is_judged_before_anything_is_read(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(UnmatchedPatchError, match="LlamaMPL"):
        load(tmp_path, Patcher({"LlamaMPL": OwnMLP}))


def test_all_that_matches_nothing_is_said_at_once(moe: Path) -> None:
    patcher = Patcher(
        {"Qwen2MoeMPL": OwnMLP, "Nothing.*": OwnMLP}, "expertz", WeightRenaming("self_atn", "attn"), name="mine"
    )
    with pytest.raises(UnmatchedPatchError) as caught:
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher.replace(class_mapping={}))
    assert str(caught.value).count("\n  ") == 2
    with pytest.raises(
        UnmatchedPatchError, match=r"^The patcher 'mine' asks for what it can't do in Qwen2MoeFor"
    ) as e:
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher)
    assert str(e.value).count("\n  ") == 2
    assert str(e.value).endswith("Correct it or take it out; with strict=False this is a warning.")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"filtered_weight_conversion_patterns": "mlp.expertz"},
            r"filtered_weight_conversion_patterns: 'mlp\.expertz' is found in no conversion of the model; "
            r"nearest: .*mlp\.experts",
        ),
        (
            {"filtered_weight_conversion_patterns": ["gate_up_proj", "vision"]},
            r"filtered_weight_conversion_patterns: 'vision' is found in no conversion of the model",
        ),
        (
            {"extra_weight_conversions": joining("self_attn.q_prj.weight", "self_attn.k_prj.weight", target="qk")},
            r"extra_weight_conversions: self_attn\.q_prj\.weight, self_attn\.k_prj\.weight -> qk "
            r"\[Concatenate\(dim=0\)\] took no tensor; nearest: .*self_attn\.q_proj\.weight",
        ),
        (
            {"extra_weight_conversions": WeightRenaming("shared_expert_gates", "gate")},
            r"extra_weight_conversions: shared_expert_gates -> gate \[rename\] took no tensor; "
            r"nearest: .*shared_expert_gate",
        ),
    ],
    ids=["filter", "second filter", "converter", "renaming"],
)
def test_a_conversion_that_does_nothing_is_named_with_what_was_meant(
    changes: dict[str, Any], text: str, moe: Path
) -> None:
    patcher = Patcher(**changes)
    with pytest.raises(UnmatchedPatchError, match=f"asks for what it can't do in Qwen2MoeForCausalLM:\n  {text}"):
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher)
    with pytest.raises(UnmatchedPatchError, match=text), patcher.applied():
        Qwen2MoeForCausalLM.from_pretrained(moe)


def test_a_filter_for_a_model_that_has_other_conversions_lists_them(llama: Path) -> None:
    text = r"'experts' is found in no conversion of the model; it has .*weight_g"
    with pytest.raises(UnmatchedPatchError, match=text):  # renamings of old names are for every model
        load(llama, Patcher(filtered_weight_conversion_patterns="experts"))


def test_a_renaming_to_what_no_parameter_is_called_does_nothing(llama: Path) -> None:
    """transformers takes back such a renaming, and forgets to say that it didn't use it."""
    patcher = Patcher(extra_weight_conversions=WeightRenaming("mlp.up_proj", "mlp.upper"))
    with pytest.raises(UnmatchedPatchError, match=r"mlp\.up_proj -> mlp\.upper \[rename\] took no tensor"):
        load(llama, patcher)


def test_conversions_are_judged_only_where_a_checkpoint_was_read(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": JoinedMLP}, "nothing", [JOIN, WeightRenaming("nothing_else", "x")])
    AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    with patcher.applied():
        LlamaForCausalLM(tiny_llama_config())
    with pytest.raises(UnmatchedPatchError, match=r"(?s)'nothing' is found in no.*nothing_else -> x"):
        load(llama, patcher)


class SharedExpert(Qwen2MoeMLP):
    pass


def test_a_block_is_judged_over_all_that_was_built_in_it(llama: Path, moe: Path) -> None:
    patcher = Patcher({"LlamaMLP": JoinedMLP, "Qwen2MoeMLP": SharedExpert}, "mlp.experts", JOIN)
    both = r"(?s)'Qwen2MoeMLP'.*'mlp\.experts' is found in no conversion"
    with pytest.raises(UnmatchedPatchError, match=both), patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)
    with pytest.raises(UnmatchedPatchError, match="'LlamaMLP'") as caught, patcher.applied():
        Qwen2MoeForCausalLM.from_pretrained(moe)
    assert "Qwen2MoeMLP" not in str(caught.value).split("nearest", maxsplit=1)[0]
    with patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)
        Qwen2MoeForCausalLM.from_pretrained(moe)


def test_an_error_inside_of_a_block_is_not_hidden_by_what_did_not_match() -> None:
    def fails() -> None:
        with Patcher({"LlamaMPL": OwnMLP}).applied():
            raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        fails()


# --- weights that don't fit ----------------------------------------------------------------------------------------


class Without(OwnMLP):
    """Leaves a weight of the checkpoint alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)))


class With(OwnMLP):
    """Has a weight that the checkpoint hasn't."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.adapter = nn.Linear(4, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
        nn.init.constant_(self.adapter.weight, 2)


class Wide(OwnMLP):
    """Wants a weight in another shape."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.up_proj = nn.Linear(config.hidden_size + 1, config.intermediate_size, bias=False)


class Both(Without):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.upper = nn.Linear(2, 2, bias=False)


def line_to_add(error: Exception) -> dict[str, Any]:
    """The keyword arguments in "If that is meant, add to the Patcher: ..."."""
    (line,) = re.findall(r"If that is meant, add to the Patcher: (.*)", str(error))
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
                "Not in the checkpoint, so these would keep what __init__ gave them:",
                "  model.layers.{0..1}.mlp.adapter.bias",
                "  model.layers.{0..1}.mlp.adapter.weight",
                "  model.layers.{0..1}.mlp.scales.{0..2}",
            ],
            {"new_weights": [r"\.adapter\.bias$", r"\.adapter\.weight$", r"\.scales\.\d+$"]},
        ),
        (
            Without,
            {},
            ["In the checkpoint, and used by nobody:", "  model.layers.{0..1}.mlp.up_proj.weight"],
            {"dropped_weights": [r"\.up_proj\.weight$"]},
        ),
        (
            Wide,
            {"ignore_mismatched_sizes": True},
            [
                "Not in the checkpoint, so these would keep what __init__ gave them:",
                "  model.layers.{0..1}.mlp.up_proj.weight",
                "  (model.layers.0.mlp.up_proj.weight: found (96, 64), expected (96, 65))",
                "  (model.layers.1.mlp.up_proj.weight: found (96, 64), expected (96, 65))",
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
    assert "extra_weight_conversions=[WeightConverter(" in lines[-1]
    assert line_to_add(caught.value) == added
    model = load(llama, patcher.replace(**line_to_add(caught.value)), **options)
    assert type(model.model.layers[0].mlp) is replacement
    with pytest.raises(PatchedWeightsError, match="don't fit together"), patcher.applied():
        LlamaForCausalLM.from_pretrained(llama, **options)


def test_a_shape_that_differs_is_our_error_where_stock_raises_its_own(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError, match=r"mlp\.up_proj\.weight: found \(96, 64\), expected \(96, 65\)"):
        load(llama, Patcher({"LlamaMLP": Wide}))
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        load(llama, Patcher({"LlamaMLP": Wide}, new_weights="up_proj"))


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
    stock = BertModel.from_pretrained(bert)
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


# --- strict=False --------------------------------------------------------------------------------------------------


def line_of(call: Callable[..., Any]) -> tuple[str, int, int]:
    lines, first = inspect.getsourcelines(call)
    return inspect.getsourcefile(call) or "", first, first + len(lines)


def in_block(folder: Path, patcher: Patcher) -> Any:
    with patcher.applied():
        return LlamaForCausalLM.from_pretrained(folder)


WAYS: dict[str, Callable[[Path, Patcher], Any]] = {
    "class": lambda folder, patcher: LlamaForCausalLM.from_pretrained(folder, patcher=patcher),
    "auto": lambda folder, patcher: AutoModelForCausalLM.from_pretrained(folder, patcher=patcher),
    "pipeline": lambda folder, patcher: pipeline(
        "text-generation", str(folder), tokenizer=tiny_tokenizer(), model_kwargs={"patcher": patcher}
    ),
    "from_config": lambda folder, patcher: AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher),
    "block": in_block,
}


@pytest.mark.parametrize("way", WAYS)
def test_without_strictness_there_is_one_warning_at_the_callers_line(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": OwnMLP, "LlamaMPL": OwnMLP}, strict=False)
    with pytest.raises(UnmatchedPatchError) as caught:
        WAYS[way](llama, patcher.replace(strict=True))
    with pytest.warns() as seen:
        WAYS[way](llama, patcher)
    (warning,) = seen
    assert warning.category is PatcherWarning
    assert str(warning.message) == str(caught.value)
    file, first, last = line_of(WAYS[way])
    assert warning.filename == file
    assert first <= warning.lineno < last


@pytest.mark.parametrize("way", ["class", "auto", "pipeline", "block"])
def test_without_strictness_all_complaints_of_a_load_are_one_warning(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Both, "Nothing": OwnMLP}, "filter", WeightRenaming("renaming", "x"), strict=False)
    with pytest.warns() as seen:
        WAYS[way](llama, patcher)
    texts = [str(warning.message) for warning in seen]
    if way == "block":  # the weights are the load's affair, the keys the block's
        assert len(texts) == 2
        assert {warning.filename for warning in seen} == {__file__}
    else:
        assert len(texts) == 1
    text = "\n".join(texts)
    for expected in (
        "'Nothing'",
        "'filter' is found in no",
        "renaming -> x",
        "  model.layers.{0..1}.mlp.upper.weight\n",
        "  model.layers.{0..1}.mlp.up_proj.weight\n",
    ):
        assert text.count(expected) == 1


def test_the_warning_says_what_the_error_says_about_weights(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError) as caught:
        load(llama, Patcher({"LlamaMLP": Both}))
    with pytest.warns() as seen:
        load(llama, Patcher({"LlamaMLP": Both}, strict=False))
    assert [str(warning.message) for warning in seen] == [str(caught.value)]
    with pytest.warns(PatcherWarning, match="model.layers"):
        model = load(llama, Patcher({"LlamaMLP": With}, strict=False))
    assert (model.model.layers[0].mlp.adapter.weight == 2).all()


def test_a_load_that_does_as_it_was_told_says_nothing(llama: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(llama, OWN.replace(strict=False))
        load(llama, JOINED)
