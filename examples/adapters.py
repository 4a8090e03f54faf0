"""LoRA adapters of the stock model on a fused one, and the reverse: an adapter un-fuses the modules that it targets.

    python examples/adapters.py                      # four layers of SmolLM2, from a package on the index
    python examples/adapters.py Qwen/Qwen2.5-0.5B    # any Llama-like causal model, by repo id or folder

It prints, in half a minute on two cores:

    trained on stock   17.9631 18.6301 18.9142 15.0455
    still fused        0 of 8 modules
    same outputs: True
    saved byte for byte as it was: True
    merged and saved as a checkpoint of transformers: True
    still fused        4 of 8 modules
    trained on fused   17.9631 18.7292 19.0679 15.2475
    same outputs on the stock model: True
    resumed            17.5450 18.2377 18.5951 14.8811
    same losses as without saving: True
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from patcher import Patcher, report

FUSED = Patcher(fusions=["qkv", "gate_up"])
# The targets of most adapters on the hub.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 4


def main(name: str, folder: Path) -> None:
    data = blocks(name)

    def load(patcher: Patcher | None = None) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, patcher=patcher)

    # An adapter that was trained on the stock model, with another rank for queries.
    torch.manual_seed(0)
    stock = get_peft_model(load(), LoraConfig(target_modules=TARGETS, r=8, rank_pattern={"q_proj": 4}))
    print(f"trained on stock   {train(stock, data)}")
    stock.save_pretrained(folder / "stock")

    fused = PeftModel.from_pretrained(load(FUSED), folder / "stock")
    print(f"still fused        {len(report(fused.get_base_model()).fused)} of 8 modules")
    show("same outputs", difference(fused, stock, data) < 1e-3)
    fused.save_pretrained(folder / "again")
    show("saved byte for byte as it was", files(folder / "again") == files(folder / "stock"))
    fused.merge_and_unload().save_pretrained(folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    show("merged and saved as a checkpoint of transformers", difference(merged, stock, data) < 1e-2)

    # A new adapter, of attention only: the MLPs stay fused.
    torch.manual_seed(0)
    new = get_peft_model(load(FUSED), LoraConfig(target_modules=["q_proj", "v_proj"], r=8))
    print(f"still fused        {len(report(new.get_base_model()).fused)} of 8 modules")
    print(f"trained on fused   {train(new, data)}")
    new.save_pretrained(folder / "fused")
    saved = PeftModel.from_pretrained(load(), folder / "fused")
    show("same outputs on the stock model", difference(saved, new, data) < 1e-3)
    again = PeftModel.from_pretrained(load(FUSED), folder / "fused", is_trainable=True)
    losses = train(again, data)
    print(f"resumed            {losses}")
    show("same losses as without saving", losses == train(new, data))


def train(model: Any, data: list[torch.Tensor]) -> str:
    """Train for a few steps, and return the losses."""
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-3)
    losses = []
    model.train()
    for block in data[:STEPS]:
        loss = model(input_ids=block, labels=block).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    model.eval()
    return " ".join(losses)


@torch.no_grad()
def difference(model: Any, other: Any, data: list[torch.Tensor]) -> float:
    """Return the largest difference between the logits of two models."""
    return (model.eval()(data[-1]).logits - other.eval()(data[-1]).logits).abs().max().item()


def files(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def show(claim: str, holds: bool) -> None:
    print(f"{claim}: {holds}")


def blocks(name: str, size: int = 64, count: int = 8) -> list[torch.Tensor]:
    """Return Python's documentation in blocks of tokens."""
    ids = AutoTokenizer.from_pretrained(name)(" ".join(topics.values()), return_tensors="pt")["input_ids"]
    return list(ids[:, : size * count].split(size, dim=1))


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2_small

        model = str(smollm2_small())
    with tempfile.TemporaryDirectory() as temporary:
        main(model, Path(temporary))
