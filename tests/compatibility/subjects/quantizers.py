"""Quantizers: what they make of a patched model, what their configs say by name, and what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.compatibility.columns import column
from tests.compatibility.outcomes import WITHIN_QUANTIZATION, compared, same_models
from tests.compatibility.rows import Row
from tests.support import quantizers
from tests.support.checkpoints import saved
from tests.support.comparing import logits
from tests.support.quantizers import Quantizer, layers

SUBJECT, SAVED = "Quantizers", "Quantized checkpoints"

#: Row -> names of what is another layer here than in stock, or of another class.
PARTS = {
    "class mapping": ["down_proj"],
    "class mapping with conversions": ["gate_proj", "up_proj"],
    "`qkv`": ["q_proj", "k_proj", "v_proj"],
    "`gate_up`": ["gate_proj", "up_proj"],
    "`sequential_experts`": ["mlp.experts"],
    "`patch_embeddings`": ["patch_embed.proj"],
}
#: Where tensors are quantized that stock leaves in full precision.
QUANTIZES_MORE = ("`sequential_experts`", "`patch_embeddings`")
#: How much farther from full precision such a model may be than stock's. The 8 bits of these models are off by 2 to
#: 6 %, random weights in one of their layers by more than 30 %.
FARTHER = 1.5


class WideRow(Row):
    """A row whose rows of weights are whole blocks of 64, which 4 bits need on some CPUs."""

    def inputs(self) -> dict[str, Any]:
        inputs = super().inputs()
        if self.has_images:
            inputs["pixel_values"] = torch.randn(32, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0))
        return inputs

    def read(self, folder: Path, **options: Any) -> Any:
        """A model from another checkpoint than its own."""
        return self._auto_class.from_pretrained(folder, **options)


@cache
def wide(row: Row) -> WideRow:
    def config() -> Any:
        found: Any = row.config()
        if row.has_images:
            found.vision_config.embed_dim, found.vision_config.patch_size = 64, 8
        found.get_text_config().intermediate_size = 128
        return found

    return WideRow(row.name, row.patcher, config, TemporaryDirectory())


@cache
def full_precision(row: WideRow) -> torch.Tensor:
    return logits(row.stock(), row.inputs())


def quantized(row: WideRow, quantizer: Quantizer) -> str:
    """All but the head are quantized: to the same bits where stock quantizes the same tensors."""
    stock, patched = (load(quantization_config=quantizer()) for load in (row.stock, row.patched))
    found = layers(patched)
    assert [path for path, is_quantized in found.items() if not is_quantized] == ["lm_head"], found
    one, other = (logits(model, row.inputs()) for model in (patched, stock))
    if row.name not in QUANTIZES_MORE:
        return compared(one, other)
    assert len(found) > len(layers(stock))
    plain = full_precision(row)
    error, allowed = (float((each.float() - plain).norm() / plain.norm()) for each in (one, other))
    assert 0 < error < FARTHER * allowed, (error, allowed)
    return WITHIN_QUANTIZATION


def compared_where_left_alone(patched: Any, stock: Any, row: WideRow) -> str:
    """The same layers are quantized in both, and not all of them."""
    one, other = ({path for path, is_it in layers(model).items() if is_it} for model in (patched, stock))
    assert one == other != set()
    assert len(one) < len(layers(patched)) - 1  # one is the head
    return same_models(patched, stock)


def left_alone(row: WideRow, quantizer: Quantizer) -> str:
    """A config that leaves alone what is another layer here."""
    configs = [quantizer([*PARTS[row.name], "lm_head"]) for _ in range(2)]
    stock, patched = row.stock(quantization_config=configs[0]), row.patched(quantization_config=configs[1])
    return compared_where_left_alone(patched, stock, row)


def single_layers(row: WideRow, folder: Path) -> str:
    """Settings of single layers, by expressions: of what is another layer here, and of one that isn't."""
    from torchao.quantization import FqnToConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    # A setting that quantizes stacks and convolutions torchao doesn't have.
    setting = None if row.name in QUANTIZES_MORE else Int8DynamicActivationInt8WeightConfig()
    names = "|".join(PARTS[row.name])
    config = TorchAoConfig(FqnToConfig({rf"re:.*\.({names})": setting, r"re:.*\.o_proj": Int8WeightOnlyConfig()}))
    stock, patched = (load(quantization_config=config) for load in (row.stock, row.patched))
    assert sum(layers(patched).values()) >= 2
    return same_models(patched, stock)


def quantized_before(row: WideRow, folder: Path, quantizer: Quantizer, skip: Sequence[str] | None = None) -> str:
    """A checkpoint that stock has quantized and saved."""
    row.stock(quantization_config=quantizer(skip)).save_pretrained(folder)
    stock, patched = row.read(folder), row.read(folder, patcher=row.patcher)
    if skip is not None:
        return compared_where_left_alone(patched, stock, row)
    return same_models(patched, stock)


def saved_quantized(row: WideRow, folder: Path, quantizer: Quantizer) -> str:
    stock, patched = (load(quantization_config=quantizer()) for load in (row.stock, row.patched))
    try:
        found = saved(patched, folder / "patched")
    except Exception:
        assert not (folder / "patched").exists()
        raise
    expected = saved(stock, folder / "stock")
    weights = [folder / name / "model.safetensors" for name in ("patched", "stock")]
    assert found["config.json"] == expected["config.json"]
    # torchao's metadata come in another order each time.
    metadata = [safe_open(path, "pt").metadata() for path in weights]
    assert metadata[0] == metadata[1]
    return compared(*(load_file(path) for path in weights), rounding=0)


def saved_as_it_is(row: WideRow, folder: Path, quantizer: Quantizer) -> str:
    patched = row.patched(quantization_config=quantizer())
    patched.save_pretrained(folder, save_original_format=False)
    again = row.read(folder)
    assert layers(again) == layers(patched)
    return same_models(again, patched)


def dequantized(row: WideRow, folder: Path) -> str:
    stock, patched = (load(quantization_config=quantizers.bnb_int8()) for load in (row.stock, row.patched))
    files = [saved(model.dequantize(), folder / name) for name, model in (("stock", stock), ("patched", patched))]
    if row.name not in QUANTIZES_MORE:
        assert files[0] == files[1]
        return compared({}, {})
    compared(logits(row.read(folder / "patched"), row.inputs()), logits(patched, row.inputs()))
    return WITHIN_QUANTIZATION


def add(name: str, needs: str, cell: Callable[[WideRow, Path], str], subject: str = SUBJECT) -> None:
    column(subject, name, needs=needs)(lambda row, folder: cell(wide(row), folder))


ALL: dict[str, tuple[Quantizer, str]] = {
    "bitsandbytes int8": (quantizers.bnb_int8, "bitsandbytes"),
    "bitsandbytes nf4": (quantizers.bnb_nf4, "bitsandbytes"),
    "torchao int8 weights": (quantizers.torchao_int8, "torchao"),
    "torchao int8 dynamic": (quantizers.torchao_dynamic, "torchao"),
    "quanto int8": (quantizers.quanto_int8, "optimum.quanto"),
    "quanto int4": (quantizers.quanto_int4, "optimum.quanto"),
    "quanto float8": (quantizers.quanto_float8, "optimum.quanto"),
}
ONE_EACH = ("bitsandbytes int8", "torchao int8 weights", "quanto int8")
SERIALIZABLE = ("bitsandbytes int8", "bitsandbytes nf4", "torchao int8 weights")

for _name, (_quantizer, _needs) in ALL.items():
    add(_name, _needs, lambda row, folder, made=_quantizer: quantized(row, made))
for _name in ONE_EACH:
    _quantizer, _needs = ALL[_name]
    add(f"{_name}, some layers left alone", _needs, lambda row, folder, made=_quantizer: left_alone(row, made))
add("torchao `FqnToConfig`", "torchao", single_layers)
for _name in SERIALIZABLE:
    _quantizer, _needs = ALL[_name]
    _before = f"{_name}, quantized before"
    add(_before, _needs, lambda row, folder, made=_quantizer: quantized_before(row, folder, made), SAVED)
add(
    "bitsandbytes int8, quantized before, some layers left alone",
    "bitsandbytes",
    lambda row, folder: quantized_before(row, folder, quantizers.bnb_int8, [*PARTS[row.name], "lm_head"]),
    SAVED,
)
for _name in SERIALIZABLE:
    _quantizer, _needs = ALL[_name]
    _as_it_is = f"{_name}, `save_original_format=False`"
    add(f"{_name}, saved", _needs, lambda row, folder, made=_quantizer: saved_quantized(row, folder, made), SAVED)
    add(_as_it_is, _needs, lambda row, folder, made=_quantizer: saved_as_it_is(row, folder, made), SAVED)
add("bitsandbytes int8, `dequantize`, saved", "bitsandbytes", dequantized, SAVED)
