"""One conversion for one layer, as a layout; and of layers that are alike, from one of them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Concatenate, WeightConverter
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
)

from patcher import PatchedWeightsError
from patcher.layouts.conversion import Converted, Group

MODEL = SimpleNamespace(config=None)


def group(converter: WeightConverter, first: str, *shape: int) -> Group:
    result = Group(converter, first)
    for pattern in converter.source_patterns:
        result.add(first.replace("ab", pattern), pattern, shape or (2, 3))
    return result


def join(*operations: ConversionOps) -> WeightConverter:
    return WeightConverter(["a", "b"], ["ab"], [*operations] or [Concatenate(dim=0)])


ORDERS: dict[str, tuple[WeightConverter, Any]] = {
    "transposed, then joined": (
        join(Transpose(0, 1), Concatenate(dim=0)),
        lambda a, b: [torch.cat([a.T, b.T])],
    ),
    "joined, then transposed": (join(Concatenate(dim=0), Transpose(0, 1)), lambda a, b: [torch.cat([a, b]).T]),
    "stacked, then transposed": (
        WeightConverter(["e.*.a"], ["ab"], [MergeModulelist(dim=0), Transpose(1, 2)]),
        lambda a, b: [torch.stack([a, b]).transpose(1, 2)],
    ),
    "transposed, then stacked": (
        WeightConverter(["e.*.a"], ["ab"], [Transpose(0, 1), MergeModulelist(dim=0)]),
        lambda a, b: [torch.stack([a.T, b.T])],
    ),
    "interleaved, then joined": (
        join(Interleave(dim=0), Concatenate(dim=1)),
        lambda *parts: [torch.cat([each.view(2, 2, 3).transpose(0, 1).reshape(4, 3) for each in parts], 1)],
    ),
    "permuted, transposed, then joined": (
        join(PermuteForRope(permute_layer_names=["a", "b"]), Transpose(0, 1), Concatenate(dim=0)),
        lambda *parts: [torch.cat([each.view(2, 2, 3).transpose(0, 1).reshape(4, 3).T for each in parts])],
    ),
    "joined twice over": (
        join(Transpose(0, 1), Transpose(0, 1), Concatenate(dim=0)),
        lambda a, b: [torch.cat([a, b])],
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_operations_run_in_any_natural_order_and_back(case: str) -> None:
    """transformers gives an operation on one tensor the first of several: the others were lost, or it raised."""
    converter, expected = ORDERS[case]
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    patterns = converter.source_patterns if len(converter.source_patterns) == 2 else converter.source_patterns * 2
    made = Group(converter, "ab")
    made.add("x.0", patterns[0], a.shape)
    made.add("x.1", patterns[1], b.shape)
    layout = made.layout(MODEL)
    whole = layout.fuse([a, b])
    assert [each.shape for each in whole] == layout.fused_shapes()
    assert all(torch.equal(one, other) for one, other in zip(whole, expected(a, b), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(layout.separate(whole), (a, b), strict=True))


def test_one_tensor_is_cut_and_each_piece_transposed() -> None:
    made = Group(WeightConverter(["w"], ["a", "b"], [Chunk(dim=0), Transpose(0, 1)]), "x.a")
    made.add("x.w", "w", (4, 3))
    layout, whole = made.layout(MODEL), torch.randn(4, 3)
    assert layout.fused == ("x.a", "x.b")
    parts = layout.fuse([whole])
    assert all(torch.equal(one, other) for one, other in zip(parts, (whole[:2].T, whole[2:].T), strict=True))
    (back,) = layout.separate(parts)
    assert torch.equal(back, whole)


def test_a_layout_is_pickled_with_what_it_has_joined() -> None:
    made = Group(join(), "x.ab")
    made.add("x.a", "a", (4, 3))
    made.add("x.b", "b", (2, 3))
    layout: Converted = pickle.loads(pickle.dumps(made.layout(MODEL)))
    parts = [torch.randn(4, 3), torch.randn(2, 3)]
    assert all(torch.equal(one, other) for one, other in zip(parts, layout.separate(layout.fuse(parts)), strict=True))


class OneWay(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"ab": input_dict["a"]}


def test_what_has_no_reverse_says_so() -> None:
    layout = group(join(OneWay()), "x.ab").layout(MODEL)
    with pytest.raises(PatchedWeightsError, match=r"x\.ab can't be saved .* operations \(OneWay\) has no reverse"):
        layout.separate(layout.fuse([torch.randn(2, 3)] * 2))
