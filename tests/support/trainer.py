"""Short runs of `Trainer` on tiny models: a few steps, a checkpoint after half of them."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from patcher import original_state_dict
from tests.support.tiny import tiny_inputs, tiny_tokenizer

#: Steps of a whole run. Half of them lie before the checkpoint that is resumed from.
STEPS = 4
MIDDLE = f"checkpoint-{STEPS // 2}"
SETTINGS: dict[str, Any] = {
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
#: Each checkpoint is worse than the one before, so that the best isn't the model as it is at the end.
FIRST_IS_BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": STEPS // 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "order",
    "greater_is_better": False,
}


def trainer(model: PreTrainedModel, folder: Path, **arguments: Any) -> Trainer:
    """A trainer that logs each step and saves after half of them."""
    data, order = batches(model), count()
    made = Trainer(
        model=model,
        args=TrainingArguments(**SETTINGS | {"output_dir": str(folder)} | arguments),
        train_dataset=data,  # type: ignore[arg-type]
        eval_dataset=data[:2],  # type: ignore[arg-type]
        data_collator=lambda items: items[0],
        compute_metrics=lambda _: {"order": next(order)},
    )
    made.remove_callback(PrinterCallback)
    return made


def batches(model: PreTrainedModel, number: int = 8) -> list[dict[str, Any]]:
    """Arguments of `forward`, with labels, each another."""
    found = [tiny_inputs(model.config, seed=seed) for seed in range(number)]
    return [each | {"labels": each["input_ids"].clone()} for each in found]


def trained(model: PreTrainedModel, folder: Path, resume: Path | None = None, **arguments: Any) -> Trainer:
    """What `trainer` gives, after `train`."""
    made = trainer(model, folder, **arguments)
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    return made


def fine_tuned(model: PreTrainedModel, folder: Path, resume: Path | None = None, **arguments: Any) -> Any:
    """The same by TRL: an `SFTTrainer`, after `train`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-untyped]

    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "w2"
    settings = SETTINGS | {"output_dir": str(folder), "per_device_train_batch_size": 2, "bf16": False}
    data = [{"text": " ".join(f"w{(3 + 7 * row * word) % 97}" for word in range(9 + row))} for row in range(8)]
    made = SFTTrainer(
        model=model,
        args=SFTConfig(**settings | arguments),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )
    made.remove_callback(PrinterCallback)
    made.train(resume_from_checkpoint=str(resume) if resume else None)
    return made


def losses(run: Trainer) -> list[torch.Tensor]:
    """The loss of each step, those before a resume too."""
    return [torch.tensor(line["loss"]) for line in run.state.log_history if "loss" in line]


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    """The weights at the end, under the names of transformers."""
    assert run.model is not None
    return original_state_dict(run.model)


def in_shards(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint of a run with its weights in two files, what is joined never all in one."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {key: f"model-{number % 2 + 1:05}-of-00002.safetensors" for number, key in enumerate(tensors)}
    for name in set(places.values()):
        save_file({key: value for key, value in tensors.items() if places[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
