"""Quantize the experts of a mixture: int8 of bitsandbytes, with and without the preset that makes them linear layers.

    python examples/quantize_experts.py                                # a small mixture made of SmolLM2's weights
    python examples/quantize_experts.py mistralai/Mixtral-8x7B-v0.1    # any model that has a preset

Size in memory, how many experts are quantized, and perplexity on Python's own documentation.
"""

from __future__ import annotations

import sys
from logging import ERROR, getLogger
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, logging

from patcher import presets, report

logging.set_verbosity_error()
logging.disable_progress_bar()
getLogger("bitsandbytes").setLevel(ERROR)  # it says for every layer that it casts
INT8 = BitsAndBytesConfig(load_in_8bit=True)


def main(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    text = " ".join(topics[topic] for topic in ("assert", "lambda", "while", "if", "return"))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :192]
    preset = next((found for found in presets.for_model(name) if "sequential_experts" in found.fusions), None)
    if preset is None:
        sys.exit(f"there is no preset that makes linear layers of the experts of {name}; `patcher presets` lists them")
    print(f"preset: {preset.name}")

    rows = []
    for title, arguments in {
        "stock": {},
        "stock, int8": {"quantization_config": INT8},
        "preset": {"patcher": preset},
        "preset, int8": {"quantization_config": INT8, "patcher": preset},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **arguments).eval()
        experts = [path for path, _, _ in report(model).fused] or _stacks(model)
        quantized = sum(
            isinstance(module, nn.Linear) and module.weight.dtype == torch.int8
            for path, module in model.named_modules()
            if path.startswith(tuple(f"{expert}." for expert in experts))
        )
        size = model.get_memory_footprint() / 2**20
        rows.append((title, size, quantized, perplexity(model, ids)))
        print(f"{title:<12} {size:5.0f} MiB, {quantized:3} layers of experts in int8, perplexity {rows[-1][3]:.2f}")
        del model

    (_, whole, _, exact), (_, without, none, _), _, (_, small, all_of_them, rounded) = rows
    print(f"int8 makes it {whole / without:.2f} times smaller without the preset, {whole / small:.2f} times with it")
    print(f"experts are quantized with the preset only: {none == 0 < all_of_them}")
    print(f"perplexity stays within 5 %: {abs(rounded / exact - 1) < 0.05}")


def _stacks(model: nn.Module) -> list[str]:
    """The modules that keep all experts of a layer in three-dimensional parameters."""
    return [
        path
        for path, module in model.named_modules()
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    ]


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    return float(model(ids, labels=ids).loss.exp())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2_moe_whole

        main(str(smollm2_moe_whole()))
