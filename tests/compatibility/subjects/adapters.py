"""Adapters of peft: made on the stock model and loaded onto the patched one, and the reverse."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.compatibility.columns import column
from tests.compatibility.outcomes import EXACT, ROUNDING, compared, worst
from tests.compatibility.rows import Row
from tests.support.comparing import logits

SUBJECT = "Adapters"
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj", "patch_embed.proj"]


def _config(row: Row, **settings: Any) -> LoraConfig:
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if "experts" in row.name else None
    given = {"target_modules": TARGETS, "target_parameters": parameters, "r": 4, "rank_pattern": {"v_proj": 2}}
    return LoraConfig(init_lora_weights=False, **given | settings)


def _of_stock(row: Row, folder: Path, **settings: Any) -> torch.Tensor:
    """Save a random adapter of the stock model; what it computes with it."""
    torch.manual_seed(0)
    adapted = get_peft_model(row.stock(), _config(row, **settings))
    adapted.save_pretrained(folder)
    return logits(adapted, row.inputs())


def _as_saved(model: Any, adapter: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    one, other = (load_file(each / "adapter_model.safetensors") for each in (folder, adapter))
    assert compared(dict(sorted(one.items())), dict(sorted(other.items())), rounding=0) == EXACT


def _compared(row: Row, found: Any, expected: torch.Tensor) -> str:
    """Never exact where layers are joined: how sums round the processor decides."""
    outcome = compared(logits(found, row.inputs()), expected, rounding=5e-5)
    return worst(ROUNDING, outcome) if row.patcher.fusions else outcome


@column(SUBJECT, "stock LoRA, `PeftModel`")
def peft_model(row: Row, folder: Path) -> str:
    expected = _of_stock(row, folder / "adapter")
    model = PeftModel.from_pretrained(row.patched(), folder / "adapter")
    _as_saved(model, folder / "adapter", folder / "again")
    return _compared(row, model, expected)


@column(SUBJECT, "stock LoRA, `load_adapter`")
def load_adapter(row: Row, folder: Path) -> str:
    expected, model = _of_stock(row, folder / "adapter"), row.patched()
    model.load_adapter(str(folder / "adapter"))
    _as_saved(model, folder / "adapter", folder / "again")
    return _compared(row, model, expected)


@column(SUBJECT, "stock DoRA")
def dora(row: Row, folder: Path) -> str:
    expected = _of_stock(row, folder / "adapter", use_dora=True, target_parameters=None)
    return _compared(row, PeftModel.from_pretrained(row.patched(), folder / "adapter"), expected)


@column(SUBJECT, "new LoRA (`all-linear`), on stock")
def on_stock(row: Row, folder: Path) -> str:
    # peft says it of the ranks of parameters, its own too
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
    torch.manual_seed(0)
    model = get_peft_model(row.patched(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.01)
    model(**row.training_inputs()).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    return _compared(row, PeftModel.from_pretrained(row.stock(), folder), logits(model, row.inputs()))


@column(SUBJECT, "stock LoRA, merged and saved")
def merged(row: Row, folder: Path) -> str:
    _of_stock(row, folder / "adapter")
    models = [PeftModel.from_pretrained(each, folder / "adapter") for each in (row.patched(), row.stock())]
    expected = logits(models[1], row.inputs())
    models[0].merge_and_unload().save_pretrained(folder / "merged")
    return _compared(row, row.load(folder / "merged"), expected)
