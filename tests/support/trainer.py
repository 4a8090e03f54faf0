"""Short runs of `Trainer` on tiny models: a dropout, a few steps, checkpoints between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from patcher import original_state_dict
from tests.support.tiny import tiny_inputs

#: Steps of a whole run. Half of them lie before the checkpoint that is resumed from.
STEPS = 4


def trainer(model: PreTrainedModel, folder: Path, **arguments: Any) -> Trainer:
    """A trainer that logs each step and saves after half of them."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with less a gradient that is rounding alone would be a step of the usual length
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    data = batches(model)
    return Trainer(
        model=model,
        args=TrainingArguments(**settings | arguments),
        train_dataset=data,  # type: ignore[arg-type]
        eval_dataset=data[:2],  # type: ignore[arg-type]
        data_collator=lambda items: items[0],
    )


def batches(model: PreTrainedModel, count: int = 8) -> list[dict[str, Any]]:
    """Arguments of `forward`, with labels, each another."""
    found = [tiny_inputs(model.config, seed=seed) for seed in range(count)]
    return [each | {"labels": each["input_ids"].clone()} for each in found]


def trained(model: PreTrainedModel, folder: Path, resume: Path | None = None, **arguments: Any) -> Trainer:
    """What `trainer` gives, after `train`."""
    made = trainer(model, folder, **arguments)
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    return made


def losses(run: Trainer) -> list[torch.Tensor]:
    """The loss of each step that this run has made."""
    return [torch.tensor(line["loss"]) for line in run.state.log_history if "loss" in line]


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    """The weights at the end, under the names of transformers."""
    assert run.model is not None
    return original_state_dict(run.model)
