"""How a load names a key of a checkpoint, and which converter takes it."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from patcher.compat.conversions import key_renamer
from tests.support.tiny import tiny_llama_config


def converter(source: str, target: str) -> WeightConverter:
    return WeightConverter([source], [target], operations=[Concatenate(0)])


def test_of_converters_with_one_text_the_first_names_the_parameter_and_the_last_makes_it() -> None:
    first, last, other = converter("q_proj", "first"), converter("q_proj", "last"), converter("k_proj", "other")

    renamed, taker, pattern = key_renamer([first, last, other])("layers.0.q_proj.weight")

    assert (renamed, pattern) == ("layers.0.first.weight", "q_proj")
    assert taker is last


def test_renamings_come_first_and_the_prefix_of_the_base_model_last() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_llama_config())
    parameters = model.state_dict()
    renaming = WeightRenaming("final", "norm")

    assert key_renamer([renaming], model, parameters)("final.weight") == ("model.norm.weight", None, None)
    assert key_renamer([WeightRenaming("lm_head", "head")], model, parameters)("lm_head.weight")[0] == "lm_head.weight"
