"""Train a fused model with `Trainer`, interrupt and resume the run, and load its checkpoint in stock transformers.

    python examples/train_and_resume.py                      # four layers of SmolLM2, from a package on the index
    python examples/train_and_resume.py Qwen/Qwen2.5-0.5B    # any Llama-like causal model, by repo id or folder

It prints, in half a minute on two cores:

    never interrupted  18.4761 15.7807 14.4808 14.6358
    interrupted        18.4761 15.7807
    resumed            18.4761 15.7807 14.4808 14.6358
    same weights as without the interruption: True
    stock              18.4761 15.7807 14.4808 14.6358
    same losses as stock, within rounding: True (1e-06)
    resumed without the patcher: PatchedWeightsError
    stock transformers loads what it saved as LlamaMLP, with the same outputs: True
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

from patcher import Patcher, PatcherError, original_state_dict

FUSED = Patcher(fusions=["qkv", "gate_up"])
STEPS, SAVED_AT, INTERRUPTED_AT = 4, 2, 3


class Interrupt(TrainerCallback):
    """Interrupt a run, as a power failure would."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == INTERRUPTED_AT:
            raise KeyboardInterrupt


def main(name: str, folder: Path) -> None:
    data = blocks(name)

    def load(patcher: Patcher | None) -> Any:
        # With dropout, a resumed run also depends on the state of the random number generator.
        model = AutoModelForCausalLM.from_pretrained(name, patcher=patcher, attention_dropout=0.1)
        model.get_input_embeddings().requires_grad_(False)  # two thirds of a small model: this is faster
        return model

    def trainer(model: Any, **arguments: Any) -> Trainer:
        result = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(folder / "run"),
                max_steps=STEPS,
                per_device_train_batch_size=2,
                learning_rate=5e-4,
                logging_steps=1,
                **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True} | arguments,
            ),
            train_dataset=data,
        )
        result.remove_callback(PrinterCallback)
        return result

    uninterrupted = trainer(load(FUSED))
    uninterrupted.train()
    show("never interrupted", uninterrupted)

    interrupted = trainer(load(FUSED), save_strategy="steps", save_steps=SAVED_AT)
    interrupted.add_callback(Interrupt())
    try:
        interrupted.train()
    except KeyboardInterrupt:
        show("interrupted", interrupted)

    resumed = trainer(load(FUSED))
    resumed.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED_AT}"))
    show("resumed", resumed)
    weights = original_state_dict(resumed.model)  # under their names in stock transformers
    same = all(torch.equal(value, weights[name]) for name, value in original_state_dict(uninterrupted.model).items())
    print(f"same weights as without the interruption: {same}")

    stock = trainer(load(None))
    stock.train()
    show("stock", stock)
    difference = max(abs(loss - expected) for loss, expected in zip(losses(resumed), losses(stock), strict=True))
    print(f"same losses as stock, within rounding: {difference < 1e-3} ({difference:.0e})")

    try:  # the state of the optimizer is in the fused layout
        trainer(load(None)).train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED_AT}"))
    except PatcherError as error:
        print(f"resumed without the patcher: {type(error).__name__}")

    resumed.save_model(str(folder / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
    ids = data[0]["input_ids"].unsqueeze(0)
    with torch.no_grad():
        difference = (loaded.eval()(ids).logits - resumed.model.eval()(ids).logits).abs().max().item()
    mlp = type(loaded.model.layers[0].mlp).__name__
    print(f"stock transformers loads what it saved as {mlp}, with the same outputs: {difference < 1e-3}")


def blocks(name: str, size: int = 64, count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return Python's documentation in blocks of tokens."""
    ids = AutoTokenizer.from_pretrained(name)(" ".join(topics.values()), return_tensors="pt")["input_ids"][0]
    return [{"input_ids": block, "labels": block} for block in ids[: size * count].split(size)]


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def show(title: str, trainer: Trainer) -> None:
    print(f"{title:<18}", " ".join(f"{loss:.4f}" for loss in losses(trainer)))


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
