"""A generated file in the folder of a model, as code that `trust_remote_code=True` runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM, PreTrainedModel

from patcher import Patcher
from patcher.codegen import PatchConfig, write
from tests.support import fresh, shared, tiny
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny.tiny_mixtral_config())


def patched() -> PatchConfig:
    """What needs nothing but transformers."""
    config = PatchConfig(MIXTRAL, "patched_modeling_mixtral.py")
    config.override_method("MixtralRMSNorm.extra_repr", "def extra_repr(self):\n    return 'mine'\n")
    return config


def fused() -> PatchConfig:
    """What needs this package."""
    return PatchConfig.from_patcher(Patcher(fusions=["sequential_experts", "qkv"]), MixtralForCausalLM)


@pytest.mark.parametrize("make", [patched, fused])
def test_in_the_folder_of_a_model(make: Callable[[], PatchConfig], checkpoint: Path, tmp_path: Path) -> None:
    """The file, and its name in `config.json`: as examples/codegen/README.md says."""
    folder = tmp_path / f"model_{make.__name__}"
    shutil.copytree(checkpoint, folder)
    config = make()
    file = write(config, folder)
    told = json.loads((folder / "config.json").read_text())
    told["auto_map"] = {"AutoModelForCausalLM": f"{file.stem}.MixtralForCausalLM"}
    (folder / "config.json").write_text(json.dumps(told))

    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    stock = MixtralForCausalLM.from_pretrained(checkpoint)
    exact = make is patched
    torch.testing.assert_close(logits(model), logits(stock), atol=0 if exact else 1e-5, rtol=0)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path / "saved")
    stock.save_pretrained(tmp_path / "stock")
    assert same_checkpoint(tmp_path / "saved", tmp_path / "stock")
    again: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", trust_remote_code=True
    )  # the file went along
    assert torch.equal(logits(again), logits(model))
    assert type(again).__name__ == type(model).__name__
    assert type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)) is MixtralForCausalLM


@pytest.mark.process
def test_in_a_process_without_this_package(
    checkpoint: Path, tmp_path: Path, imported: Callable[[PatchConfig], ModuleType]
) -> None:
    """Saved with its code by transformers itself."""
    module: Any = imported(patched())
    module.MixtralForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model = module.MixtralForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "model")
    code = f"""
import sys
sys.modules["patcher"] = None
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
assert "mine" in repr(model)
model.save_pretrained({str(tmp_path / "again")!r})
torch.save(model(torch.arange(3, 27).view(2, 12)).logits.detach(), {str(tmp_path / "logits.pt")!r})
"""
    fresh.run(code, cwd=tmp_path)
    with torch.no_grad():
        expected = MixtralForCausalLM.from_pretrained(checkpoint).eval()(torch.arange(3, 27).view(2, 12)).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    assert same_checkpoint(tmp_path / "again", tmp_path / "model")
