"""Quantizers of transformers, how tests call them, and what they make of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

#: Makes a config that leaves some layers alone; without a list the quantizer decides.
Quantizer = Callable[..., Any]


def bnb_int8(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)


def bnb_nf4(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skip)


def torchao_int8(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    # It looks for names of parameters, from their beginning: `q_proj` alone would name nothing, in stock as well.
    listed = None if skip is None else [rf".*\b{name}" for name in skip]
    return TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=listed)


def torchao_dynamic(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), modules_to_not_convert=skip)


def quanto_int8(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="int8", modules_to_not_convert=skip)


def quanto_float8(skip: Sequence[str] | None = None) -> Any:
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="float8", modules_to_not_convert=skip)


def quanto_int4(skip: Sequence[str] | None = None) -> Any:
    without_a_compiler()
    return QuantoConfig(weights="int4", modules_to_not_convert=skip)


def without_a_compiler() -> None:
    """Have quanto unpack 4 bits by what its own function in Python does: otherwise it compiles one for a minute."""
    pytest.importorskip("optimum.quanto")
    from optimum.quanto import library

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    library.extensions.get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of a layer is of a quantizer's own type, or of one byte."""
    weight: Any = layer.weight
    return type(weight) not in (torch.Tensor, nn.Parameter) or weight.dtype.itemsize == 1


def layers(model: nn.Module) -> dict[str, bool]:
    """Path of a linear layer -> whether it is quantized."""
    return {
        path: is_quantized(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "QLinear"
    }
