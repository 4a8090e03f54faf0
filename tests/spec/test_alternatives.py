"""`alternatives`: class keys of which a model needs to have only one."""

from __future__ import annotations

import pickle

import pytest
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
        ([["LlamaMPL"]], "alternatives: 'LlamaMPL' is no key of the class_mapping; did you mean 'LlamaMLP'?"),
        (
            ["LlamaMLP"],
            r"alternatives takes groups of .*, found the text 'LlamaMLP'; write alternatives=\[\['LlamaMLP'",
        ),
        ([3], "alternatives takes a class key or a list of them, found 3"),
        (3, "alternatives takes a group of class keys or a list of them, found 3"),
    ],
)
def test_what_is_no_group_raises(groups: object, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher({"LlamaMLP": MyMLP}, alternatives=groups)  # type: ignore[arg-type]
