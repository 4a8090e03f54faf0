"""What is noted of a conversion is what the conversion does: values read by it, and written back through it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patcher.layouts.pieces import Piece, UntracedError, Values, traced

Tensors = dict[str, torch.Tensor]


def on_meta(tensors: Tensors) -> Tensors:
    return {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for n, t in tensors.items()}


def moved(draw: random.Random, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Some of what conversions do with tensors of one shape."""
    kind = draw.choice(["stack", "cat", "blank", "interleaved", "one"])
    dim = draw.randrange(tensors[0].dim())
    if kind == "stack":
        return torch.stack(tensors, dim)
    if kind == "cat":
        return torch.cat(tensors, dim)
    if kind == "blank":
        blank = tensors[0].new_empty((len(tensors), *tensors[0].shape))
        for place, tensor in zip(blank.unbind(), reversed(tensors), strict=True):
            place.copy_(tensor)
        return blank
    if kind == "interleaved":
        blank = tensors[0].new_empty((tensors[0].shape[0] * len(tensors), *tensors[0].shape[1:]))
        for number, tensor in enumerate(tensors):
            blank[number :: len(tensors)].copy_(tensor)
        return blank
    return draw.choice(tensors)


def turned(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    one, other = draw.randrange(tensor.dim()), draw.randrange(tensor.dim())
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.transpose(one, other),
        lambda: tensor.transpose(one, other).contiguous(),
        lambda: tensor.clone(),
        lambda: tensor.flatten(0, min(1, tensor.dim() - 1)),
        lambda: tensor.reshape(-1, tensor.shape[-1]),
        lambda: tensor.unsqueeze(one),
        lambda: tensor[..., : max(1, tensor.shape[-1] // 2)],
        lambda: tensor.narrow(one, tensor.shape[one] // 2, tensor.shape[one] - tensor.shape[one] // 2),
    ]
    return draw.choice(ways)()


def conversion(seed: int, computes: bool) -> Callable[[Any], Tensors]:
    def convert(tensors: Tensors) -> Tensors:
        draw = random.Random(seed)
        result = moved(draw, list(tensors.values()))
        for _ in range(draw.randrange(5)):
            result = turned(draw, result)
        if computes:
            result = result * 2 + 1
        if draw.random() < 0.5:
            result = moved(draw, list(result.chunk(2, draw.randrange(result.dim()))[:1]) * 1)
        cut = result.chunk(draw.randrange(1, 4), draw.randrange(result.dim()))
        return {str(number): turned(draw, piece) for number, piece in enumerate(cut)}

    return convert


@pytest.mark.parametrize("computes", [False, True])
def test_it_reads_and_writes_what_the_conversion_does(computes: bool) -> None:
    views = 0
    for seed in range(400):
        values = torch.arange(3.0 * 24).view(3, 4, 6)
        own = {name: each.clone() for name, each in zip("abc", values, strict=True)}
        if seed % 3 == 0:
            own["b"] = own["b"].T.contiguous().T  # lies otherwise
        convert = conversion(seed, computes)
        pieces = traced(convert, on_meta(own), {})
        expected = convert(own)
        reader = Values(pieces.values(), own.__getitem__)
        for name, value in expected.items():
            assert torch.equal(reader.take(pieces[name]), value), (seed, name)
        assert not reader._held
        if not all(piece.is_moved for piece in pieces.values()):
            continue
        assert not computes
        views += 1
        target = {name: torch.full_like(each, -1) for name, each in own.items()}
        for name in reversed(expected):
            pieces[name].write(expected[name], target.__getitem__)
        # All that the conversion keeps is there again, and nothing else has been written.
        kept = torch.cat([value.flatten() for value in expected.values()]).unique()
        for name, each in target.items():
            wanted = torch.where(torch.isin(own[name], kept), own[name], -torch.ones(()))
            assert torch.equal(each, wanted), (seed, name)
    assert computes or views > 100


def again(tensors: Tensors) -> Tensors:
    blank = tensors["a"].new_empty((2, 3)).copy_(tensors["a"])
    early = blank.clone()
    blank.copy_(tensors["b"])
    return {"early": early, "late": blank}


REFUSED: dict[str, Callable[[Any], Tensors]] = {
    "writes to the model": lambda tensors: {"a": tensors["a"].copy_(tensors["b"])},
    "computes in place": lambda tensors: {"a": tensors["a"].clone().mul_(2)},
    "writes to what was read": again,
    "reads bits of another type": lambda tensors: {"a": tensors["a"].view(torch.int32) + 1},
    "makes a tensor of nothing": lambda tensors: {"a": torch.zeros(2, device=tensors["a"].device)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_noted_is_refused(what: str) -> None:
    own = {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}
    with pytest.raises(UntracedError):
        traced(REFUSED[what], on_meta(own), {})


def twice_written(tensors: Tensors) -> Tensors:
    blank = tensors["a"].new_empty((2, 3)).copy_(tensors["a"])
    blank[0].copy_(tensors["b"][0])
    return {"x": blank}


def twice_read(tensors: Tensors) -> Tensors:
    joined = torch.cat([tensors["a"][0], tensors["b"].flatten(), tensors["a"][1]])
    return {"x": joined[:6].expand(2, 6)}  # as many as there are, and not all of them


@pytest.mark.parametrize("convert", [twice_written, twice_read])
def test_what_is_there_twice_is_read_and_not_written(convert: Callable[[Tensors], Tensors]) -> None:
    own = {"a": torch.arange(6.0).view(2, 3), "b": -torch.arange(6.0).view(2, 3)}
    pieces = traced(convert, on_meta(own), {})
    assert torch.equal(Values(pieces.values(), own.__getitem__).take(pieces["x"]), convert(own)["x"])
    assert not pieces["x"].is_moved


def test_what_is_not_looked_into_stays_what_it_is() -> None:
    other = object()
    found = traced(lambda tensors: tensors, on_meta({"a": torch.ones(2)}), {"other": other})
    assert found["other"] is other
    assert isinstance(found["a"], Piece)


def test_an_operation_that_computes_is_run_once_for_each_that_needs_it() -> None:
    own = {"a": torch.arange(6.0).view(2, 3)}
    pieces = traced(lambda tensors: dict(zip("xy", (tensors["a"] * 2).unbind(), strict=True)), on_meta(own), {})
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return own[name]

    reader = Values(pieces.values(), read)
    assert torch.equal(torch.stack([reader.take(pieces[name]) for name in "xy"]), own["a"] * 2)
    assert reads == ["a"]
