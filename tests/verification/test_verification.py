"""`patcher.verify`: right patchers pass at every stage, and what was found is a value."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from patcher import InvalidPatcherError, Patcher, Verification, verify
from tests.support.offloaded import DEVICE_MAPS
from tests.support.replacements import JOINED, OWN
from tests.support.sampling import sampled
from tests.support.tiny import tiny_bert_config, tiny_llama_config, tiny_llava_config
from tests.verification.models import LLAMA, T5, VIT, WHISPER

RIGHT: dict[str, tuple[Any, Patcher, set[str]]] = {
    "a class": (tiny_llama_config(), OWN, {"windows"}),
    "an encoder": (tiny_bert_config(), Patcher(fusions="qkv"), {"windows", "generation"}),
    "encoder and decoder": (T5, Patcher(fusions=["qkv", "gate_up"]), {"windows"}),
    "vision": (VIT, Patcher(fusions=["qkv", "patch_embeddings"]), {"windows", "generation"}),
}


@pytest.mark.parametrize("name", sampled(RIGHT, {"a class", "encoder and decoder"}))
def test_what_is_right_passes_at_every_stage(name: str) -> None:
    config, patcher, unchecked = RIGHT[name]
    found = verify(config, patcher)

    assert found.failures == ()
    assert found
    assert found.passed
    assert found.replaced > 0
    found.raise_on_failure()
    assert [stage.name for stage in found.stages] == STAGES
    assert {stage.name for stage in found.stages if not stage.checked} == unchecked


STAGES = "load outputs arguments recorded windows precision generation gradients training save reload".split()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_offloaded_weights_of_one_model_are_not_those_of_another(llama: Path, tmp_path: Path) -> None:
    """Each model that is loaded on the way writes its own: under the same names, and some in another type."""
    options = {"device_map": DEVICE_MAPS["a layer on disk"], "offload_folder": tmp_path}
    found = verify(llama, Patcher(fusions=["qkv", "gate_up"]), **options)
    found.raise_on_failure()
    assert {stage.name for stage in found.stages if not stage.checked} == {"windows", "gradients", "training"}


class NormAsShipped(LlamaRMSNorm):
    pass


def test_half_precision_is_compared_module_by_module(llama: Path) -> None:
    found = verify(llama, JOINED | Patcher({"LlamaRMSNorm": NormAsShipped}), dtype=torch.bfloat16)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 2.0), ("of", 2.0))


def test_in_half_precision_all_towers_are_reached() -> None:
    found = verify(tiny_llava_config(), Patcher(fusions=["qkv", "patch_embeddings"]), dtype=torch.bfloat16)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 3.0), ("of", 3.0))


def test_in_half_precision_inputs_are_too() -> None:
    """Whisper takes sounds as they are; most other models cast what they are given."""
    found = verify(WHISPER, Patcher(fusions="qkv"), dtype=torch.bfloat16)

    assert found.failures == ()
    assert found.replaced > 0


def test_it_is_a_value_that_goes_to_json(llama: Path) -> None:
    found = verify(llama, OWN)

    with pytest.raises(dataclasses.FrozenInstanceError):
        found.model = "another"  # type: ignore[misc]
    assert hash(found) == hash(dataclasses.replace(found))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["passed"] is True
    assert data["failures"] == []
    assert data["checkpoint"] == str(llama)
    assert [stage["name"] for stage in data["stages"]] == STAGES
    layers = data["stages"][1]["layers"]
    assert layers["errors"] == {
        "model.embed_tokens": 0.0,
        "model.rotary_emb": 0.0,
        "model.layers.0": 0.0,
        "model.layers.1": 0.0,
        "model.norm": 0.0,
        "lm_head": 0.0,
    }
    assert (layers["inputs"], layers["begins"]) == ("a short row", None)
    assert "<script" not in found._repr_html_()
    assert "equal byte for byte" in found._repr_html_()


def test_two_runs_measure_the_same(llama: Path) -> None:
    one, other = (verify(llama, JOINED, seed=3) for _ in range(2))

    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)


def test_nothing_is_not_passed() -> None:
    nothing = Verification("M", "", "", "float32")
    assert not nothing
    assert not nothing.passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA, None), r"verify takes a patcher.Patcher, found None \(NoneType\); write verify\(model, Patcher\("),
        ((LLAMA, OWN, torch.int8), r"dtype=torch\.int8 can't be compared; write one of torch\.float64"),
        ((LlamaForCausalLM, OWN), r"a model is named by its repo, its folder or its config"),
    ],
    ids=["no patcher", "dtype", "no model"],
)
def test_wrong_use_raises(arguments: Any, message: str) -> None:
    model, patcher, *dtype = arguments
    with pytest.raises(InvalidPatcherError, match=message):
        verify(model, patcher, **({"dtype": dtype[0]} if dtype else {}))
