"""A checkpoint that lacks a part of what is joined, or has it in another shape, is refused, whatever was requested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from patcher import PatchedWeightsError, Patcher, plan
from patcher.loading.saving import saved_state_dict
from tests.support.replacements import JoinedMLP
from tests.support.tiny import build_tiny, tiny_bert_config, tiny_llama_config

JOINED = Patcher(
    {"LlamaMLP": JoinedMLP},
    extra_weight_conversions=WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up_proj.weight", operations=[Concatenate(dim=0)]
    ),
)
#: A patcher that joins, its model, and what is joined in one of its layers.
CASES: dict[str, tuple[Patcher, Any, Any, tuple[str, ...]]] = {
    "a class mapping": (
        JOINED,
        LlamaForCausalLM,
        tiny_llama_config(),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ),
    "gate_up": (
        Patcher(fusions="gate_up"),
        LlamaForCausalLM,
        tiny_llama_config(),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ),
    "qkv": (
        Patcher(fusions="qkv"),
        LlamaForCausalLM,
        tiny_llama_config(),
        tuple(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"),
    ),
    "qkv with biases": (
        Patcher(fusions="qkv"),
        BertModel,
        tiny_bert_config(),
        tuple(f"encoder.layer.1.attention.self.{name}.bias" for name in ("query", "key", "value")),
    ),
}
LLAMA = [name for name in CASES if "bias" not in name]


def checkpoint_of(name: str) -> dict[str, torch.Tensor]:
    _, cls, config, _ = CASES[name]
    return {key: value.clone() for key, value in build_tiny(config, model_class=cls).state_dict().items()}


def load(name: str, state: dict[str, torch.Tensor], patcher: Patcher | None, **options: Any) -> Any:
    _, cls, config, _ = CASES[name]
    torch.manual_seed(0)
    return cls.from_pretrained(None, config=config, state_dict=dict(state), patcher=patcher, **options)


def assert_as_stock(name: str, model: Any, state: dict[str, torch.Tensor], **options: Any) -> None:
    expected = load(name, state, None, **options).state_dict()
    found = saved_state_dict(model, model.state_dict())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_refused(case: str, state: dict[str, torch.Tensor], text: str, tmp_path: Path) -> None:
    """It is an error, whatever is requested, and what that advises works."""
    patcher = CASES[case][0]
    for options in ({}, {"ignore_mismatched_sizes": True}):
        for strict in (True, False):
            with pytest.raises(PatchedWeightsError, match=text):
                load(case, state, patcher.replace(strict=strict), **options)
    stock = load(case, state, None, ignore_mismatched_sizes=True)
    stock.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert_as_stock(case, load(case, saved, patcher), saved)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_missing_part_is_named(case: str, place: int, tmp_path: Path) -> None:
    """Row 41. With strict=False it loaded, and output_loading_info said that nothing was missing."""
    parts, state = CASES[case][-1], checkpoint_of(case)
    del state[parts[place]]
    text = rf"(?s)of which the checkpoint lacks:\n  {parts[place]}\n.*without the patcher"
    assert_refused(case, state, text, tmp_path)


def test_a_part_of_another_shape_is_named(case: str, tmp_path: Path) -> None:
    parts, state = CASES[case][-1], checkpoint_of(case)
    state[parts[1]] = torch.randn(state[parts[1]].shape[0] + 3, *state[parts[1]].shape[1:])
    assert_refused(case, state, rf"(?s){parts[1]}: found .*, expected .*ignore_mismatched_sizes=True, save", tmp_path)


def test_what_a_conversion_makes_of_nothing_is_named() -> None:
    """A save would write it under its own name among those of the original."""
    patcher, *_, parts = CASES["a class mapping"]
    state = {key: value for key, value in checkpoint_of("a class mapping").items() if key not in parts}
    for strict in (True, False):
        with pytest.raises(
            PatchedWeightsError, match=r"the checkpoint lacks:\n  model\.layers\.1\.mlp\.gate_proj\.weight\n"
        ):
            load("a class mapping", state, patcher.replace(strict=strict))
    load("a class mapping", state, patcher.replace(new_weights="gate_up_proj"))


@pytest.mark.parametrize("case", [name for name in CASES if name != "a class mapping"])
def test_what_transformers_misses_as_well_is_no_fault(case: str) -> None:
    patcher, *_, parts = CASES[case]
    state = {key: value for key, value in checkpoint_of(case).items() if key not in parts}
    model, info = load(case, state, patcher, output_loading_info=True)
    owner = parts[0].rpartition(".")[0].rpartition(".")[0]
    assert [key.rpartition(".")[2] for key in info["missing_keys"]] == [parts[0].rpartition(".")[2]]
    assert all(key.startswith(owner) for key in info["missing_keys"])
    found = saved_state_dict(model, model.state_dict())
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert all(found[part].shape == checkpoint_of(case)[part].shape for part in parts)


@pytest.mark.parametrize("strict", [True, False])
def test_parts_whose_sum_is_right_are_refused(case: str, strict: bool) -> None:
    """Row 18. What is refused by transformers isn't read by a patched load."""
    patcher, *_, parts = CASES[case]
    state = checkpoint_of(case)
    whole = torch.cat([state[part] for part in parts[-2:]])
    state[parts[-2]], state[parts[-1]] = whole[:7], whole[7:]
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(case, state, None)
    with pytest.raises(PatchedWeightsError, match=rf"{parts[-1]}: found .*, expected "):
        load(case, state, patcher.replace(strict=strict))


def test_shapes_that_a_conversion_changes_are_its_own_affair() -> None:
    """A checkpoint that transformers doesn't read, and that this conversion is for."""
    state = checkpoint_of("gate_up")
    turned = {
        key: value.T.contiguous() if "gate_proj" in key or "up_proj" in key else value for key, value in state.items()
    }
    conversion = WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.gate_up_proj.weight",
        operations=[Concatenate(dim=1), Transpose(0, 1)],
    )
    model = load("gate_up", turned, JOINED.replace(extra_weight_conversions=conversion))
    for layer in range(2):
        parts = [state[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(model.model.layers[layer].mlp.gate_up_proj.weight, torch.cat(parts))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", LLAMA)
def test_both_layouts_of_one_tensor_are_named(name: str, strict: bool) -> None:
    patcher, *_, parts = CASES[name]
    state = checkpoint_of(name)
    joined = parts[0].replace("gate_proj", "gate_up_proj").replace("q_proj", "qkv_proj")
    state[joined] = torch.cat([state[part] for part in parts])
    text = rf"The checkpoint holds {joined} twice: as it is, and as {', '.join(parts)}\. Take one of them out"
    with pytest.raises(PatchedWeightsError, match=text):
        load(name, state, patcher.replace(strict=strict))
    del state[joined]  # as the error advises
    assert_as_stock(name, load(name, state, patcher), checkpoint_of(name))


def test_a_missing_part_is_named_where_the_checkpoint_has_no_prefix() -> None:
    """Saved from the base model."""
    state = {key.removeprefix("model."): value for key, value in checkpoint_of("qkv").items()}
    for name in LLAMA:
        patcher, *_, parts = CASES[name]
        lacking = {key: value for key, value in state.items() if key != parts[1].removeprefix("model.")}
        with pytest.raises(PatchedWeightsError, match=rf"the checkpoint lacks:\n  {parts[1]}\n"):
            load(name, lacking, patcher)


def test_a_plan_says_what_the_load_does(case: str, tmp_path: Any) -> None:
    patcher, cls, config, parts = CASES[case]
    model = build_tiny(config, model_class=cls)
    state = dict(model.state_dict())
    del state[parts[0]]
    model.save_pretrained(tmp_path, state_dict=state)
    assert parts[0] not in load_file(tmp_path / "model.safetensors")
    judged = plan(tmp_path, patcher, model_class=cls)
    assert not judged.ok
    assert f"the checkpoint lacks:\n  {parts[0]}\n" in judged.problems[0]
    with pytest.raises(PatchedWeightsError, match="the checkpoint lacks") as caught:
        cls.from_pretrained(tmp_path, patcher=patcher)
    assert str(caught.value) == judged.problems[0]
