"""A patcher as data: what is written is read back as the same value, and what is read can't run anything."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn

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


@st.composite
def patchers(draw: st.DrawFn) -> Patcher:
    mapping = draw(st.dictionaries(st.one_of(NAMES, st.just("MLP$")), CLASSES, max_size=3))
    return Patcher(
        mapping,
        draw(EXPRESSIONS),
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
    # The names alone are enough as well; torch's class is found where it says it is.
    named = [f"{cls.__module__}:{cls.__qualname__}" for cls in allowed]
    assert Patcher.from_dict(through_json(patcher), allowed=named) == patcher


def test_only_what_is_set_is_written() -> None:
    assert Patcher().to_dict() == {"schema": 1}
    assert Patcher({"LlamaMLP": JoinedMLP}, new_weights="a").to_dict() == {
        "schema": 1,
        "class_mapping": {"LlamaMLP": "tests.support.replacements:JoinedMLP"},
        "new_weights": ["a"],
    }


# --- what has no name ----------------------------------------------------------------------------------------------


class OwnFusion(Fusion):
    pass


def _local_class() -> type[nn.Module]:
    class Local(nn.Module): ...

    return Local


def _renamed_class() -> type[nn.Module]:
    return type("OwnMLP", (nn.Module,), {"__module__": "tests.support.replacements"})


def _notebook_class() -> type[nn.Module]:
    cls = type("InACell", (nn.Module,), {"__module__": "__main__"})
    vars(sys.modules["__main__"])["InACell"] = cls
    return cls


def _tagged(hint: Any) -> PatchEmbeddings:
    fusion = PatchEmbeddings("visual")
    fusion.hint = hint  # type: ignore[attr-defined]
    return fusion


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Patcher({"A": _local_class()}), r"_local_class.<locals>.Local can't be written as data"),
        (
            lambda: Patcher({"A": _renamed_class()}),
            r"class_mapping\['A'\]: tests.support.replacements:OwnMLP can't be written",
        ),
        (lambda: Patcher({"A": _notebook_class()}), r"__main__:InACell can't be written as data.*module of its own"),
        (lambda: Patcher(fusions=_tagged(object())), r"PatchEmbeddings\(modules=.*can't be written as data"),
        (lambda: Patcher(fusions=_tagged("x")), r"PatchEmbeddings\(modules=.*can't be written as data"),
        (lambda: Patcher(fusions=OwnFusion()), r"OwnFusion\(\) can't be written as data, it isn.t a family.*qkv"),
        (
            lambda: JOINED,
            r"gate_proj.weight, .* can't be written as data\. Put it into the `conversion_mapping` of",
        ),
    ],
    ids="local renamed notebook tagged option fusion conversion".split(),
)
def test_what_has_no_name_is_not_written(make: Any, message: str) -> None:
    patcher = make()
    with pytest.raises(InvalidPatcherError, match=message):
        patcher.to_dict()


# --- what may be imported ------------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import leaves a trace."""
    (tmp_path / "trapped").mkdir()
    (tmp_path / "trapped" / "__init__.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n"
        "from torch import nn\nclass Block(nn.Module):\n    class Inner(nn.Module): ...\nclass Other(nn.Module): ...\n"
        "class Plain: ...\nvalue = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trapped", raising=False)
    return tmp_path / "trapped" / "sprung"


def _data(where: Any, **more: Any) -> dict[str, Any]:
    return {"schema": 1, "class_mapping": {"LlamaMLP": where}, **more}


@pytest.mark.parametrize("allowed", [(), [OWN_MLP], [OwnMLP], "trapped:Other", ["trapped:Block.Inner"]], ids=str)
def test_a_module_that_is_not_on_the_list_is_not_imported(trap: Path, allowed: Any) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"'trapped:Block' is not on the list of what may be imported.*allow"
    ):
        Patcher.from_dict(_data("trapped:Block"), allowed=allowed)
    assert "trapped" not in sys.modules
    assert not trap.exists()


def test_what_is_on_the_list_is_imported(trap: Path) -> None:
    patcher = Patcher.from_dict(_data("trapped:Block.Inner"), allowed="trapped:Block.Inner")
    assert trap.exists()
    assert patcher.class_mapping["LlamaMLP"].__qualname__ == "Block.Inner"
    assert Patcher.from_dict(through_json(patcher), allowed=patcher.class_mapping.values()) == patcher


def test_a_class_on_the_list_is_taken_as_it_is() -> None:
    local = _local_class()
    where = f"{local.__module__}:{local.__qualname__}"
    assert Patcher.from_dict(_data(where), allowed=local) == Patcher({"LlamaMLP": local})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("trapped:Plain", r"class_mapping\['LlamaMLP'\] must be a subclass of nn.Module, found Plain"),
        ("trapped:value", r"class_mapping\['LlamaMLP'\] must be a class, found 1"),
        ("trapped:Missing", r"trapped:Missing can't be imported: AttributeError"),
        ("trapped:Block.forward", r"class_mapping\['LlamaMLP'\] must be a class, found <function"),
        ("trapped.deeper:Block", r"trapped.deeper:Block can't be imported: ModuleNotFoundError"),
    ],
)
@pytest.mark.usefixtures("trap")
def test_what_is_on_the_list_and_no_module_class_raises(where: str, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher.from_dict(_data(where), allowed=where)


@pytest.mark.parametrize(
    "where",
    [
        "os:system",
        "builtins:eval",
        "builtins:__import__",
        "torch.nn:Linear.__init__.__globals__",
        "torch.nn:Module.__subclasses__",
        "__main__:anything",
        "importlib:import_module",
        "torch.nn",
        "torch.nn:",
        ":Linear",
        "torch..nn:Linear",
        "../../etc/passwd:x",
        "torch.nn:Linear()",
        "torch.nn:Linear; import os",
        "",
        "x" * 9_000,
    ],
)
def test_hostile_names_are_refused_and_on_a_list_most_of_them_as_well(where: str) -> None:
    with pytest.raises(InvalidPatcherError, match="is not on the list"):
        Patcher.from_dict(_data(where), allowed=[OwnMLP])
    with pytest.raises(InvalidPatcherError, match=r"allowed takes classes|must be a class|is not on the list"):
        Patcher.from_dict(_data(where), allowed=[where])


@pytest.mark.parametrize("allowed", [3, [None], [["a:B"]], "module.alone", [OWN], ["a:B", "a b:C"]], ids=repr)
def test_a_list_that_means_nothing_is_told(allowed: Any) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"allowed takes classes and functions, or texts such as 'package.module:Class'"
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


def patch_embeddings(**options: Any) -> dict[str, Any]:
    return {"schema": 1, "fusions": [{"name": "patch_embeddings", "options": options}]}


#: From Python 3.14 on a `repr` may be deeper, and the limit of what is deepest has other words.
DEEP_OBJECT, DEEP_EXPRESSION = (
    ("Stack overflow", "isn't an expression") if sys.version_info >= (3, 14) else ("maximum recursion depth",) * 2
)

HOSTILE: list[tuple[str, Any, str]] = [
    ("none", None, "expected an object of JSON .* it is None"),
    ("list", [], r"expected an object of JSON .* it is \[\]"),
    ("text", '{"schema": 1}', "expected an object of JSON"),
    ("bytes", b"{}", "Object of type bytes is not JSON"),
    ("number keys", {1: 2}, "reads schema 1, found None"),
    ("deep list", deep(), "expected an object of JSON"),
    ("deep object", deep_object(), DEEP_OBJECT),
    ("no schema", {}, "reads schema 1, found None"),
    ("newer schema", {"schema": 2}, "reads schema 1, found 2.*install the release"),
    ("schema as text", {"schema": "1"}, "found '1'"),
    ("schema as truth", {"schema": True}, "found True"),
    ("schema as float", {"schema": 1.0}, "found 1.0"),
    ("huge schema", {"schema": 10**5000}, "Exceeds the limit"),
    ("misspelt key", {"schema": 1, "fusion": ["qkv"]}, "no parameter 'fusion'; did you mean 'fusions'"),
    ("dunder key", {"schema": 1, "__class__": "x"}, "no parameter '__class__'"),
    ("reduce", {"schema": 1, "__reduce__": ["os.system", ["x"]]}, "no parameter '__reduce__'"),
    ("long key", {"schema": 1, "k" * 9_000: 1}, r"no parameter 'kkkk.*k\.\.\.'"),
    ("many keys", {"schema": 1} | {f"k{n}": 1 for n in range(20_000)}, "no parameter 'k0'"),
    ("name", {"schema": 1, "name": 3}, r"name must be a str, found 3 \(int\)"),
    ("huge name", {"schema": 1, "name": "x" * 10**6}, "at most 1,000,000 characters: it has 1,000,025 characters"),
    ("strict", {"schema": 1, "strict": 0}, "strict must be a bool, found 0"),
    ("strict text", {"schema": 1, "strict": "false"}, "strict must be a bool, found 'false'"),
    ("specifier", {"schema": 1, "transformers": "newest"}, "isn't a version specifier"),
    ("specifier type", {"schema": 1, "transformers": None}, "transformers must be a str, found None"),
    ("expression type", {"schema": 1, "new_weights": [1]}, r"new_weights: 1 \(int\) isn't an expression"),
    ("long expression", {"schema": 1, "new_weights": ["a" * 10_001]}, "too large to be compiled"),
    ("empty expression", {"schema": 1, "dropped_weights": [""]}, "empty expression"),
    ("no expression", {"schema": 1, "new_weights": ["("]}, "isn't a regular expression"),
    ("nested expression", {"schema": 1, "new_weights": ["(" * 4_900 + ")" * 4_900]}, "too large to be compiled"),
    ("repeats", {"schema": 1, "new_weights": ["a{" + "9" * 30 + "}"]}, "too large|no regular expression"),
    ("many expressions", {"schema": 1, "new_weights": ["a"] * 20_000}, "20,000 expressions are too many"),
    ("deep expression", {"schema": 1, "new_weights": [deep()]}, DEEP_EXPRESSION),
    ("mapping", {"schema": 1, "class_mapping": [["A", OWN_MLP]]}, "class_mapping must be a mapping, found"),
    (
        "mapping value",
        {"schema": 1, "class_mapping": {"A": {"py/type": "os.system"}}},
        "is not on the list of what may be imported",
    ),
    ("class itself", {"schema": 1, "class_mapping": {"A": OwnMLP}}, "Object of type type is not JSON"),
    ("no fingerprint", {"schema": 1, "fingerprints": {"A": []}}, "must be a text or several"),
    (
        "alternatives",
        {"schema": 1, "alternatives": ["A"]},
        r"takes groups of class keys, found \['A'\]",
    ),
    ("nested alternatives", {"schema": 1, "alternatives": [[[]]]}, r"takes groups of class keys, found \[\[\[\]\]\]"),
    ("self", {"schema": 1, "self": None}, "no parameter 'self'"),
    ("alternatives key", {"schema": 1, "alternatives": [["A"]]}, "isn't a key of the class_mapping"),
    ("fusion", {"schema": 1, "fusions": ["qkw"]}, "fusions: 'qkw' isn't a fusion; did you mean 'qkv'"),
    ("fusion path", {"schema": 1, "fusions": ["os:system"]}, "'os:system' isn't a fusion"),
    ("fusion type", {"schema": 1, "fusions": [3]}, r"fusions: 3 \(int\) isn't a fusion"),
    ("fusion without name", {"schema": 1, "fusions": [{"options": {}}]}, "fusions: None isn't a fusion"),
    (
        "fusion key",
        {"schema": 1, "fusions": [{"name": "qkv", "class": "os"}]},
        "a fusion is a name, or an object of",
    ),
    ("fusion option", patch_embeddings(module="x"), r"doesn't take the options \{'module': 'x'\}"),
    ("fusion option type", patch_embeddings(modules=1.5), "modules: 1.5 .* isn't a path of a module"),
    (
        "conversion",
        {"schema": 1, "extra_weight_conversions": []},
        "a conversion can't be written as data. Put it into",
    ),
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
