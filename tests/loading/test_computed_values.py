"""What the `__init__` of a replacement computes is right after a load, or is refused (row 19).

A weight that the checkpoint has counts with the value that it has there, and that isn't known yet.
"""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TorchAoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from patcher import PatchConstructionError, PatchedWeightsError, Patcher
from tests.support import shared
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
    setattr(module, name, nn.Parameter(value))


def keep_as_parameter_written_to(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(torch.empty_like(value)))
    with torch.no_grad():
        getattr(module, name).copy_(value).mul_(0.5)


def keep_in_a_part(module: Any, name: str, value: torch.Tensor) -> None:
    part = nn.Module()
    part.weight = nn.Parameter(value)
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
        return torch.arange(-1.0, 5.0).view(2, 3)
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


#: What has a value while a load builds, and what hasn't.
SOURCES = ("a new tensor", "another name")
WITHOUT_VALUE = (*BASE, "a copied part")
REFUSED = r"Computing\.__init__ derives .* from a parameter\. .*: compute it in forward\."


def steps_of(sources: tuple[str, ...]) -> Any:
    step = st.tuples(st.sampled_from(sources), st.sampled_from(list(OPERATIONS)), st.sampled_from(list(KEPT)))
    return st.lists(step)


def computing(steps: list[Step]) -> Patcher:
    class Computing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            compute(self, steps)

    named = any(source == "another name" for source, _, _ in steps)
    new = [name for name, used in (("computed_", any(KEPT[kept][1] for *_, kept in steps)), ("named", named)) if used]
    return Patcher({"LlamaMLP": Computing}, new_weights=new)


def load_and_compare(llama: Path, steps: list[Step], dtype: torch.dtype = torch.float32) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=computing(steps), dtype=dtype)
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
@given(steps=steps_of(SOURCES), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_whatever_is_computed_from_what_has_a_value_has_that_value(
    llama: Path, steps: list[Step], dtype: torch.dtype
) -> None:
    load_and_compare(llama, steps, dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_wherever_it_is_kept(operation: str, llama: Path) -> None:
    load_and_compare(llama, [(source, operation, kept) for kept in KEPT for source in SOURCES])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("source", ["gate_proj.weight", "a copied part"])
def test_what_is_computed_from_a_weight_is_refused_wherever_it_is_kept(
    source: str, operation: str, llama: Path
) -> None:
    for kept in KEPT:
        with pytest.raises(PatchConstructionError, match=REFUSED):
            LlamaForCausalLM.from_pretrained(llama, patcher=computing([(source, operation, kept)]))


@settings(max_examples=25, deadline=None)
@given(
    before=steps_of(SOURCES), steps=steps_of(WITHOUT_VALUE).filter(bool), after=steps_of((*SOURCES, *WITHOUT_VALUE))
)
def test_one_value_of_a_weight_among_others_is_refused(
    llama: Path, before: list[Step], steps: list[Step], after: list[Step]
) -> None:
    with pytest.raises(PatchConstructionError, match=REFUSED):
        LlamaForCausalLM.from_pretrained(llama, patcher=computing([*before, *steps, *after]))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fusions", [(), "qkv"], ids=["", "fused"])
def test_where_nothing_is_loaded_all_is_computed(operation: str, fusions: Any) -> None:
    steps = [(source, operation, kept) for kept in KEPT for source in (*SOURCES, *WITHOUT_VALUE)]
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=computing(steps).replace(fusions=fusions))
    for number, (source, *_, kept) in enumerate(steps):
        value = tensors(getattr(model.model.layers[1].mlp, f"computed_{number}"))
        assert all(each.device.type == "cpu" for each in value if isinstance(each, torch.Tensor)), (source, kept)


#: What torch computes of a real and a meta tensor without a word; of most, it is uninitialised memory.
MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: torch.eye(96) @ x,
    "added in place": lambda x: torch.ones(96, 64).add_(x),
    "filled with": lambda x: torch.ones(3).fill_(x.detach().sum()),
    "masked by": lambda x: torch.ones(96, 64).masked_fill_(x > 0, 0.0),
    "indexed by": lambda x: torch.arange(96.0)[x.detach().argmax(dim=0)],
    "several at once": lambda x: torch._foreach_add([torch.ones(96, 64)], [x.detach()])[0],
    "put where": lambda x: put_where(torch.ones(96, 64), x.detach() > 0),
}


def put_where(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    value[mask] = 2.0
    return value


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("kept", ["buffer", "attribute", "parameter", "new parameter written to"])
def test_what_torch_computes_without_a_value_is_refused(what: str, kept: str, llama: Path) -> None:
    class Computing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            value = MIXED[what](self.gate_proj.weight)
            KEPT.get(kept, KEPT["parameter written to"])[0](self, "computed", value)

    with pytest.raises(PatchConstructionError, match=REFUSED):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Computing}, new_weights="computed"))


@pytest.mark.parametrize("write", [torch.Tensor.copy_, torch.Tensor.add_], ids=["copied", "added"])
def test_a_new_weight_is_not_filled_with_what_a_weight_of_the_checkpoint_is_initialised_with(
    write: Callable[[torch.Tensor, torch.Tensor], Any], llama: Path
) -> None:
    """Both are on meta when it is built first: it shows when the new one is given its values."""

    class Computing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.computed = nn.Parameter(torch.empty(96, 64))
            with torch.no_grad():
                write(self.computed, self.gate_proj.weight)

    with pytest.raises(PatchConstructionError, match=REFUSED):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Computing}, new_weights="computed"))


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


def test_a_weight_derived_from_a_weight_is_refused_where_the_checkpoint_lacks_it(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchConstructionError, match=r"derives model\.layers\.0\.mlp\.magnitude from a parameter"):
        LlamaForCausalLM.from_pretrained(llama, patcher=MAGNITUDES)
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=MAGNITUDES)
    with torch.no_grad():
        model.model.layers[1].mlp.magnitude.fill_(3)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, patcher=MAGNITUDES)
    assert (again.model.layers[1].mlp.magnitude == 3).all()
    assert same_output(again, model)


def test_where_nobody_said_that_it_is_new_the_load_refuses(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError, match=r"layers\.\{0\.\.1\}\.mlp\.magnitude"):
        LlamaForCausalLM.from_pretrained(llama, patcher=MAGNITUDES.replace(new_weights=()))


def quantized(way: str) -> dict[str, Any]:
    if way == "bitsandbytes":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    from torchao.quantization import Int8WeightOnlyConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": "cpu"}


class Adapter(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((2,), 0.5))
        self.twice = nn.Parameter(self.scale.detach() * 4)


@pytest.mark.libraries
@pytest.mark.parametrize("way", ["bitsandbytes", "torchao"])
def test_new_weights_are_computed_from_each_other_beside_quantized_ones(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Adapter}, new_weights="scale|twice")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher, **quantized(way))
    assert (model.model.layers[1].mlp.twice == 2).all()


def test_what_is_written_to_a_weight_of_the_checkpoint_while_it_is_built_has_no_effect(llama: Path) -> None:
    """As it has none on a model that was built by hand and then gets its weights."""

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
            self.gate_proj.reset_parameters()

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Writing}))
    stock = shared.stock(llama, LlamaForCausalLM)
    for layer, plain in zip(model.model.layers, stock.model.layers, strict=True):
        assert torch.equal(layer.mlp.gate_proj.weight, plain.mlp.gate_proj.weight)


def test_what_is_random_is_drawn_once(llama: Path) -> None:
    """A buffer that was drawn together with a new weight belongs to it, not to another draw of it."""

    class Drawing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = nn.Linear(4, 4)
            noise = torch.randn(4)
            self.register_buffer("noise", noise, persistent=False)
            self.register_buffer("kept", noise * 3)
            self.weight = nn.Parameter(noise * 2)

    patcher = Patcher({"LlamaMLP": Drawing}, new_weights=r"mlp\.(linear|weight)")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    for layer in model.model.layers:
        assert torch.equal(layer.mlp.weight, layer.mlp.noise * 2)
        assert torch.equal(layer.mlp.kept, layer.mlp.noise * 3)


def test_a_random_attribute_is_that_of_the_new_weight_beside_it(llama: Path) -> None:
    class Drawing(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.noise = torch.randn(4)
            self.held = [torch.arange(3), {"noise": self.noise}]
            self.weight = nn.Parameter(self.noise * 2)

    patcher = Patcher({"LlamaMLP": Drawing}, new_weights=r"mlp\.weight$")
    for layer in LlamaForCausalLM.from_pretrained(llama, patcher=patcher).model.layers:
        mlp: Any = layer.mlp
        assert torch.equal(mlp.weight, mlp.noise * 2)
        assert torch.equal(mlp.weight, mlp.held[1]["noise"] * 2)


def test_copies_of_a_new_part_are_new_as_well(llama: Path) -> None:
    class Copying(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            part = nn.Linear(3, 3)
            nn.init.constant_(part.weight, 5)
            self.parts = nn.ModuleList([copy.deepcopy(part) for _ in range(3)])

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Copying}, new_weights="parts"))
    for layer in model.model.layers:
        assert all((part.weight == 5).all() for part in layer.mlp.parts)
        assert layer.mlp.parts[0].weight is not layer.mlp.parts[1].weight


# --- other names of what the model has -----------------------------------------------------------------------------


class Holding(OwnMLP):
    """Holds its parts under names that no state dict knows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.parts = (self.gate_proj, self.up_proj)
        self.call = self.down_proj.forward


def test_new_parts_that_are_fused_start_with_their_own_values(tmp_path: Path) -> None:
    class Starting(LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            for value, name in enumerate(("q_proj", "k_proj", "v_proj"), 1):
                nn.init.constant_(getattr(self.self_attn, name).weight, value)

    folder = shared.checkpoint(tiny_llama_config())
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if "self_attn" not in key}
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    patcher = Patcher({"LlamaDecoderLayer": Starting}, fusions="qkv", new_weights="self_attn")
    for layer in LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher).model.layers:
        rows = layer.self_attn.qkv_proj.weight.split((64, 32, 32))
        assert [part.unique().tolist() for part in rows] == [[1], [2], [3]]


def test_a_part_that_is_held_under_another_name_is_the_very_part(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Holding}))
    for layer in model.model.layers:
        assert layer.mlp.parts[0] is layer.mlp.gate_proj
        assert layer.mlp.call.__self__ is layer.mlp.down_proj


def test_the_outer_model_is_not_copied_with_what_refers_to_it(llama: Path) -> None:
    class Referring(LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.same = [self.mlp]

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaDecoderLayer": Referring}))
    for layer in model.model.layers:
        assert layer.same[0] is layer.mlp


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


def test_parameters_of_somebody_else_stay_what_they_are(llama: Path) -> None:
    class Holding(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.shared = SHARED
            self.gate_proj.weight = GATE
            self.twice = nn.Parameter(self.shared.detach() * 2)

    patcher = Patcher({"LlamaMLP": Holding}, new_weights=r"mlp\.(shared|twice)$")
    for _ in range(2):
        model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
        stock = shared.stock(llama, LlamaForCausalLM)
        for layer, plain in zip(model.model.layers, stock.model.layers, strict=True):
            mlp = layer.mlp
            assert (mlp.shared == 2).all()
            assert (mlp.twice == 4).all()
            assert torch.equal(mlp.gate_proj.weight, plain.mlp.gate_proj.weight)
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


def buffer_of_a_new_weight(module: Any) -> None:
    module.new = nn.Linear(2, 2)
    module.register_buffer("sums", module.new.weight.detach().sum(-1))


def parameters_in_a_list(module: Any) -> None:
    module.weights = [module.gate_proj.weight, {"up": module.up_proj.weight}]


def a_parameter_that_was_not_registered_yet(module: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    module.weights, module.scale = [weight], weight


def views_of_a_parameter(module: Any) -> None:
    module.halves = module.gate_proj.weight.detach().chunk(2)


def modules_in_a_list(module: Any) -> None:
    module.hidden = [nn.Linear(3, 3), nn.LayerNorm(2)]


def closure_of_a_tensor(module: Any) -> None:
    norm = module.gate_proj.weight.detach().norm()
    module.rescale = lambda x: x * norm


def partial_of_a_parameter(module: Any) -> None:
    module.late = functools.partial(torch.mul, module.up_proj.weight)


def new_of_another_shape_each_time(module: Any) -> None:
    module.new = nn.Parameter(torch.ones(next(CALLS) + 1))


def new_under_another_name_each_time(module: Any) -> None:
    setattr(module, f"new{next(CALLS)}", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("add", "text"),
    [
        (buffer_of_a_new_weight, r"Computing\.__init__ derives the buffer 'sums' from a parameter"),
        (parameters_in_a_list, r"Computing\.__init__ derives the attribute 'weights' from a parameter"),
        (a_parameter_that_was_not_registered_yet, "derives the attribute 'weights' from a parameter"),
        (views_of_a_parameter, "derives the attribute 'halves' from a parameter"),
        (modules_in_a_list, "derives the attribute 'hidden' from a parameter"),
        (closure_of_a_tensor, "derives the attribute 'rescale' from a parameter"),
        (partial_of_a_parameter, "derives the attribute 'late' from a parameter"),
        (
            new_of_another_shape_each_time,
            r"has made \S+\.new of shape \(1,\), and with \(3,\) when it was called again",
        ),
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
