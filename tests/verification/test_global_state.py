"""What is in force around `verify` is not in stock, and afterwards it is as it was."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils import logging as transformers_logging

from patcher import Patcher, VerificationError, verify
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from tests.support.replacements import OWN
from tests.support.tiny import save_tiny, tiny_llama_config
from tests.verification.wrong_classes import NoNorm


def test_what_is_in_force_around_it_is_not_in_stock(llama: Path) -> None:
    with Patcher({"LlamaRMSNorm": NoNorm}).applied():
        inside = verify(llama, OWN)
    register_patch_mapping({"LlamaRMSNorm": NoNorm})
    try:
        registered = verify(llama, OWN)
    finally:
        clear_patch_mapping()

    for found in (inside, registered):
        with pytest.raises(VerificationError, match=r"outputs: .* begins in .*input_layernorm \(NoNorm in place of"):
            found.raise_on_failure()
    assert verify(llama, OWN).passed


class Careless(LlamaMLP):
    """Draws from every random state there is, and changes what is global."""

    raises: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3), random.random(), numpy.random.rand(3)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        if self.raises is not None:
            raise self.raises
        return super().forward(x)


class Interrupted(Careless):
    raises = KeyboardInterrupt


@pytest.fixture
def _drawn_from() -> None:
    torch.manual_seed(5)
    torch.rand(3)


def global_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in numpy.random.get_state(legacy=False).items()],
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "verbosity": transformers_logging.get_verbosity(),
        "progress bars": transformers_logging.is_progress_bar_enabled(),
    }


NIGHTLY = [pytest.param(mode, marks=pytest.mark.nightly) for mode in (torch.no_grad, torch.inference_mode)]


@pytest.mark.usefixtures("_drawn_from")
@pytest.mark.parametrize("mode", [torch.enable_grad, *NIGHTLY])
def test_it_changes_no_global_state(llama: Path, mode: Any) -> None:
    with mode():
        before = global_state()
        found = verify(llama, OWN)
        assert global_state() == before
        assert found.failures == ()
        assert all(stage.checked for stage in found.stages if stage.name == "gradients")
        assert verify(tiny_llama_config(), OWN).passed
        assert global_state() == before


@pytest.mark.usefixtures("_drawn_from")
@pytest.mark.parametrize("replacement", [Careless, Interrupted])
def test_nor_does_a_replacement_that_changes_some(llama: Path, replacement: type[nn.Module]) -> None:
    before = global_state()
    with contextlib.suppress(KeyboardInterrupt):
        verify(llama, Patcher({"LlamaMLP": replacement}))
        assert replacement is Careless
    assert global_state() == before


@pytest.mark.usefixtures("_drawn_from")
def test_nor_one_that_cannot_be_verified(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    before = global_state()
    with pytest.raises(Exception, match="header"):
        verify(tmp_path, OWN)
    assert global_state() == before
