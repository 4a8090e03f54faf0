"""State dicts of patched models, in either layout: what is loaded, what is said, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM, LlamaModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter, WeightRenaming

from patcher import InvalidPatcherError, Patcher, load_original_state_dict, original_state_dict
from patcher.layouts.carried import carriers
from tests.compatibility.rows import ROWS, Row
from tests.support.beside import LINEAR_EXPERTS
from tests.support.comparing import logits
from tests.support.tiny import build_tiny, save_tiny, tiny_llama_config, tiny_mixtral_config, tiny_qwen2_moe_config

BY_NAME = {row.name.strip("`"): row for row in ROWS}
rows = pytest.mark.parametrize("row", ROWS, ids=list(BY_NAME))
rows_of_two_layouts = pytest.mark.parametrize("row", ROWS[1:], ids=list(BY_NAME)[1:])
rows_of_layers = pytest.mark.parametrize("row", ROWS[:-1], ids=list(BY_NAME)[:-1])


def stock_names(model: nn.Module, keys: list[str]) -> set[str]:
    """Names of a model, those of parameters that it has joined as those of their parts."""
    parts = {
        f"{path}.{name}": [f"{path}.{part}" for part in layout.stock]
        for path, _, carried in carriers(model)
        for layout in carried.all
        for name in layout.fused
    }
    return {part for key in keys for part in parts.get(key, [key])}


def outcome(model: nn.Module, state_dict: dict[str, Any], **options: Any) -> tuple[set[str], set[str], list[str]]:
    """The missing and the unexpected keys, and the lines of the error."""
    said: list[str] = []
    missing, unexpected = set(), set()
    try:
        found = model.load_state_dict(state_dict, **options)
        missing, unexpected = stock_names(model, found.missing_keys), set(found.unexpected_keys)
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines()[1:] if "size mismatch" in line]
    return missing, unexpected, said


def same_weights(one: nn.Module, stock: nn.Module) -> bool:
    found, expected = original_state_dict(one), stock.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Any, Any]]:
    """Row -> the patched model and the stock one, whose weights every example overwrites."""
    return {row.name: (row.patched(), row.stock()) for row in ROWS}


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_pieces_of_a_state_dict_load_as_in_stock(models: dict[str, tuple[Any, Any]], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    patched, stock = models[row.name]
    seed = data.draw(st.integers(0, 2**31))
    source = build_tiny(row.config(), seed=seed).state_dict()
    for model in models[row.name]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
    options = {"assign": data.draw(st.booleans()), "strict": data.draw(st.booleans())}
    for piece in pieces(data, list(source)):
        given_here = {key: source[key].clone() for key in piece}
        for key in data.draw(st.lists(st.sampled_from(piece), max_size=2)) if piece else ():
            kind = data.draw(st.sampled_from(["shape", "foreign"]))
            if kind == "shape":
                given_here[key] = torch.zeros(3, 5, 7)
            else:
                given_here[f"{key}.foreign"] = torch.zeros(1)
        assert outcome(patched, dict(given_here), **options) == outcome(stock, dict(given_here), **options)
        assert same_weights(patched, stock)


def pieces(data: st.DataObject, keys: list[str]) -> list[list[str]]:
    """The keys spread over some shards; some keys get lost."""
    count = data.draw(st.integers(1, 3))
    number = st.integers(-1 if data.draw(st.booleans()) else 0, count - 1)
    where = data.draw(st.lists(number, min_size=len(keys), max_size=len(keys)))
    return [[key for key, at in zip(keys, where, strict=True) if at == shard] for shard in range(count)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shards_of_a_checkpoint_load(models: dict[str, tuple[Any, Any]], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    patched, _ = models[row.name]
    checkpoint = load_file(row.folder / "model.safetensors")
    with torch.no_grad():
        for parameter in patched.parameters():
            parameter.fill_(0.5)
    for shard in pieces_of_all(data, list(checkpoint)):
        found = patched.load_state_dict({key: checkpoint[key] for key in shard}, strict=False)
        assert found.unexpected_keys == []
        assert bool(found.missing_keys) == (len(shard) < len(checkpoint))
    assert same_weights(patched, row.stock())


def pieces_of_all(data: st.DataObject, keys: list[str]) -> list[list[str]]:
    count = data.draw(st.integers(1, 4))
    where = data.draw(st.lists(st.integers(0, count - 1), min_size=len(keys), max_size=len(keys)))
    return [[key for key, at in zip(keys, where, strict=True) if at == shard] for shard in range(count)]


def test_absent_tensors_of_a_checkpoint_are_missing_under_its_names() -> None:
    row = BY_NAME["sequential_experts"]
    model, checkpoint = row.patched(), load_file(row.folder / "model.safetensors")
    absent = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    before = original_state_dict(model)
    del checkpoint[absent]
    assert model.load_state_dict(checkpoint, strict=False).missing_keys == [absent]
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"{absent}\""):
        model.load_state_dict(checkpoint)
    assert all(torch.equal(value, before[key]) for key, value in original_state_dict(model).items())


@rows_of_two_layouts
def test_both_layouts_at_once_are_refused(row: Row) -> None:
    model, stock = row.patched(), row.stock().state_dict()
    both = {**model.state_dict(), **stock}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"are both in the state dict.*use patcher\.load_original_state_dict"):
            model.load_state_dict(both, strict=strict)


@rows_of_two_layouts
def test_a_tool_that_filters_by_names_of_the_model_does_not_pass_in_silence(row: Row) -> None:
    model, stock = row.patched(), row.stock().state_dict()
    for strict in (True, False):
        options = StateDictOptions(full_state_dict=True, strict=strict)
        with pytest.raises(RuntimeError, match=r"use patcher\.load_original_state_dict"):
            set_model_state_dict(model, dict(stock), options=options)
    load_original_state_dict(model, stock)
    assert same_weights(model, row.stock())


@rows_of_layers
def test_a_layer_takes_either_layout_wherever_it_is(row: Row) -> None:
    patched, other, stock = row.patched(), row.stock(), row.stock()
    with torch.no_grad():
        for parameter in patched.parameters():
            parameter.zero_()
    layer = patched.model.layers[0]
    other.model.layers[0] = layer
    assert not any(other.load_state_dict(stock.state_dict()))
    own, expected = original_state_dict(layer), stock.model.layers[0].state_dict()
    assert list(own) == list(expected)
    assert all(torch.equal(own[key], expected[key]) for key in expected)
    torch.testing.assert_close(logits(other, row.inputs()), logits(stock, row.inputs()))


@rows
def test_a_model_from_a_config_takes_either_layout(row: Row) -> None:
    stock, checkpoint = row.stock(), load_file(row.folder / "model.safetensors")
    for state_dict in (stock.state_dict(), checkpoint):
        model = row.from_config(patcher=row.patcher)
        model.load_state_dict(state_dict)
        assert same_weights(model, stock)
    assert same_weights(row.patched(), stock)


def test_weights_that_are_tied_need_not_be_given_twice(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path)
    checkpoint = load_file(folder / "model.safetensors")
    model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher(fusions="qkv"))
    assert "lm_head.weight" not in checkpoint
    for assign in (False, True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not any(load_original_state_dict(model, checkpoint, assign=assign))
        assert same_weights(model, LlamaForCausalLM.from_pretrained(folder))
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"lm_head\.weight\""):  # as in stock
        model.load_state_dict(checkpoint)


class TransposedMLP(nn.Module):
    """The down projection as a matrix on the right; the other two under names of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.second = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Module()
        self.down_proj.weight = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.first(x)) * self.second(x) @ self.down_proj.weight


TRANSPOSED = Patcher(
    {"LlamaMLP": TransposedMLP},
    extra_weight_conversions=[
        WeightRenaming(r"mlp\.gate_proj", "mlp.first"),
        WeightRenaming(r"mlp\.up_proj", "mlp.second"),
        WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]),
    ],
)


@pytest.mark.parametrize("width", [64, 96], ids=["square", "not square"])
def test_conversions_that_keep_a_name_or_only_change_it(width: int, tmp_path: Path) -> None:
    config = tiny_llama_config(intermediate_size=width)
    folder = save_tiny(config, tmp_path)
    stock, model = (LlamaForCausalLM.from_pretrained(folder, patcher=each) for each in (None, TRANSPOSED))
    torch.testing.assert_close(logits(model), logits(stock))
    own = copy.deepcopy(model.state_dict())
    assert same_weights(model, stock)
    other = build_tiny(config, seed=1)
    load_original_state_dict(model, other.state_dict())
    assert same_weights(model, other)
    model.load_state_dict(own)
    assert same_weights(model, stock)
    plain: dict[str, torch.Tensor] = dict(other.state_dict())
    if width == 96:  # told by the shape
        model.load_state_dict(plain)
        assert same_weights(model, other)
    else:
        with pytest.raises(RuntimeError, match=r"same name and shape.*load_original_state_dict\(model, state_dict\)"):
            model.load_state_dict(plain)
        with pytest.raises(RuntimeError, match="same name and shape"):
            model.load_state_dict(dict(own))  # what has lost its metadata says nothing either
        load_original_state_dict(model, plain)
        assert same_weights(model, other)


@pytest.mark.libraries
def test_parts_are_not_written_into_a_quantized_weight(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)
    quantized = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions="qkv"), quantization_config=quantized)
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight is quantized \(Int8Params.*Load the model again"):
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)


def test_what_is_not_known_is_not_assigned() -> None:
    row = BY_NAME["qkv"]
    state_dict = row.stock().state_dict()
    half = {key: value for key, value in state_dict.items() if "k_proj" not in key}
    with torch.device("meta"):
        model = row.from_config(patcher=row.patcher)
    with pytest.raises(RuntimeError, match=r"k_proj\.weight aren't there.*all parts of a tensor in one state dict"):
        model.load_state_dict(half, strict=False, assign=True)
    other = row.patched()
    with pytest.raises(RuntimeError, match="leave out assign=True"):
        other.load_state_dict({key: value.bfloat16() for key, value in half.items()}, strict=False, assign=True)
    mixed = {key: value.bfloat16() if "k_proj" in key else value for key, value in state_dict.items()}
    with pytest.raises(RuntimeError, match="one dtype"):
        other.load_state_dict(mixed, assign=True)
    assert same_weights(other, row.stock())


def test_assigned_parameters_have_memory_of_their_own() -> None:
    row = BY_NAME["sequential_experts"]
    for model in (row.patched(), row.patched()):
        storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(storages) == len(list(model.parameters()))
        model.load_state_dict(row.stock().state_dict(), assign=True)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_weights_on_the_disk_are_in_the_original_state_dict(tmp_path: Path) -> None:
    row = BY_NAME["qkv"]
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = row.patched(device_map=places, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert same_weights(model, row.stock())
    # torch would only warn, and report that all keys matched.
    with pytest.raises(InvalidPatcherError, match=r"qkv_proj\.weight of .* is on the disk.*from_pretrained"):
        load_original_state_dict(model, row.stock().state_dict())


@rows_of_two_layouts
def test_what_is_missing_has_the_names_of_transformers(row: Row) -> None:
    """Also if all that makes one parameter is missing."""
    model, stock = row.patched(), row.stock()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = load_original_state_dict(model, {}, strict=False)
    assert set(result.missing_keys) == set(stock.load_state_dict({}, strict=False).missing_keys)
    assert len(result.missing_keys) == len(set(result.missing_keys))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key") as raised:
        load_original_state_dict(model, {})
    assert all(f'"{key}"' in str(raised.value) for key in result.missing_keys)


@pytest.mark.libraries
def test_a_compiled_model_and_a_module_around_take_either_layout() -> None:
    row = BY_NAME["class mapping with conversions"]
    model, stock = row.patched(), row.stock()
    compiled: Any = torch.compile(model)
    around = nn.ModuleDict({"inner": model})
    for wrapped, prefix in ((compiled, "_orig_mod."), (around, "inner.")):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        wrapped.load_state_dict({f"{prefix}{key}": value for key, value in stock.state_dict().items()})
        assert same_weights(model, stock)
        assert list(original_state_dict(wrapped)) == [f"{prefix}{key}" for key in stock.state_dict()]


def test_compiled_layers_are_in_the_order_of_stock() -> None:
    row = BY_NAME["qkv"]
    model, stock = row.patched(), row.stock()
    for one in (model, stock):
        one.model.layers[0] = torch.compile(one.model.layers[0], backend="eager")
    assert list(original_state_dict(model)) == list(stock.state_dict())


def test_parameters_that_a_filter_leaves_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    folder = save_tiny(tiny_qwen2_moe_config(), tmp_path)
    model, stock = (AutoModelForCausalLM.from_pretrained(folder, patcher=each) for each in (LINEAR_EXPERTS, None))
    found, expected = original_state_dict(model), stock.state_dict()
    new = [key for key in model.state_dict() if key.endswith(".offset")]
    assert list(found) == [*expected, *new]
    other = build_tiny(tiny_qwen2_moe_config(), seed=1).state_dict()
    assert model.load_state_dict(other, strict=False) == (new, [])
    assert all(torch.equal(original_state_dict(model)[key], other[key]) for key in other)
    one = "model.layers.0.mlp.experts.gate_up_proj"
    assert model.load_state_dict({one: expected[one]}, strict=False).unexpected_keys == []
    assert torch.equal(original_state_dict(model)[one], expected[one])


def test_a_tensor_that_no_layer_has_a_place_for_is_unexpected_and_changes_nothing() -> None:
    row = BY_NAME["sequential_experts"]
    model, checkpoint = row.patched(), load_file(row.folder / "model.safetensors")
    before = original_state_dict(model)
    layer = "model.layers.1.block_sparse_moe.experts"
    given = {key: torch.zeros_like(value) for key, value in checkpoint.items() if key.startswith(layer)}
    given[f"{layer}.4.w1.weight"] = given[f"{layer}.0.w1.weight"].clone()  # there are four
    found = model.load_state_dict(given, strict=False)
    assert f"{layer}.4.w1.weight" in found.unexpected_keys
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(original_state_dict(model)[stack], before[stack])
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*experts\.4\.w1\.weight"):
        model.load_state_dict({**checkpoint, **given})


def test_renamed_weights_of_a_checkpoint_without_the_head(tmp_path: Path) -> None:
    config = tiny_llama_config(tie_word_embeddings=True)
    save_tiny(config, tmp_path, model_class=LlamaModel)
    model, stock = (LlamaForCausalLM.from_pretrained(tmp_path, patcher=each) for each in (TRANSPOSED, None))
    assert same_weights(model, stock)
    other = build_tiny(config, seed=1)
    model.load_state_dict(other.state_dict())
    assert same_weights(model, other)


class Turned(nn.Module):
    """Experts of Mixtral whose weights are stacked from a checkpoint's in a layout of their own."""

    conversion_mapping = (
        WeightConverter(["*.w1.weight", "*.w3.weight"], ["gu"], [MergeModulelist(0), Concatenate(1), Transpose(1, 2)]),
        WeightConverter(["*.w2.weight"], ["dn"], [MergeModulelist(0), Transpose(1, 2)]),
    )

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts, outer, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gu = nn.Parameter(torch.empty(experts, outer, 2 * inner))
        self.dn = nn.Parameter(torch.empty(experts, inner, outer))


@pytest.mark.parametrize("filters", [(), r"w\d"], ids=["beside stock's conversions", "without stock's conversions"])
def test_stock_s_stacks_are_loaded_into_experts_made_from_a_checkpoint_s(filters: Any, tmp_path: Path) -> None:
    source = build_tiny(tiny_mixtral_config())
    source.save_pretrained(tmp_path)
    patcher = Patcher({"MixtralExperts": Turned}, filtered_weight_conversion_patterns=filters)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    for load in (model.load_state_dict, partial(load_original_state_dict, model)):
        for state_dict in (source.state_dict(), copy.deepcopy(original_state_dict(model))):
            with torch.no_grad():
                model.model.layers[0].mlp.experts.gu.zero_()
            load(state_dict)
            assert same_weights(model, source)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(RuntimeError, match=r"mlp\.experts\.gu"):
        model.load_state_dict(source.state_dict() | {name: torch.zeros(1)})
