"""Stacks of matrices as parameters of linear layers: each law over the ways in which stacks lie."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from patcher import InvalidPatcherError
from patcher.fusions.experts.matrices import Matrices

GATE_AND_UP = ("gate_proj", "up_proj")


def layout(parts: tuple[str, ...], shape: tuple[int, ...], kind: str = "weight", **how: bool) -> Matrices:
    module = nn.Module()
    module.stack = nn.Parameter(torch.empty(shape, device="meta"))
    return Matrices(("stack",), layers=tuple(f"{part}.{kind}" for part in parts), **how).of(module)


CASES = [
    pytest.param(layout(("down_proj",), (3, 4, 6)), id="one"),
    pytest.param(layout(("down_proj",), (3, 6, 4), transposed=True), id="one, transposed"),
    pytest.param(layout(GATE_AND_UP, (3, 8, 6)), id="halves"),
    pytest.param(layout(GATE_AND_UP, (3, 6, 8), transposed=True), id="halves, transposed"),
    pytest.param(layout(GATE_AND_UP, (3, 8, 6), interleaved=True), id="interleaved"),
    pytest.param(layout(GATE_AND_UP, (3, 6, 8), transposed=True, interleaved=True), id="interleaved, transposed"),
    pytest.param(layout(GATE_AND_UP, (3, 8), "bias"), id="biases"),
    pytest.param(layout(GATE_AND_UP, (3, 8), "bias", interleaved=True), id="biases, interleaved"),
    pytest.param(layout(GATE_AND_UP, (1, 2, 1)), id="smallest"),
]


def bits(stack: torch.Tensor) -> torch.Tensor:
    return stack.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("case", CASES)
def test_what_is_cut_is_put_together_byte_for_byte(case: Matrices, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    (shape,) = case.stock_shapes
    # Any bytes: not-a-numbers keep theirs too.
    stack = torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)
    pieces = case.fuse([stack])

    assert len(pieces) == len(case.fused)
    assert all(piece.is_contiguous() and piece.dtype is dtype for piece in pieces)
    (again,) = case.separate(pieces)
    assert again.shape == stack.shape
    assert again.dtype is dtype
    assert torch.equal(bits(again), bits(stack))


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_known_without_values(case: Matrices) -> None:
    pieces = case.fuse([torch.empty(case.stock_shapes[0], device="meta")])
    (again,) = case.separate(pieces)

    assert {piece.device.type for piece in (*pieces, again)} == {"meta"}
    assert again.shape == case.stock_shapes[0]
    assert case.fused_shapes() == [piece.shape for piece in pieces]


def test_a_layer_computes_its_rows_of_the_product() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    for how in ({}, {"interleaved": True}):
        stack = torch.randn(3, 8, 6, dtype=torch.float64)
        pieces = dict(zip((case := layout(GATE_AND_UP, (3, 8, 6), **how)).fused, case.fuse([stack]), strict=True))
        whole = x @ stack[1].T
        gate, up = (whole[:, ::2], whole[:, 1::2]) if how else whole.chunk(2, dim=-1)
        torch.testing.assert_close(x @ pieces["1.gate_proj.weight"].T, gate)
        torch.testing.assert_close(x @ pieces["1.up_proj.weight"].T, up)


def test_halves_are_views_where_no_copy_is_needed() -> None:
    stack = torch.randn(3, 8, 6)
    storage = stack.untyped_storage().data_ptr()

    assert {piece.untyped_storage().data_ptr() for piece in layout(GATE_AND_UP, (3, 8, 6)).fuse([stack])} == {storage}


def test_a_layout_is_a_value() -> None:
    case = layout(GATE_AND_UP, (3, 8, 6), interleaved=True)

    assert pickle.loads(pickle.dumps(case)) == case
    assert hash(case) == hash(layout(GATE_AND_UP, (3, 8, 6), interleaved=True))
    assert case != layout(GATE_AND_UP, (3, 8, 6))
    with pytest.raises(FrozenInstanceError):
        case.interleaved = False  # type: ignore[misc]


def test_what_does_not_fit_is_an_error() -> None:
    case = layout(GATE_AND_UP, (2, 4, 3))
    pieces = case.fuse([torch.randn(2, 4, 3)])

    with pytest.raises(ValueError, match=r"stack has the shape \(2, 3, 4\), not \(2, 4, 3\)"):
        case.fuse([torch.randn(2, 3, 4)])
    with pytest.raises(ValueError, match="stack is made of 4 parameters, found 3"):
        case.separate(pieces[:3])
    with pytest.raises(ValueError, match=r"1\.gate_proj\.weight is \(3, 2\), torch.float32, and stack needs \(2, 3\)"):
        case.separate([*pieces[:2], pieces[2].T, pieces[3]])
    with pytest.raises(ValueError, match=r"1\.up_proj\.weight is \(2, 3\), torch.float16, and stack needs"):
        case.separate([*pieces[:3], pieces[3].half()])
    with pytest.raises(InvalidPatcherError, match=r"stack of the shape \(2, 5, 3\) can't be cut into 2 equal parts"):
        layout(GATE_AND_UP, (2, 5, 3))
