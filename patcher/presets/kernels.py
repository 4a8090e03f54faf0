"""Kernels of Liger: RMSNorm and SwiGLU in Triton, for training on GPUs.

The kernels keep fewer activations and read memory once. Their parameters are named as stock's, so nothing is
converted. They compute as stock does within the rounding of the dtype; verify on your GPU with
`patcher verify MODEL --preset NAME`. They need the package `liger-kernel` and a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from patcher import InvalidPatcherError

#: model -> the norm and the MLP that are replaced, with the fingerprints of the code that they were verified on
_MODELS = {
    "LLAMA": {"LlamaRMSNorm": "d343b51fc4f03ebb", "LlamaMLP": "eafbe94b23d9df2e"},
    "MISTRAL": {"MistralRMSNorm": "defbb7587335fe14", "MistralMLP": "c73b8ed157b7f657"},
    "QWEN3": {"Qwen3RMSNorm": "96d2aafc97b998f1", "Qwen3MLP": "b5887e774e35e3ce"},
}


def arguments(model: str) -> dict[str, Any]:
    """Those of the preset's `Patcher`."""
    norm, mlp = _MODELS[model]
    name = f"{model}_LIGER"
    classes = {norm: _from_liger("rms_norm", "LigerRMSNorm", name), mlp: _from_liger("swiglu", "LigerSwiGLUMLP", name)}
    return {"class_mapping": classes, "fingerprints": _MODELS[model]}


def describe(model: str) -> str:
    return f"{model.capitalize()} with Liger's RMSNorm and SwiGLU."


def _from_liger(module: str, cls: str, name: str) -> Any:
    try:
        found = getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), cls)
    except ImportError as error:
        raise InvalidPatcherError(
            f"The preset {name} needs Liger's kernels, which can't be imported ({error}). "
            "Install them: pip install liger-kernel"
        ) from error
    if not torch.accelerator.is_available():
        raise InvalidPatcherError(
            f"The preset {name} needs a GPU: Liger's kernels are written in Triton, and torch {torch.__version__} "
            "sees no GPU here. Use it where there is one, or load without it."
        )
    return found
