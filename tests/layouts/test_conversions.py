"""Conversions do what they say and no more: whatever else their patterns meet is kept, or the load says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Concatenate, WeightConverter
from transformers.core_model_loading import WeightRenaming

from patcher import Patcher
from patcher.layouts.transforms import select_conversions
from tests.support import shared
from tests.support.replacements import JoinedAttention
from tests.support.tiny import tiny_llava_config


def joining(before: str = "", after: str = "") -> WeightConverter:
    sources = [rf"{before}self_attn\.{name}_proj\.weight" for name in "qkv"]
    return WeightConverter(sources, [f"{after}self_attn.qkv_proj.weight"], operations=[Concatenate(dim=0)])


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llava_config())


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, **options)


@pytest.mark.parametrize("before", ["", r"(language_model\.layers\.\d+\.)"], ids=["anywhere", "bound"])
def test_a_pattern_takes_no_weights_of_a_namesake(llava: Path, before: str) -> None:
    """CLIP's attention has q_proj, k_proj and v_proj as well, and is not replaced: it has nothing to be made there."""
    conversion = joining(before, r"\1" if before else "")
    model, stock = load(llava, patcher=Patcher({"LlamaAttention": JoinedAttention}, (), conversion)), load(llava)
    for mine, its in zip(model.model.language_model.layers, stock.model.language_model.layers, strict=True):
        parts = [its.self_attn.get_submodule(f"{name}_proj").weight for name in "qkv"]
        assert torch.equal(mine.self_attn.qkv_proj.weight, torch.cat(parts))
    tower = stock.model.vision_tower.state_dict()
    assert all(torch.equal(value, tower[key]) for key, value in model.model.vision_tower.state_dict().items())


@pytest.mark.parametrize("text", [r"\(\?=c", r"\^b", r"^\^\(\?<!x\)a", "^what it makes$"])
def test_a_filter_is_searched_in_patterns_as_written_and_as_matched(text: str) -> None:
    renaming = WeightRenaming(r"(?<!x)a", r"^b(?=c)$")  # transformers matches `^(?<!x)a`, and makes `b$`, or `b`
    text = text.replace("what it makes", re.escape(renaming.target_patterns[0]))
    found = select_conversions([renaming], [Patcher(filtered_weight_conversion_patterns=text)])
    assert (found.kept, [each for _, each in found.dropped]) == ((), [text])
