"""Checkpoints that the tests of adapters share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases in its attention."""
    return save_tiny(tiny_llama_config(attention_bias=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_mixtral_config(), tmp_path_factory.mktemp("mixtral"))
