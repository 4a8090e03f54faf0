"""Rows of several tensors as one: without a copy where they lie one behind the other."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from patcher.layouts.layouts import Layout, Rows
from patcher.layouts.sources import Computation, Computed, JoinedRows, fused_sources

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
    return JoinedRows([(piece, 0, len(piece)) for piece in pieces])[...]


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


class OnDisk:
    """A tensor that is read by slices, as safetensors gives it, and says which rows it was asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.rows: set[int] = set()

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.tensor[index]
        self.rows |= {int(value) for value in found.flatten()}
        return found


SLICES = st.tuples(st.none() | st.integers(-14, 14), st.none() | st.integers(-14, 14)).map(lambda ends: slice(*ends))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    index=SLICES | st.tuples(SLICES, SLICES) | st.integers(0, 9),
)
def test_any_slice_is_that_of_the_joined_tensor(sizes: list[int], index: Any) -> None:
    rows = sum(sizes)
    whole = torch.arange(float(rows)).view(rows, 1).expand(rows, 3).contiguous()
    parts = [OnDisk(part) for part in whole.split(sizes)]
    if isinstance(index, int) and index >= rows:
        return
    source = JoinedRows([(part, 0, size) for part, size in zip(parts, sizes, strict=True)])

    assert source.get_shape() == list(whole.shape)
    found = source[index]

    assert torch.equal(found, whole[index])
    if isinstance(index, slice):  # and no other rows were read
        assert {row for part in parts for row in part.rows} == set(whole[index][:, 0].int().tolist())


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), tail=st.lists(st.integers(1, 3), max_size=2))
def test_the_shape_of_joined_rows_is_known_before_they_are(sizes: list[int], tail: list[int]) -> None:
    names = [str(number) for number in range(len(sizes))]
    layout = Rows(names, "joined", tuple((size, *tail) for size in sizes))
    parts = [torch.zeros(shape) for shape in layout.stock_shapes]

    assert layout.fused_shapes() == [tensor.shape for tensor in layout.fuse(parts)]
    assert [part.shape for part in layout.separate(layout.fuse(parts))] == [part.shape for part in parts]


class Halves(Layout):
    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors[0].chunk(2))


def test_what_is_computed_together_is_computed_once_and_forgotten() -> None:
    part, runs = OnDisk(WHOLE), []
    made = fused_sources(Halves("w", ("a", "b"), ((6, 4),)), [part])
    assert [source.get_shape() for source in made] == [[3, 4], [3, 4]]
    assert not part.rows

    def run() -> dict[str, torch.Tensor]:
        runs.append(1)
        return {"a": WHOLE[:2], "b": WHOLE[2:]}

    group = Computation(lambda _: run(), {})
    sources = [Computed(group, name, (2, 4), torch.float32) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda source: source[...], sources))

    assert torch.equal(torch.cat(found), WHOLE)
    assert len(runs) == 1
    assert not group._results
    assert torch.equal(sources[0][1:], WHOLE[1:2])  # whoever reads it again computes it again
    assert len(runs) == 2


def test_one_part_is_read_as_it_is() -> None:
    (source,) = fused_sources(Rows("a", "b", ((6, 4),)), [WHOLE])
    assert source is WHOLE
