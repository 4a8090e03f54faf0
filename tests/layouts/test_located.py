"""Conversions that run only where the model has what they make."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hypothesis import given, strategies as st
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform

from patcher.compat.conversions import key_renamer
from patcher.layouts.located import located, pattern_as_written
from patcher.layouts.selection import in_order
from patcher.layouts.tracing import trace_of, with_trace

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


def where(model: Any, key: str, added: list[tuple[WeightTransform, Any]], kept: list[WeightTransform]) -> str:
    """The name that a load gives a key of the checkpoint."""
    chain = in_order(located(added, kept, model), kept)
    return key_renamer(chain, model, model.state_dict())(key)[0]


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
        (WeightConverter(["^a", "^b"], ["ab"], operations=[Concatenate(dim=0)]), paths),
        (WeightRenaming("^c", "d"), paths),
    ]
    added = own if is_bound else [(JOIN, None), (NAME, None)]
    found = {
        where(model, f"{'model.' * has_prefix}layers.{number}.mlp.{name}", added, [])
        for number in range(len(kinds))
        for name in "abc"
    }
    assert found == set(model.state_dict())


def test_what_is_bound_to_a_module_leaves_its_likes_alone() -> None:
    model = Model(["joined", "joined"])
    own = [(WeightConverter(["a", "b"], ["ab"], operations=[Concatenate(dim=0)]), frozenset({"model.layers.0.mlp"}))]
    assert where(model, "model.layers.0.mlp.a", own, []) == "model.layers.0.mlp.ab"
    assert where(model, "model.layers.1.mlp.a", own, []) == "model.layers.1.mlp.a"


def test_a_renaming_whose_result_is_converted_runs_where_that_is() -> None:
    """`c` is named `b` for a converter of ours in one layer; a conversion of stock takes it in the other."""
    model = Model(["joined", "stock"])
    ours = [(WeightRenaming("mlp.x", "mlp.b"), None), (JOIN, None)]
    stock: list[WeightTransform] = [WeightConverter(["mlp.x"], ["mlp.a"], operations=[Concatenate(dim=0)])]
    assert where(model, "model.layers.0.mlp.x", ours, stock) == "model.layers.0.mlp.ab"
    # `b` of the second layer is there, so that leads somewhere as well: the patcher's comes first, as ever.
    assert where(model, "model.layers.1.mlp.x", ours, stock) == "model.layers.1.mlp.b"
    assert where(Model(["joined", "named"]), "model.layers.1.mlp.x", [ours[0]], stock) == "model.layers.1.mlp.b"


def test_patterns_of_one_text_are_told_apart_and_written_as_they_were() -> None:
    model = Model(["joined", "both"])
    stock = WeightConverter(["mlp.a", "mlp.b"], ["mlp.c"], operations=[Concatenate(dim=0)])
    (ours,) = located([(JOIN, None)], [stock], model)
    assert not set(ours.source_patterns) & set(stock.source_patterns)
    assert [pattern_as_written(ours, text) for text in ours.source_patterns] == JOIN.source_patterns
    (alone,) = located([(JOIN, None)], [], model)
    assert alone.source_patterns == JOIN.source_patterns


def test_copies_of_a_load_stay_where_they_are_and_traces_can_be_pickled() -> None:
    model = Model(["joined", "stock"])
    traced = with_trace(located([(JOIN, None)], [JOIN], model)[0])
    for each in (traced, copy.deepcopy(traced), with_trace(traced)):
        assert each.rename_source_key("model.layers.0.mlp.a")[0] == "model.layers.0.mlp.ab"
        assert each.rename_source_key("model.layers.1.mlp.a") == ("model.layers.1.mlp.a", None)
    trace = trace_of(traced)
    assert trace is not None
    assert pickle.loads(pickle.dumps(trace)).renamed == {"model.layers.0.mlp.a": "model.layers.0.mlp.ab"}
