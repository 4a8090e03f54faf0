"""Where the names of a checkpoint go: conversions act only where the model has what they make."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform

from patcher.layouts.transforms import Added, KeyResolver, ResolvedKey

LAYERS = 5
#: which tensors a layer has, as stock, as one that joins two of them, and as one that calls one of them otherwise
KINDS = {"stock": ("a", "b", "c"), "joined": ("ab", "c"), "named": ("a", "b", "d"), "both": ("ab", "d")}
JOIN = WeightConverter(["mlp.a", "mlp.b"], ["mlp.ab"], operations=[Concatenate(dim=0)])
NAME = WeightRenaming("mlp.c", "mlp.d")


class Layer(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.mlp = nn.Module()
        for name in names:
            self.mlp.register_buffer(name, nn.Parameter())


class Model(nn.Module):
    base_model_prefix = "model"

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(KINDS[kind]) for kind in kinds)


def follow(model: Any, key: str, added: list[Added], kept: list[WeightTransform]) -> ResolvedKey:
    return KeyResolver(model, model.state_dict(), kept, added).resolve(key)


def where(model: Any, key: str, added: list[Added], kept: list[WeightTransform]) -> str:
    """The name that a load gives a key of the checkpoint."""
    return follow(model, key, added, kept).name


@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=LAYERS),
    is_bound=st.booleans(),
    has_prefix=st.booleans(),
)
def test_each_tensor_finds_its_place_whatever_the_layer_is(kinds: list[str], is_bound: bool, has_prefix: bool) -> None:
    """Bound to the modules or by the names alone, with the prefix of the base model in the file or without."""
    model = Model(kinds)
    paths = frozenset(f"model.layers.{number}.mlp" for number, kind in enumerate(kinds) if kind != "stock")
    own = [
        Added(WeightConverter(["^a", "^b"], ["ab"], operations=[Concatenate(dim=0)]), paths),
        Added(WeightRenaming("^c", "d"), paths),
    ]
    added = own if is_bound else [Added(JOIN), Added(NAME)]
    found = {
        where(model, f"{'model.' * has_prefix}layers.{number}.mlp.{name}", added, [])
        for number in range(len(kinds))
        for name in "abc"
    }
    assert found == set(model.state_dict())


def test_what_is_bound_to_a_module_leaves_its_likes_alone() -> None:
    model = Model(["joined", "joined"])
    join = WeightConverter(["a", "b"], ["ab"], operations=[Concatenate(dim=0)])
    own = [Added(join, frozenset({"model.layers.0.mlp"}))]
    assert where(model, "model.layers.0.mlp.a", own, []) == "model.layers.0.mlp.ab"
    assert where(model, "model.layers.1.mlp.a", own, []) == "model.layers.1.mlp.a"


def test_a_renaming_whose_result_is_converted_runs_where_that_is() -> None:
    """`c` is named `b` for a converter of ours in one layer; a conversion of stock takes it in the other."""
    model = Model(["joined", "stock"])
    ours = [Added(WeightRenaming("mlp.x", "mlp.b")), Added(JOIN)]
    stock: list[WeightTransform] = [WeightConverter(["mlp.x"], ["mlp.a"], operations=[Concatenate(dim=0)])]
    assert where(model, "model.layers.0.mlp.x", ours, stock) == "model.layers.0.mlp.ab"
    # `b` of the second layer is there, so that leads somewhere as well: the patcher's comes first, as ever.
    assert where(model, "model.layers.1.mlp.x", ours, stock) == "model.layers.1.mlp.b"
    assert where(Model(["joined", "named"]), "model.layers.1.mlp.x", [ours[0]], stock) == "model.layers.1.mlp.b"


def test_patterns_equal_to_those_of_stock_are_told_apart() -> None:
    """Row 34. A load of transformers finds a converter by the text of the pattern that has matched."""
    model = Model(["joined", "both"])
    stock = WeightConverter(["mlp.a", "mlp.b"], ["mlp.d"], operations=[Concatenate(dim=0)])
    found = follow(model, "model.layers.0.mlp.a", [Added(JOIN)], [stock])
    assert [each.transform for each in found.added] == [JOIN]
    assert found.converter is not None
    assert found.converter.target_patterns == ["mlp.ab"]
    assert not follow(model, "model.layers.0.mlp.a", [], [stock]).added


def test_an_anchored_conversion_finds_its_layer() -> None:
    """Row 34."""
    anchored = WeightConverter(
        [r"(layers\.\d+\.mlp\.)a$", r"(layers\.\d+\.mlp\.)b$"], [r"\1ab"], operations=[Concatenate(dim=0)]
    )
    model = Model(["joined", "stock"])
    assert where(model, "model.layers.0.mlp.b", [Added(anchored)], []) == "model.layers.0.mlp.ab"
    assert where(model, "model.layers.1.mlp.b", [Added(anchored)], []) == "model.layers.1.mlp.b"


def test_what_is_tried_is_not_used() -> None:
    """A conversion of transformers is remembered, and reversed, only if it had a part in the end."""
    model = Model(["joined"])
    stock: list[WeightTransform] = [WeightRenaming("mlp.c", "mlp.e"), WeightRenaming("mlp.old", "mlp.a")]
    names = KeyResolver(model, model.state_dict(), stock, [Added(JOIN)])
    found = names.resolve("model.layers.0.mlp.old")
    assert (found.name, found.stock) == ("model.layers.0.mlp.ab", "model.layers.0.mlp.a")
    assert names.used == [stock[1]]
    assert not JOIN._was_used
