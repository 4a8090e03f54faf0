"""`alternatives`: class keys of which a model needs to have only one."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from patcher import InvalidPatcherError, Patcher, UnmatchedPatchError, report
from tests.support.tiny import tiny_llama_config


class MyMLP(LlamaMLP):
    pass


class MyNorm(LlamaRMSNorm):
    pass


EITHER = Patcher({"LlamaMLP": MyMLP, "MistralMLP": MyMLP}, alternatives=[("MistralMLP", "LlamaMLP")])


def test_one_of_a_group_is_enough() -> None:
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=EITHER)
    assert len(report(model).replaced) == 2


def test_none_of_a_group_raises_once_for_all() -> None:
    patcher = Patcher({"MistralMLP": MyMLP, "GemmaMLP": MyMLP}, alternatives=[("MistralMLP", "GemmaMLP")])
    with pytest.raises(UnmatchedPatchError, match="no class of the model matches any of 'GemmaMLP', 'MistralMLP';"):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher)


def test_a_group_excuses_nothing_outside_of_it() -> None:
    patcher = EITHER | Patcher({"MistralRMSNorm": MyNorm})
    with pytest.raises(UnmatchedPatchError, match="no class of the model matches 'MistralRMSNorm'"):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher)


def test_what_one_patcher_requires_a_group_of_the_other_does_not_excuse() -> None:
    required = Patcher({"MistralMLP": MyMLP})
    for both in (EITHER | required, required | EITHER):
        assert both.alternatives == (("LlamaMLP", "MistralMLP"), ("MistralMLP",))
        with pytest.raises(UnmatchedPatchError, match="no class of the model matches 'MistralMLP'; it has"):
            LlamaForCausalLM._from_config(tiny_llama_config(), patcher=both)
    assert len(report(LlamaForCausalLM._from_config(tiny_llama_config(), patcher=EITHER | EITHER)).replaced) == 2


KEYS = ("A", "B", "C", "D")
GROUPS = st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), max_size=3)


@st.composite
def patchers(draw: st.DrawFn) -> Patcher:
    groups = draw(GROUPS)
    keys = {*draw(st.lists(st.sampled_from(KEYS), max_size=3)), *(key for group in groups for key in group)}
    return Patcher(dict.fromkeys(sorted(keys), MyMLP), alternatives=groups)


def fits(patcher: Patcher, classes: frozenset[str]) -> bool:
    """Whether a model of these classes has what a patcher requires: what is documented of `alternatives`."""
    grouped = {key for group in patcher.alternatives for key in group}
    needed = [*patcher.alternatives, *((key,) for key in patcher.class_mapping if key not in grouped)]
    return all(classes.intersection(group) for group in needed)


@given(patchers(), patchers(), patchers(), st.frozensets(st.sampled_from(KEYS)))
def test_both_require_what_each_requires(a: Patcher, b: Patcher, c: Patcher, classes: frozenset[str]) -> None:
    assert fits(a | b, classes) == (fits(a, classes) and fits(b, classes))
    assert (a | b) | c == a | (b | c)
    assert a | b == b | a
    assert a | a == a
    assert Patcher.from_dict((a | b).to_dict(), allowed=MyMLP) == a | b


def test_a_group_of_one_key_says_something_beside_others_only() -> None:
    assert Patcher({"LlamaMLP": MyMLP}, alternatives=[["LlamaMLP"]]) == Patcher({"LlamaMLP": MyMLP})
    assert EITHER.replace(alternatives=[["LlamaMLP"], ["LlamaMLP", "MistralMLP"]]) != EITHER


def test_it_is_part_of_the_value() -> None:
    assert EITHER.alternatives == (("LlamaMLP", "MistralMLP"),)
    assert EITHER.replace(alternatives=()) != EITHER
    assert EITHER.replace(alternatives=[["LlamaMLP", "MistralMLP"]]) == EITHER
    assert pickle.loads(pickle.dumps(EITHER)) == EITHER
    assert "alternatives=[('LlamaMLP', 'MistralMLP')]" in repr(EITHER)
    assert (EITHER | Patcher({"LlamaRMSNorm": MyNorm})).alternatives == EITHER.alternatives


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["LlamaMPL"]], "alternatives: 'LlamaMPL' isn't a key of the class_mapping; did you mean 'LlamaMLP'?"),
        (
            ["LlamaMLP"],
            r"alternatives takes groups of .*, found \['LlamaMLP'\]; write alternatives=\[\['LlamaMLP'",
        ),
        ([[]], "alternatives: a group without class keys matches no model; take it out"),
        ([3], r"alternatives takes groups of class keys, found \[3\]; write"),
        (3, "alternatives takes groups of class keys, found 3; write"),
    ],
)
def test_what_is_no_group_raises(groups: object, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher({"LlamaMLP": MyMLP}, alternatives=groups)  # type: ignore[arg-type]
