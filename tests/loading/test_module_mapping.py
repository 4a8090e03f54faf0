"""Modules that are replaced by their path: what is built, loaded, said and saved."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, WeightConverter
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patcher
from patcher import Patcher, Plan, UnmatchedPatchError, diff, plan, report, verify
from patcher.codegen import PatchConfig
from patcher.errors import (
    CodegenError,
    InvalidPatcherError,
    PatchConflictError,
    PatchConstructionError,
    PatchedWeightsError,
)
from patcher.fusions import GateUp
from tests.support import shared
from tests.support.bringing import BringingMLP, ExpertLinears, ExpertStack, TurnedMLP
from tests.support.checkpoints import assert_saved_alike, files
from tests.support.comparing import logits
from tests.support.replacements import JOIN, JoinedMLP, OwnMLP, same_output
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config

LAYERS = 6


class OwnHead(nn.Module):
    """In place of torch's own Linear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class OwnAttention(LlamaAttention):
    pass


class WrappedAttention(nn.Module):
    """Holds an attention of stock: its weights are one level deeper."""

    conversion_mapping = WeightRenaming("^(.)_proj", r"inner.\1_proj")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.inner = LlamaAttention(config, layer_idx)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config(num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config(num_hidden_layers=4))


def load(folder: Path, given: Patcher | None = None, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=given, **options)


def kinds(model: Any) -> list[str]:
    return [type(layer.mlp).__name__ for layer in model.model.layers]


# --- what is built --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"model.layers.{0..3}.mlp": OwnMLP}, ["OwnMLP"] * 4 + ["LlamaMLP"] * 2),
        ({"**.mlp": OwnMLP}, ["OwnMLP"] * LAYERS),
        (
            {"model.layers.*.mlp": OwnMLP, "model.layers.1.mlp": BringingMLP},
            ["OwnMLP", "BringingMLP"] + ["OwnMLP"] * 4,
        ),
        ({"**.{0,4..5}.mlp": BringingMLP, "**.{1..3}.mlp": TurnedMLP}, "BTTTBB"),
    ],
    ids=["layers 0 to 3", "every mlp", "the exact path wins", "two for one class"],
)
def test_a_path_says_which_modules(folder: Path, mapping: dict[str, Any], expected: Any) -> None:
    before, stock = snapshot(), load(folder)
    model = load(folder, Patcher(module_mapping=mapping))
    assert kinds(model) == expected or "".join(kind[0] for kind in kinds(model)) == expected
    assert same_output(model, stock)
    assert kinds(load(folder)) == ["LlamaMLP"] * LAYERS
    assert not changes(before)


def test_torchs_own_linear_at_the_head(folder: Path) -> None:
    model = load(folder, Patcher(module_mapping={"lm_head": OwnHead}))
    assert type(model.lm_head) is OwnHead
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert torch.equal(logits(model), logits(load(folder)))


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    stock = load(save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "tied"))
    model = load(tmp_path / "tied", Patcher(module_mapping={"lm_head": OwnHead}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_saved_alike(model, stock, tmp_path)


class TurnedHead(nn.Module):
    conversion_mapping = WeightConverter("weight", "columns", [Transpose(0, 1)])

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.empty(in_features, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.columns


class TurnedEmbedding(nn.Embedding):
    conversion_mapping = WeightConverter("weight", "weight", [Transpose(0, 1)])

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__(embedding_dim, num_embeddings)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.weight.T[input]


@pytest.mark.parametrize(
    ("mapping", "found"),
    [
        ({"lm_head": TurnedHead}, r"TurnedHead in place of Linear .*: lm_head\.weight is missing and model\."),
        ({"model.embed_tokens": TurnedEmbedding}, r"lm_head\.weight \(128, 64\) and model\..*\.weight \(64, 128\)"),
    ],
)
def test_a_tied_parameter_that_a_replacement_lacks_is_an_error(mapping: Any, found: str) -> None:
    tied, untied = (tiny_llama_config(tie_word_embeddings=is_tied) for is_tied in (True, False))
    patcher, folder, before = Patcher(module_mapping=mapping), shared.checkpoint(tied), snapshot()
    text = rf"transformers ties lm_head\.weight to model\.embed_tokens\.weight, .*{found}"
    with pytest.raises(PatchConstructionError, match=text):
        load(folder, patcher)
    with pytest.raises(PatchConstructionError, match=text):
        AutoModelForCausalLM.from_config(tied, patcher=patcher)
    with pytest.raises(PatchConstructionError, match=text), patcher.applied():
        LlamaForCausalLM(tied)
    assert not plan(folder, patcher).ok
    assert not changes(before)
    assert torch.equal(logits(load(shared.checkpoint(untied), patcher)), logits(load(shared.checkpoint(untied))))


def test_it_wins_over_the_class_mapping_and_stands_beside_it(folder: Path) -> None:
    both = Patcher({"LlamaMLP": OwnMLP}, module_mapping={"**.{0..1}.mlp": BringingMLP})
    model = load(folder, both)
    assert kinds(model) == ["BringingMLP"] * 2 + ["OwnMLP"] * 4
    assert same_output(model, load(folder))


def test_what_replaces_a_layer_has_its_parts_replaced_too(folder: Path) -> None:
    class Layer(type(load(folder).model.layers[0])):  # type: ignore[misc]
        pass

    model = load(folder, Patcher(module_mapping={"**.{0..1}.mlp": BringingMLP, "model.layers.{1..2}": Layer}))
    assert [type(layer).__name__ for layer in model.model.layers[:4]] == [
        "LlamaDecoderLayer", "Layer", "Layer", "LlamaDecoderLayer"
    ]  # fmt: skip
    assert kinds(model) == ["BringingMLP"] * 2 + ["LlamaMLP"] * 4
    assert "Layer" in model._no_split_modules
    assert "LlamaDecoderLayer" in model._no_split_modules


def test_recorded_outputs_follow(folder: Path) -> None:
    given = Patcher(module_mapping={"**.{0..1}.self_attn": OwnAttention, "**.{2..3}.self_attn": WrappedAttention})
    model, stock = (load(folder, each, attn_implementation="eager") for each in (given, None))
    ids = torch.arange(3, 9)[None]
    for found, expected in zip(
        model(ids, output_attentions=True).attentions, stock(ids, output_attentions=True).attentions, strict=True
    ):
        assert torch.equal(found, expected)


# --- with whatever else ---------------------------------------------------------------------------------------------


def test_fusions_act_on_the_rest_and_one_on_the_same_module_is_a_conflict(folder: Path, tmp_path: Path) -> None:
    given = Patcher(module_mapping={"**.{0..1}.mlp": BringingMLP}, fusions=["qkv", "gate_up"])
    model, stock = load(folder, given), load(folder)
    assert sorted(report(model).to_dict()["fused"], key=str)
    assert hasattr(model.model.layers[5].mlp, "gate_up_proj")
    assert same_output(model, stock)
    assert_saved_alike(model, stock, tmp_path)
    same = Patcher(module_mapping={"**.{0..1}.self_attn": OwnAttention}, fusions="qkv")
    with pytest.raises(PatchConflictError, match=r"claims model\.layers\.0\.self_attn, which the module mapping"):
        load(folder, same)


def test_by_hand_from_a_config_and_in_memory(folder: Path, tmp_path: Path) -> None:
    given = Patcher(module_mapping={"**.{1,3}.mlp": BringingMLP, "lm_head": OwnHead})
    stock = load(folder)
    with given.applied():
        by_hand = LlamaForCausalLM(stock.config)
    made = AutoModelForCausalLM.from_config(stock.config, patcher=given)
    applied = given.apply(stock)
    for number, model in enumerate((by_hand, made, applied)):
        model.load_state_dict(stock.state_dict())
        assert kinds(model)[:4] == ["LlamaMLP", "BringingMLP"] * 2
        assert type(model.lm_head) is OwnHead
        assert same_output(model, stock)
        assert_saved_alike(model, stock, tmp_path / str(number))
    back = Patcher().apply(applied)
    assert kinds(back) == ["LlamaMLP"] * LAYERS
    assert torch.equal(logits(back), logits(stock))


def test_copies_pickles_and_moved_layers_are_given_back(folder: Path, tmp_path: Path) -> None:
    model, stock = load(folder, Patcher(module_mapping={"**.{0..1}.mlp": TurnedMLP})), load(folder)
    for number, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        assert_saved_alike(other, stock, tmp_path / str(number))
    assert patcher.original_state_dict(model).keys() == stock.state_dict().keys()


@pytest.mark.parametrize("cls", [BringingMLP, TurnedMLP])
def test_a_layer_that_is_put_into_another_model_is_given_back_there(
    folder: Path, tmp_path: Path, cls: type[nn.Module]
) -> None:
    model, stock = load(folder, Patcher(module_mapping={"**.{0..1}.mlp": cls})), load(folder)
    other = load(folder)
    other.model.layers[3] = copy.deepcopy(model.model.layers[0])
    stock.model.layers[3] = copy.deepcopy(stock.model.layers[0])
    assert_saved_alike(other, stock, tmp_path / "stock", max_shard_size="40KB")
    assert patcher.original_state_dict(other).keys() == stock.state_dict().keys()
    model.model.layers[3] = copy.deepcopy(model.model.layers[0])
    assert_saved_alike(model, stock, tmp_path / "patched", max_shard_size="40KB")
    fused = load(folder, Patcher(fusions="qkv"))
    fused.model.layers[3].mlp = copy.deepcopy(model.model.layers[3].mlp)
    expected = load(folder)
    expected.model.layers[3].mlp = copy.deepcopy(stock.model.layers[3].mlp)
    assert_saved_alike(fused, expected, tmp_path / "fused")
    with pytest.raises(PatchedWeightsError, match=r"layers\.3\.mlp is converted, and LlamaForCausalLM around it"):
        other.save_pretrained(tmp_path / "runtime", save_original_format=False)


def test_experts_that_are_put_into_another_model_are_given_back_there(moe: Path, tmp_path: Path) -> None:
    model, stock = load(moe, Patcher(module_mapping={"**.0.mlp.experts": ExpertStack})), load(moe)
    other = load(moe)
    other.model.layers[0].mlp.experts = copy.deepcopy(model.model.layers[0].mlp.experts)
    assert_saved_alike(other, stock, tmp_path)


# --- conversions ----------------------------------------------------------------------------------------------------

CLASSES: dict[str, Any] = {"own": OwnMLP, "bringing": BringingMLP, "turned": TurnedMLP}


@settings(max_examples=8, deadline=None)
@given(
    chosen=st.lists(st.sampled_from([None, *CLASSES]), min_size=LAYERS, max_size=LAYERS).filter(any),
    fused=st.sets(st.sampled_from(["qkv", "gate_up"])),
    everywhere=st.sampled_from([None, "own", "bringing"]),
)
def test_whatever_stands_where_it_loads_and_is_given_back(
    chosen: list[str | None], fused: set[str], everywhere: str | None
) -> None:
    """Any class at any layer, over any class mapping, beside fusions of the rest."""
    torch.manual_seed(0)
    stock = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=LAYERS)).eval()
    mapping = {f"model.layers.{number}.mlp": CLASSES[name] for number, name in enumerate(chosen) if name is not None}
    by_class = {"LlamaMLP": CLASSES[everywhere]} if everywhere and None in chosen else {}
    unreplaced = [number for number, name in enumerate(chosen) if name is None and not by_class]
    fusions: list[Any] = ["qkv"] if "qkv" in fused else []
    if "gate_up" in fused and unreplaced:
        fusions.append(GateUp(modules=[f"model.layers.{number}.mlp" for number in unreplaced]))
    given = Patcher(by_class, module_mapping=mapping, fusions=fusions)
    model: Any = given.apply(stock)
    expected = [CLASSES[name or everywhere].__name__ if name or by_class else None for name in chosen]
    assert [kind if known else None for kind, known in zip(kinds(model), expected, strict=True)] == expected
    assert same_output(model, stock)
    given_back = patcher.original_state_dict(model)
    assert given_back.keys() == stock.state_dict().keys()
    assert all(torch.equal(given_back[name], tensor) for name, tensor in stock.state_dict().items())


def test_a_conversion_of_the_patcher_leaves_other_layers_alone(folder: Path, tmp_path: Path) -> None:
    given = Patcher(module_mapping={"model.layers.{0..3}.mlp": JoinedMLP}, extra_weight_conversions=JOIN)
    model, stock = load(folder, given), load(folder)
    assert report(model).to_dict()["conversions_fired"][0][1] == 4
    assert same_output(model, stock)
    assert_saved_alike(model, stock, tmp_path)


@pytest.mark.parametrize("experts", [ExpertLinears, ExpertStack])
def test_experts_of_some_layers_beside_those_that_transformers_converts(
    moe: Path, tmp_path: Path, experts: type[nn.Module]
) -> None:
    model, stock = load(moe, Patcher(module_mapping={"**.{0,2}.mlp.experts": experts})), load(moe)
    assert [type(layer.mlp.experts).__name__ for layer in model.model.layers][:3:2] == [experts.__name__] * 2
    assert same_output(model, stock)
    assert_saved_alike(model, stock, tmp_path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert torch.equal(logits(load(tmp_path / "shards")), logits(stock))


def test_a_conversion_with_the_very_patterns_of_one_of_transformers(moe: Path, tmp_path: Path) -> None:
    """A load finds a converter by the text of its pattern: both must run, each in its layers."""

    class Plain(ExpertStack):
        conversion_mapping = ()

    texts = [".experts.*.w1.weight", ".experts.*.w3.weight"]
    same = [
        WeightConverter(texts, [".experts.gate_up"], operations=[MergeModulelist(dim=0), Concatenate(dim=1)]),
        WeightConverter([".experts.*.w2.weight"], [".experts.down"], operations=[MergeModulelist(dim=0)]),
    ]
    given = Patcher(module_mapping={"**.{0,2}.mlp.experts": Plain}, extra_weight_conversions=same)
    model, stock = load(moe, given), load(moe)
    assert same_output(model, stock)
    assert_saved_alike(model, stock, tmp_path)


def test_what_a_class_brings_is_judged(folder: Path) -> None:
    class Misspelt(BringingMLP):
        conversion_mapping = (
            WeightConverter(["gate.weight", "up.weight"], ["gate_up_proj.weight"], operations=[Concatenate(0)]),
        )

    said = r"Misspelt\.conversion_mapping: gate\.weight, up\.weight .*took no tensor"
    with pytest.raises(UnmatchedPatchError, match=said):
        load(folder, Patcher(module_mapping={"**.0.mlp": Misspelt}))


def test_weights_that_do_not_fit_are_refused_as_ever(folder: Path) -> None:
    with pytest.raises(PatchedWeightsError, match=r"model\.layers\.\{0\.\.1\}\.mlp\.gate_up_proj\.weight"):
        load(folder, Patcher(module_mapping={"**.{0..1}.mlp": JoinedMLP}))


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("model.layer.{0..3}.mlp", r"module_mapping: 'model\.layer\..*', where .*nearest: model\.layers\.\{0\.\.5\}"),
        ("model.layers.9.mlp", r"nearest: model\.layers\.\{0\.\.5\}\.mlp"),
        ("**.mpl", r"nearest: .*mlp"),
    ],
)  # fmt: skip
def test_a_path_that_names_nothing_tells_the_nearest(folder: Path, path: str, said: str) -> None:
    given = Patcher(module_mapping={path: OwnMLP})
    with pytest.raises(UnmatchedPatchError, match=said):
        load(folder, given)
    with pytest.raises(UnmatchedPatchError, match=said), given.applied():
        LlamaForCausalLM(tiny_llama_config(num_hidden_layers=LAYERS))
    assert not plan(folder, given).ok
    with pytest.warns(UserWarning, match=said):
        assert kinds(load(folder, given.replace(strict=False))) == ["LlamaMLP"] * LAYERS


def test_plan_report_diff_and_verify_know_it(folder: Path) -> None:
    given = Patcher(module_mapping={"**.{0..1}.mlp": BringingMLP, "**.{2..3}.mlp": TurnedMLP, "lm_head": OwnHead})
    rows = {("lm_head", "Linear", "OwnHead")}
    rows |= {(f"model.layers.{number}.mlp", "LlamaMLP", "BringingMLP") for number in (0, 1)}
    rows |= {(f"model.layers.{number}.mlp", "LlamaMLP", "TurnedMLP") for number in (2, 3)}
    planned = plan(folder, given)
    assert planned.ok, str(planned)
    assert {tuple(row) for row in planned.to_dict()["replaced"]} == rows
    assert {tuple(row) for row in report(load(folder, given)).to_dict()["replaced"]} == rows
    shown = {(entry.modules, entry.becomes.rpartition(".")[2]) for entry in diff(folder, given).classes}
    assert shown == {
        (("lm_head",), "OwnHead"),
        (("model.layers.{0..1}.mlp",), "BringingMLP"),
        (("model.layers.{2..3}.mlp",), "TurnedMLP"),
    }


class DoubledMLP(BringingMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.nightly
def test_verify_knows_it(folder: Path) -> None:
    assert verify(folder, Patcher(module_mapping={"**.{0..1}.mlp": BringingMLP, "lm_head": OwnHead})).passed
    assert "logits" in str(verify(folder, Patcher(module_mapping={"**.2.mlp": DoubledMLP})).failures)


def test_a_misfit_of_one_of_two_replacements_is_found(folder: Path) -> None:
    class Narrow(LlamaMLP):
        def forward(self) -> torch.Tensor:  # type: ignore[override]
            raise NotImplementedError

    class Wide(LlamaMLP):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    class Wider(Wide):
        pass

    def planned(first: type[nn.Module], second: type[nn.Module]) -> Plan:
        return plan(folder, Patcher(module_mapping={"**.0.mlp": first, "**.1.mlp": second}))

    for found in (planned(Narrow, OwnMLP), planned(OwnMLP, Narrow)):
        assert [name.rpartition(".")[2] for name, *_ in found.misfits] == ["Narrow"]
    (problem,) = planned(Wide, Wider).problems
    assert re.search(r"Wide.* could not be built", problem), problem


def test_what_conversions_are_not_known_to_survive_is_refused_for_those_of_classes(folder: Path) -> None:
    with pytest.raises(InvalidPatcherError, match=r"together with device_mesh, which is not supported"):
        load(folder, Patcher(module_mapping={"**.mlp": BringingMLP}), device_mesh=object())


def test_as_data_in_json_and_together(folder: Path) -> None:
    given = Patcher(module_mapping={"**.{0..1}.mlp": BringingMLP})
    data = json.loads(json.dumps(given.to_dict()))
    assert data["module_mapping"] == {"**.{0..1}.mlp": "tests.support.bringing:BringingMLP"}
    assert Patcher.from_dict(data, allowed=[BringingMLP]) == given == pickle.loads(pickle.dumps(given))
    assert given != given.replace(module_mapping={"**.{0..1}.mlp": TurnedMLP})
    both = given | Patcher(module_mapping={"**.2.mlp": TurnedMLP})
    assert kinds(load(folder, both))[:4] == ["BringingMLP", "BringingMLP", "TurnedMLP", "LlamaMLP"]
    with pytest.raises(PatchConflictError, match=r"Both patchers replace .* by BringingMLP and by TurnedMLP"):
        given | Patcher(module_mapping={"**.{0..1}.mlp": TurnedMLP})


def test_the_innermost_wins_path_by_path(folder: Path) -> None:
    with Patcher(module_mapping={"**.{0..2}.mlp": OwnMLP}).applied():
        model = load(folder, Patcher(module_mapping={"**.0.mlp": BringingMLP}))
    assert kinds(model)[:4] == ["BringingMLP", "OwnMLP", "OwnMLP", "LlamaMLP"]


def test_the_runtime_layout_has_no_name(folder: Path, tmp_path: Path) -> None:
    model = load(folder, Patcher(module_mapping={"**.0.mlp": BringingMLP}))
    with pytest.raises(PatchedWeightsError, match=r"no fusion describes it"):
        model.save_pretrained(tmp_path / "runtime", save_original_format=False)
    assert not (tmp_path / "runtime").exists() or not files(tmp_path / "runtime")


def test_code_generation_refuses_with_the_reason() -> None:
    given = Patcher(module_mapping={"**.0.mlp": OwnMLP})
    with pytest.raises(CodegenError, match="a path is a place in one model"):
        PatchConfig.from_patcher(given, LlamaForCausalLM)
