"""What a checkpoint lacks of what is joined: named, or initialised part by part, as transformers does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
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


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_missing_part_is_named_by_its_key(case: str, place: int) -> None:
    patcher, *_, parts = CASES[case]
    state = checkpoint_of(case)
    del state[parts[place]]
    text = rf"(?s)of which the checkpoint has only some\. It lacks:\n  {parts[place]}\nWith strict=False"
    with pytest.raises(PatchedWeightsError, match=text):
        load(case, state, patcher)
    with pytest.warns(UserWarning, match=text):  # as the error advises
        model = load(case, state, patcher.replace(strict=False))
    assert_as_stock(case, model, state)


def test_what_transformers_misses_as_well_is_no_fault(case: str, caplog: pytest.LogCaptureFixture) -> None:
    patcher, *_, parts = CASES[case]
    layer = ".".join(parts[0].split(".")[:3])
    for gone in (parts, [key for key in checkpoint_of(case) if key.startswith(layer)]):
        state = {key: value for key, value in checkpoint_of(case).items() if key not in gone}
        if case == "a class mapping" and len(gone) > len(parts):
            state |= {key: value for key, value in checkpoint_of(case).items() if key in gone and "mlp." not in key}
            state |= {
                key: value for key, value in checkpoint_of(case).items() if key.endswith("1.mlp.down_proj.weight")
            }
        assert_as_stock(case, load(case, state, patcher), state)


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_of_other_shapes_are_ignored_part_by_part(case: str, strict: bool) -> None:
    patcher, *_, parts = CASES[case]
    state = checkpoint_of(case)
    state[parts[1]] = torch.randn(state[parts[1]].shape[0] + 3, *state[parts[1]].shape[1:])
    with pytest.raises(PatchedWeightsError, match=rf"{parts[1]}: found .*, expected "):
        load(case, state, patcher.replace(strict=strict))
    model = load(case, state, patcher.replace(strict=strict), ignore_mismatched_sizes=True)
    assert_as_stock(case, model, state, ignore_mismatched_sizes=True)


def test_when_each_part_is_missing_or_of_another_shape_all_are_initialised(case: str) -> None:
    patcher, *_, parts = CASES[case]
    for missing in range(len(parts)):
        state = {key: value for key, value in checkpoint_of(case).items() if key not in parts[:missing]}
        state |= {key: torch.randn(state[key].shape[0] + 3, *state[key].shape[1:]) for key in parts[missing:]}
        model = load(case, state, patcher, ignore_mismatched_sizes=True)
        assert_as_stock(case, model, state, ignore_mismatched_sizes=True)


def test_what_was_initialised_is_in_the_loading_info(case: str) -> None:
    """Row 41. It said that nothing was missing."""
    patcher, *_, parts = CASES[case]
    state = checkpoint_of(case)
    del state[parts[0]]
    state[parts[1]] = torch.randn(state[parts[1]].shape[0] + 3, *state[parts[1]].shape[1:])
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, ours = load(case, state, patcher.replace(strict=False), **options)
        _, stock = load(case, state, None, **options)
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        assert sorted(ours[what]) == sorted(stock[what]), what


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


def test_the_names_are_those_that_the_checkpoint_has() -> None:
    """Saved from the base model, so without its prefix."""
    state = {key.removeprefix("model."): value for key, value in checkpoint_of("qkv").items()}
    del state["layers.0.self_attn.k_proj.weight"]
    for name, key in (("qkv", "layers.0.self_attn.k_proj.weight"), ("a class mapping", "layers.0.mlp.up_proj.weight")):
        lacking = {other: value for other, value in state.items() if other != key}
        patcher = CASES[name][0]
        with pytest.raises(PatchedWeightsError, match=rf"It lacks:\n  {key}\n"):
            load(name, lacking, patcher)
        with pytest.warns(UserWarning, match=rf"It lacks:\n  {key}\n"):
            model = load(name, lacking, patcher.replace(strict=False))
        found = saved_state_dict(model, model.state_dict())
        for layer in range(2):
            q = f"layers.{layer}.self_attn.q_proj.weight"
            assert torch.equal(found[f"model.{q}"], state[q])


def test_a_plan_says_what_the_load_does(case: str, tmp_path: Any) -> None:
    patcher, cls, config, parts = CASES[case]
    model = build_tiny(config, model_class=cls)
    state = dict(model.state_dict())
    del state[parts[0]]
    model.save_pretrained(tmp_path, state_dict=state)
    assert parts[0] not in load_file(tmp_path / "model.safetensors")
    judged = plan(tmp_path, patcher, model_class=cls)
    assert not judged.ok
    assert f"It lacks:\n  {parts[0]}\n" in judged.problems[0]
    with pytest.raises(PatchedWeightsError, match="It lacks") as caught:
        cls.from_pretrained(tmp_path, patcher=patcher)
    assert str(caught.value) == judged.problems[0]


# --- generated -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(LLAMA), data=st.data())
def test_random_holes_are_filled_as_transformers_fills_them(name: str, data: st.DataObject) -> None:
    patcher, *_ = CASES[name]
    state = checkpoint_of(name)
    projections = sorted(key for key in state if "_proj" in key)
    if name == "a class mapping":  # what it joins; other parameters of a replacement keep what `__init__` gave them
        projections = [key for key in projections if "gate_proj" in key or "up_proj" in key]
    gone = data.draw(st.sets(st.sampled_from(projections), max_size=4))
    other = data.draw(st.sets(st.sampled_from(projections), max_size=2)) - gone
    damaged = {key: value for key, value in state.items() if key not in gone}
    damaged |= {key: torch.randn(5, *state[key].shape[1:]) for key in other}
    options = {"ignore_mismatched_sizes": True} if other else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(name, damaged, patcher.replace(strict=False), **options)
    found = saved_state_dict(model, model.state_dict())
    assert found.keys() == state.keys()
    for key, value in state.items():
        if key not in gone | other:
            assert torch.equal(found[key], value), key
        else:
            assert found[key].shape == value.shape, key
            assert 0.8 < found[key].std() / model.config.initializer_range < 1.2, key
    for group in joined_groups(name, state):
        if 0 < len(gone.intersection(group)) < len(set(group) - other):
            with pytest.raises(PatchedWeightsError, match="of which the checkpoint has only some"):
                load(name, damaged, patcher, **options)
            break


def joined_groups(name: str, state: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    parts = [part.rpartition(".")[0].rpartition(".")[2] for part in CASES[name][-1]]
    for layer in range(2):
        yield [key for key in state if f"layers.{layer}." in key and any(f".{part}." in key for part in parts)]
