"""LoRA adapters of the stock model on a fused one, and the reverse: an adapter un-fuses the layers that it names.

    python examples/adapters.py                      # four layers of SmolLM2, from a package on the index
    python examples/adapters.py Qwen/Qwen2.5-0.5B    # any Llama-like causal model, by repo id or folder

It prints, in half a minute on two cores:

    trained on stock   17.9631 18.6301 18.9142 15.0455
    still fused        0 of 8 modules
    it computes the same: True
    and is saved as it was, byte for byte: True
    merged and saved, it is a checkpoint of transformers: True
    still fused        4 of 8 modules
    trained on fused   17.9631 18.7292 19.0679 15.2475
    the stock model computes the same with it: True
    training goes on   17.5450 18.2377 18.5951 14.8811
    as if it had never been saved: True
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
# What most adapters on the hub are for.
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 4


def main(name: str, folder: Path) -> None:
    data = blocks(name)

    def load(patcher: Patcher | None = None) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, patcher=patcher)

    # An adapter that somebody has trained on the stock model, with ranks of its own for queries.
    torch.manual_seed(0)
    stock = get_peft_model(load(), LoraConfig(target_modules=SEVEN, r=8, rank_pattern={"q_proj": 4}))
    print(f"trained on stock   {train(stock, data)}")
    stock.save_pretrained(folder / "stock")

    fused = PeftModel.from_pretrained(load(FUSED), folder / "stock")
    print(f"still fused        {len(report(fused.get_base_model()).fused)} of 8 modules")
    show("it computes the same", apart(fused, stock, data) < 1e-3)
    fused.save_pretrained(folder / "again")
    show("and is saved as it was, byte for byte", files(folder / "again") == files(folder / "stock"))
    fused.merge_and_unload().save_pretrained(folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    show("merged and saved, it is a checkpoint of transformers", apart(merged, stock, data) < 1e-2)

    # A new one, of attention alone: the MLPs stay fused.
    torch.manual_seed(0)
    new = get_peft_model(load(FUSED), LoraConfig(target_modules=["q_proj", "v_proj"], r=8))
    print(f"still fused        {len(report(new.get_base_model()).fused)} of 8 modules")
    print(f"trained on fused   {train(new, data)}")
    new.save_pretrained(folder / "fused")
    saved = PeftModel.from_pretrained(load(), folder / "fused")
    show("the stock model computes the same with it", apart(saved, new, data) < 1e-3)
    again = PeftModel.from_pretrained(load(FUSED), folder / "fused", is_trainable=True)
    losses = train(again, data)
    print(f"training goes on   {losses}")
    show("as if it had never been saved", losses == train(new, data))


def train(model: Any, data: list[torch.Tensor]) -> str:
    """A few steps; their losses."""
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
def apart(one: Any, other: Any, data: list[torch.Tensor]) -> float:
    """By how much two models differ in what they compute."""
    return (one.eval()(data[-1]).logits - other.eval()(data[-1]).logits).abs().max().item()


def files(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def show(claim: str, holds: bool) -> None:
    print(f"{claim}: {holds}")


def blocks(name: str, size: int = 64, count: int = 8) -> list[torch.Tensor]:
    """Python's own documentation in blocks of tokens."""
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
