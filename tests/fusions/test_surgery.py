"""Fused modules in other hands: copied, moved, appended, pickled, changed. They save right, or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from patcher import PatchedWeightsError, Patcher
from patcher.compat.models import is_initialized, mark_initialized
from patcher.fusions import Flatten, Rows
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.layouts.carried import fused_modules
from tests.support import fresh, shared
from tests.support.comparing import logits
from tests.support.surgery import SURGERY, fuse, operated
from tests.support.tiny import tiny_inputs, tiny_llama_config, tiny_mixtral_config

BOTH = Patcher(fusions=["qkv", "gate_up"])
CONFIGS = {
    "llama": tiny_llama_config,
    "biases": lambda: tiny_llama_config(attention_bias=True, mlp_bias=True),
    "experts": tiny_mixtral_config,
}
PATCHERS = {"llama": BOTH, "biases": BOTH, "experts": Patcher(fusions=["qkv", "sequential_experts"])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared.checkpoint(config()) for name, config in CONFIGS.items()}


def load(folder: Path, patcher: Patcher | None = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)


# --- any surgery on layers -------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    steps=st.lists(st.tuples(st.sampled_from(sorted(SURGERY)), st.integers(0, 5), st.integers(0, 5)), max_size=5),
    fused_host=st.booleans(),
)
def test_whatever_is_done_with_layers_the_checkpoint_is_that_of_stock(
    name: str, steps: list[tuple[str, int, int]], fused_host: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    stock, fused, twin = load(folders[name]), load(folders[name], PATCHERS[name]), load(folders[name])
    with torch.no_grad():  # so that it is seen whose layer is whose
        for model in (stock, fused):
            for layer in model.model.layers:
                layer.input_layernorm.weight.add_(1.0)
    host, other = (fused, twin) if fused_host else (twin, fused)
    expected_host, expected_other = (stock, load(folders[name])) if fused_host else (load(folders[name]), stock)

    found = operated(host, other, steps)
    expected = operated(expected_host, expected_other, steps)

    inputs = tiny_inputs(found.config)
    torch.testing.assert_close(logits(found, inputs), logits(expected, inputs), atol=1e-4, rtol=1e-4)
    for model, folder in ((found, "found"), (expected, "expected")):
        model.save_pretrained(tmp_path / folder)
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("found", "expected"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again = load(tmp_path / "found")
    torch.testing.assert_close(logits(again, inputs), logits(expected, inputs), atol=1e-4, rtol=1e-4)


# --- changes that have no place in the checkpoint --------------------------------------------------------------------


def add_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.zeros(layer.out_features))


def older_weight_norm(layer: nn.Linear) -> None:
    with pytest.warns(FutureWarning, match="is deprecated"):
        nn.utils.weight_norm(layer)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def replace(name: str, make: Callable[[nn.Linear], nn.Module]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make(getattr(module, name)))


#: change of a fused attention -> what is said when the model is saved
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a bias": (
        lambda attention: add_bias(attention.qkv_proj),
        r"layers\.1\.self_attn\.qkv_proj\.bias can't be saved in the original format: it was added to a fused layer",
    ),
    "weight_norm": (
        lambda attention: nn.utils.parametrizations.weight_norm(attention.qkv_proj),
        r"qkv_proj\.parametrizations\.weight\.original0 can't be saved.* it was added to a fused layer",
    ),
    "the older weight_norm": (
        lambda attention: older_weight_norm(attention.qkv_proj),
        r"qkv_proj\.weight_g can't be saved in the original format: it was added to a fused layer",
    ),
    "another size": (
        replace("qkv_proj", lambda old: nn.Linear(old.in_features, old.out_features + 1, bias=False)),
        r"qkv_proj\.weight can't be saved in the original format: it had the shape \(128, 64\) when it was made, "
        r"it has \(129, 64\) now",
    ),
    "a wrapper": (
        replace("qkv_proj", Wrapped),
        r"qkv_proj\.inner\.weight can't be saved in the original format: it was added to a fused layer",
    ),
    "a buffer": (
        lambda attention: attention.qkv_proj.register_buffer("scale", torch.ones(1)),
        r"qkv_proj\.scale can't be saved in the original format: it was added to a fused layer",
    ),
    "a projection behind its back": (
        lambda attention: attention._modules.__setitem__("q_proj", nn.Linear(64, 64, bias=False)),
        r"q_proj\.weight can't be saved.* qkv_proj\.weight of a fused module holds it, and both are there",
    ),
    "eight bits": (
        lambda attention: attention.qkv_proj._parameters.__setitem__(
            "weight", nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
        ),
        r"qkv_proj\.weight can't be saved in the original format: it is quantized",
    ),
}


@pytest.mark.parametrize("host", ["its own model", "a stock model"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_can_not_be_given_back_raises_before_a_file_is_written(
    change: str, host: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(folders["llama"], BOTH)
    act, message = CHANGES[change]
    act(model.model.layers[1].self_attn)
    if host == "a stock model":
        stock = load(folders["llama"])
        stock.model.layers[1] = model.model.layers[1]
        model = stock

    with pytest.raises(PatchedWeightsError, match=message):
        model.save_pretrained(tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


def test_a_fused_layer_in_a_stock_model_has_no_runtime_layout_to_save(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(folders["llama"])
    model.model.layers[1] = load(folders["llama"], BOTH).model.layers[1]

    with pytest.raises(
        PatchedWeightsError, match=r"model\.layers\.1\.self_attn is fused, and LlamaForCausalLM around"
    ):
        model.save_pretrained(tmp_path / "saved", save_original_format=False)


# --- a model around it -----------------------------------------------------------------------------------------------


class Around(PreTrainedModel):
    """A model that holds another one, and is initialised when it has it."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any, inner: PreTrainedModel) -> None:
        super().__init__(config)
        self.inner = inner
        self.post_init()


@pytest.mark.parametrize("made", ["loaded", "made of a config"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_around_it_does_not_initialise_it_again(name: str, made: str, folders: dict[str, Path]) -> None:
    model = load(folders[name], PATCHERS[name])
    if made == "made of a config":
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), patcher=PATCHERS[name])
    assert fused_modules(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    Around(tiny_llama_config(), model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("marked", [(), ("gate_proj",), ("gate_proj", "up_proj")])
def test_a_layer_passes_for_initialized_where_all_its_parts_do(marked: tuple[str, ...]) -> None:
    mlp: Any = LlamaMLP(tiny_llama_config())
    for name in marked:
        mark_initialized(mlp.get_submodule(name))
    fuse(mlp, Rows(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight"))
    assert is_initialized(mlp.gate_up_proj) == (len(marked) == 2)

    convolution = nn.Conv2d(3, 8, kernel_size=4, stride=4)
    if marked:
        mark_initialized(convolution)
    layouts = (Flatten("weight", "linear.weight"), Rows("bias", "linear.bias"))
    linear = fuse(convolution, *layouts, into=LinearPatchEmbedding)
    assert is_initialized(linear) == is_initialized(linear.linear) == bool(marked)


def test_what_is_joined_takes_the_place_of_the_first_part() -> None:
    attention = LlamaAttention(tiny_llama_config(), 0)
    fuse(attention, Rows(["k_proj.weight", "v_proj.weight"], "kv_proj.weight"))
    assert list(attention._modules) == ["q_proj", "kv_proj", "o_proj"]


# --- pickles ---------------------------------------------------------------------------------------------------------

READER = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model = pickle.load(file)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "what", [pytest.param("a fused model", marks=pytest.mark.nightly), "a stock model with a fused layer"]
)
def test_a_pickle_saves_right_where_nobody_has_imported_the_package(
    what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(folders["llama"], BOTH)
    if "stock" in what:
        stock = load(folders["llama"])
        stock.model.layers[1] = model.model.layers[1]
        model = stock
    with (tmp_path / "model.pickle").open("wb") as file:
        pickle.dump(model, file)

    fresh.run(READER, tmp_path / "model.pickle", tmp_path / "saved")

    original, saved = (folder / "model.safetensors" for folder in (folders["llama"], tmp_path / "saved"))
    assert saved.read_bytes() == original.read_bytes()
