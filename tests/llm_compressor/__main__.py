"""Quantize listed experts with llm-compressor, and look at what is in the file: names that engines read, and values.

    python3.11 -m venv /tmp/llm-compressor
    /tmp/llm-compressor/bin/pip install torch==2.13.0 "llmcompressor==0.14.*" "transformers==5.17.*" -e .
    /tmp/llm-compressor/bin/python -m tests.llm_compressor

It needs an environment of its own, as llm-compressor pins transformers, so it isn't a part of the other tests. Tiny
models with random weights, on the CPU, in about a minute. For each model and recipe:

- names: beside what isn't quantized, the file has `weight_packed`, `weight_scale`, `weight_shape` and, where there are
  any, `weight_zero_point` under the names that the checkpoint has for the weights of each expert, and nothing else;
- values: they are those that llm-compressor writes for the stock model, whose experts it takes apart itself. With
  GPTQ that is so, but for rounding, with `SequentialExperts(all_tokens=True)`: llm-compressor shows every expert every
  token too. Without it experts are calibrated with the tokens that chose them;
- reading: stock transformers and a load with the patcher read the 8-bit file, with outputs near those of the model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from patcher import Patcher
from patcher.errors import PatcherError
from patcher.fusions.sequential_experts import SequentialExperts
from patcher.patterns import compress
from tests.support.tiny import save_tiny, tiny_mixtral_config, tiny_tokenizer
from tests.support.tiny_experts import tiny_qwen3_moe_config

#: How many of the packed words may differ after GPTQ, where a sum of another order may round the other way.
ROUNDING = 0.01
IGNORED = ["lm_head", r"re:.*\.gate$", r"re:.*self_attn.*"]
#: Groups of 128 columns, so no layer may have fewer.
SIZES = {"hidden_size": 128, "intermediate_size": 128}
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-MoE": tiny_qwen3_moe_config(**SIZES, moe_intermediate_size=128),
    "Mixtral": tiny_mixtral_config(**SIZES),
}
RECIPES: dict[str, Callable[[], Any]] = {
    "RTN W8A16": lambda: QuantizationModifier(targets="Linear", scheme="W8A16", ignore=IGNORED),
    "RTN W4A16_ASYM": lambda: QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=IGNORED),
    "GPTQ W4A16": lambda: GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORED),
}
#: Here values differ with reason.
CALIBRATED_LESS = ("GPTQ W4A16", "listed")
PATCHERS: dict[str, Patcher | None] = {
    "stock": None,
    "listed": Patcher(fusions=[SequentialExperts()]),
    "all tokens": Patcher(fusions=[SequentialExperts(all_tokens=True)]),
}


def main() -> None:
    logger.remove()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for model, config in MODELS.items():
            checkpoint = save_tiny(config, Path(folder, model))
            names = set(load_file(checkpoint / "model.safetensors"))
            for recipe in RECIPES:
                files = {
                    how: quantized(checkpoint, recipe, patcher, Path(folder, model, recipe, how))
                    for how, patcher in PATCHERS.items()
                }
                for how in ("listed", "all tokens"):
                    problems = wrong_names(names, files["stock"], files[how])
                    share = different(files["stock"], files[how])
                    print(f"{model}, {recipe}, {how}: {share:.2%} of the words are others than without patcher")
                    if share > (ROUNDING if recipe.startswith("GPTQ") else 0) and (recipe, how) != CALIBRATED_LESS:
                        problems.append("other values")
                    if recipe == "RTN W8A16":
                        problems += wrong_outputs(checkpoint, Path(folder, model, recipe, how), patcher=PATCHERS[how])
                    print("".join(f"  {problem}\n" for problem in problems), end="", flush=True)
                    failures += bool(problems)
    sys.exit(f"{failures} wrong" if failures else 0)


def quantized(checkpoint: Path, recipe: str, patcher: Patcher | None, out: Path) -> dict[str, torch.Tensor]:
    """What is in the file that llm-compressor saves."""
    options = {"patcher": patcher} if patcher else {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 100, (32,), generator=generator).tolist() for _ in range(8)]
    samples = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    calibration = {"dataset": samples, "num_calibration_samples": 8, "max_seq_length": 32}
    oneshot(
        model=model,
        recipe=RECIPES[recipe](),
        tokenizer=tiny_tokenizer(),
        **(calibration if recipe.startswith("GPTQ") else {}),
    )
    model.save_pretrained(out)
    return load_file(out / "model.safetensors")


def wrong_names(checkpoint: set[str], stock: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """What is missing in a quantized file and what shouldn't be there, by the names of the checkpoint."""
    weights = {name for name in checkpoint if ".experts." in name}
    companions = {name.rpartition(".")[2] for name in stock if ".experts." in name}
    expected = checkpoint - weights
    expected |= {f"{name.removesuffix('weight')}{companion}" for name in weights for companion in companions}
    problems = [f"missing: {name}" for name in compress(sorted(expected - found.keys()))]
    return problems + [f"not of the checkpoint: {name}" for name in compress(sorted(found.keys() - expected))]


@torch.no_grad()
def wrong_outputs(checkpoint: Path, saved: Path, **patched: Any) -> list[str]:
    """What is wrong with what is read of a file of 8 bits."""
    ids = torch.arange(3, 19)[None]
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(ids).logits
    problems = []
    for how, options in {"by stock transformers": {}, "with the patcher": patched}.items():
        try:
            found = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, **options)(ids).logits
        except PatcherError as error:
            problems.append(f"read {how}: {str(error).splitlines()[0]}")
            continue
        off = (found - expected).square().mean().sqrt() / expected.std()
        if off > 0.1:
            problems.append(f"read {how}: outputs are off by {off:.2f} standard deviations")
    return problems


def different(stock: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The share of the packed words of experts that differ from what llm-compressor writes by itself."""
    roles = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # whatever the tensors are called

    def packed(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        named = {".".join(roles.get(part, part) for part in name.split(".")): name for name in tensors}
        return torch.cat([tensors[named[name]].flatten() for name in sorted(named) if name.endswith("weight_packed")])

    return float((packed(stock) != packed(found)).float().mean())


if __name__ == "__main__":
    main()
