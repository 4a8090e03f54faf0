"""The value: immutable, comparable by content, combined without surprises, and picky at construction."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import Concatenate, LlamaConfig, LlamaForCausalLM, WeightConverter
from transformers.core_model_loading import Chunk, WeightRenaming

from patcher import InvalidPatcherError, PatchConflictError, Patcher, PatcherError, errors as patcher_errors
from patcher.fusions import Fusion
from tests.support.tiny import save_tiny, tiny_llama_config


class One(nn.Module):
    pass


class Abstract(One, ABC):
    @abstractmethod
    def scale(self) -> float: ...


class Two(nn.Module):
    pass


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        return x


class Family(Fusion):
    def __init__(self, width: int = 1) -> None:
        self.width = width


def qkv(dim: int = 0) -> WeightConverter:
    return WeightConverter(["q", "k", "v"], ["qkv"], operations=[Concatenate(dim=dim)])


def full(**changes: Any) -> Patcher:
    settings = {
        "class_mapping": {"LlamaMLP": One, ".*Norm$": Two},
        "filtered_weight_conversion_patterns": ["experts"],
        "extra_weight_conversions": [qkv()],
        "fusions": [Family(2)],
        "new_weights": ["adapter"],
        "dropped_weights": "inv_freq",
        "strict": False,
        "name": "mine",
        "transformers": ">=5.17,<6",
        "fingerprints": {"LlamaMLP": "ab"},
    }
    return Patcher(**{**settings, **changes})


def test_it_is_equal_by_content_and_hashable() -> None:
    assert full() == full()
    assert hash(full()) == hash(full())
    assert len({full(), full(), Patcher()}) == 2
    assert full() != "a patcher"


@pytest.mark.parametrize(
    "change",
    [
        {"class_mapping": {"LlamaMLP": Two, ".*Norm$": Two}},
        {"class_mapping": {"LlamaMLP": One}},
        {"filtered_weight_conversion_patterns": ()},
        {"extra_weight_conversions": qkv(dim=1)},
        {"extra_weight_conversions": WeightConverter(["q", "k", "v"], ["other"], operations=[Concatenate(dim=0)])},
        {"extra_weight_conversions": WeightConverter(["q"], ["qkv"], operations=[Chunk(dim=0)])},
        {"extra_weight_conversions": WeightRenaming("q", "qkv")},
        {"fusions": Family(3)},
        {"new_weights": ()},
        {"dropped_weights": ()},
        {"strict": True},
        {"name": "other"},
        {"transformers": ""},
        {"fingerprints": {"LlamaMLP": "cd"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_parameter_counts(change: dict[str, Any]) -> None:
    assert full().replace(**change) != full()
    assert full().replace(**change).replace(**{key: getattr(full(), key) for key in change}) == full()


def test_it_survives_copying_and_pickling_and_threads() -> None:
    patcher = full()
    assert copy.copy(patcher) is patcher
    assert copy.deepcopy({"patcher": patcher})["patcher"] is patcher
    assert pickle.loads(pickle.dumps(patcher)) == patcher
    hashes: list[int] = []
    threads = [threading.Thread(target=lambda: hashes.append(hash(patcher))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashes == [hash(patcher)] * 4


def test_it_is_immutable() -> None:
    patcher, mapping = full(), {"LlamaMLP": One}
    with pytest.raises(AttributeError, match=r"immutable; use patcher.replace\(strict=...\)"):
        patcher.strict = True  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        del patcher.name
    with pytest.raises(TypeError):
        patcher.class_mapping["LlamaMLP"] = Two  # type: ignore[index]
    made = Patcher(mapping)
    mapping["LlamaMLP"] = Two
    assert made == Patcher({"LlamaMLP": One})
    transform = qkv()
    made = Patcher(extra_weight_conversions=transform)
    transform.rename_source_key("q")  # marks it as used
    made.extra_weight_conversions[0].rename_source_key("q")
    assert not made.extra_weight_conversions[0].was_used()
    assert made == Patcher(extra_weight_conversions=qkv())


def test_repr_reads_like_the_call() -> None:
    assert repr(Patcher()) == "Patcher()"
    assert repr(Patcher({"A": One}, "b", new_weights="c", strict=False)) == (
        "Patcher(class_mapping={'A': One}, filtered_weight_conversion_patterns=['b'], new_weights=['c'], strict=False)"
    )
    names = {
        "One": One,
        "Two": Two,
        "Patcher": Patcher,
        "WeightConverter": WeightConverter,
        "Concatenate": Concatenate,
    }
    assert eval(repr(full()), {**names, "Family": Family}) == full()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"class_mapping": {"LlamaMLP": One()}},
            r"class_mapping\['LlamaMLP'\] must be a class, found One\(\) \(an object",
        ),
        (
            {"class_mapping": {"LlamaMLP": int}},
            "must be a subclass of nn.Module, found int, which derives from object",
        ),
        (
            {"class_mapping": {"LlamaMLP": Abstract}},
            r"class_mapping\['LlamaMLP'\]: Abstract is abstract; write a subclass that implements scale",
        ),
        ({"class_mapping": {"LlamaMLP": "One"}}, r"must be a class, found 'One' \(str\)"),
        (
            {"class_mapping": {One: Two}},
            r"an expression, or like\(\.\.\.\), found .*; write 'One'",
        ),
        ({"class_mapping": {"": Two}}, r"a key is the name of a class"),
        ({"class_mapping": [("A", One)]}, "class_mapping must be a mapping, found"),
        (
            {"class_mapping": {"Llama(": One}},
            r"class_mapping key 'Llama\(' isn't a regular expression: .* write 'Llama\\\\\('",
        ),
        ({"filtered_weight_conversion_patterns": "("}, "isn't a regular expression"),
        ({"filtered_weight_conversion_patterns": ""}, "the empty expression is found everywhere"),
        ({"new_weights": [3]}, r"new_weights: 3 \(int\) isn't an expression"),
        ({"dropped_weights": 3}, "dropped_weights takes an expression or a list of them, found 3"),
        ({"extra_weight_conversions": "gate"}, r"takes a weight transform or a list of them, found 'gate' \(str\)"),
        ({"extra_weight_conversions": ["q"]}, r"'q' \(str\) isn't a weight transform; write a WeightConverter"),
        ({"extra_weight_conversions": [qkv(), {"q": "k"}]}, "isn't a weight transform"),
        (
            {"function_mapping": {"rotate_half": Unhashable()}},
            "must be a function that has a hash, found .*able",
        ),
        ({"function_mapping": {"rotate_half": 3}}, r"must be a function, found 3 \(int\)"),
        ({"fusions": "no_such_family"}, "fusions: 'no_such_family' isn't a fusion; "),
        ({"fusions": [Family]}, r"write an object of it, Family\(\)"),
        ({"fusions": [One]}, "write a name .* or an object of a Fusion subclass"),
        ({"strict": "yes"}, r"strict must be a bool, found 'yes' \(str\)"),
        ({"name": 3}, r"name must be a str, found 3 \(int\)"),
        ({"transformers": "five"}, "transformers='five' isn't a version specifier; write for instance"),
        ({"fingerprints": {"A": []}}, r"fingerprints\['A'\] must be a text or several, found \[\]"),
        ({"fingerprints": "ab"}, "fingerprints must be a mapping"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_mean_anything_is_said_at_construction(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidPatcherError, match=text):
        Patcher(**arguments)


def test_replace_knows_its_parameters() -> None:
    with pytest.raises(InvalidPatcherError, match="no parameter 'class_maping'; did you mean 'class_mapping'"):
        Patcher().replace(class_maping={})


def test_two_conversions_of_the_same_tensors_conflict() -> None:
    with pytest.raises(PatchConflictError, match="Two extra_weight_conversions take the same tensors, 'q'"):
        Patcher(extra_weight_conversions=[qkv(), WeightConverter(["q"], ["other"], operations=[Chunk(dim=0)])])
    assert len(Patcher(extra_weight_conversions=[qkv(), qkv()]).extra_weight_conversions) == 1


def test_combining() -> None:
    a = Patcher({"A": One}, "f", qkv(), new_weights="n", name="a", transformers=">=5.17", fingerprints={"A": "1"})
    b = Patcher({"B": Two}, "g", fusions=Family(), dropped_weights="d", strict=False, name="b", transformers="<6")
    both = a | b.replace(fingerprints={"A": "2", "B": "3"})
    assert dict(both.class_mapping) == {"A": One, "B": Two}
    assert both.filtered_weight_conversion_patterns == ("f", "g")
    assert both.fusions == (Family(),)
    assert (both.new_weights, both.dropped_weights) == (("n",), ("d",))
    assert both.strict
    assert both.name == "a | b"
    assert both == both.replace(transformers=">=5.17,<6")
    assert dict(both.fingerprints) == {"A": ("1", "2"), "B": ("3",)}
    assert not (b | b).strict
    with pytest.raises(TypeError):
        a | {"A": One}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (Patcher({"A": One}), Patcher({"A": Two}), "Both patchers replace 'A', by One and by Two"),
        (
            Patcher({".*ear$": One}, fingerprints={"Linear": "0"}),
            Patcher({"^Line": Two}),
            r"'.*' and '.*' both match the class Linear",
        ),
        (Patcher(extra_weight_conversions=qkv(0)), Patcher(extra_weight_conversions=qkv(1)), "take the same tensors"),
    ],
)
def test_conflicts(one: Patcher, other: Patcher, text: str) -> None:
    with pytest.raises(PatchConflictError, match=text):
        one | other
    with pytest.raises(PatchConflictError, match=text.replace("by One and by Two", "by Two and by One")):
        other | one


def test_what_is_imported_does_not_decide_whether_patchers_conflict() -> None:
    """Two expressions conflict where a model has a class that both match, or where a pin names one."""
    unrelated = type("UnrelatedMLP", (nn.Module,), {})
    both = Patcher({"^Unrelated": One}) | Patcher({"MLP$": Two})
    assert set(both.class_mapping) == {"^Unrelated", "MLP$"}
    with pytest.raises(PatchConflictError, match=f"both match the class {unrelated.__name__}, and they ask for"):
        both.replace(fingerprints={"UnrelatedMLP": "0"})
    assert both.replace(class_mapping={**both.class_mapping, "UnrelatedMLP": One}, fingerprints={"UnrelatedMLP": "0"})


def _in_a_block(patcher: Patcher, config: LlamaConfig, folder: Path) -> None:
    with patcher.applied():
        LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "build",
    [
        lambda p, config, folder: LlamaForCausalLM.from_pretrained(save_tiny(config, folder), patcher=p),
        _in_a_block,
        lambda p, config, folder: p.resolve(LlamaForCausalLM, config),
    ],
    ids=["a load", "a block", "resolve"],
)
def test_two_expressions_raise_where_a_class_is_built_that_both_match(build: Any, tmp_path: Path) -> None:
    both = Patcher({"^LlamaML": One}) | Patcher({"aMLP$": Two})
    with pytest.raises(PatchConflictError, match=r"'\^LlamaML' and 'aMLP\$' both match the class LlamaMLP"):
        build(both, tiny_llama_config(), tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers() | st.booleans(), max_size=3)
    ),
    max_leaves=8,
)


def otherwise_said(value: Any) -> Any:
    """An equal value of other types and another order, whose repr is another."""
    if isinstance(value, dict):
        return {key: otherwise_said(item) for key, item in reversed(value.items())}
    if isinstance(value, list | tuple):
        return type(value)(map(otherwise_said, value))
    if isinstance(value, bool | int) and value == float(value % 2**50):
        return float(value)
    return value


@settings(deadline=None)
@given(VALUES)
def test_equal_fusions_have_equal_hashes(value: Any) -> None:
    one, other = Family(value), Family(otherwise_said(value))
    assert one == other
    assert hash(one) == hash(other)
    assert Patcher(fusions=one) == Patcher(fusions=other)
    assert hash(Patcher(fusions=one)) == hash(Patcher(fusions=other))


def test_the_hash_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = full()
    hash(patcher)
    monkeypatch.setattr("patcher.spec.patcher.identity", None)
    assert hash(patcher) == hash(patcher)
    assert patcher == patcher


PATCHERS = st.builds(
    Patcher,
    st.dictionaries(st.sampled_from(["A", "B", "C"]), st.just(One)),
    st.lists(st.sampled_from(["x", "y", "z"]), max_size=2),
    st.sampled_from([(), (qkv(),)]),
    new_weights=st.lists(st.sampled_from(["n", "m"]), max_size=2),
    strict=st.booleans(),
    transformers=st.sampled_from(["", ">=5.17", "<6"]),
    fingerprints=st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["1", "2"])),
)


def unordered(patcher: Patcher) -> Patcher:
    return patcher.replace(
        filtered_weight_conversion_patterns=sorted(patcher.filtered_weight_conversion_patterns),
        new_weights=sorted(patcher.new_weights),
    )


@settings(max_examples=60, deadline=None)
@given(a=PATCHERS, b=PATCHERS, c=PATCHERS)
def test_laws_of_combining(a: Patcher, b: Patcher, c: Patcher) -> None:
    assert a | a == a
    assert (a | b) | c == a | (b | c)
    assert unordered(a | b) == unordered(b | a)
    assert pickle.loads(pickle.dumps(a | b)) == a | b


def test_errors_are_no_builtin_errors_that_pipeline_would_swallow() -> None:
    stack, errors = [PatcherError], []
    while stack:
        errors.append(stack.pop())
        stack += errors[-1].__subclasses__()
    names = {error.__name__ for error in errors if error.__module__ == "patcher.errors"}
    assert names == {*patcher_errors.__all__, "NoSuchNameError"} - {"PatcherWarning"}
    assert not [error for error in errors if issubclass(error, OSError | ValueError | TypeError | RuntimeError)]


def test_help_shows_what_the_parameters_take() -> None:
    """Not private generics or aliases, which nobody can look up."""
    shown = {name: each.annotation for name, each in inspect.signature(Patcher).parameters.items()}
    assert shown["class_mapping"] == shown["module_mapping"] == "Mapping[str, type[nn.Module]]"
    assert shown["fusions"] == "str | Fusion | Iterable[str | Fusion]"
    assert not re.search(r"\b_\w", " ".join(shown.values()))
