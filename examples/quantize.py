"""Quantize a model with fused layers while it loads: number of layers, size and perplexity before and after.

    python examples/quantize.py                                       # SmolLM2, and a mixture from its weights
    python examples/quantize.py Qwen/Qwen2.5-0.5B qkv gate_up         # a repo id or folder, and fusions
    python examples/quantize.py mistralai/Mixtral-8x7B-v0.1 sequential_experts

Fused projections are quantized to the same bits as stock's, because each row is quantized separately. Lists of layers
to skip may name all parts of a fused layer. A quantizer skips experts unless they are linear layers.

It takes half a minute on a CPU, and prints (perplexity is that of Python's own documentation):

    Patcher(fusions=['qkv', 'gate_up'])
    stock                         257 MiB,   0 of 210 layers int8, perplexity 19.02
    stock, int8                   155 MiB, 210 of 210 layers int8, perplexity 19.28
    fused                         257 MiB,   0 of 120 layers int8, perplexity 19.02
    fused, int8                   155 MiB, 120 of 120 layers int8, perplexity 19.28
    fused, int8 but for q, k, v   171 MiB,  90 of 120 layers int8, perplexity 18.90
    perplexity stays within 5 %: True
    InvalidPatcherError: quantization_config names layers that are parts of others in the patched model:
      model.layers.{0..29}.self_attn.k_proj: part of model.layers.{0..29}.self_attn.qkv_proj
    Name those instead, or leave these modules out of the patcher.
    Patcher(fusions=['sequential_experts'])
    stock                         409 MiB,   0 of 120 layers int8, perplexity 19.02
    stock, int8                   383 MiB, 120 of 120 layers int8, perplexity 19.08
    fused                         409 MiB,   0 of 300 layers int8, perplexity 18.95
    fused, int8                   231 MiB, 300 of 300 layers int8, perplexity 19.37
    fused, int8 but for q, k, v   247 MiB, 210 of 300 layers int8, perplexity 19.29
    perplexity stays within 5 %: True
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from logging import ERROR, getLogger
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, logging

from patcher import Patcher, PatcherError

logging.set_verbosity_error()
logging.disable_progress_bar()
getLogger("bitsandbytes").setLevel(ERROR)  # it warns of casts for every layer

#: Names of the stock model. Where one layer has all three, that layer is skipped.
ATTENTION = ["q_proj", "k_proj", "v_proj"]


def int8(*skipped: str) -> BitsAndBytesConfig:
    # A custom list replaces the default one, which has the head.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[*skipped, "lm_head"])


def main(name: str, fusions: list[str]) -> None:
    patcher = Patcher(fusions=fusions)
    tokenizer = AutoTokenizer.from_pretrained(name)
    text = " ".join(topics[topic] for topic in ("assert", "lambda", "while", "if", "return"))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :192]
    print(patcher)
    perplexities: dict[str, float] = {}
    for title, options in {
        "stock": {},
        "stock, int8": {"quantization_config": int8()},
        "fused": {"patcher": patcher},
        "fused, int8": {"patcher": patcher, "quantization_config": int8()},
        "fused, int8 but for q, k, v": {"patcher": patcher, "quantization_config": int8(*ATTENTION)},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **options).eval()
        linear = [layer.weight.dtype == torch.int8 for layer in linear_layers(model)]
        perplexities[title] = perplexity(model, ids)
        size = model.get_memory_footprint() / 2**20
        print(f"{title:<28} {size:4.0f} MiB, {sum(linear):3} of {len(linear)} layers int8", end="")
        print(f", perplexity {perplexities[title]:.2f}")
        del model
    print(f"perplexity stays within 5 %: {abs(perplexities['fused, int8'] / perplexities['stock'] - 1) < 0.05}")

    if "qkv" in fusions:  # a third of a layer can't be skipped
        try:
            AutoModelForCausalLM.from_pretrained(name, patcher=patcher, quantization_config=int8("k_proj"))
        except PatcherError as error:
            print(f"{type(error).__name__}: {error}")


def linear_layers(model: nn.Module) -> Iterator[Any]:
    """Return all linear layers but the head."""
    return (layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and path != "lm_head")


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    return float(model(ids, labels=ids).loss.exp())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2, smollm2_moe_whole

        main(str(smollm2()), ["qkv", "gate_up"])
        main(str(smollm2_moe_whole()), ["sequential_experts"])
