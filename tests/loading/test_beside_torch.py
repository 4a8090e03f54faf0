"""A patched model is a model like any other: it generates, compiles, is copied and pickled."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from patcher import Patcher, report
from tests.support.replacements import JOINED, OWN, JoinedMLP, OwnNorm
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config

PATCHERS = {
    "a class": OWN,
    "a class and a conversion": JOINED,
    "two classes and a fusion": JOINED | Patcher({"LlamaRMSNorm": OwnNorm}, fusions="qkv"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=PATCHERS.values(), ids=PATCHERS.keys())
def pair(request: pytest.FixtureRequest, llama: Path) -> tuple[Any, Any]:
    stock = LlamaForCausalLM.from_pretrained(llama).eval()
    return LlamaForCausalLM.from_pretrained(llama, patcher=request.param).eval(), stock


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}],
    ids=["greedy", "without a cache", "beams", "static cache"],
)
def test_it_generates_what_stock_does(pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    model, stock = pair
    ids = tiny_inputs(stock.config)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}

    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


@pytest.mark.slow
def test_it_compiles_as_stock_does(pair: tuple[Any, Any]) -> None:
    inputs = tiny_inputs(pair[1].config)
    outputs, breaks = [], []
    for model in pair:
        torch._dynamo.reset()
        breaks.append(torch._dynamo.explain(model)(**inputs).graph_break_count)
        torch._dynamo.reset()
        with torch.no_grad():
            outputs.append(torch.compile(model, backend="eager")(**inputs).logits)

    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert breaks[0] <= breaks[1]


def test_a_copy_is_a_model_of_its_own(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    inputs = tiny_inputs(model.config)
    before = model(**inputs).logits
    twin = copy.deepcopy(model)

    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert report(twin) == report(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(**inputs).logits, before)


UNPICKLE = """
import pickle, sys
import torch
model, inputs, logits = pickle.load(open(sys.argv[1], "rb"))
torch.testing.assert_close(model(**inputs).logits, logits)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_pickle_is_read_in_another_process_that_saves_the_original_checkpoint(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = LlamaForCausalLM.from_pretrained(llama, patcher=JOINED).eval()
    assert type(model.model.layers[0].mlp) is JoinedMLP
    inputs = tiny_inputs(model.config)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, inputs, model(**inputs).logits.detach())))

    command = [sys.executable, "-c", UNPICKLE, tmp_path / "model.pickle", tmp_path / "saved"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    assert done.returncode == 0, done.stderr
    saved, original = load_file(tmp_path / "saved/model.safetensors"), load_file(llama / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in original)
