"""A patched model is a model like any other: it generates, compiles, is copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM

from patcher import Patcher, load_original_state_dict, original_state_dict, report
from tests.compatibility.outcomes import compared
from tests.compatibility.rows import ROWS, Row
from tests.support import fresh, shared
from tests.support.checkpoints import saved
from tests.support.replacements import JOINED, OWN, JoinedMLP, OwnNorm
from tests.support.tiny import tiny_inputs, tiny_llama_config

PATCHERS = {
    "a class": OWN,
    "a class and a conversion": JOINED,
    "two classes and a fusion": JOINED | Patcher({"LlamaRMSNorm": OwnNorm}, fusions="qkv"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(params=PATCHERS.values(), ids=PATCHERS.keys())
def pair(request: pytest.FixtureRequest, llama: Path) -> tuple[Any, Any]:
    stock = LlamaForCausalLM.from_pretrained(llama).eval()
    return LlamaForCausalLM.from_pretrained(llama, patcher=request.param).eval(), stock


@pytest.mark.crossed
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


@pytest.mark.libraries
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


@pytest.mark.process
def test_a_pickle_is_read_in_another_process_that_saves_the_original_checkpoint(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = LlamaForCausalLM.from_pretrained(llama, patcher=JOINED).eval()
    assert type(model.model.layers[0].mlp) is JoinedMLP
    inputs = tiny_inputs(model.config)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, inputs, model(**inputs).logits.detach())))

    fresh.run(UNPICKLE, tmp_path / "model.pickle", tmp_path / "saved")

    saved, original = load_file(tmp_path / "saved/model.safetensors"), load_file(llama / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in original)


def wrapped(model: Any) -> Any:
    """A model with activation checkpointing of torch around its layers, as accelerate puts it there."""
    text = getattr(model.model, "language_model", model.model)
    for number, layer in enumerate(text.layers):
        text.layers[number] = checkpoint_wrapper(layer)
    if hasattr(model.model, "visual"):
        model.model.visual = checkpoint_wrapper(model.model.visual)
    return model


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_wrappers_that_state_dicts_leave_out_are_left_out(row: Row, tmp_path: Path) -> None:
    model, stock = wrapped(row.patched()), row.stock()
    assert saved(model, tmp_path / "ours") == saved(stock, tmp_path / "stock")
    state_dict = dict(stock.state_dict())
    compared(original_state_dict(model), state_dict, rounding=0)
    ways: list[Callable[[], Any]] = [
        lambda: model.load_state_dict(state_dict),
        lambda: model.load_state_dict(load_file(row.folder / "model.safetensors")),
        lambda: load_original_state_dict(model, state_dict),
        lambda: model.load_state_dict(row.patched().state_dict()),
    ]
    for load in ways:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not any(load())
        compared(original_state_dict(model), state_dict, rounding=0)
