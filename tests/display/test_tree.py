"""The tree of a model: alike layers are one, what is said hangs where it belongs, large models stay short."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BartConfig, LlamaForCausalLM, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import Patcher, plan, report
from patcher.display.parts import ModuleNode, Weights
from patcher.display.tree import module_tree
from tests.support import shared
from tests.support.replacements import JOINED, OWN, Both, OwnMLP
from tests.support.speed import slowness
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config(num_hidden_layers=6))


def paths(node: ModuleNode | None, inside: str = "") -> dict[str, ModuleNode]:
    """Every module by its path, as reports write it."""
    assert node is not None
    path = f"{inside}.{node.name}" if inside else node.name
    found = {path: node}
    for child in node.children:
        found |= paths(child, path)
    return found


def test_layers_that_differ_are_apart(llama: Path) -> None:
    tree = plan(llama, Patcher(module_mapping={"model.layers.{0,2..3}.mlp": OwnMLP})).tree

    found = paths(tree)
    assert found["model.layers.{0,2..3}.mlp"].becomes == "OwnMLP"
    assert found["model.layers.{1,4..5}.mlp"].becomes == ""
    assert found["model.layers.{1,4..5}"].is_open is False
    assert found["model.layers.{0,2..3}"].is_open is True
    assert found["model.layers"].was == "ModuleList"


def test_layers_and_experts_are_folded_in_both_places(tmp_path: Path) -> None:
    folder = save_tiny(tiny_mixtral_config(num_hidden_layers=3), tmp_path)
    found = paths(plan(folder, Patcher(fusions="sequential_experts")).tree)

    experts = found["model.layers.{0..2}.mlp.experts"]
    assert experts.becomes == "SequentialMixtralExperts"
    assert [child.name for child in experts.children if child.was == "_Expert" or child.children] == ["{0..3}"]
    # The checkpoint has them elsewhere: `*` for the numbers of the module, so that layers are alike.
    keys = {key for each in experts.weights for key in each.keys}
    assert keys == {f"model.layers.*.block_sparse_moe.experts.{{0..3}}.{name}.weight" for name in ("w1", "w2", "w3")}


def test_conversions_of_stock_hang_at_replaced_modules_only(tmp_path: Path) -> None:
    folder = save_tiny(tiny_mixtral_config(), tmp_path)
    same = type("Same", (MixtralExperts,), {})
    for patcher, kinds in ((Patcher(fusions="qkv"), set()), (Patcher({"MixtralExperts": same}), {"converted"})):
        for value in (plan(folder, patcher), report(MixtralForCausalLM.from_pretrained(folder, patcher=patcher))):
            experts = paths(value.tree)["model.layers.{0..1}.mlp.experts"]
            assert {each.what for each in experts.weights} <= kinds
        assert bool(paths(plan(folder, patcher).tree)["model.layers.{0..1}.mlp.experts"].weights) == bool(kinds)


def test_why_a_module_is_left_alone_hangs_at_it() -> None:
    config = BartConfig(d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
    config.architectures = ["BartForConditionalGeneration"]
    found = paths(plan(config, Patcher(fusions="qkv")).tree)

    assert found["model.encoder.layers.{0..1}.self_attn"].becomes == "FusedBartAttention"
    cross = found["model.decoder.layers.{0..1}.encoder_attn"]
    assert (cross.becomes, cross.was) == ("", "BartAttention")
    assert cross.reason.startswith("cross attention")
    assert all(not node.reason for path, node in found.items() if not path.endswith("encoder_attn"))


def rotate(x: object) -> object:
    return x


def test_functions_hang_at_the_classes_that_call_them(llama: Path) -> None:
    planned = plan(llama, Patcher(function_mapping={"rotate_half": rotate}))
    calling = {path: node.functions for path, node in paths(planned.tree).items() if node.functions}

    (called,) = calling.values()
    assert list(calling) == ["model.layers.{0..5}.self_attn"]
    assert "rotate" in called[0][1]
    assert "calls " in str(planned)
    assert "called by" not in str(planned)  # the table would say it again


def test_weights_hang_at_their_modules_by_their_names_there(llama: Path) -> None:
    planned = plan(llama, Patcher({"LlamaMLP": Both}))
    mlp = paths(planned.tree)["model.layers.{0..5}.mlp"]

    assert mlp.weights == (Weights("missing", (), ("upper.weight",)), Weights("left over", ("up_proj.weight",)))
    for value in (planned, report(LlamaForCausalLM.from_pretrained(llama, patcher=JOINED))):
        assert value.tree is not None
        assert pickle.loads(pickle.dumps(value)) == value
        assert json.loads(json.dumps(value.to_dict()))["tree"]["children"][0]["name"] == "model"
    (joined,) = paths(value.tree)["model.layers.{0..5}.mlp"].weights
    assert joined.keys == ("gate_proj.weight", "up_proj.weight")
    assert joined.parameters == ("gate_up_proj.weight",)
    assert "gate_up_proj.weight  Concatenate(dim=0)" in str(value)


def test_tensors_of_no_module_hang_at_the_model(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(99, 64), "elsewhere.0.weight": torch.zeros(1)}, file)
    tree = plan(tiny_llama_config(architectures=["LlamaForCausalLM"]), OWN, checkpoint=file).tree

    assert tree is not None
    assert tree.weights == (Weights("left over", ("elsewhere.0.weight",)),)


def test_a_checkpoint_of_the_base_model_folds_too() -> None:
    modules = [("model", "M"), *((f"model.layers.{number}.mlp", "MLP") for number in range(3))]
    weights = [
        Weights("converted", (f"layers.{at}.mlp.a", f"h.{at}.b"), (f"model.layers.{at}.mlp.ab",), "x")
        for at in range(3)
    ]
    changed = [(f"model.layers.{number}.mlp", "MLP", "Mine") for number in range(3)]
    found = paths(module_tree("Model", modules, changed=changed, weights=weights))

    assert found["model.layers.{0..2}.mlp"].weights == (Weights("converted", ("a", "h.*.b"), ("ab",), "x"),)


def test_a_model_of_hundreds_of_layers_is_short_and_quick(tmp_path: Path) -> None:
    import time

    modules = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}", "Linear")
        for layer in range(61)
        for expert in range(256)
        for name in ("gate", "up")
    ]
    changed = [(f"model.layers.{layer}.mlp", "MoE", "Mine") for layer in range(3, 61)]
    started = time.process_time()
    tree = module_tree("Model", modules, changed=changed)
    assert time.process_time() - started < 5 * slowness()  # half a second where nothing else runs
    assert len(pickle.dumps(tree)) < 4000
    assert [node.name for node in tree.walk() if node.becomes] == ["mlp"]
