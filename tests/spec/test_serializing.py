"""A patcher as data: what is written is read back as the same value, and what is read can't run anything."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import core_model_loading as loading
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from patcher import InvalidPatcherError, Patcher
from patcher.fusions import KV, QKV, GateUp, PatchEmbeddings, SequentialExperts
from patcher.fusions.base import Fusion
from tests.support.replacements import JOINED, OWN, JoinedMLP, OwnMLP, OwnNorm

OWN_MLP = "tests.support.replacements:OwnMLP"


def through_json(patcher: Patcher) -> Any:
    return json.loads(json.dumps(patcher.to_dict()))


# --- the law -------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
EXPRESSIONS = st.lists(
    st.one_of(NAMES, st.sampled_from([r"\.mlp\.", r"^model\.(a|b)$", "größe", r"q_proj\.(?:weight|bias)"])), max_size=3
)
CLASSES = st.sampled_from([OwnMLP, OwnNorm, JoinedMLP, nn.Linear])
FUSIONS = st.lists(
    st.one_of(
        st.sampled_from(["qkv", "kv", "gate_up", "sequential_experts", QKV()]),
        st.builds(
            lambda family, modules: family(modules),
            st.sampled_from([QKV, KV, GateUp, PatchEmbeddings, SequentialExperts]),
            st.lists(st.one_of(NAMES, st.sampled_from(["**.mlp", "a.{0,2..5}.*"])), min_size=1, max_size=2),
        ),
    ),
    max_size=3,
)


def operations(draw: st.DrawFn) -> Any:
    kinds = [
        st.builds(Concatenate, dim=st.integers(-2, 3), num_shards_attribute=st.none() | NAMES),
        st.builds(Transpose, dim0=st.integers(0, 3), dim1=st.integers(0, 3), check_dims=st.booleans()),
        st.builds(MergeModulelist, dim=st.integers(0, 2)),
        st.builds(loading.Conv3dToLinear, st.integers(1, 4), st.tuples(*[st.integers(1, 4)] * 3)),
        st.builds(loading.PermuteForRope, permute_layer_names=st.none() | st.lists(NAMES, max_size=2)),
    ]
    return draw(st.lists(st.one_of(kinds), min_size=1, max_size=3))


@st.composite
def transforms(draw: st.DrawFn) -> list[Any]:
    made: list[Any] = []
    for number in range(draw(st.integers(0, 3))):
        # The number keeps them apart: two that take the same tensors are a conflict.
        sources = [f"{draw(NAMES)}{number}.{end}" for end in range(draw(st.integers(1, 3)))]
        target = draw(st.one_of(NAMES, st.just(""), NAMES.map(lambda name: rf"{name}\.weight")))
        if draw(st.booleans()):
            transform: Any = WeightRenaming(sources[0], target)
        else:
            transform = WeightConverter(sources, [target], operations(draw), force_cpu=draw(st.booleans()))
        if draw(st.booleans()):
            transform.scope_prefix, transform.base_model_prefix = draw(NAMES), draw(st.one_of(NAMES, st.just("")))
        made.append(transform)
    return made


@st.composite
def patchers(draw: st.DrawFn) -> Patcher:
    mapping = draw(st.dictionaries(st.one_of(NAMES, st.just("MLP$")), CLASSES, max_size=3))
    return Patcher(
        mapping,
        draw(EXPRESSIONS),
        draw(transforms()),
        fusions=draw(FUSIONS),
        new_weights=draw(EXPRESSIONS),
        dropped_weights=draw(EXPRESSIONS),
        strict=draw(st.booleans()),
        name=draw(st.text(max_size=10)),
        transformers=draw(st.sampled_from(["", ">=5.17", ">=5.17,<5.24", "==5.23.0"])),
        fingerprints=draw(st.dictionaries(NAMES, st.lists(NAMES, min_size=1, max_size=2), max_size=2)),
        alternatives=[list(mapping)] if mapping and draw(st.booleans()) else [],
    )


@settings(max_examples=100, deadline=None)
@given(patchers())
def test_what_is_written_is_read_back_as_the_same_value(patcher: Patcher) -> None:
    allowed = list(patcher.class_mapping.values())
    back = Patcher.from_dict(through_json(patcher), allowed=allowed)
    assert back == patcher
    assert back.to_dict() == patcher.to_dict()


@pytest.mark.parametrize("name", sorted({"Chunk", "Interleave", "SplitModulelist", "LinearToConv3d"}))
def test_operations_of_transformers_travel_with_their_attributes(name: str) -> None:
    cls: Any = getattr(loading, name)
    operation = cls(3, (2, 4, 4)) if name == "LinearToConv3d" else cls(dim=1)
    patcher = Patcher(extra_weight_conversions=WeightConverter("a.b", "c.d", [operation]))
    back = Patcher.from_dict(through_json(patcher))
    assert back == patcher
    (made,) = back.extra_weight_conversions[0].operations  # type: ignore[attr-defined]
    assert type(made) is cls
    assert vars(made) == vars(operation)  # a tuple is a tuple again
    assert back != Patcher(extra_weight_conversions=WeightConverter("a.b", "c.d", [Transpose()]))


def test_only_what_is_set_is_written() -> None:
    assert Patcher().to_dict() == {"schema": 1}
    assert JOINED.to_dict() == {
        "schema": 1,
        "class_mapping": {"LlamaMLP": "tests.support.replacements:JoinedMLP"},
        "extra_weight_conversions": [
            {
                "type": "WeightConverter",
                "source_patterns": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
                "target_patterns": ["mlp.gate_up_proj.weight"],
                "operations": [{"type": "Concatenate", "dim": 0, "num_shards_attribute": None}],
            }
        ],
    }


# --- what has no name ----------------------------------------------------------------------------------------------


class OwnFusion(Fusion):
    pass


class OwnOperation(Concatenate):
    pass


class OwnRenaming(WeightRenaming):
    pass


def _local_class() -> type[nn.Module]:
    class Local(nn.Module): ...

    return Local


def _with_attribute() -> Any:
    operation = Chunk()
    operation.hint = object()  # type: ignore[attr-defined]
    return WeightConverter("a", "b", [operation])


def _tagged(hint: Any) -> PatchEmbeddings:
    fusion = PatchEmbeddings("visual")
    fusion.hint = hint  # type: ignore[attr-defined]
    return fusion


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Patcher(function_mapping={"f": functools.partial(print)}),
            r"function_mapping\['f'\]: functools.partial.* can't be said as data, because it has no name; write a",
        ),
        (lambda: Patcher(fusions=_tagged(object())), r"PatchEmbeddings\(modules=.*can't be said as data"),
        (lambda: Patcher(fusions=_tagged("x")), r"PatchEmbeddings\(modules=.*can't be said as data"),
        (lambda: Patcher(fusions=OwnFusion()), r"OwnFusion\(\) can't be said as data, it is no family.*qkv"),
        (
            lambda: Patcher(extra_weight_conversions=WeightConverter("a", "b", [OwnOperation()])),
            r"a -> b .*can't be said as data: it must be a WeightRenaming or .*Concatenate.*found a WeightConverter",
        ),
        (lambda: Patcher(extra_weight_conversions=OwnRenaming("a", "b")), r"found a OwnRenaming"),
        (lambda: Patcher(extra_weight_conversions=_with_attribute()), r"a -> b .*can't be said as data"),
    ],
    ids="function tagged option fusion operation transform attribute".split(),
)
def test_what_has_no_name_is_not_written(make: Any, message: str) -> None:
    patcher = make()
    with pytest.raises(InvalidPatcherError, match=message):
        patcher.to_dict()


# --- what may be named ---------------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import leaves a trace."""
    (tmp_path / "trapped").mkdir()
    (tmp_path / "trapped" / "__init__.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n"
        "from torch import nn\nclass Block(nn.Module): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trapped", raising=False)
    return tmp_path / "trapped" / "sprung"


def _data(where: Any, **more: Any) -> dict[str, Any]:
    return {"schema": 1, "class_mapping": {"LlamaMLP": where}, **more}


@pytest.mark.parametrize("allowed", [(), [OwnMLP], OwnNorm], ids=str)
def test_nothing_is_imported_for_what_data_names(trap: Path, allowed: Any) -> None:
    text = r"class_mapping\['LlamaMLP'\]: 'trapped:Block' is not among what is allowed \(.*If you trust that code, "
    with pytest.raises(InvalidPatcherError, match=text):
        Patcher.from_dict(_data("trapped:Block"), allowed=allowed)
    assert "trapped" not in sys.modules
    assert not trap.exists()


def test_a_class_that_is_allowed_is_taken_as_it_is() -> None:
    """One that no import finds as well: of a function, of a notebook."""
    local = _local_class()
    patcher = Patcher({"LlamaMLP": local})
    assert Patcher.from_dict(through_json(patcher), allowed=local) == patcher
    with pytest.raises(InvalidPatcherError, match="is not among what is allowed"):
        Patcher.from_dict(through_json(patcher), allowed=OwnMLP)


def test_what_is_allowed_and_is_not_a_module_class_raises() -> None:
    with pytest.raises(InvalidPatcherError, match=r"class_mapping\['LlamaMLP'\] must be a class, found <function"):
        Patcher.from_dict(_data(f"{__name__}:_data"), allowed=_data)


@pytest.mark.parametrize(
    "where",
    ["os:system", "builtins:eval", "torch.nn:Linear.__init__.__globals__", "torch.nn", ":Linear", "", "x" * 9_000],
)
def test_hostile_names_are_refused(where: str) -> None:
    with pytest.raises(InvalidPatcherError, match="is not among what is allowed"):
        Patcher.from_dict(_data(where), allowed=[OwnMLP])


@pytest.mark.parametrize("allowed", [3, [None], [["a:B"]], "module:Class", [OWN], ["a:B"]], ids=str)
def test_a_list_that_means_nothing_is_told(allowed: Any) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"allowed takes classes and functions themselves, found .*allowed=\[MyMLP\]"
    ):
        Patcher.from_dict(_data(OWN_MLP), allowed=allowed)


# --- other hostile input -------------------------------------------------------------------------------------------


def deep(levels: int = 50_000) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def deep_object(levels: int = 50_000) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"schema": value}
    return value


def converter(**changes: Any) -> dict[str, Any]:
    data = {"type": "WeightConverter", "source_patterns": ["a"], "target_patterns": ["b"]}
    return {"schema": 1, "extra_weight_conversions": [data | {"operations": [{"type": "Transpose"}]} | changes]}


def patch_embeddings(**options: Any) -> dict[str, Any]:
    return {"schema": 1, "fusions": [{"name": "patch_embeddings", "options": options}]}


HOSTILE: list[tuple[str, Any, str]] = [
    ("none", None, "expected an object with names as keys, found None"),
    ("list", [], r"expected an object .* found \[\]"),
    ("text", '{"schema": 1}', "expected an object"),
    ("bytes", b"{}", "found a bytes"),
    ("number keys", {1: 2}, "expected an object with names as keys"),
    ("deep list", deep(), "expected an object"),
    ("deep object", deep_object(), "this release reads schema 1"),
    ("no schema", {}, "reads schema 1, found None"),
    ("newer schema", {"schema": 2}, "reads schema 1, found 2.*install the release"),
    ("schema as text", {"schema": "1"}, "found '1'"),
    ("schema as truth", {"schema": True}, "found True"),
    ("schema as float", {"schema": 1.0}, "found 1.0"),
    ("huge schema", {"schema": 10**5000}, "found a int"),
    ("misspelt key", {"schema": 1, "fusion": ["qkv"]}, "unknown key 'fusion'; did you mean 'fusions'"),
    ("dunder key", {"schema": 1, "__class__": "x"}, "unknown key '__class__'"),
    ("reduce", {"schema": 1, "__reduce__": ["os.system", ["x"]]}, "unknown key '__reduce__'"),
    ("huge key", {"schema": 1, "k" * 20_000: 1}, "too long"),
    ("long key", {"schema": 1, "k" * 9_000: 1}, r"unknown key 'kkkk.*\.\.\.kkk"),
    ("many keys", {"schema": 1} | {f"k{n}": 1 for n in range(20_000)}, "20,001 is too long"),
    ("name", {"schema": 1, "name": 3}, "name: expected a text, found 3"),
    ("huge name", {"schema": 1, "name": "x" * 10**6}, "name: 1,000,000 is too long, at most 10,000"),
    ("strict", {"schema": 1, "strict": 0}, "strict: expected bool, found 0"),
    ("strict text", {"schema": 1, "strict": "false"}, "strict: expected bool, found 'false'"),
    ("specifier", {"schema": 1, "transformers": "newest"}, "is no version specifier"),
    ("specifier type", {"schema": 1, "transformers": None}, "transformers: expected a text, found None"),
    ("expressions as text", {"schema": 1, "new_weights": "a"}, "new_weights: expected a list, found 'a'"),
    ("expression type", {"schema": 1, "new_weights": [1]}, "new_weights: expected a text, found 1"),
    ("empty expression", {"schema": 1, "dropped_weights": [""]}, "empty expression"),
    ("no expression", {"schema": 1, "new_weights": ["("]}, "is no regular expression"),
    ("nested expression", {"schema": 1, "new_weights": ["(" * 4_900 + ")" * 4_900]}, "too large to be compiled"),
    ("repeats", {"schema": 1, "new_weights": ["a{" + "9" * 30 + "}"]}, "too large|no regular expression"),
    ("many expressions", {"schema": 1, "new_weights": ["a"] * 20_000}, "20,000 is too long"),
    ("deep expression", {"schema": 1, "new_weights": [deep()]}, r"expected a text, found \["),
    ("mapping", {"schema": 1, "class_mapping": [["A", OWN_MLP]]}, "class_mapping: expected an object"),
    ("mapping value", {"schema": 1, "class_mapping": {"A": {"py/type": "os.system"}}}, "expected a text, found {"),
    ("class itself", {"schema": 1, "class_mapping": {"A": OwnMLP}}, "expected a text, found a type"),
    ("fingerprints", {"schema": 1, "fingerprints": {"A": "x"}}, r"fingerprints\['A'\]: expected a list"),
    ("no fingerprint", {"schema": 1, "fingerprints": {"A": []}}, "must be a text or several"),
    ("alternatives", {"schema": 1, "alternatives": ["A"]}, "alternatives: expected a list, found 'A'"),
    ("alternatives key", {"schema": 1, "alternatives": [["A"]]}, "is no key of the class_mapping"),
    ("fusion", {"schema": 1, "fusions": ["qkw"]}, "fusions: 'qkw' is no fusion; did you mean 'qkv'"),
    ("fusion path", {"schema": 1, "fusions": ["os:system"]}, "'os:system' is no fusion"),
    ("fusion type", {"schema": 1, "fusions": [3]}, "fusions: expected an object"),
    ("fusion without name", {"schema": 1, "fusions": [{"options": {}}]}, "fusions: expected a text, found None"),
    ("fusion key", {"schema": 1, "fusions": [{"name": "qkv", "class": "os"}]}, "unknown key 'class'"),
    ("fusion option", patch_embeddings(module="x"), r"doesn't take the options \{'module': 'x'\}"),
    ("fusion option type", patch_embeddings(modules={"a": 1}), "'patch_embeddings': modules: expected"),
    ("fusion option float", patch_embeddings(modules=1.5), "modules: expected"),
    ("transform", converter(type="PrefixChange"), "'PrefixChange' is not known.*WeightRenaming"),
    ("transform base", converter(type="WeightTransform"), "'WeightTransform' is not known"),
    ("transform dunder", converter(type="__class__"), "'__class__' is not known"),
    ("transform type", converter(type=["WeightConverter"]), "expected a text"),
    ("transform key", converter(_was_used=True), "unknown key '_was_used'"),
    ("renaming key", converter(type="WeightRenaming"), "unknown key 'operations'"),
    ("no sources", converter(source_patterns=[]), "needs source_patterns"),
    ("empty source", converter(source_patterns=[""]), "needs source_patterns"),
    ("sources as text", converter(source_patterns="a"), "source_patterns: expected a list"),
    ("targets", converter(target_patterns=None), "target_patterns: expected a list, found None"),
    ("bad source", converter(source_patterns=["("]), "transformers can't make a WeightConverter of it"),
    ("nested source", converter(source_patterns=["(" * 4_900 + ")" * 4_900]), "can't make a WeightConverter of it"),
    ("two groups", converter(target_patterns=["(a)b", "(c)d"]), "can't make a WeightConverter of it"),
    ("many to many", converter(source_patterns=["a", "b"], target_patterns=["c", "d"]), "can't make"),
    ("no operation", converter(operations=[]), "can't make a WeightConverter"),
    ("operations", converter(operations={"type": "Chunk"}), "operations: expected a list"),
    ("operation path", converter(operations=[{"type": "os.system"}]), "'os.system' is not known.*Concatenate"),
    ("operation base", converter(operations=[{"type": "ConversionOps"}]), "'ConversionOps' is not known"),
    ("private operation", converter(operations=[{"type": "_IdentityOp"}]), "'_IdentityOp' is not known"),
    ("operation key", converter(operations=[{"type": "Chunk", "convert": "x"}]), "Chunk: unknown key 'convert'"),
    ("operation value", converter(operations=[{"type": "Chunk", "dim": "0"}]), "Chunk: dim: expected int, found '0'"),
    ("operation truth", converter(operations=[{"type": "Chunk", "dim": True}]), "dim: expected int, found True"),
    ("operation without", converter(operations=[{"type": "Conv3dToLinear"}]), "missing 2 required"),
    (
        "operation tuple",
        converter(operations=[{"type": "Conv3dToLinear", "in_channels": 3, "kernel_size": [1, 2]}]),
        r"kernel_size: expected tuple\[int, int, int\], found \[1, 2\]",
    ),
    ("force_cpu", converter(force_cpu=1), "force_cpu: expected bool, found 1"),
    ("scope_prefix", converter(scope_prefix=None), "scope_prefix: expected a text, found None"),
]


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_what_means_nothing_raises_and_says_what_was_found(data: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message) as caught:
        Patcher.from_dict(data, allowed=[OwnMLP])
    assert len(str(caught.value)) < 25_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(list(inspect.signature(Patcher).parameters)) | st.text(max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.one_of(JSON, st.dictionaries(KEYS, JSON, max_size=4).map(lambda data: {"schema": 1} | data)))
def test_any_json_gives_a_patcher_or_our_error_and_imports_nothing(data: Any) -> None:
    before = set(sys.modules)
    try:
        patcher = Patcher.from_dict(data)
    except InvalidPatcherError:
        pass
    else:
        assert Patcher.from_dict(through_json(patcher)) == patcher
    assert {name for name in set(sys.modules) - before if not name.startswith("patcher.")} == set()
