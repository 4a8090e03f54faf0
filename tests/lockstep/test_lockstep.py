"""A few sequences of `python -m tests.lockstep`; and what is wrong, seen and shortened to its cause."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from patcher import PatchedWeightsError
from tests.lockstep import libraries, operations
from tests.lockstep.subjects import IN_FILE, TINY, Side, Stock
from tests.lockstep.trials import Trial, Trials

#: Patchers aren't strict here, and most find nothing in some model.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("subject", TINY)
def test_a_few_sequences(subject: str, trials: Trials) -> None:
    for seed in range(3):
        trial = Trial.random(seed, length=4, subjects=[subject])
        assert trials.failure_of(trial) == "", trial


@pytest.mark.parametrize("subject", ["tied llama", "bert", "mixtral", "qwen2_vl", "t5"])
def test_a_few_sequences_of_generated_files(subject: str, trials: Trials) -> None:
    for seed in range(2):
        trial = Trial.random(seed, length=3, subjects=[subject], in_file=True)
        assert trials.failure_of(trial) == "", trial


#: Architectures whose files were wrong.
FILES = [
    ("FalconH1ForCausalLM", "qkv, gate_up"),  # fills buffers of its layers
    ("Qwen3VLMoeForConditionalGeneration", "qkv, sequential_experts"),
    ("TimesFm2_5ModelForPrediction", "siblings"),  # reads the dtype of a part
]


@pytest.mark.parametrize(("subject", "fusions"), FILES)
def test_a_file_of(subject: str, fusions: str, trials: Trials) -> None:
    trial = Trial(subject, fusions, (("training", 0), ("saved", 0)), IN_FILE)
    assert trials.failure_of(trial) == ""
    assert trials.counts["saved"]
    assert trial not in trials.refusals.values()


def of_llama(*names: str) -> Trial:
    return Trial("llama", "qkv, gate_up", tuple((name, 0) for name in names))


OF_LIBRARIES = [name for name, function in operations.OPERATIONS.items() if function.__module__ == libraries.__name__]


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_what_libraries_do(name: str, trials: Trials) -> None:
    assert trials.failure_of(of_llama(name)) == ""
    assert trials.counts[name]


def test_another_value_is_seen_and_its_operation_named(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(side: Side, stock: Stock, choice: Random, seen: dict[str, Any]) -> Any:
        if side.patcher is not None:
            with torch.no_grad():
                joined = side.model.model.layers[0].self_attn.qkv_proj.weight
                joined[64:128] = joined[64:128].roll(32, 0)  # k and v
        return side.model

    monkeypatch.setitem(operations.OPERATIONS, "swapped", swapped)
    trial = of_llama("reported", "swapped", "scaled")

    assert trials.failure_of(trial).startswith("outputs: 0: off by ")
    assert trials.shortest(trial) == of_llama("swapped")


def test_a_refusal_that_leaves_something_changed_is_seen(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_done(side: Side, stock: Stock, choice: Random, seen: dict[str, Any]) -> Any:
        if side.patcher is not None:
            side.model.lm_head.weight.data[0] += 1
            raise PatchedWeightsError("halfway")
        return side.model

    monkeypatch.setitem(operations.OPERATIONS, "half done", half_done)

    assert "half done was refused (halfway), and left something changed: " in trials.failure_of(of_llama("half done"))


def test_what_an_operation_sees_is_compared(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen_on_one_side(side: Side, stock: Stock, choice: Random, seen: dict[str, Any]) -> Any:
        seen["side"] = side.patcher is None
        return side.model

    monkeypatch.setitem(operations.OPERATIONS, "seen", seen_on_one_side)

    assert trials.failure_of(of_llama("seen")) == "seen: side: True and False"
