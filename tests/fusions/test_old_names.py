"""What is written under names from before a fusion takes effect as on the stock model, or raises with what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from patcher import InvalidPatcherError, PatchConflictError, Patcher
from patcher.compat.models import is_initialized, mark_initialized
from patcher.fusions import QKV, fused_class_of
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.layouts.carried import fused_modules
from tests.support import shared
from tests.support.comparing import logits
from tests.support.fusing import fuse
from tests.support.offloaded import offloaded
from tests.support.processes import one_process
from tests.support.tiny import tiny_inputs, tiny_llama_config, tiny_mixtral_config

BOTH = Patcher(fusions=["qkv", "gate_up"])
ADVICE = r".* Take the fusions off with Patcher\(\)\.apply\(model\) first"


@pytest.fixture(scope="module")
def folder() -> Path:
    return shared.checkpoint(tiny_llama_config(attention_bias=True))


@pytest.fixture(scope="module")
def moe() -> Path:
    return shared.checkpoint(tiny_mixtral_config())


def load(folder: Path, patcher: Patcher | None = BOTH) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)


def attention_of(model: Any) -> Any:
    return model.model.layers[1].self_attn


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) / 8


def layer(**changes: Any) -> nn.Linear:
    made = nn.Linear(64, 64)
    made.load_state_dict({"weight": values(64, 64), "bias": values(64)})
    return made.requires_grad_(changes.get("requires_grad", True))


def added(attention: Any) -> None:
    with torch.no_grad():
        attention.q_proj.weight += 1


def new_parameters(attention: Any) -> None:
    attention.q_proj.weight = nn.Parameter(values(64, 64))
    attention.q_proj.bias = nn.Parameter(values(64))


def new_layer(attention: Any) -> None:
    attention.q_proj = layer()


# --- what takes effect -----------------------------------------------------------------------------------------------

EFFECTIVE: dict[str, Callable[[Any], object]] = {
    ".data.copy_": lambda attention: attention.q_proj.weight.data.copy_(values(64, 64)),
    ".data[...] =": lambda attention: attention.k_proj.weight.data.__setitem__(0, 2.0),
    "[...] =": torch.no_grad()(lambda attention: attention.q_proj.weight.__setitem__(..., values(64, 64))),
    "copy_": torch.no_grad()(lambda attention: attention.v_proj.bias.copy_(values(32))),
    "mul_": torch.no_grad()(lambda attention: attention.q_proj.weight.mul_(2)),
    "+=": added,
    "nn.init": lambda attention: nn.init.constant_(attention.q_proj.weight, 0.1),
    "= nn.Parameter": new_parameters,
    "= nn.Linear": new_layer,
    "add_module": lambda attention: attention.add_module("q_proj", layer()),
    "register_module": lambda attention: attention.register_module(name="q_proj", module=layer()),
    "load_state_dict": lambda attention: attention.load_state_dict({"q_proj.weight": values(64, 64)}, strict=False),
}


@pytest.mark.parametrize("way", EFFECTIVE)
def test_what_takes_effect_does_as_on_the_stock_model(way: str, folder: Path, tmp_path: Path) -> None:
    models = {"stock": load(folder, None), "fused": load(folder)}
    before = logits(models["fused"], tiny_inputs(models["fused"].config))
    for name, model in models.items():
        EFFECTIVE[way](attention_of(model))
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
        model.save_pretrained(tmp_path / name)

    after = {name: logits(model, tiny_inputs(model.config)) for name, model in models.items()}
    torch.testing.assert_close(after["fused"], after["stock"], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(after["fused"], before, atol=1e-3)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in models]
    assert files[0] == files[1]


def test_a_bias_that_only_some_projections_have_is_a_parameter_of_its_own() -> None:
    config = tiny_llama_config(attention_bias=True)
    attention: Any = LlamaAttention(config, 0)
    attention.k_proj.bias = None
    attention = fuse(QKV(), attention, fused_class_of(QKV(), attention))

    attention.q_proj.bias = nn.Parameter(values(64))
    attention.v_proj.bias.data = values(32)  # a parameter, of which nothing is refused
    assert torch.equal(attention.q_proj_bias, values(64))
    assert torch.equal(attention.v_proj_bias, values(32))
    with pytest.raises(PatchConflictError, match=r"k_proj .*: its bias is None, and can't take \(32,\)" + ADVICE):
        attention.k_proj.bias = nn.Parameter(values(32))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_part_shows_where_its_rows_are(folder: Path) -> None:
    whole = "Linear(in_features=64, out_features=128, bias=True)"
    assert repr(attention_of(load(folder)).k_proj) == f"<rows 64 to 96 of qkv_proj, {whole}>"


ROWS = r"Attention\.q_proj is rows of qkv_proj and not a module: "
IN_PLACE = r"Attention\.q_proj\.weight is rows of qkv_proj\.weight and takes values in place only: "
HELD = r"its weight takes the values of a new parameter, and there are other references to this one"
KEPT = nn.Parameter(values(64, 64))


def frozen(attention: Any) -> None:
    attention.q_proj.weight = nn.Parameter(values(64, 64), requires_grad=False)


def tied(attention: Any) -> None:
    attention.q_proj.weight = attention.o_proj.weight


def kept(attention: Any) -> None:
    attention.q_proj.weight = KEPT


def of_another_layer(attention: Any) -> None:
    other = load(shared.checkpoint(tiny_llama_config(attention_bias=True)))
    attention.q_proj.weight = attention_of(other).q_proj.weight


def tied_layer(attention: Any) -> None:
    made = layer()
    made.weight = attention.o_proj.weight
    attention.q_proj = made


def the_layer_of_another(attention: Any) -> None:
    attention.q_proj = attention.o_proj


def with_a_gradient() -> nn.Linear:
    made = layer()
    made.weight.grad = torch.ones(64, 64)
    return made


def with_a_hook() -> nn.Linear:
    made = layer()
    made.weight.register_hook(lambda gradient: gradient)
    return made


def put_behind(attention: Any) -> None:
    attention._modules["q_proj"] = layer()
    attention.q_proj(torch.zeros(1, 64))


def parametrized(attention: Any) -> None:
    nn.utils.parametrize.register_parametrization(attention.q_proj, "weight", nn.Identity())


#: what is done -> the error, and what it says
REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    ".data =": (
        lambda attention: setattr(attention.q_proj.weight, "data", values(64, 64)),
        PatchConflictError,
        IN_PLACE + "data would have no effect",
    ),
    "requires_grad =": (
        lambda attention: setattr(attention.q_proj.weight, "requires_grad", False),
        PatchConflictError,
        IN_PLACE + "requires_grad would",
    ),
    "requires_grad_": (
        lambda attention: attention.q_proj.weight.requires_grad_(False),
        PatchConflictError,
        IN_PLACE + "requires_grad_ would",
    ),
    "requires_grad_ of the layer": (
        lambda attention: attention.q_proj.requires_grad_(False),
        AttributeError,
        ROWS + "it has no 'requires_grad_'",
    ),
    "an attribute of the weight": (
        lambda attention: setattr(attention.q_proj.weight, "no_decay", True),
        PatchConflictError,
        IN_PLACE + "no_decay would",
    ),
    "the class of the weight": (
        lambda attention: setattr(attention.q_proj.weight, "__class__", nn.Parameter),
        PatchConflictError,
        IN_PLACE + "__class__ would",
    ),
    "del of the gradient": (
        lambda attention: delattr(attention.q_proj.weight, "grad"),
        PatchConflictError,
        IN_PLACE + "del grad would",
    ),
    "vector_to_parameters": (
        lambda attention: nn.utils.vector_to_parameters(torch.zeros(64 * 64), [attention.q_proj.weight]),
        PatchConflictError,
        IN_PLACE + "data would",
    ),
    "swap_tensors": (
        lambda attention: torch.utils.swap_tensors(attention.q_proj.weight, values(64, 64)),
        PatchConflictError,
        IN_PLACE + "swap_tensors would",
    ),
    "swap_tensors, the other way round": (
        lambda attention: torch.utils.swap_tensors(values(64, 64), attention.q_proj.weight),
        PatchConflictError,
        IN_PLACE + "swap_tensors would",
    ),
    "set_": (
        torch.no_grad()(lambda attention: attention.q_proj.weight.set_(values(64, 64))),
        PatchConflictError,
        IN_PLACE + "set_ would",
    ),
    "t_": (
        torch.no_grad()(lambda attention: attention.q_proj.weight.t_()),
        PatchConflictError,
        IN_PLACE + "t_ would",
    ),
    "a hook on the weight": (
        lambda attention: attention.q_proj.weight.register_hook(print),
        PatchConflictError,
        IN_PLACE + "register_hook would",
    ),
    "a hook behind the gradient": (
        lambda attention: attention.q_proj.weight.register_post_accumulate_grad_hook(print),
        PatchConflictError,
        IN_PLACE + "register_post_accumulate_grad_hook would",
    ),
    "a hook on the layer": (
        lambda attention: attention.q_proj.register_forward_hook(print),
        AttributeError,
        ROWS + "it has no 'register_forward_hook'",
    ),
    "a parametrization": (parametrized, AttributeError, ROWS + "it has no"),
    "register_parameter": (
        lambda attention: attention.q_proj.register_parameter("weight", None),
        AttributeError,
        ROWS + "it has no 'register_parameter'",
    ),
    "register_buffer": (
        lambda attention: attention.q_proj.register_buffer("scale", torch.ones(1)),
        AttributeError,
        ROWS + "it has no 'register_buffer'",
    ),
    "to": (lambda attention: attention.q_proj.to(torch.float16), AttributeError, ROWS + "it has no 'to'"),
    "half": (lambda attention: attention.q_proj.half(), AttributeError, ROWS + "it has no 'half'"),
    "forward =": (
        lambda attention: setattr(attention.q_proj, "forward", lambda x: x),
        PatchConflictError,
        ROWS + "'forward' can't be set on it",
    ),
    "an attribute": (
        lambda attention: setattr(attention.q_proj, "scaling", 2),
        PatchConflictError,
        ROWS + "'scaling' can't be set on it",
    ),
    "the class": (
        lambda attention: setattr(attention.q_proj, "__class__", nn.Linear),
        PatchConflictError,
        ROWS + "'__class__' can't be set on it",
    ),
    "del of the weight": (
        lambda attention: delattr(attention.q_proj, "weight"),
        PatchConflictError,
        ROWS + "'weight' can't be deleted",
    ),
    "del": (
        lambda attention: delattr(attention, "q_proj"),
        PatchConflictError,
        r"q_proj is fused: its values are in qkv_proj\.weight, and can't be deleted by itself\.",
    ),
    "a frozen parameter": (
        frozen,
        PatchConflictError,
        ROWS + "its weight has requires_grad=True, as all rows have, and not False",
    ),
    "a parameter of another layer": (tied, PatchConflictError, ROWS + HELD),
    "a parameter that is kept": (kept, PatchConflictError, ROWS + HELD),
    "rows of another layer": (of_another_layer, PatchConflictError, ROWS + HELD),
    "a parameter of eight bits": (
        lambda attention: setattr(attention.q_proj, "weight", torch.zeros(64, 64, dtype=torch.int8)),
        PatchConflictError,
        ROWS + "its weight or the assigned tensor is quantized",
    ),
    "a parameter without values": (
        lambda attention: setattr(attention.q_proj, "weight", torch.zeros(64, 64, device="meta")),
        PatchConflictError,
        ROWS + r"its weight or the assigned tensor has no values yet \(it is on the meta device\)",
    ),
    "another shape": (
        lambda attention: setattr(attention.q_proj, "weight", nn.Parameter(torch.zeros(3, 3))),
        PatchConflictError,
        ROWS + r"its weight is \(64, 64\), and can't take \(3, 3\)",
    ),
    "no bias": (
        lambda attention: setattr(attention.q_proj, "bias", None),
        PatchConflictError,
        ROWS + r"its bias is \(64,\), and can't take None",
    ),
    "a layer of another size": (
        lambda attention: setattr(attention, "q_proj", nn.Linear(64, 32)),
        PatchConflictError,
        ROWS + r"its weight is \(64, 64\), and can't take \(32, 64\)",
    ),
    "a layer without bias": (
        lambda attention: setattr(attention, "q_proj", nn.Linear(64, 64, bias=False)),
        PatchConflictError,
        ROWS + r"its bias is \(64,\), and can't take None",
    ),
    "a frozen layer": (
        lambda attention: setattr(attention, "q_proj", layer(requires_grad=False)),
        PatchConflictError,
        ROWS + "its weight has requires_grad=True, as all rows have, and not False",
    ),
    "a layer that is tied": (tied_layer, PatchConflictError, ROWS + HELD),
    "a layer with a gradient": (
        lambda attention: setattr(attention, "q_proj", with_a_gradient()),
        PatchConflictError,
        ROWS + "its weight takes values, and this parameter has a gradient or hooks",
    ),
    "a layer with a hook on its weight": (
        lambda attention: setattr(attention, "q_proj", with_a_hook()),
        PatchConflictError,
        ROWS + "its weight takes values, and this parameter has a gradient or hooks",
    ),
    "the layer of another module": (
        the_layer_of_another,
        PatchConflictError,
        ROWS + r"it takes the values of a new nn\.Linear, and this one is a layer of another module",
    ),
    "a wrapper": (
        lambda attention: setattr(attention, "q_proj", nn.Sequential(layer())),
        PatchConflictError,
        ROWS + r"it takes the values of a plain nn\.Linear, and this is a Sequential",
    ),
    "add_module of a wrapper": (
        lambda attention: attention.add_module("q_proj", nn.Sequential(layer())),
        PatchConflictError,
        ROWS + r"it takes the values of a plain nn\.Linear, and this is a Sequential",
    ),
    "a layer behind its back": (
        put_behind,
        PatchConflictError,
        ROWS + r"a Linear that was put into _modules is not run, only module\.q_proj = layer is seen",
    ),
}


@pytest.fixture(scope="module")
def fused(folder: Path) -> Any:
    return load(folder)


@pytest.mark.parametrize("way", REFUSED)
def test_what_would_have_no_effect_is_refused(way: str, fused: Any) -> None:
    attention = attention_of(fused)
    act, error, message = REFUSED[way]
    before = {name: parameter.detach().clone() for name, parameter in attention.named_parameters()}

    with pytest.raises(error, match=message + ADVICE):
        act(attention)

    attention._modules.pop("q_proj", None)
    found = dict(attention.named_parameters())
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert all(parameter.requires_grad and type(parameter) is nn.Parameter for parameter in found.values())


def test_what_torch_refuses_itself(fused: Any) -> None:
    weight = attention_of(fused).q_proj.weight
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        torch.optim.SGD([weight])
    with pytest.raises(RuntimeError, match="is being used in an in-place operation"):
        weight.mul_(2)
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight'"):
        attention_of(fused).o_proj.weight = weight
    with pytest.raises(RuntimeError, match="detach"):
        nn.Parameter(weight)
    assert nn.Parameter(weight.detach()).data_ptr() == weight.data_ptr()


def test_weights_that_are_quantized_take_none(folder: Path) -> None:
    attention = attention_of(load(folder))
    codes = nn.Parameter(torch.zeros(attention.qkv_proj.weight.shape, dtype=torch.int8), requires_grad=False)
    attention.qkv_proj.weight = codes
    with pytest.raises(PatchConflictError, match="its weight or the assigned tensor is quantized" + ADVICE):
        attention.q_proj = layer(requires_grad=False)


def test_parts_that_are_offloaded_are_called_as_stock_ones(folder: Path, tmp_path: Path) -> None:
    stock, model = (offloaded(folder, "a layer on disk", tmp_path, patcher=patcher) for patcher in (None, BOTH))
    x = values(2, 64)
    for name in ("q_proj", "k_proj", "v_proj"):
        found, expected = (getattr(attention_of(each), name)(x) for each in (model, stock))
        torch.testing.assert_close(found, expected)


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_rows(folder: Path) -> None:
    models = [load(folder, None), load(folder)]
    inputs = tiny_inputs(models[0].config)
    for model in models:
        assert attention_of(model).k_proj.weight.grad is None
        attention_of(model).k_proj.weight.grad = None
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    stock, fused = map(attention_of, models)

    for name in ("q_proj", "k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            own, other = (getattr(getattr(attention, name), kind).grad for attention in (fused, stock))
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)

    for attention in (stock, fused):
        attention.q_proj.weight.grad.mul_(3)
        attention.k_proj.weight.grad = values(32, 64)
        attention.v_proj.weight.grad += 1
        nn.utils.clip_grad_norm_([attention.q_proj.weight, attention.k_proj.weight], 0.5)
    joined = torch.cat([getattr(stock, name).weight.grad for name in ("q_proj", "k_proj", "v_proj")])
    torch.testing.assert_close(fused.qkv_proj.weight.grad, joined, atol=1e-5, rtol=1e-4)


def test_rows_have_no_gradient_of_their_own(folder: Path) -> None:
    attention = attention_of(load(folder))
    message = IN_PLACE + "a gradient of its own would have no effect" + ADVICE
    with pytest.raises(PatchConflictError, match=message):  # that of the other rows would be zero and not None
        attention.q_proj.weight.grad = values(64, 64)
    attention.qkv_proj.weight.grad = torch.ones_like(attention.qkv_proj.weight)
    with pytest.raises(PatchConflictError, match=message):  # nor is a row of it that of all rows
        attention.q_proj.weight.grad = values(1, 64)
    with pytest.raises(PatchConflictError, match=message):
        attention.q_proj.weight.grad = None
    with pytest.raises(PatchConflictError, match=r"the gradient of .*q_proj\.weight is rows of .* data would"):
        attention.q_proj.weight.grad.data = values(64, 64)
    assert attention.qkv_proj.weight.grad.eq(1).all()


# --- what a view is --------------------------------------------------------------------------------------------------


def test_torch_takes_a_view_for_a_tensor(fused: Any) -> None:
    weight, x = attention_of(fused).q_proj.weight, values(2, 64)

    for result in (weight + 1, weight.T, weight.detach(), weight.data, weight[0], torch.stack([weight])):
        assert type(result) is torch.Tensor
    torch.testing.assert_close(nn.functional.linear(x, weight), x @ weight.T)
    assert weight.requires_grad

    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, weight)
    assert copy.deepcopy(weight).data_ptr() != weight.data_ptr()


def test_a_view_passes_for_initialized_where_its_parameter_does(folder: Path) -> None:
    attention = attention_of(load(folder))
    del attention.qkv_proj.weight._is_hf_initialized
    assert not is_initialized(attention.q_proj.weight)
    mark_initialized(attention.qkv_proj.weight)
    assert is_initialized(attention.q_proj.weight)


class Reads(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention: Any = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.attention.k_proj
        return part(x) + nn.functional.linear(x, part.weight, part.bias)


def test_code_that_reads_parts_compiles_in_one_piece(fused: Any) -> None:
    reads, x = Reads(attention_of(fused)), values(2, 64)
    torch._dynamo.reset()
    compiled = torch.compile(reads, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), reads(x))
    torch.testing.assert_close(torch.export.export(reads, (x,), strict=False).module()(x), reads(x))


def test_functions_of_parts_are_differentiated(fused: Any) -> None:
    reads, x = Reads(attention_of(fused)), values(2, 64)
    parameters = {name: parameter.detach() for name, parameter in reads.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(reads, parameters, (x,))
        return result.sum()

    found = torch.func.grad(loss)(parameters)["attention.qkv_proj.weight"]
    torch.testing.assert_close(found[64:96], 2 * x.sum(0).expand(32, 64))


def test_parts_that_are_split_over_processes_can_only_be_read(folder: Path) -> None:
    with one_process():
        torch.distributed.init_device_mesh("cpu", (1,))
        attention = attention_of(fully_shard(load(folder)))
        weight = attention.q_proj.weight
        assert weight.grad is None
        attention.qkv_proj.weight.grad = attention.qkv_proj.weight.detach() * 2
        torch.testing.assert_close(weight.grad.full_tensor(), weight.full_tensor() * 2)
        with pytest.raises(PatchConflictError, match=ROWS + "its weight is split over processes" + ADVICE):
            attention.q_proj = layer()
        with pytest.raises(PatchConflictError, match=IN_PLACE + "data would have no effect" + ADVICE):
            weight.data = weight.data
        with pytest.raises(PatchConflictError, match=IN_PLACE + "register_hook would have no effect" + ADVICE):
            weight.register_hook(print)
        with pytest.raises(PatchConflictError, match="Write to the parameter that holds them"):
            weight.grad = weight.grad


# --- experts and patch embeddings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(moe: Path) -> Any:
    return load(moe, Patcher(fusions="sequential_experts")).model.layers[0].mlp.experts


def scaled(experts: Any) -> None:
    experts.gate_up_proj *= 2


STACK = r"gate_up_proj is fused: its values are in .*, and "
NOT_HERE = STACK + "it can't be written under this name"
OF_EXPERTS: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "= nn.Parameter": (
        lambda experts: setattr(experts, "gate_up_proj", nn.Parameter(torch.zeros(4, 128, 64))),
        PatchConflictError,
        STACK + "nothing can take its place",
    ),
    "= tensor": (
        lambda experts: setattr(experts, "gate_up_proj", torch.zeros(4, 128, 64)),
        PatchConflictError,
        STACK + "nothing can take its place",
    ),
    "del": (lambda experts: delattr(experts, "gate_up_proj"), PatchConflictError, STACK + "can't be deleted"),
    ".data =": (
        lambda experts: setattr(experts.gate_up_proj, "data", torch.zeros(4, 128, 64)),
        PatchConflictError,
        NOT_HERE,
    ),
    ".requires_grad =": (
        lambda experts: setattr(experts.gate_up_proj, "requires_grad", False),
        PatchConflictError,
        NOT_HERE,
    ),
    "[0] =": (lambda experts: experts.gate_up_proj.__setitem__(0, 1.0), PatchConflictError, NOT_HERE),
    "*=": (scaled, PatchConflictError, NOT_HERE),
}


@pytest.mark.parametrize("way", OF_EXPERTS)
def test_the_stacks_of_experts_take_nothing(way: str, experts: Any) -> None:
    act, error, message = OF_EXPERTS[way]
    before = {name: value.clone() for name, value in experts.state_dict().items()}

    with pytest.raises(error, match=message + ADVICE):
        act(experts)

    after = experts.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_methods_of_the_stacks_of_experts_are_refused(experts: Any) -> None:
    for name in ("copy_", "mul_", "requires_grad_", "register_hook"):
        with pytest.raises(AttributeError, match=f"gate_up_proj is fused: .* Use '{name}' of these"):
            getattr(experts.gate_up_proj, name)
    with pytest.raises(PatchConflictError, match=r"gate_up_proj is fused: .* Use these\."):
        experts.gate_up_proj[0]
    again = copy.deepcopy(experts)
    with pytest.raises(PatchConflictError, match=NOT_HERE):
        again.gate_up_proj.data = torch.zeros(4, 128, 64)
    for register in (again.register_parameter, again.register_buffer):
        with pytest.raises(KeyError, match="attribute 'gate_up_proj' already exists"):
            register("gate_up_proj", None)


def patch_embedding() -> LinearPatchEmbedding:
    return LinearPatchEmbedding.from_module(nn.Conv2d(3, 8, kernel_size=4, stride=4))


@pytest.mark.parametrize("name", ["weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode"])
def test_what_a_patch_embedding_does_not_compute_with_can_not_be_set(name: str) -> None:
    for value in (2, nn.Parameter(torch.zeros(8, 3, 4, 4))):
        with pytest.raises(PatchConflictError, match=f"the {name} of the convolution can't be set on it" + ADVICE):
            setattr(patch_embedding(), name, value)


def test_the_weight_of_a_patch_embedding_is_written_in_place() -> None:
    linear = patch_embedding()
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[0] = 2.0
    assert linear.linear.weight[0].eq(2).all()
    assert linear.linear.weight[1:].eq(1).all()
    linear(torch.ones(1, 3, 8, 8)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.shape == (8, 3, 4, 4)
    assert torch.equal(linear.weight.grad.flatten(1), linear.linear.weight.grad)
    message = r"LinearPatchEmbedding\.weight is its linear\.weight and takes values in place only: data would"
    with pytest.raises(PatchConflictError, match=message + ADVICE):
        linear.weight.data = torch.zeros(8, 3, 4, 4)


# --- subclasses of a fused class -------------------------------------------------------------------------------------

Fused: Any = fused_class_of(QKV(), LlamaAttention(tiny_llama_config(attention_bias=True), 0))


class Louder(Fused):
    """What somebody makes of a fused class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 3 * output, weights


def copies_of(model: Any) -> Iterator[Any]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield pickle.loads(pytest.importorskip("cloudpickle").dumps(model))


@pytest.mark.parametrize("made", ["assigned", "loaded"])
def test_a_subclass_of_a_fused_class_stays(made: str, folder: Path, tmp_path: Path) -> None:
    model = load(folder, Patcher({"LlamaAttention": Louder}) if made == "loaded" else BOTH)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Louder
    inputs = tiny_inputs(model.config)
    expected = logits(model, inputs)
    assert not torch.allclose(expected, logits(load(folder), inputs), atol=0.1)

    for number, again in enumerate(copies_of(model)):
        assert {type(layer.self_attn) for layer in again.model.layers} == {Louder}
        assert torch.equal(logits(again, inputs), expected)
        again.save_pretrained(tmp_path / str(number))
        files = [path / "model.safetensors" for path in (folder, tmp_path / str(number))]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_subclass_that_no_other_process_knows_is_copied_and_not_pickled(fused: Any) -> None:
    attention = copy.deepcopy(attention_of(fused))
    attention.__class__ = type("X", (type(attention),), {"scale": 2})

    for again in (copy.deepcopy(attention), copy.copy(attention)):
        assert type(again).__name__ == "X"
        assert type(again).scale == 2
        assert torch.equal(again.q_proj.weight, attention.q_proj.weight)
    with pytest.raises(pickle.PicklingError, match="X"):
        pickle.dumps(attention)


def test_a_subclass_is_not_lost_on_the_way_back(folder: Path) -> None:
    model = load(folder)
    attention_of(model).__class__ = Louder
    with pytest.raises(
        InvalidPatcherError, match=r"layers\.1\.self_attn .*its class Louder was derived from the fused one"
    ):
        Patcher().apply(model)

    replaced = Patcher().apply(load(folder, Patcher({"LlamaAttention": Louder})))
    assert type(attention_of(replaced)) is LlamaAttention
    assert not fused_modules(replaced)


def test_data_of_a_part_is_changed_in_place() -> None:
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=Patcher(fusions="qkv"))
    attention = model.model.layers[0].self_attn
    before = attention.qkv_proj.weight.detach().clone()
    size = attention.k_proj.weight.shape[0]
    attention.k_proj.weight.data *= 2
    changed = (attention.qkv_proj.weight != before).any(1)
    assert changed.sum() == size
    with pytest.raises(PatchConflictError, match="data would have no effect"):
        attention.k_proj.weight.data = attention.k_proj.weight.data * 2
