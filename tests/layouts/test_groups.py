"""What one conversion makes, told from what it has made of a layer that is alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Concatenate, WeightConverter

from patcher.layouts.groups import Alike, Group

MODEL = SimpleNamespace(config=None)


def group(converter: WeightConverter, first: str, rows: int) -> Group:
    result = Group(converter, first)
    for pattern in converter.source_patterns:
        result.add(first.replace("ab", pattern), pattern, torch.empty(rows, 3, device="meta"))
    return result


@pytest.fixture
def converter() -> WeightConverter:
    return WeightConverter(["a", "b"], ["ab"], operations=[Concatenate(dim=0)])


def test_of_layers_that_are_alike_one_is_converted(converter: WeightConverter) -> None:
    alike, one = Alike(), group(converter, "layers.0.ab", 2)
    assert alike.made_by(one) is None
    alike.keep(one, one.convert(MODEL))

    again = group(converter, "layers.17.ab", 2)
    assert alike.made_by(again) == again.convert(MODEL) == {"layers.17.ab": torch.Size([4, 3])}


def test_other_shapes_names_and_converters_are_not_alike(converter: WeightConverter) -> None:
    alike, one = Alike(), group(converter, "layers.0.ab", 2)
    alike.keep(one, one.convert(MODEL))

    assert alike.made_by(group(converter, "layers.1.ab", 5)) is None
    assert alike.made_by(group(converter, "blocks.1.ab", 2)) is None
    assert alike.made_by(group(WeightConverter(["a", "b"], ["ab"], [Concatenate(dim=1)]), "layers.1.ab", 2)) is None


def test_what_lies_elsewhere_is_told_of_its_own_layer_only(converter: WeightConverter) -> None:
    """A conversion may name what it makes as it likes: the number is then a part of the name."""
    alike, one = Alike(), group(converter, "layers.0.ab", 2)
    alike.keep(one, {"layers.0.ab": torch.Size([4, 3]), "shared.scale": torch.Size([1])})

    assert alike.made_by(group(converter, "layers.1.ab", 2)) is None
