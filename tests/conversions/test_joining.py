"""Rows of several tensors as one: without a copy where they lie one behind the other."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import Chunk, WeightConverter

from patcher.fusions.joining import JoinRows
from patcher.fusions.origins import Origins, ParameterSource
from patcher.fusions.weight_layout import Layout, Step, converters_for

WHOLE = torch.arange(24.0).view(6, 4)
HALF = WHOLE.bfloat16()

#: case -> pieces, whether they can be viewed as one
PIECES: dict[str, tuple[list[torch.Tensor], bool]] = {
    "one behind the other": ([WHOLE[:3], WHOLE[3:]], True),
    "three of different sizes": ([WHOLE[:3], WHOLE[3:4], WHOLE[4:]], True),
    "biases": ([WHOLE.flatten()[:4], WHOLE.flatten()[4:9]], True),
    "half precision": ([HALF[:3], HALF[3:]], True),
    "a gap": ([WHOLE[:2], WHOLE[3:]], False),
    "the other order": ([WHOLE[3:], WHOLE[:3]], False),
    "the same twice": ([WHOLE[:3], WHOLE[:3]], False),
    "columns": ([WHOLE[:, :2], WHOLE[:, 2:]], False),
    "each by itself": ([WHOLE[:3].clone(), WHOLE[3:].clone()], False),
}


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    steps = tuple(Step(place, 1, ((place, ""),), (), (), (), "") for place in range(len(pieces)))
    names = [str(place) for place in range(len(pieces))]
    given = {name: [piece] for name, piece in zip(names, pieces, strict=True)}
    return JoinRows(steps, "w").convert(given, names, ["w"], "w")["w"]


@pytest.mark.parametrize("case", PIECES)
def test_it_is_what_concatenation_gives(case: str) -> None:
    pieces, viewed = PIECES[case]

    found = joined(pieces)

    assert torch.equal(found, torch.cat(pieces))
    assert (found.data_ptr() == pieces[0].data_ptr()) is viewed


def test_a_mapped_file_stays_mapped_as_long_as_the_view(tmp_path: Path) -> None:
    expected = torch.randn(2048, 256)
    save_file({"a": expected[:1024].contiguous(), "b": expected[1024:].contiguous()}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        pieces = [file.get_tensor(name) for name in ("a", "b")]
    found = joined(pieces)
    assert found.data_ptr() == pieces[0].data_ptr()

    del pieces, file
    gc.collect()
    torch.randn(4096, 256)  # whoever takes freed memory

    assert torch.equal(found, expected)
    found.zero_()  # it can be trained, and the file stays what it is
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("a"), expected[:1024])


def test_what_the_checkpoint_names_as_the_joined_one_is_one_conversion_for_all_layers() -> None:
    """The name of the joined parameter is also that of the key, and no part of what the layers don't share."""
    origins, layouts = Origins(), []
    for layer in ("layers.0.", "layers.1."):
        parts = tuple(f"{layer}{name}_proj.weight" for name in ("gate", "up"))
        patterns = ["gate_proj.weight", "up_proj.weight"]
        converter = WeightConverter("gate_up_proj.weight", patterns, operations=[Chunk(dim=0)])
        key = f"{layer}gate_up_proj.weight"
        targets = tuple(zip(patterns, parts, strict=True))
        source = ParameterSource((key,), ("gate_up_proj.weight",), targets, converter)
        origins.update(dict.fromkeys(parts, source))
        layouts.append(Layout(parts, key, JoinRows))

    (conversion,) = converters_for(SimpleNamespace(base_model_prefix=""), layouts, origins)  # type: ignore[arg-type]

    assert conversion.source_patterns == [r"^(layers\.\d+\.)gate_up_proj\.weight$"]
    assert conversion.target_patterns == [r"\1gate_up_proj.weight"]
    (step,) = conversion.operations[0].steps
    assert step.name == "gate_proj.weight"  # of any layer
