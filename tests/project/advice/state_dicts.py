"""State dicts, and checkpoints that are read into a model which is already built."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig, MixtralForCausalLM
from transformers.core_model_loading import Chunk, Transpose, WeightConverter
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import Patcher
from tests.project.advice import Place, Steps, advice, load, same, written
from tests.support.processes import one_process
from tests.support.tiny import save_tiny, tiny_llama_config

QKV = Patcher(fusions="qkv")


def emptied(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


class HalvesMLP(LlamaMLP):
    """The up projection in two halves."""

    conversion_mapping = WeightConverter(["up_proj.weight"], ["first.weight", "second.weight"], [Chunk(0)])

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.up_proj
        self.first = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)
        self.second = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.cat([self.first(x), self.second(x)], dim=-1)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


@advice("it is missing in the state dict, and {} has made it with others. Save a state dict with all ")
def a_part_of_a_converted_layer_in_another_model(at: Place) -> Steps:
    stock, model = load(at.llama), load(at.llama, Patcher(module_mapping={"**.mlp": HalvesMLP}))
    stock.model.layers[0] = model.model.layers[0]
    whole = stock.state_dict()
    part = {name: value for name, value in whole.items() if "second" not in name}
    yield lambda: stock.save_pretrained(at.tmp / "saved", state_dict=part)
    stock.save_pretrained(at.tmp / "saved", state_dict=whole)
    assert same(load(at.tmp / "saved"), at.llama)


@advice(
    "{}{} and {}{} are both in the state dict, and one is made of the other: which is meant can't be known. Take one "
    "of them out.",
    "use patcher.load_original_state_dict(model, state_dict), with a state dict that has not been filled in.",
    error=RuntimeError,
)
def a_state_dict_in_both_layouts(at: Place) -> Steps:
    model, stock = load(at.llama, QKV), load(at.llama).state_dict()
    both = {**emptied(model).state_dict(), **stock}
    yield lambda: model.load_state_dict(both)
    model.load_state_dict({key: value for key, value in both.items() if "qkv_proj" not in key})
    assert same(model, at.llama)
    options = StateDictOptions(full_state_dict=True)
    said = yield lambda: set_model_state_dict(emptied(model), dict(stock), options=options)
    written(said, r"use (patcher\.load_original_state_dict\(.*?\)),", patcher=patcher, model=model, state_dict=stock)
    assert same(model, at.llama)


@advice(
    "Use patcher.load_original_state_dict(model, state_dict), in every process with all tensors", error=RuntimeError
)
def whole_tensors_for_a_split_model(at: Place) -> Steps:
    with one_process():
        torch.distributed.init_device_mesh("cpu", (1,))
        model, stock = fully_shard(emptied(load(at.llama, QKV))), load(at.llama).state_dict()
        said = yield lambda: model.load_state_dict(stock)
        names = {"patcher": patcher, "model": model, "state_dict": stock}
        written(said, r"Use (patcher\.load_original_state_dict\(.*?\)), in every", **names)
        found = patcher.original_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in stock.items())


@advice("Write to the parameter that holds them, or load the model without fusions.")
def rows_of_a_split_parameter(at: Place) -> Steps:
    with one_process(), torch.no_grad():
        torch.distributed.init_device_mesh("cpu", (1,))
        model: Any = fully_shard(load(at.llama, QKV))
        attention = model.model.layers[0].self_attn
        yield lambda: attention.q_proj.weight.zero_()
        attention.qkv_proj.weight.zero_()
        assert not attention.q_proj.weight.full_tensor().any()
        plain: Any = fully_shard(load(at.llama))
        plain.model.layers[1].self_attn.q_proj.weight.zero_()
        assert not plain.model.layers[1].self_attn.q_proj.weight.full_tensor().any()


class SquareMLP(LlamaMLP):
    """The down projection is on the right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x) @ self.down_proj.weight


@advice(
    "{}{} has the same name and shape before and after {}, and the state dict doesn't say which it is. For the layout "
    "of transformers use patcher.load_original_state_dict(model, state_dict); for that of the patched model the "
    "state dict that its state_dict() gave.",
    error=RuntimeError,
)
def a_name_of_both_layouts(at: Place) -> Steps:
    folder = save_tiny(tiny_llama_config(intermediate_size=64), at.tmp / "square")
    turned = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)])
    model = load(folder, Patcher({"LlamaMLP": SquareMLP}, extra_weight_conversions=turned))
    checkpoint = load_file(folder / "model.safetensors")
    said = yield lambda: model.load_state_dict(checkpoint)
    names = {"patcher": patcher, "model": emptied(model), "state_dict": checkpoint}
    written(said, r"use (patcher\.load_original_state_dict\(.*?\));", **names)
    assert same(model, folder)
    model.load_state_dict(model.state_dict())
    assert same(model, folder)


@advice("{} is {}. Load the model again with from_pretrained(..., patcher=...)", error=RuntimeError)
def a_state_dict_for_a_quantized_model(at: Place) -> Steps:
    how = BitsAndBytesConfig(load_in_8bit=True)
    model = load(at.llama, QKV, quantization_config=how)
    yield lambda: model.load_state_dict(load_file(at.llama / "model.safetensors"), strict=False)
    assert type(load(at.llama, QKV, quantization_config=how).model.layers[0].self_attn.qkv_proj) is not nn.Linear


@advice("Give all parts of a tensor in one state dict, or leave out assign=True", error=RuntimeError)
def parts_of_another_type(at: Place) -> Steps:
    model = load(at.llama, QKV)
    checkpoint = {key: value.double() for key, value in load_file(at.llama / "model.safetensors").items()}
    half = {key: value for key, value in checkpoint.items() if "k_proj" not in key}
    yield lambda: model.load_state_dict(half, strict=False, assign=True)
    model = emptied(load(at.llama, QKV))  # an assigned parameter is the tensor that was given
    model.load_state_dict(checkpoint, assign=True)
    assert model.dtype == torch.float64
    assert same(model.float(), at.llama)
    model = emptied(load(at.llama, QKV))
    model.load_state_dict(half, strict=False)
    model.load_state_dict(checkpoint)
    assert same(model, at.llama)


@advice(
    "The state dict has {}, and tensors of a checkpoint that make it, under names as {}{}: which is meant can't be "
    "known. Take one of them out.",
    error=RuntimeError,
)
def a_tensor_and_what_it_is_made_of(at: Place) -> Steps:
    model: Any = MixtralForCausalLM.from_pretrained(at.moe, patcher=Patcher(fusions="sequential_experts"))
    stock: Any = MixtralForCausalLM.from_pretrained(at.moe)
    checkpoint = load_file(at.moe / "model.safetensors")
    yield lambda: model.load_state_dict({**stock.state_dict(), **checkpoint})
    emptied(model).load_state_dict(checkpoint)
    assert same(model, at.moe)


@advice("Load it with from_pretrained(..., patcher=..., device_map=...), which converts and dispatches.")
def a_checkpoint_that_is_dispatched(at: Place) -> Steps:
    model = emptied(load(at.llama, QKV))
    yield lambda: load_checkpoint_and_dispatch(model, str(at.llama), device_map={"": "cpu"})
    assert same(load(at.llama, QKV, device_map={"": "cpu"}), at.llama)


@advice("Load it with from_pretrained(..., patcher=..., device_map=...), which converts and dispatches.")
def a_checkpoint_that_is_loaded_in_place(at: Place) -> Steps:
    model = emptied(load(at.llama, QKV))
    yield lambda: load_checkpoint_in_model(model, str(at.llama))
    assert same(load(at.llama, QKV), at.llama)
