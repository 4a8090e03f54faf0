"""New weights of a replacement are what its `__init__` made of them: values, kind, dtype, names, place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, WhisperForConditionalGeneration
from transformers.models.llama import modeling_llama
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from patcher import InvalidPatcherError, PatchConstructionError, Patcher
from tests.support import shared
from tests.support.offloaded import DEVICE_MAPS, offloaded
from tests.support.replacements import OWN, OwnMLP, in_block, same_output
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config
from tests.verification.models import WHISPER


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


class Marked(nn.Parameter):
    """A kind of parameter of its own."""


class Adapted(OwnMLP):
    """New weights of every kind, each with values that only `__init__` gives."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.down = nn.Linear(size, 4)
        nn.init.constant_(self.down.weight, 0.5)
        self.up = nn.Linear(4, size, bias=False)
        nn.init.zeros_(self.up.weight)
        self.random = nn.Linear(3, 3)
        nn.init.uniform_(self.random.weight, 5, 6)
        self.norm = nn.LayerNorm(3)
        nn.init.constant_(self.norm.weight, 3)
        self.table = nn.Embedding(4, 2)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(8.0).view(4, 2))
        self.nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"deep": nn.Linear(2, 2)}))
        for parameter in self.nested.parameters():
            nn.init.constant_(parameter, 0.25)
        self.frozen = nn.Parameter(torch.full((2,), 8.0), requires_grad=False)
        self.gate_proj.weight.requires_grad_(False)
        self.first = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, 7)
        self.second = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.second.weight, 7)
        self.wide = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))
        self.single = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float32))
        self.whole = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
        self.marked = Marked(torch.full((2,), 9.0))
        self.listed = nn.ParameterList([nn.Parameter(torch.full((1,), float(index))) for index in range(3)])
        self.late = None
        self.late = nn.Parameter(torch.full((2,), 4.0))
        self.filled = nn.Parameter(torch.empty(2))
        self.filled.data.fill_(6.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


NEW = ("down", "up", "random", "norm", "table", "nested", "first", "second", "wide", "single", "whole")
NEW += ("marked", "listed", "late", "filled", "frozen")
ADAPTED = Patcher({"LlamaMLP": Adapted}, new_weights=rf"\.mlp\.({'|'.join(NEW)})(\.|$)")


def assert_initial(module: Any, dtype: torch.dtype = torch.float32) -> None:
    values = {
        "down.weight": 0.5,
        "up.weight": 0,
        "norm.weight": 3,
        "nested.0.weight": 0.25,
        "nested.0.bias": 0.25,
        "nested.1.deep.weight": 0.25,
        "first.weight": 7,
        "second.weight": 7,
        "marked": 9,
        "late": 4,
        "filled": 6,
        "listed.0": 0,
        "listed.2": 2,
    }
    for name, value in values.items():
        parameter = module.get_parameter(name)
        assert isinstance(parameter, nn.Parameter), name
        assert (parameter == value).all(), (name, parameter)
        assert parameter.dtype == dtype, name
        assert parameter.device.type == "cpu", name
        assert parameter.requires_grad, name
    assert module.random.weight.min() >= 5
    assert module.random.weight.max() <= 6
    assert module.random.weight.unique().numel() > 1
    assert torch.equal(module.table.weight, torch.arange(8.0, dtype=dtype).view(4, 2))
    assert torch.equal(module.wide, torch.full((2,), 1 / 3, dtype=torch.float64))
    assert torch.equal(module.single, torch.full((2,), 1 / 3, dtype=torch.float32))
    assert torch.equal(module.whole, torch.tensor([1, 2], dtype=torch.int8))
    assert not module.whole.requires_grad
    assert type(module.marked) is Marked
    assert torch.equal(module.frozen, torch.full((2,), 8.0, dtype=dtype))
    trained = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert trained == {"gate_proj.weight", "whole", "frozen"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_new_weights_keep_what_init_gave_them(dtype: torch.dtype, device_map: Any, llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED, dtype=dtype, device_map=device_map)
    stock = LlamaForCausalLM.from_pretrained(llama, dtype=dtype)
    for layer, other in zip(model.model.layers, stock.model.layers, strict=True):
        assert_initial(layer.mlp, dtype)
        assert torch.equal(layer.mlp.gate_proj.weight, other.mlp.gate_proj.weight)
    if dtype == torch.float32:
        assert same_output(model, stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_from_a_config_is_initialised_as_if_the_replacement_were_its_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=ADAPTED, dtype=dtype)
    torch.manual_seed(5)
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Adapted)
    expected = LlamaForCausalLM._from_config(tiny_llama_config(), dtype=dtype)
    assert_equal_states(model, expected)


def test_a_model_built_in_a_block_is_initialised_as_if_the_replacement_were_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(5)
    model = in_block(ADAPTED)
    torch.manual_seed(5)
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Adapted)
    assert_equal_states(model, LlamaForCausalLM(tiny_llama_config()))


def assert_equal_states(model: nn.Module, expected: nn.Module) -> None:
    assert type(model.model.layers[1].mlp) is type(expected.model.layers[1].mlp)
    found, state = model.state_dict(), expected.state_dict()
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def test_new_weights_are_kept_when_they_are_saved_and_loaded(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED)
    with torch.no_grad():
        for parameter in model.model.layers[0].mlp.up.parameters():
            parameter.fill_(11)
    again = LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict(), patcher=ADAPTED)
    assert (again.model.layers[0].mlp.up.weight == 11).all()
    assert (again.model.layers[1].mlp.up.weight == 0).all()


class Sharing(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_a_parameter_of_two_names_is_refused(llama: Path) -> None:
    """transformers makes two of it, in silence."""
    patcher = Patcher({"LlamaMLP": Sharing}, new_weights="first|second")
    text = r"Sharing has one parameter under two names, model\.layers\.0\.mlp\.first\.weight and .*mlp\.second\.weight"
    with pytest.raises(PatchConstructionError, match=text):
        LlamaForCausalLM.from_pretrained(llama, patcher=patcher)


@pytest.mark.parametrize("name", DEVICE_MAPS)
def test_new_weights_are_right_where_a_part_is_on_disk(name: str, llama: Path, tmp_path: Path) -> None:
    class Added(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.adapter = nn.Linear(config.hidden_size, config.hidden_size)
            nn.init.zeros_(self.adapter.weight)
            nn.init.zeros_(self.adapter.bias)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.adapter(x)

    model = offloaded(
        llama, name, tmp_path / "patched", patcher=Patcher({"LlamaMLP": Added}, new_weights="adapter|scale")
    )
    stock = shared.stock(llama, LlamaForCausalLM)
    assert same_output(model, stock)
    assert same_output(model, stock)


def test_a_new_weight_that_goes_to_the_disk_needs_a_folder(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Adapted}, new_weights=ADAPTED.new_weights)
    text = r"mlp\.\S+ is not in the checkpoint, and the device map puts it on the disk: say where, with offload_folder"
    with pytest.raises(InvalidPatcherError, match=text):
        LlamaForCausalLM.from_pretrained(llama, device_map=DEVICE_MAPS["a layer on disk"], patcher=patcher)


@pytest.mark.filterwarnings("ignore:The replaced modules and the checkpoint")
def test_a_weight_that_is_missing_without_leave_keeps_what_init_gave_it(llama: Path) -> None:
    patcher = ADAPTED.replace(new_weights=(), strict=False)
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    assert_initial(model.model.layers[1].mlp)


@pytest.mark.filterwarnings("ignore:The replaced modules and the checkpoint")
def test_a_weight_of_another_shape_keeps_what_init_gave_it(llama: Path) -> None:
    class Wider(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.up_proj = nn.Linear(config.hidden_size + 1, 2)
            nn.init.constant_(self.up_proj.weight, 5)
            nn.init.constant_(self.up_proj.bias, 6)

    model = LlamaForCausalLM.from_pretrained(
        llama, ignore_mismatched_sizes=True, patcher=Patcher({"LlamaMLP": Wider}, strict=False)
    )
    assert model.model.layers[0].mlp.up_proj.weight.shape == (2, 65)
    assert (model.model.layers[0].mlp.up_proj.weight == 5).all()
    assert (model.model.layers[0].mlp.up_proj.bias == 6).all()


def test_two_loads_from_one_seed_are_alike(llama: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED))
    first, second = (model.model.layers[0].mlp.random.weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, models[0].model.layers[1].mlp.random.weight)


# --- afterwards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patcher", [OWN, ADAPTED], ids=["same weights", "new weights"])
@pytest.mark.parametrize("way", ["load", "disk", "from_config", "applied"])
def test_nothing_marks_the_tensors_of_a_finished_model(
    patcher: Patcher, way: str, llama: Path, tmp_path: Path
) -> None:
    if way == "load":
        model: Any = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    elif way == "disk":
        model = offloaded(llama, "a layer on disk", tmp_path, patcher=patcher)
    elif way == "from_config":
        model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher)
    else:
        model = in_block(patcher)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        assert not [attribute for attribute in vars(tensor) if "patcher" in attribute], name


def test_a_finished_model_trains_like_any_other(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED).train()
    inputs = tiny_inputs(model.config)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert model.model.layers[0].mlp.up.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.gate_proj.weight.grad is None


class OwnEncoder(WhisperEncoder):
    """As the original, whose `__init__` freezes a parameter; a load of stock makes it trainable."""


def test_what_the_original_freezes_is_as_after_a_load_of_stock(tmp_path: Path) -> None:
    folder = save_tiny(WHISPER, tmp_path, model_class=WhisperForConditionalGeneration)
    stock = WhisperForConditionalGeneration.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, patcher=Patcher({"WhisperEncoder": OwnEncoder}))
    assert isinstance(model.model.encoder, OwnEncoder)
    for name, parameter in stock.named_parameters():
        assert model.get_parameter(name).requires_grad is parameter.requires_grad, name
