"""DeepSpeed ZeRO-3, by the switch of transformers itself: refused with a patcher before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import InvalidPatcherError, Patcher
from tests.support import shared
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import tiny_llama_config

REFUSED = r"A patcher was requested while DeepSpeed ZeRO-3 is enabled, .*: patchers don't support that\. Load the"


class Own(LlamaMLP):  # type: ignore[misc]
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@contextmanager
def deepspeed(stage: int) -> Iterator[None]:
    """What `TrainingArguments(deepspeed=...)` does to transformers; for that DeepSpeed needn't be installed."""
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1})
    set_hf_deepspeed_config(config)  # which holds it weakly
    try:
        assert is_deepspeed_zero3_enabled() is (stage == 3)
        yield
    finally:
        unset_hf_deepspeed_config()


PATCHERS = {"classes": Patcher({"LlamaMLP": Own}), "fusions": Patcher(fusions="qkv"), "nothing": Patcher()}
WAYS: dict[str, Callable[[Path, Patcher], Any]] = {
    "from_pretrained": lambda folder, asked: LlamaForCausalLM.from_pretrained(folder, patcher=asked),
    "an Auto class": lambda folder, asked: AutoModelForCausalLM.from_pretrained(folder, patcher=asked),
    "from_config": lambda folder, asked: AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=asked),
    "weights in memory": lambda folder, asked: LlamaForCausalLM.from_pretrained(
        None, config=tiny_llama_config(), state_dict={}, patcher=asked
    ),
}


@pytest.mark.crossed
@pytest.mark.parametrize("asked", PATCHERS.values(), ids=PATCHERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_patcher_is_refused_before_anything_is_read(
    way: str, asked: Patcher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot()
    monkeypatch.setattr("transformers.modeling_utils.load_state_dict", None)  # whoever reads falls over it
    monkeypatch.setattr("transformers.modeling_utils.safe_open", None)
    with deepspeed(3):
        with pytest.raises(InvalidPatcherError, match=REFUSED):
            WAYS[way](folder, asked)
        with pytest.raises(InvalidPatcherError, match=REFUSED), asked.applied():
            WAYS[way](folder, None)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert changes(before) == []


def test_a_plan_and_a_config_say_so(folder: Path) -> None:
    with deepspeed(3):
        planned = patcher.plan(folder, PATCHERS["classes"])
        assert not planned.ok
        assert "DeepSpeed ZeRO-3 is enabled" in planned.problems[0]
        with pytest.raises(InvalidPatcherError, match=REFUSED):
            LlamaForCausalLM.from_pretrained(folder, fusion_config={"patcher": ["qkv"]})
    assert patcher.plan(folder, PATCHERS["classes"]).ok


def test_a_load_without_a_patcher_goes_the_way_of_stock(folder: Path) -> None:
    with deepspeed(3), pytest.raises(ModuleNotFoundError, match="deepspeed"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("asked", [PATCHERS["classes"], PATCHERS["fusions"]], ids=["classes", "fusions"])
def test_what_the_error_advises_works(asked: Patcher, folder: Path) -> None:
    stock = shared.stock(folder, LlamaForCausalLM)
    with deepspeed(2):
        second = LlamaForCausalLM.from_pretrained(folder, patcher=asked)
    before = LlamaForCausalLM.from_pretrained(folder, patcher=asked)  # and then comes the config
    ids = torch.arange(8)[None]
    with deepspeed(3):
        for model in (second, before):
            torch.testing.assert_close(model(ids).logits, stock(ids).logits)
