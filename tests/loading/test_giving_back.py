"""Saving gives back what the unpatched load with the same arguments would save, byte for byte."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Concatenate,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    WeightConverter,
)
from transformers.core_model_loading import Chunk, ConversionOps, Transpose, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    checkpoint_weights,
    original_optimizer_state_dict,
    original_state_dict,
    report,
)
from patcher.layouts.conversion import Group, single
from tests.support import shared
from tests.support.checkpoints import assert_saved_alike, files
from tests.support.computing import InDouble, ThereOnly, Twice, TwiceInPlace
from tests.support.replacements import JOINED, JoinedAttention
from tests.support.split_replacements import ByPowersOfTwo, InThirds
from tests.support.tiny import save_tiny, tiny_llama_config


def joined(*kinds: str, operation: ConversionOps | None = None) -> Patcher:
    return Patcher(
        {"LlamaAttention": JoinedAttention},
        extra_weight_conversions=[
            WeightConverter(
                [f"self_attn.{name}_proj.{kind}" for name in "qkv"],
                [f"self_attn.qkv_proj.{kind}"],
                operations=[operation or Concatenate(dim=0)],
            )
            for kind in kinds
        ],
    )


class TransposedMLP(nn.Module):
    """The down projection as its transpose: checkpoint (hidden, intermediate), here (intermediate, hidden)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.turned = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)) @ self.turned


class SplitMLP(LlamaMLP):
    """The up projection in two halves."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        del self.up_proj
        self.first = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)
        self.second = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)

    def up_proj(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([self.first(x), self.second(x)], dim=-1)


class RenamedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


TRANSPOSED = Patcher(
    {"LlamaMLP": TransposedMLP},
    extra_weight_conversions=WeightConverter(["mlp.down_proj.weight"], ["mlp.turned"], operations=[Transpose(0, 1)]),
)
SPLIT = Patcher(
    {"LlamaMLP": SplitMLP},
    extra_weight_conversions=WeightConverter(
        ["mlp.up_proj.weight"], ["mlp.first.weight", "mlp.second.weight"], operations=[Chunk(dim=0)]
    ),
)
RENAMED = Patcher(
    {"LlamaMLP": RenamedMLP},
    extra_weight_conversions=[
        WeightRenaming("mlp.gate_proj", "mlp.w1"),
        WeightRenaming("mlp.up_proj", "mlp.w3"),
        WeightRenaming("mlp.down_proj", "mlp.w2"),
    ],
)
QKV = joined("weight")
QKV_BIAS = joined("weight", "bias")

HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("heads", HEADS)
def test_joined_attention_is_given_back(heads: str, bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny_llama_config(num_key_value_heads=HEADS[heads], attention_bias=bias)
    checkpoint = save_tiny(config, tmp_path / "checkpoint", dtype=dtype)
    patched = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV_BIAS if bias else QKV)
    assert patched.model.layers[0].self_attn.qkv_proj.weight.dtype == dtype
    assert_saved_alike(patched, AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "patcher", [QKV, TRANSPOSED, SPLIT, RENAMED, QKV | SPLIT], ids=["qkv", "turn", "split", "rename", "both"]
)
@pytest.mark.parametrize("shards", [None, "30KB"], ids=["one file", "shards"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"dtype": torch.bfloat16}, id="in another dtype"),
        pytest.param({"key_mapping": {"^model\\.": "model."}}, id="key_mapping"),
    ],
)
def test_every_transform_is_given_back(
    patcher: Patcher, shards: str | None, arguments: dict[str, Any], tmp_path: Path
) -> None:
    options = {} if shards is None else {"max_shard_size": shards}
    checkpoint = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "checkpoint", **options)
    patched = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher, **arguments)
    assert report(patched).conversions_fired
    assert_saved_alike(patched, AutoModelForCausalLM.from_pretrained(checkpoint, **arguments), tmp_path, **options)


@pytest.mark.parametrize("patcher", [QKV, RENAMED], ids=["qkv", "rename"])
def test_checkpoints_with_and_without_the_base_model_prefix(patcher: Patcher, tmp_path: Path) -> None:
    with_head = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "with")
    LlamaModel.from_pretrained(with_head).save_pretrained(tmp_path / "without")
    for cls in (LlamaModel, LlamaForCausalLM):
        for name in ("with", "without"):
            folder = tmp_path / f"{cls.__name__}-{name}"
            folder.mkdir()
            patched = cls.from_pretrained(tmp_path / name, patcher=patcher)
            assert_saved_alike(patched, cls.from_pretrained(tmp_path / name), folder)


def test_bin_checkpoints(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    stock = shared.stock(checkpoint)
    torch.save(stock.state_dict(), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    assert_saved_alike(AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV), stock, tmp_path)


def test_models_made_without_a_checkpoint_save_in_the_original_format(tmp_path: Path) -> None:
    config = tiny_llama_config()
    with QKV.applied():
        by_hand = LlamaForCausalLM(config)
    from_config = AutoModelForCausalLM.from_config(config, patcher=QKV)
    for number, model in enumerate((by_hand, from_config)):
        model.save_pretrained(tmp_path / str(number))
        stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        fused = model.model.layers[0].self_attn.qkv_proj.weight
        parts = [getattr(stock.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
        assert torch.equal(fused, torch.cat(parts))


def test_copies_pickles_and_sub_models_save_alike(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    stock = shared.stock(checkpoint)
    patched = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV)
    cases = {"copy": copy.deepcopy(patched), "pickle": pickle.loads(pickle.dumps(patched))}
    for name, model in cases.items():
        (tmp_path / name).mkdir()
        assert_saved_alike(model, stock, tmp_path / name)
    (tmp_path / "part").mkdir()
    assert_saved_alike(patched.model, stock.model, tmp_path / "part")


def test_loading_never_changes_a_patcher(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    before, pickled = copy.deepcopy(QKV), pickle.dumps(QKV)
    saved = []
    for number in range(3):
        AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV).save_pretrained(tmp_path / str(number))
        saved.append(files(tmp_path / str(number)))
    assert saved[0] == saved[1] == saved[2]
    assert before == QKV
    assert pickle.dumps(QKV) == pickled


class OneWay(Concatenate):
    """Joins, and has no reverse."""

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError


class WrongWay(Concatenate):
    """Joins, and says that cutting into equal pieces leads back."""


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (OneWay(dim=0), r"one of its operations \(OneWay\) has no reverse"),
        (WrongWay(dim=0), r".* gives in reverse q_proj.weight the shape \(43, 64\), the checkpoint had \(64, 64\)"),
    ],
)
def test_what_cannot_be_reversed_raises_before_a_file_is_written(
    operation: ConversionOps, reason: str, tmp_path: Path
) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=joined("weight", operation=operation))
    with pytest.raises(
        PatchedWeightsError, match=f"(?s)q(kv)?_proj.weight can't be saved in the original format: {reason}"
    ):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Tenfold(Twice):
    """Its way back rounds: some values become their neighbours."""

    factor = 10.0


class InEighths(Twice):
    factor = 0.125


class OfSmallValues(Twice):
    """Takes no value beyond 2, as some of a normal distribution are."""

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_meta or value.abs().max() < 2:
            return super()._of(value)
        raise ValueError


def computing(operation: ConversionOps) -> Patcher:
    class Own(LlamaMLP):
        conversion_mapping: ClassVar = [WeightConverter(["up_proj.weight"], ["up_proj.weight"], [operation])]

    return Patcher({"LlamaMLP": Own})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", [ThereOnly(), Tenfold(), InThirds(), InDouble()])
def test_an_operation_that_does_not_restore_values_raises_before_a_file_is_written(
    operation: ConversionOps, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = shared.checkpoint(tiny_llama_config())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=computing(operation), dtype=dtype)
    message = rf"mlp\.up_proj\.weight .* \[{type(operation).__name__}\] doesn't restore the values that it converts"
    for call in (
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: list(checkpoint_weights(model)),
        lambda: original_state_dict(model),
        lambda: Patcher().apply(model),
    ):
        with pytest.raises(PatchedWeightsError, match=message):
            call()
    assert not (tmp_path / "out").exists()


class Doubling(WeightConverter):
    """Computes by itself, not by an operation."""

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return {name: 2 * single(value) for name, value in super().convert(*args, **kwargs).items()}


def test_a_conversion_that_computes_by_itself_is_tried_as_its_operations_are(tmp_path: Path) -> None:
    class Own(LlamaMLP):
        conversion_mapping: ClassVar = [Doubling(["up_proj.weight"], ["up_proj.weight"], [Transpose(), Transpose()])]

    model = AutoModelForCausalLM.from_pretrained(
        shared.checkpoint(tiny_llama_config()), patcher=Patcher({"LlamaMLP": Own})
    )
    with pytest.raises(PatchedWeightsError, match="doesn't restore the values that it converts"):
        model.save_pretrained(tmp_path / "out")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InvalidPatcherError, match="isn't known to only move values"):
        original_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", [Twice(), InEighths(), ByPowersOfTwo(), OfSmallValues()])
def test_what_an_operation_computes_and_restores_is_saved_as_it_was(
    operation: ConversionOps, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = shared.checkpoint(tiny_llama_config())
    model, stock = (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **options)
        for options in ({"patcher": computing(operation)}, {})
    )
    for number in range(2):  # that it was tried changes nothing that it remembers
        assert_saved_alike(model, stock, tmp_path / str(number))


@pytest.mark.parametrize("operation", [TwiceInPlace(), InDouble()])
def test_an_operation_may_write_into_what_it_is_given_and_compute_in_another_type(operation: ConversionOps) -> None:
    """What it was given is the model in memory, or a state dict of the caller."""
    checkpoint = shared.checkpoint(tiny_llama_config())
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    state_dict, patcher = copy.deepcopy(before), computing(operation)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
    from_memory = LlamaForCausalLM.from_pretrained(None, config=stock.config, state_dict=state_dict, patcher=patcher)
    for model in (loaded, from_memory, patcher.apply(stock)):
        weight = model.model.layers[1].mlp.up_proj.weight
        assert weight.dtype is torch.float32
        assert torch.equal(weight, 2 * before["model.layers.1.mlp.up_proj.weight"])
    for after in (stock.state_dict(), state_dict):
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_changed_shape_raises(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tiny_llama_config(), tmp_path / "checkpoint"), patcher=QKV)
    model.model.layers[1].self_attn.qkv_proj.weight = nn.Parameter(torch.zeros(3, 64))
    with pytest.raises(
        PatchedWeightsError, match=r"layers.1.* had the shape \(128, 64\) when it was made, it has \(3, 64\) now"
    ):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.libraries
def test_a_quantized_fused_weight_raises(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV, quantization_config=quantization)
    with pytest.raises(
        PatchedWeightsError, match=r"qkv_proj.weight .* is quantized .* its scales fit this layout only"
    ):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.libraries
def test_what_becomes_of_quantized_weights_that_are_converted_is_said_once(tmp_path: Path) -> None:
    checkpoint, quantization = shared.checkpoint(tiny_llama_config()), BitsAndBytesConfig(load_in_8bit=True)
    load = AutoModelForCausalLM.from_pretrained
    model = load(checkpoint, patcher=JOINED, quantization_config=quantization)
    with pytest.raises(PatchedWeightsError, match=r"only \(keep the checkpoint in full precision, and quantize it at"):
        model.save_pretrained(tmp_path / "out")
    load(checkpoint, quantization_config=quantization).save_pretrained(tmp_path / "quantized")
    with pytest.raises(PatchedWeightsError, match="The checkpoint is quantized, and the patcher converts") as raised:
        load(tmp_path / "quantized", patcher=JOINED)
    assert str(raised.value).count("The checkpoint is quantized") == 1


def test_the_runtime_layout_that_no_fusion_describes_is_not_saved(tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV)
    with pytest.raises(PatchedWeightsError, match=r"save_original_format=False would write .* no fusion"):
        model.save_pretrained(tmp_path / "out", save_original_format=False)
    assert not (tmp_path / "out").exists()

    class Same(LlamaAttention):
        pass

    unchanged = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=Patcher({"LlamaAttention": Same}))
    unchanged.save_pretrained(tmp_path / "out", save_original_format=False)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_the_naive_mechanism_saves_wrong(tmp_path: Path) -> None:
    """Row 6: stock's own reverse of the same conversion cuts into equal pieces."""
    from transformers import core_model_loading

    checkpoint = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=QKV)
    stock_view = type(
        "View", (), {"_weight_conversions": list(QKV.extra_weight_conversions), "config": model.config}
    )()
    naive = core_model_loading.revert_weight_conversion(stock_view, dict(model.state_dict()))
    assert [naive[f"model.layers.0.self_attn.{name}_proj.weight"].shape[0] for name in "qkv"] == [43, 43, 42]
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), other=st.integers(1, 6), dim=st.integers(0, 1))
def test_law_taking_apart_what_was_joined(sizes: list[int], other: int, dim: int) -> None:
    names = [f"part{number}" for number in range(len(sizes))]
    group = Group(WeightConverter(names, ["whole"], operations=[Concatenate(dim=dim)]), "x.whole")
    parts = {
        f"x.{name}": torch.rand((size, other) if dim == 0 else (other, size))
        for name, size in zip(names, sizes, strict=True)
    }
    for name in reversed(names):
        group.add(f"x.{name}", name, parts[f"x.{name}"].shape)
    layout = group.layout(SimpleNamespace(config=None))
    restored = dict(zip(layout.stock, layout.separate(layout.fuse([parts[key] for key in layout.stock])), strict=True))
    assert [*restored] == [*parts]
    assert all(torch.equal(restored[key], parts[key]) for key in parts)
