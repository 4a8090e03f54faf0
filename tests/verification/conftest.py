"""A checkpoint to verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import save_tiny, tiny_llama_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))
