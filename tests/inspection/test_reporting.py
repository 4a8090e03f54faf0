"""`patcher.report(model)` says what happened, to a reader in a terminal, in a notebook, and to a program."""

from __future__ import annotations

import dataclasses
import importlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import InvalidPatcherError, Patcher, PatcherWarning, Report, diff, forward_of, like, plan, report
from patcher.display.parts import Weights
from patcher.patterns import compress
from tests.support import shared
from tests.support.replacements import JOIN, JOINED, OWN, Both, JoinedMLP, OtherMLP, OwnMLP, OwnNorm
from tests.support.tiny import save_tiny, tiny_bert_config, tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


class Experts(nn.ModuleList):
    """The experts of a checkpoint as they lie there."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        for _ in range(config.num_local_experts):
            expert = nn.Module()
            expert.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            expert.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
            expert.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            self.append(expert)


class OwnForward(nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.fixture(scope="module")
def joined(llama: Path) -> Report:
    return report(LlamaForCausalLM.from_pretrained(llama, patcher=JOINED))


def test_every_replaced_module_is_listed_in_order(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": OwnMLP, "^LlamaRMSNorm$": OwnNorm}))
    said = report(model).replaced

    built = {path: type(module).__name__ for path, module in model.named_modules()}
    assert {path: is_ for path, _, is_ in said} == {
        path: name for path, name in built.items() if name in ("OwnMLP", "OwnNorm")
    }
    assert len(said) == 2 + 5
    assert {(was, is_) for _, was, is_ in said} == {("LlamaMLP", "OwnMLP"), ("LlamaRMSNorm", "OwnNorm")}
    assert said[0] == ("model.layers.0.input_layernorm", "LlamaRMSNorm", "OwnNorm")


ROTARY = "transformers.models.llama.modeling_llama:apply_rotary_pos_emb"


def rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (like("LlamaRMSNorm"), True),
        ("RMSNorm$", True),
        ("MistralRMSNorm", False),
        ("model.norm", False),
    ],
)
def test_the_rule_that_matched_is_shown(key: str, shown: bool) -> None:
    """By `plan` and `report`, where the key doesn't say by itself what it matches."""
    field = "module_mapping" if "." in key else "class_mapping"
    patcher = Patcher(**{field: {key: forward_of(OwnForward)}}, function_mapping={like(ROTARY): rotary})
    config = MistralConfig(**tiny_llama_config().to_diff_dict() | {"model_type": "mistral"})
    model = AutoModelForCausalLM.from_config(config, patcher=patcher)

    for said in (plan(config, patcher), report(model)):
        (rule, function_rule) = said.rules
        assert rule == (f"{field}[{key!r}]", ("MistralRMSNorm",))
        assert function_rule == (f"function_mapping[{like(ROTARY)!r}]", (ROTARY.replace("llama", "mistral"),))
        assert ("model.norm", "MistralRMSNorm", "forward_of(OwnForward)") in said.replaced
        assert (rule[0] in str(said)) is shown
        assert "function_mapping[like(" in str(said)


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    config = tiny_llama_config(num_hidden_layers=11)
    said = report(LlamaForCausalLM.from_pretrained(save_tiny(config, tmp_path), patcher=OWN))

    assert [path for path, _, _ in said.replaced] == [f"model.layers.{index}.mlp" for index in range(11)]
    assert "layers.{0..10}  LlamaDecoderLayer" in str(said)


def test_conversions_that_were_added_say_how_much_they_made(joined: Report) -> None:
    assert len(joined.conversions_added) == 1
    (text,) = joined.conversions_added
    assert "mlp.gate_proj.weight" in text
    assert "mlp.gate_up_proj.weight" in text
    assert "Concatenate" in text
    assert joined.conversions_fired == ((text, 2),)
    assert joined.conversions_dropped == ()
    assert "gate_proj.weight, up_proj.weight -> gate_up_proj.weight  Concatenate(dim=0)" in str(joined)


def test_conversions_that_were_dropped_say_which_filter_did_it(mixtral: Path) -> None:
    patcher = Patcher({"MixtralExperts": Experts}, filtered_weight_conversion_patterns=".experts.")
    said = report(MixtralForCausalLM.from_pretrained(mixtral, patcher=patcher))

    assert {filtered for _, filtered in said.conversions_dropped} == {".experts."}
    texts = " ".join(text for text, _ in said.conversions_dropped)
    assert "gate_up_proj" in texts
    assert "down_proj" in texts
    assert all(text not in dict(said.conversions_fired) for text, _ in said.conversions_dropped)
    assert "by '.experts.'" in str(said)


def test_conversions_of_stock_that_stay_are_listed_as_used(mixtral: Path) -> None:
    class Same(MixtralExperts):
        pass

    said = report(MixtralForCausalLM.from_pretrained(mixtral, patcher=Patcher({"MixtralExperts": Same})))

    assert said.conversions_added == said.conversions_dropped == ()
    assert any("gate_up_proj" in text for text, _ in said.conversions_fired)
    assert "kept" in str(said)


def test_new_and_dropped_weights_are_listed(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Both}, new_weights=r"\.mlp\.upper\.", dropped_weights=r"\.mlp\.up_proj\.")
    said = report(LlamaForCausalLM.from_pretrained(llama, patcher=patcher))

    assert said.new_weights == tuple(f"model.layers.{index}.mlp.upper.weight" for index in range(2))
    assert said.dropped_weights == tuple(f"model.layers.{index}.mlp.up_proj.weight" for index in range(2))
    assert said.tree is not None
    (mlp,) = (node for node in said.tree.walk() if node.becomes)
    assert mlp.weights == (Weights("new", (), ("upper.weight",)), Weights("dropped", ("up_proj.weight",)))
    assert "new: upper.weight" in str(said)


def test_fused_and_refused_modules_are_listed_apart_from_replaced_ones(llama: Path) -> None:
    said = report(LlamaForCausalLM.from_pretrained(llama, patcher=OWN | Patcher(fusions="qkv")))

    assert [path for path, _, _ in said.fused] == [f"model.layers.{index}.self_attn" for index in range(2)]
    assert [path for path, _, _ in said.replaced] == [f"model.layers.{index}.mlp" for index in range(2)]
    assert {was for _, was, _ in said.fused} == {"LlamaAttention"}
    assert "self_attn  LlamaAttention -> FusedLlamaAttention" in str(said)


def test_why_a_module_was_not_fused_is_listed(tmp_path: Path) -> None:
    class Hooked(LlamaMLP):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.gate_proj.register_forward_hook(_nothing)

    folder = save_tiny(tiny_llama_config(), tmp_path)
    patcher = Patcher({"LlamaMLP": Hooked}, fusions=["qkv", "gate_up"], strict=False)
    with pytest.warns(PatcherWarning, match="gate_up"):
        said = report(LlamaForCausalLM.from_pretrained(folder, patcher=patcher))

    assert [path for path, _ in said.refused] == [f"model.layers.{index}.mlp" for index in range(2)]
    assert all("hook" in reason for _, reason in said.refused)
    assert f"not fused: {said.refused[0][1]}"[:60] in str(said)
    assert said.warnings
    assert "gate_up" in said.warnings[0]


def _nothing(*_: Any) -> None:
    return None


def test_time_is_told_in_seconds(joined: Report) -> None:
    seconds = dict(joined.seconds)

    assert set(seconds) == {"construction", "reading", "total"}
    assert all(value >= 0 for value in seconds.values())
    assert seconds["construction"] + seconds["reading"] <= seconds["total"]
    assert f"loaded in {seconds['total']:.2f} s" in str(joined)


def test_of_several_patchers_the_winner_is_first(llama: Path) -> None:
    with Patcher({"LlamaMLP": JoinedMLP}, name="outer").applied():
        said = report(LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": OwnMLP}, name="inner")))

    assert ["inner" in said.patchers[0][0], "outer" in said.patchers[1][0]] == [True, True]
    assert [origin for _, origin in said.patchers] == ["patcher=", "applied()"]


def from_config(folder: Path) -> Any:
    return LlamaForCausalLM._from_config(tiny_llama_config(), patcher=OWN)


def by_hand(folder: Path) -> Any:
    with OWN.applied():
        return LlamaForCausalLM(tiny_llama_config())


def from_memory(folder: Path) -> Any:
    return OWN.apply(LlamaForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("make", [from_config, by_hand, from_memory])
def test_models_without_a_checkpoint_have_a_report(make: Any, llama: Path) -> None:
    said = report(make(llama))

    assert said.model == "LlamaForCausalLM"
    assert [path for path, _, _ in said.replaced] == [f"model.layers.{index}.mlp" for index in range(2)]
    assert said.new_weights == said.dropped_weights == ()


def test_a_stock_model_says_so(llama: Path) -> None:
    said = report(LlamaForCausalLM.from_pretrained(llama))

    assert said == Report("LlamaForCausalLM")
    assert str(said) == "LlamaForCausalLM: not patched"
    assert "not patched" in said._repr_html_()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")  # the default one starts a process in torch 2.6


@pytest.mark.parametrize("wrap", [compiled, lambda model: nn.Sequential(model), nn.DataParallel])
def test_in_a_wrapper_the_model_reports(wrap: Any, llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN)

    assert report(wrap(model)) == report(model)
    assert str(report(wrap(LlamaForCausalLM.from_pretrained(llama)))) == "LlamaForCausalLM: not patched"


def test_a_model_of_patched_parts_reports_on_all_of_them(llama: Path) -> None:
    bert = str(shared.checkpoint(tiny_bert_config(), model_class=AutoModel))
    together = EncoderDecoderModel.from_encoder_decoder_pretrained
    parts = together(bert, bert, encoder_patcher=Patcher(fusions="qkv"), decoder_patcher=Patcher(fusions="kv"))
    said = report(parts)
    assert [path for path, *_ in said.fused] == [
        *(f"decoder.bert.encoder.layer.{index}.crossattention.self" for index in range(2)),
        *(f"encoder.encoder.layer.{index}.attention.self" for index in range(2)),
    ]
    assert len(said.patchers) == 2
    assert "BertCrossAttention -> FusedBertCrossAttention" in str(said)
    assert [path for entry in diff(parts).classes for path in entry.modules] == [
        "decoder.bert.encoder.layer.{0..1}.crossattention.self",
        "encoder.encoder.layer.{0..1}.attention.self",
    ]

    inner = LlamaForCausalLM.from_pretrained(llama, patcher=JOINED)
    outer = LlamaForCausalLM.from_pretrained(llama)
    outer.model = inner.model
    assert [path for path, *_ in report(outer).replaced] == [path for path, *_ in report(inner).replaced]
    assert report(outer).conversions_added == report(inner).conversions_added


def test_a_sub_model_reports_on_itself(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN)

    assert [path for path, _, _ in report(model.model).replaced] == [f"layers.{index}.mlp" for index in range(2)]


def test_a_wrapper_of_several_models_reports_on_all_of_them(llama: Path) -> None:
    load = LlamaForCausalLM.from_pretrained
    stock, own = load(llama), load(llama, patcher=OWN)
    said = report(nn.ModuleDict({"stock": stock, "own": own, "other": load(llama, patcher=JOINED)}))
    assert said.model == "ModuleDict"
    paths = [f"{name}.model.layers.{index}.mlp" for name in ("other", "own") for index in range(2)]
    assert [path for path, *_ in said.replaced] == paths
    assert len(said.patchers) == 2
    assert [path for path, *_ in report(nn.Sequential(stock, own)).replaced] == [
        f"1.model.layers.{index}.mlp" for index in range(2)
    ]
    assert str(report(nn.Sequential(stock, load(llama)))) == "Sequential: not patched"


@pytest.mark.parametrize("patcher", [JOINED, Patcher(fusions="gate_up")], ids=["replaced", "fused"])
def test_modules_that_were_moved_are_reported_where_they_are(patcher: Patcher, llama: Path) -> None:
    patched, stock = (LlamaForCausalLM.from_pretrained(llama, patcher=each) for each in (patcher, None))

    def paths(model: nn.Module) -> list[str]:
        said = report(model)
        return [path for path, *_ in (*said.replaced, *said.fused)]

    assert paths(patched.model.layers[0]) == ["mlp"]
    stock.model.layers[0], patched.model.layers[0] = patched.model.layers[0], stock.model.layers[0]
    assert (paths(stock), paths(patched)) == (["model.layers.0.mlp"], ["model.layers.1.mlp"])
    assert str(report(stock)).startswith("LlamaForCausalLM: 1 module replaced\n")
    del patched.model.layers[1]
    said = report(patched)
    assert str(said).startswith("LlamaForCausalLM: 0 modules replaced")
    assert said.tree is not None
    assert not [node for node in said.tree.walk() if node.weights or node.becomes]


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class OwnAttention(LlamaAttention):
    pass


CALLING = Patcher({"LlamaMLP": OwnMLP}, fusions="qkv", function_mapping={"rotate_half": rotated}, name="first")


def shown_now(model: nn.Module) -> tuple[Any, ...]:
    """The modules, functions, calls and patchers of a report; the diff shows the modules and functions as well."""
    said, changes = report(model), diff(model)  # type: ignore[arg-type]
    modules = [(path, cls) for path, _, cls in (*said.replaced, *said.fused)]
    paths = [compress(path for path, cls in modules if cls == name) for name in dict.fromkeys(dict(modules).values())]
    assert sorted(map(tuple, paths)) == sorted(entry.modules for entry in changes.classes)
    assert [(entry.was, entry.callers) for entry in changes.functions] == [
        (function.replace(":", "."), callers) for function, _, callers in said.functions
    ]
    functions = [(function.rpartition(":")[2], callers) for function, _, callers in said.functions]
    return modules, functions, said.calling, ["first" in text for text, _ in said.patchers]


def of_layers(*names: int) -> list[tuple[str, str]]:
    return [
        *((f"model.layers.{name}.mlp", "OwnMLP") for name in names),
        *((f"model.layers.{name}.self_attn", "FusedLlamaAttention") for name in names),
    ]


def test_a_report_and_a_diff_show_what_a_model_has_now(llama: Path) -> None:
    model, stock = (LlamaForCausalLM.from_pretrained(llama, patcher=patcher) for patcher in (CALLING, None))
    calls = [("rotate_half", ("LlamaAttention",))]
    assert shown_now(model) == (of_layers(0, 1), calls, 2, [True])
    stock.model.layers[0], model.model.layers[0] = model.model.layers[0], stock.model.layers[0]
    assert shown_now(model) == (of_layers(1), calls, 1, [True])
    assert shown_now(stock) == (of_layers(0), calls, 1, [])
    model.model.layers[1].mlp = LlamaMLP(model.config)
    assert shown_now(model) == (of_layers(1)[1:], calls, 1, [True])
    model.model = Patcher({"LlamaMLP": OtherMLP}, name="second").apply(model.model)
    assert shown_now(model) == (
        [(f"model.layers.{index}.mlp", "OtherMLP") for index in range(2)],
        [],
        0,
        [True, False],
    )
    model.model = Patcher().apply(model.model)
    assert shown_now(model)[:3] == ([], [], 0)


def test_a_replacement_that_calls_a_replaced_function_is_counted(llama: Path) -> None:
    patcher = Patcher({"LlamaAttention": OwnAttention}, function_mapping={"rotate_half": rotated})
    for said in (report(LlamaForCausalLM.from_pretrained(llama, patcher=patcher)), plan(llama, patcher)):
        assert said.calling == 2
        assert "calls transformers.models.llama.modeling_llama:rotate_half -> " in str(said)


@pytest.mark.parametrize("value", [None, "gpt2", OWN, LlamaForCausalLM])
def test_only_models_have_a_report(value: Any) -> None:
    with pytest.raises(InvalidPatcherError, match="report takes a model, found"):
        report(value)


def test_it_is_frozen_and_comparable(joined: Report) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        joined.model = "another"  # type: ignore[misc]
    assert joined == dataclasses.replace(joined)
    assert len({joined, dataclasses.replace(joined)}) == 1


def test_it_goes_to_json_and_says_all_of_it(joined: Report) -> None:
    data = json.loads(json.dumps(joined.to_dict()))

    assert set(data) == {field.name for field in dataclasses.fields(Report)}
    assert data["replaced"] == [[f"model.layers.{index}.mlp", "LlamaMLP", "JoinedMLP"] for index in range(2)]
    assert data["seconds"] == dict(joined.seconds)


class Reader(HTMLParser):
    """Reads the texts, and insists that every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.texts.append(data.strip())


def test_html_shows_what_the_terminal_shows(joined: Report) -> None:
    texts = Reader(joined._repr_html_()).texts

    at = texts.index("JoinedMLP")
    assert texts[at - 3 : at + 5] == [
        "mlp",
        "LlamaMLP",
        "→",
        "JoinedMLP",
        "gate_proj.weight, up_proj.weight",
        "→",
        "gate_up_proj.weight",
        "Concatenate(dim=0)",
    ]
    for line in str(joined).splitlines():  # module by module
        name, gap, _ = line.strip(" │├─└").partition("  ")
        assert not gap or name.split(" ")[0].strip(",") in " ".join(texts)


@pytest.mark.libraries
def test_as_text_a_notebook_shows_what_print_does(joined: Report, llama: Path) -> None:
    formatter: Any = importlib.import_module("IPython.core.formatters").DisplayFormatter()
    for shown in (joined, plan(llama, JOINED), diff(llama, JOINED)):
        texts = formatter.format(shown)[0]
        assert (texts["text/plain"], texts["text/html"]) == (str(shown), shown._repr_html_())


def test_names_that_look_like_markup_are_shown_as_they_are(llama: Path) -> None:
    hostile = type("<script>alert(1)</script>[bold red]", (OwnMLP,), {})
    said = report(LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": hostile})))

    assert "<script>alert(1)</script>[bold red]" in str(said)
    page = Reader(said._repr_html_())
    assert "script" not in page.seen
    assert hostile.__qualname__ in page.texts


def test_a_terminal_line_is_never_wider_than_a_page(joined: Report) -> None:
    assert all(len(line) <= 119 for line in str(joined).splitlines())


def test_a_filter_and_a_conversion_of_ours_are_both_told(llama: Path) -> None:
    patcher = Patcher(
        {"LlamaMLP": JoinedMLP},
        filtered_weight_conversion_patterns="nowhere",
        extra_weight_conversions=JOIN,
        strict=False,
    )
    with pytest.warns(PatcherWarning, match="nowhere"):
        said = report(LlamaForCausalLM.from_pretrained(llama, patcher=patcher))

    assert said.conversions_dropped == ()
    assert len(said.conversions_added) == 1
    assert "nowhere" in " ".join(said.warnings)
    assert "nowhere" in str(said)


def test_of_a_function_it_is_said_how_many_modules_call_it(llama: Path) -> None:
    patcher = Patcher(function_mapping={"rotate_half": rotated})
    shown = report(LlamaForCausalLM.from_pretrained(llama, patcher=patcher))
    assert shown.calling == len(shown.functions[0][2]) * 2 == 2
    assert str(shown).startswith("LlamaForCausalLM: 1 function replaced (in calls of 2 modules), loaded in ")
    assert "1 function would be replaced (in calls of 2 modules); " in str(plan(llama, patcher))
    joined = report(LlamaForCausalLM.from_pretrained(llama, patcher=patcher | Patcher(fusions="gate_up")))
    assert str(joined).startswith("LlamaForCausalLM: 2 modules and 1 function replaced (in calls of 2 modules)")
