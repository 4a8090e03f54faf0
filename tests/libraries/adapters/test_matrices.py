"""The arithmetic of joined adapters, and configs that nobody would write: random ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from patcher import Patcher
from patcher.fusions import QKV, GateUp
from patcher.loading.adapters.layers import JoinedLayer, Part
from patcher.loading.adapters.lora import BIAS, A, B, JoinedAdapter, alpha_for, join, scaling_of, separate
from tests.support.adapters import (
    LOADS,
    SEVEN,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    new_adapter,
    trained,
)
from tests.support.comparing import logits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@st.composite
def layers(draw: st.DrawFn) -> tuple[JoinedLayer, dict[int, tuple[int, float]], bool]:
    """A joined layer, rank and alpha of the adapters of some of its parts, and how scalings are computed."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    parts = tuple(Part(f"part{number}", sum(sizes[:number]), size) for number, size in enumerate(sizes))
    chosen = draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    alphas = st.one_of(st.integers(1, 64), st.floats(0.1, 50))
    found = {number: (draw(st.integers(1, 5)), draw(alphas)) for number in sorted(chosen)}
    return JoinedLayer("joined", parts), found, draw(st.booleans())


def no_magnitudes() -> torch.Tensor:
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(layers(), st.sampled_from(DTYPES), st.integers(0, 1000), st.booleans())
def test_joined_they_are_what_they_were(drawn: Any, dtype: torch.dtype, seed: int, has_bias: bool) -> None:
    layer, adapted, by_root = drawn
    torch.manual_seed(seed)
    tensors = {
        number: {A: torch.randn(rank, 7, dtype=dtype), B: torch.randn(layer.parts[number].size, rank, dtype=dtype)}
        | ({BIAS: torch.randn(layer.parts[number].size, dtype=dtype)} if has_bias else {})
        for number, (rank, _) in adapted.items()
    }
    adapter, made = join(layer, JoinedAdapter.of(layer, adapted, by_root, False), tensors, no_magnitudes)
    scaling = scaling_of(adapter.rank, adapter.alpha, by_root)
    found = made[B].double() @ made[A].double() * scaling
    expected = torch.zeros(layer.rows, 7, dtype=torch.float64)
    for number, (rank, alpha) in adapted.items():
        own = tensors[number]
        expected[layer.parts[number].rows] = own[B].double() @ own[A].double() * scaling_of(rank, alpha, by_root)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    for cast in (made, {kind: value.to(torch.float32) for kind, value in made.items()}):
        back = separate(layer, adapter, cast, adapter.rank, adapter.alpha)
        assert back.keys() == adapted.keys()
        for number, (rank, alpha, own) in back.items():
            assert (rank, alpha) == adapted[number]
            assert own.keys() == tensors[number].keys()
            assert all(torch.equal(value, tensors[number][kind].to(value.dtype)) for kind, value in own.items())


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-3, 1e3), st.integers(1, 512), st.booleans())
def test_an_alpha_gives_its_scaling(scaling: float, rank: int, by_root: bool) -> None:
    found = scaling_of(rank, alpha_for(scaling, rank, by_root), by_root)
    assert found == pytest.approx(scaling, rel=3e-16)


def test_what_was_changed_in_between_is_saved_as_it_is() -> None:
    """By the same `A` and rows of `B`: between the blocks there is something now."""
    layer = JoinedLayer("joined", (Part("one", 0, 3), Part("other", 3, 2)))
    adapted = {0: (2, 4.0), 1: (1, 3.0)}
    tensors = {number: {A: torch.randn(r, 5), B: torch.randn(3 - number, r)} for number, (r, _) in adapted.items()}
    adapter, made = join(layer, JoinedAdapter.of(layer, adapted, False, False), tensors, no_magnitudes)
    made[B][4, 0] = 1.0
    back = separate(layer, adapter, made, adapter.rank, adapter.alpha)
    for number, (rank, alpha, own) in back.items():
        assert (rank, alpha) == (3, adapter.alpha)
        assert torch.equal(own[A], made[A])
        assert torch.equal(own[B], made[B][layer.parts[number].rows])


def some(choice: random.Random, names: list[str]) -> list[str]:
    return choice.sample(names, choice.randint(1, len(names)))


def some_settings(choice: random.Random, names: list[str]) -> dict[str, Any]:
    """A config that somebody might come up with."""
    targets: Any = some(choice, names)
    if choice.random() < 0.3:
        targets = rf".*layers\.{choice.randint(0, 1)}\..*({'|'.join(targets)})"
    paths = [f"layers.{choice.randint(0, 1)}.{where}.{name}" for where in ("mlp", "self_attn") for name in names]
    keys = [*names, *(path.replace(".", r"\.") for path in paths)]
    return {
        "target_modules": targets,
        "r": choice.randint(1, 6),
        "lora_alpha": choice.choice([1, 4, 7, 16]),
        "rank_pattern": {key: choice.randint(1, 5) for key in some(choice, keys)[:3]},
        "alpha_pattern": {key: choice.choice([2, 3, 8]) for key in some(choice, keys)[:3]},
        "use_rslora": choice.random() < 0.3,
        "use_dora": choice.random() < 0.3,
    } | ({"exclude_modules": some(choice, paths)} if choice.random() < 0.3 and isinstance(targets, list) else {})


FUSIONS = [
    Patcher(fusions=["qkv", "gate_up"]),
    Patcher(fusions=["qkv"]),
    Patcher(fusions=[QKV(modules="model.layers.1.self_attn"), GateUp(modules="model.layers.0.mlp")]),
]
#: What peft says of names and patterns that mean nothing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules=:UserWarning"),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_adapters_onto_fused_models(seed: int, llama: Path, tmp_path: Path) -> None:
    choice = random.Random(seed)
    expected = new_adapter(base(llama), tmp_path / "one", seed, **some_settings(choice, SEVEN))
    as_peft_model(llama, tmp_path / "one").save_pretrained(tmp_path / "stock")
    model = choice.choice(LOADS[:2])(llama, tmp_path / "one", patcher=choice.choice(FUSIONS))
    assert_close(logits(model), expected)
    model.save_pretrained(tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "stock")


@pytest.mark.parametrize("seed", range(6))
def test_random_adapters_from_fused_models(seed: int, llama: Path, tmp_path: Path) -> None:
    choice = random.Random(seed)
    given = some_settings(choice, ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"])
    model = trained(llama, tmp_path, FUSIONS[0], **given)
    assert_close(logits(as_peft_model(llama, tmp_path)), logits(model))
    assert_close(logits(choice.choice(LOADS)(llama, tmp_path, patcher=FUSIONS[0])), logits(model))
