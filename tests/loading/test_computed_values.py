"""What the `__init__` of a replacement computes is right after a load, whatever it computes it from (row 19).

A weight that the checkpoint has counts with the value that it has there: that is what the model computes with.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TorchAoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from patcher import PatchConstructionError, PatchedWeightsError, Patcher
from tests.support import shared
from tests.support.offloaded import DEVICE_MAPS
from tests.support.replacements import OwnMLP, OwnNorm, same_output
from tests.support.tiny import save_tiny, tiny_llama_config

BASE = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every weight has values that no initialisation gives."""
    return shared.checkpoint(tiny_llama_config())


# --- generated ---------------------------------------------------------------------------------------------------

#: What is computed from a tensor; the last ones leave torch on the way.
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda x: x.detach() * 2 + 1,
    "norms": lambda x: x.detach().norm(dim=-1),
    "largest": lambda x: x.detach().abs().max(),
    "copied": lambda x: x.detach().clone(),
    "turned": lambda x: x.detach().flatten().flip(0),
    "compared": lambda x: (x.detach() > 0).float(),
    "of data": lambda x: x.data.sum(-1),
    "through a number": lambda x: torch.full((3,), float(x.detach().sum())),
    "through numpy": lambda x: torch.from_numpy(x.detach().float().numpy() * 3),
    "decided": lambda x: torch.ones(2) if x.detach().mean() > 0 else torch.zeros(2),
    "with a real one": lambda x: x.detach() * torch.ones(1) + torch.arange(1.0),
    "zeros like it": lambda x: torch.zeros_like(x.detach()),
}


def keep_as_parameter(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(value))


def keep_as_parameter_set_twice(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(torch.zeros_like(value)))
    setattr(module, name, nn.Parameter(getattr(module, name).detach() + value))


def keep_as_parameter_written_to(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(torch.empty_like(value)))
    with torch.no_grad():
        getattr(module, name).copy_(value).mul_(0.5)


def keep_in_a_part(module: Any, name: str, value: torch.Tensor) -> None:
    part = nn.Module()
    part.weight = nn.Parameter(value)
    part.register_buffer("again", part.weight.detach() - 1)
    setattr(module, name, nn.Sequential(part))


def keep_in_an_object(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, SimpleNamespace(value=value, deep={"list": [value + 1]}))


#: Where it is kept, and whether as a parameter.
KEPT: dict[str, tuple[Callable[[Any, str, torch.Tensor], Any], bool]] = {
    "parameter": (keep_as_parameter, True),
    "parameter set twice": (keep_as_parameter_set_twice, True),
    "parameter written to": (keep_as_parameter_written_to, True),
    "part": (keep_in_a_part, True),
    "buffer": (lambda module, name, value: module.register_buffer(name, value), False),
    "fleeting buffer": (lambda module, name, value: module.register_buffer(name, value, persistent=False), False),
    "attribute": (setattr, False),
    "list": (lambda module, name, value: setattr(module, name, [value, "text", (value * 2,)]), False),
    "dict": (lambda module, name, value: setattr(module, name, {"a": value, "b": {"c": [value + 1]}}), False),
    "object": (keep_in_an_object, False),
    "number": (lambda module, name, value: setattr(module, name, float(value.sum())), False),
    "numbers": (lambda module, name, value: setattr(module, name, value.flatten()[:3].tolist()), False),
}

Step = tuple[str, str, str]  # what it is computed from, how, and where it is kept


def tensor_of(module: nn.Module, source: str) -> torch.Tensor:
    """What a step computes from: a weight of the base, a part of it copied, or what an earlier step has kept."""
    if source == "a new tensor":
        return torch.linspace(-1, 2, 6).view(2, 3)
    if source == "a copied part":
        return copy.deepcopy(module.get_submodule("up_proj")).get_parameter("weight")
    if source == "another name":
        weight = nn.Parameter(torch.arange(1.0, 5.0))
        module.register_parameter("named", weight)
        return weight
    return module.get_parameter(source)


def compute(module: nn.Module, steps: list[Step]) -> None:
    for number, (source, operation, kept) in enumerate(steps):
        KEPT[kept][0](module, f"computed_{number}", OPERATIONS[operation](tensor_of(module, source)))


def tensors(value: Any) -> list[Any]:
    """All that a value holds, in order."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, nn.Module):
        return [*value.state_dict().values(), *value.buffers()]
    if isinstance(value, dict):
        return [each for item in value.values() for each in tensors(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in tensors(item)]
    return [value]


def assert_same(found: Any, expected: Any, what: Any) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert len(ours) == len(theirs), what
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.device.type == "cpu", what
            assert one.dtype == other.dtype, what
            assert torch.equal(one, other), (what, one, other)
            assert one.is_leaf, what
        else:
            assert one == other, what


SOURCES = (*BASE, "a new tensor", "a copied part", "another name")
STEPS = st.lists(st.tuples(st.sampled_from(SOURCES), st.sampled_from(list(OPERATIONS)), st.sampled_from(list(KEPT))))


def load_and_compare(llama: Path, steps: list[Step], dtype: torch.dtype = torch.float32) -> None:
    class Computing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            compute(self, steps)

    named = any(source == "another name" for source, _, _ in steps)
    new = [name for name, used in (("computed_", any(KEPT[kept][1] for *_, kept in steps)), ("named", named)) if used]
    model = LlamaForCausalLM.from_pretrained(
        llama, patcher=Patcher({"LlamaMLP": Computing}, new_weights=new), dtype=dtype
    )
    stock = LlamaForCausalLM.from_pretrained(llama, dtype=dtype)
    assert same_output(model, stock)
    default = torch.get_default_dtype()
    for layer, plain in zip(model.model.layers, stock.model.layers, strict=True):
        torch.set_default_dtype(dtype)  # under which a load builds
        try:
            by_hand = OwnMLP(model.config)
            by_hand.load_state_dict(plain.mlp.state_dict())
            compute(by_hand, steps)
        finally:
            torch.set_default_dtype(default)
        for number, step in enumerate(steps):
            name = f"computed_{number}"
            assert_same(getattr(layer.mlp, name), getattr(by_hand, name), step)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_whatever_is_computed_has_the_values_of_the_checkpoint(
    llama: Path, steps: list[Step], dtype: torch.dtype
) -> None:
    load_and_compare(llama, steps, dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_wherever_it_is_kept(operation: str, llama: Path) -> None:
    load_and_compare(llama, [(source, operation, kept) for kept in KEPT for source in SOURCES[2:5]])


# --- weights that are derived from others --------------------------------------------------------------------------


class Magnitudes(OwnMLP):
    """As DoRA begins: the direction and the length of each row, the length as a parameter of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.magnitude = nn.Parameter(self.gate_proj.weight.norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate_proj.weight
        weight = weight * (self.magnitude / weight.norm(dim=1))[:, None]
        return self.down_proj(nn.functional.silu(nn.functional.linear(x, weight)) * self.up_proj(x))


MAGNITUDES = Patcher({"LlamaMLP": Magnitudes}, new_weights="magnitude")


def test_a_weight_derived_from_a_weight_of_the_checkpoint_follows_it(llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=MAGNITUDES)
    for layer in model.model.layers:
        assert torch.equal(layer.mlp.magnitude, layer.mlp.gate_proj.weight.norm(dim=1))
        assert isinstance(layer.mlp.magnitude, nn.Parameter)
        assert layer.mlp.magnitude.requires_grad
    assert same_output(model, LlamaForCausalLM.from_pretrained(llama))
    with torch.no_grad():
        model.model.layers[1].mlp.magnitude.fill_(3)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, patcher=MAGNITUDES)
    assert (again.model.layers[1].mlp.magnitude == 3).all()  # a checkpoint that has it is not asked twice


def test_where_nobody_said_that_it_is_new_the_load_refuses(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError, match=r"layers\.\{0\.\.1\}\.mlp\.magnitude"):
        LlamaForCausalLM.from_pretrained(llama, patcher=MAGNITUDES.replace(new_weights=()))


def quantized(way: str) -> dict[str, Any]:
    if way == "bitsandbytes":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    from torchao.quantization import Int8WeightOnlyConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": "cpu"}


@pytest.mark.parametrize(
    "way", ["disk", *(pytest.param(way, marks=pytest.mark.libraries) for way in ("bitsandbytes", "torchao"))]
)
def test_a_weight_derived_from_what_has_no_value_is_refused(way: str, llama: Path, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"device_map": DEVICE_MAPS["a layer on disk"], "offload_folder": tmp_path}
    text = (
        r"Magnitudes.__init__ computes .* from weights of the checkpoint, and these have no values there: .*gate_proj"
    )
    with pytest.raises(PatchConstructionError, match=text):
        LlamaForCausalLM.from_pretrained(llama, patcher=MAGNITUDES, **(disk if way == "disk" else quantized(way)))


class Adapter(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((2,), 0.5))
        self.twice = nn.Parameter(self.scale.detach() * 4)


@pytest.mark.libraries
@pytest.mark.parametrize("way", ["bitsandbytes", "torchao"])
def test_what_depends_on_no_quantized_weight_is_computed_beside_them(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Adapter}, new_weights="scale|twice")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher, **quantized(way))
    assert (model.model.layers[1].mlp.twice == 2).all()


@pytest.mark.libraries
def test_what_depends_on_a_weight_that_is_not_quantized_is_computed_from_it(llama: Path) -> None:
    class Layer(LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.scale = nn.Parameter(self.input_layernorm.weight.detach() * 2)

    patcher = Patcher({"LlamaDecoderLayer": Layer}, new_weights=r"\.scale$")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher, **quantized("bitsandbytes"))
    for layer in model.model.layers:
        assert type(layer.mlp.gate_proj) is not nn.Linear
        assert torch.equal(layer.scale, layer.input_layernorm.weight * 2)


def test_what_is_written_to_a_weight_of_the_checkpoint_while_it_is_built_has_no_effect(llama: Path) -> None:
    """As it has none on a model that was built by hand and then gets its weights. What is computed sees none of it."""

    class Writing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            weight = self.gate_proj.weight
            nn.init.ones_(weight)
            with torch.no_grad():
                weight.mul_(5)[0].zero_()
                torch.add(weight, 1, out=weight)
                weight.data[1:3] = 9
                weight.view(-1).copy_(torch.zeros(weight.numel()))
            self.register_buffer("norm", weight.detach().norm(dim=1), persistent=False)
            self.gate_proj.reset_parameters()
            weight.detach().numpy()[:] = 4  # behind torch's back

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Writing}))
    stock = shared.stock(llama, LlamaForCausalLM)
    for layer, plain in zip(model.model.layers, stock.model.layers, strict=True):
        assert torch.equal(layer.mlp.gate_proj.weight, plain.mlp.gate_proj.weight)
        assert torch.equal(layer.mlp.norm, plain.mlp.gate_proj.weight.norm(dim=1))


def test_what_is_random_is_drawn_once(llama: Path) -> None:
    """Buffers and attributes that were computed from a new weight belong to it, not to another draw of it."""

    class Drawing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            noise = torch.randn(4)
            self.register_buffer("noise", noise, persistent=False)
            self.linear = nn.Linear(4, 4)
            self.weight = nn.Parameter(noise * 2)
            self.register_buffer("sums", self.linear.weight.detach().sum(-1))
            self.kept = [noise * 3, self.linear.bias.detach() + 1]

    model = LlamaForCausalLM.from_pretrained(
        llama, patcher=Patcher({"LlamaMLP": Drawing}, new_weights=r"mlp\.(linear|weight)")
    )
    for layer in model.model.layers:
        mlp = layer.mlp
        assert torch.equal(mlp.weight, mlp.noise * 2)
        assert torch.equal(mlp.sums, mlp.linear.weight.sum(-1))
        assert torch.equal(mlp.kept[0], mlp.noise * 3)
        assert torch.equal(mlp.kept[1], mlp.linear.bias + 1)


def test_a_buffer_alone_that_was_computed_from_a_weight_follows_it(llama: Path) -> None:
    class Summing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("sums", self.up_proj.weight.detach().sum(-1))

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Summing}))
    for layer in model.model.layers:
        assert torch.equal(layer.mlp.sums, layer.mlp.up_proj.weight.sum(-1))


def test_a_replacement_that_must_be_built_real_gives_its_memory_back_at_once(llama: Path) -> None:
    built, devices = [], []

    class Looking(OwnMLP):
        def __init__(self, config: Any) -> None:
            devices.extend(each.device.type for module in built for each in module.parameters())
            super().__init__(config)
            self.largest = float(self.gate_proj.weight.max())
            built.append(self)

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Looking}))
    assert devices[:3] == ["meta"] * 3  # the first, while the second was built
    for layer in model.model.layers:
        assert layer.mlp.largest == float(layer.mlp.gate_proj.weight.max())


# --- other names of what the model has -----------------------------------------------------------------------------


class Holding(OwnMLP):
    """Holds its weights, and parts of them, under names that no state dict knows; and unregistered modules."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weights = [self.gate_proj.weight, {"up": self.up_proj.weight}]
        self.halves = self.gate_proj.weight.detach().chunk(2)
        self.hidden = [nn.Linear(3, 3), nn.LayerNorm(2)]
        self.parts = (self.gate_proj, self.up_proj)
        self.call = self.down_proj.forward
        self.late = functools.partial(torch.mul, self.up_proj.weight)


def test_what_is_held_under_another_name_is_the_very_weight(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Holding}))
    for layer in model.model.layers:
        mlp = layer.mlp
        assert mlp.weights[0] is mlp.gate_proj.weight
        assert mlp.weights[1]["up"] is mlp.up_proj.weight
        assert mlp.parts[0] is mlp.gate_proj
        assert mlp.call.__self__ is mlp.down_proj
        assert mlp.late.args[0] is mlp.up_proj.weight
        assert all(parameter.device.type == "cpu" for part in mlp.hidden for parameter in part.parameters())
        assert (mlp.hidden[1].weight == 1).all()
        with torch.no_grad():
            mlp.gate_proj.weight[0].fill_(8)
            mlp.gate_proj.weight[-1].fill_(7)
        assert (mlp.halves[0][0] == 8).all()
        assert (mlp.halves[1][-1] == 7).all()
        assert not [key for part in mlp.hidden for each in part.parameters() for key in vars(each)]


def test_the_outer_model_is_not_copied_with_what_refers_to_it(llama: Path) -> None:
    class Referring(LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.same = [self.mlp, self.self_attn.q_proj.weight]
            self.register_buffer("sum", self.mlp.gate_proj.weight.detach().sum(), persistent=False)

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaDecoderLayer": Referring}))
    for layer in model.model.layers:
        assert layer.same[0] is layer.mlp
        assert layer.same[1] is layer.self_attn.q_proj.weight
        assert torch.equal(layer.sum, layer.mlp.gate_proj.weight.sum())


class Root(LlamaForCausalLM):
    under_construction: Any = None

    def __init__(self, config: Any) -> None:
        Root.under_construction = self
        super().__init__(config)


def test_a_model_that_a_part_refers_to_is_no_reason_to_build_it_again(llama: Path) -> None:
    built = []

    class Referring(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.outer = [Root.under_construction]
            built.append(self)

    model = Root.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Referring}))
    assert len(built) == 2
    assert all(layer.mlp.outer[0] is model for layer in model.model.layers)


#: Parameters that belong to nobody's model, and that each of them may hold.
SHARED = nn.Parameter(torch.full((3,), 2.0))
GATE = nn.Parameter(torch.ones(96, 64))


@pytest.mark.parametrize("looks", [False, True], ids=["", "built real"])
def test_parameters_of_somebody_else_stay_what_they_are(looks: bool, llama: Path) -> None:
    class Holding(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            weight = nn.Parameter(torch.ones(2))
            self.one = self.other = weight
            self.register_parameter("third", weight)
            self.shared = SHARED
            self.gate_proj.weight = GATE
            self.twice = nn.Parameter(self.shared.detach() * 2)
            if looks:
                self.sum = float(self.gate_proj.weight.sum())

    patcher = Patcher({"LlamaMLP": Holding}, new_weights=r"mlp\.(one|other|third|shared|twice)$")
    for _ in range(2):
        model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
        stock = shared.stock(llama, LlamaForCausalLM)
        for layer, plain in zip(model.model.layers, stock.model.layers, strict=True):
            mlp = layer.mlp
            assert mlp.one is mlp.other is mlp.third
            assert (mlp.one == 1).all()
            assert (mlp.shared == 2).all()
            assert (mlp.twice == 4).all()
            assert torch.equal(mlp.gate_proj.weight, plain.mlp.gate_proj.weight)
            assert not looks or mlp.sum == float(mlp.gate_proj.weight.sum())
        assert (SHARED == 2).all()
        assert (GATE == 1).all()
        assert vars(SHARED) == vars(GATE) == {}


def test_a_recurrent_part_runs(llama: Path) -> None:
    """`nn.LSTM` keeps a list of its weights, and weak references to them."""

    class Recurrent(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * self.lstm(x)[0]

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Recurrent}, new_weights="lstm"))
    assert same_output(model, LlamaForCausalLM.from_pretrained(llama))
    lstm = model.model.layers[0].mlp.lstm
    assert all(one is other for one, other in zip(lstm._flat_weights, lstm.parameters(), strict=True))
    assert lstm.weight_ih_l0.abs().max() <= lstm.hidden_size**-0.5


# --- what can't be followed is refused -----------------------------------------------------------------------------


def with_init(add: Callable[[Any], None]) -> Patcher:
    class Computing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            add(self)

    return Patcher({"LlamaMLP": Computing}, new_weights="new" if "new" in add.__name__ else ())


CALLS = itertools.count()


def closure_of_a_tensor(module: Any) -> None:
    norm = module.gate_proj.weight.detach().norm()
    module.rescale = lambda x: x * norm


def lock_beside_a_tensor(module: Any) -> None:
    module.state = SimpleNamespace(norm=module.gate_proj.weight.detach().norm(), lock=threading.Lock())


def several_written_at_once(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([module.gate_proj.weight, torch.ones(2)], 2.0)
    module.norm = module.gate_proj.weight.detach().norm()


def new_of_another_shape_each_time(module: Any) -> None:
    module.new = nn.Parameter(torch.ones(next(CALLS) + 1))


def new_under_another_name_each_time(module: Any) -> None:
    setattr(module, f"new{next(CALLS)}", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("add", "text"),
    [
        (closure_of_a_tensor, r"layers\.0\.mlp\.rescale is a function that holds tensors .* make it a method"),
        (
            lock_beside_a_tensor,
            r"layers\.0\.mlp\.state was computed from weights .* can't be copied: TypeError: .*lock",
        ),
        (
            new_of_another_shape_each_time,
            r"has made \S+\.new of shape \(1,\), and with \(3,\) when it was called again",
        ),
        (several_written_at_once, r"writes to several tensors, of which one is a weight of the checkpoint"),
        (new_under_another_name_each_time, r"has made \S+\.new0 of shape \(2,\), and not at all when"),
    ],
)
def test_what_cannot_be_followed_is_refused(add: Callable[[Any], None], text: str, llama: Path) -> None:
    global CALLS
    CALLS = itertools.count()
    with pytest.raises(PatchConstructionError, match=text):
        LlamaForCausalLM.from_pretrained(llama, patcher=with_init(add))


# --- a model inside of a replacement -------------------------------------------------------------------------------


class Teaching(OwnMLP):
    """Has a whole model in it, which it loads itself or is given."""

    other: Any = None  # a folder, or a model

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        load = LlamaForCausalLM.from_pretrained
        self.teacher = self.other if isinstance(self.other, nn.Module) else load(self.other)
        self.hidden = [self.teacher]


TEACHING = Patcher({"LlamaMLP": Teaching, "LlamaRMSNorm": OwnNorm}, new_weights="teacher")


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = save_tiny(tiny_llama_config(num_hidden_layers=1), tmp_path, seed=7)
    monkeypatch.setattr(Teaching, "other", folder)
    return LlamaForCausalLM.from_pretrained(folder)


def assert_unharmed(teacher: Any, expected: Any) -> None:
    assert {type(module) for module in teacher.modules()} == {type(module) for module in expected.modules()}
    state = teacher.state_dict()
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value), key
    assert same_output(teacher, expected)


@pytest.mark.parametrize("fusions", [(), ("qkv",)], ids=["", "fused"])
def test_a_load_while_a_model_is_loaded_is_an_error_whose_advice_works(
    fusions: tuple[str, ...], teacher: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = TEACHING.replace(fusions=fusions)
    with pytest.raises(PatchConstructionError, match=r"load it before, and let __init__ take that object"):
        LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    expected = copy.deepcopy(teacher)
    monkeypatch.setattr(Teaching, "other", teacher)
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    for layer in model.model.layers:
        assert layer.mlp.teacher is layer.mlp.hidden[0] is teacher
        assert_unharmed(layer.mlp.teacher, expected)
    assert same_output(model, LlamaForCausalLM.from_pretrained(llama))


def test_a_load_in_a_model_that_is_built_by_hand_is_real_and_unpatched(teacher: Any) -> None:
    with TEACHING.applied():
        built = LlamaForCausalLM(tiny_llama_config())
    made = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=TEACHING)
    for model in (built, made):
        assert type(model.model.norm) is OwnNorm
        for layer in model.model.layers:
            assert_unharmed(layer.mlp.teacher, teacher)
