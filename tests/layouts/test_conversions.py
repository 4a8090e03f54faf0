"""Conversions do what they say and no more: whatever else their patterns meet is kept, or the load says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Concatenate, WeightConverter
from transformers.core_model_loading import Chunk, Transpose, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher, plan
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


class Halves(LlamaMLP):
    """Two halves for the gate projection, and the down projection transposed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rows, columns = self.gate_proj.weight.shape
        self.first, self.second = (nn.Parameter(torch.empty(rows // 2, columns)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(rows, columns))
        del self.gate_proj, self.down_proj


def test_any_conversion_may_be_anchored(llava: Path, tmp_path: Path) -> None:
    r"""transformers expands `\1` in the name of the layer, and operations name their results by the pattern."""
    layer = r"(language_model\.layers\.\d+\.)mlp\."
    conversions = [
        WeightConverter(rf"{layer}gate_proj\.weight$", [r"\1mlp.first", r"\1mlp.second"], [Chunk(dim=0)]),
        WeightConverter(rf"{layer}down_proj\.weight$", r"\1mlp.down", [Transpose(0, 1)]),
    ]
    patcher = Patcher({"LlamaMLP": Halves}, extra_weight_conversions=conversions)
    model, stock = load(llava, patcher=patcher), load(llava)
    assert plan(llava, patcher).ok
    for mine, its in zip(model.model.language_model.layers, stock.model.language_model.layers, strict=True):
        assert torch.equal(torch.cat([mine.mlp.first, mine.mlp.second]), its.mlp.gate_proj.weight)
        assert torch.equal(mine.mlp.down, its.mlp.down_proj.weight.T)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (llava / "model.safetensors").read_bytes()


@pytest.mark.parametrize("text", [r"\(\?=c", r"\^b", r"^\^\(\?<!x\)a", "^what it makes$"])
def test_a_filter_is_searched_in_patterns_as_written_and_as_matched(text: str) -> None:
    renaming = WeightRenaming(r"(?<!x)a", r"^b(?=c)$")  # transformers matches `^(?<!x)a`, and makes `b$`, or `b`
    text = text.replace("what it makes", re.escape(renaming.target_patterns[0]))
    found = select_conversions([renaming], [Patcher(filtered_weight_conversion_patterns=text)])
    assert (found.kept, [each for _, each in found.dropped]) == ((), [text])
