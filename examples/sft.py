"""Fine-tune a fused model on conversations with TRL's `SFTTrainer`, and resume the run. It needs `pip install trl`.

    python examples/sft.py                                   # four layers of SmolLM2, from a package on the index
    python examples/sft.py Qwen/Qwen2.5-0.5B-Instruct        # any Llama-like chat model, by repo id or folder

It prints, in half a minute on two cores:

    8 fused modules; loss and accuracy of each step:
    fused    19.5615 (2%)  14.3493 (3%)  14.6964 (0%)  12.0199 (6%)
    resumed  19.5615 (2%)  14.3493 (3%)  14.6964 (0%)  12.0199 (6%)
    resumed in the middle, same losses: True
    stock    19.5615 (2%)  14.3493 (3%)  14.6964 (0%)  12.0199 (6%)
    same losses as stock, within rounding: True (2e-06)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback, logging
from trl import SFTConfig, SFTTrainer

from patcher import Patcher, report

FUSED = Patcher(fusions=["qkv", "gate_up"])


def conversations(count: int = 32) -> Dataset:
    """Return questions about Python's keywords, answered by its documentation."""
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What does Python's documentation say about {topic}?"},
                    {"role": "assistant", "content": text[:400]},
                ]
            }
            for topic, text in list(topics.items())[:count]
        ]
    )


def trainer(name: str, folder: Path, patcher: Patcher | None = None) -> Any:
    """Create a trainer that loads the model: TRL passes `model_init_kwargs` to `from_pretrained`."""
    arguments = SFTConfig(
        output_dir=str(folder),
        model_init_kwargs={"patcher": patcher, "dtype": "float32"},
        max_length=96,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=1,
        learning_rate=5e-4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    result = SFTTrainer(model=name, args=arguments, train_dataset=conversations())
    result.remove_callback(PrinterCallback)
    return result


def show(title: str, run: Any) -> list[float]:
    lines = [line for line in run.state.log_history if "loss" in line]
    print(f"{title:<8}", "  ".join(f"{line['loss']:.4f} ({line['mean_token_accuracy']:.0%})" for line in lines))
    return [line["loss"] for line in lines]


def main(name: str, folder: Path) -> None:
    fused = trainer(name, folder / "fused", FUSED)
    print(f"{len(report(fused.model).fused)} fused modules; loss and accuracy of each step:")
    fused.train()
    losses = show("fused", fused)

    resumed = trainer(name, folder / "resumed", FUSED)
    resumed.train(resume_from_checkpoint=str(folder / "fused" / "checkpoint-2"))
    print(f"resumed in the middle, same losses: {show('resumed', resumed) == losses}")

    stock = trainer(name, folder / "stock")
    stock.train()
    difference = max(abs(loss - expected) for loss, expected in zip(losses, show("stock", stock), strict=True))
    print(f"same losses as stock, within rounding: {difference < 1e-3} ({difference:.0e})")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2_small

        model = str(smollm2_small())
    with tempfile.TemporaryDirectory() as temporary:
        main(model, Path(temporary))
