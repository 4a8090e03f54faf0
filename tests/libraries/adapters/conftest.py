"""Checkpoints that the tests of adapters share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import shared
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases in its attention."""
    return shared.checkpoint(tiny_llama_config(attention_bias=True))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())
