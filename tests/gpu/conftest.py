"""Tests of the kind `gpu`: python -m pytest -m gpu, on a machine with CUDA."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _there_is_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail(
            f"torch {torch.__version__} sees no GPU with CUDA here: leave the tests of `gpu` out", pytrace=False
        )
