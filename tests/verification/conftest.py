"""A checkpoint to verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import shared
from tests.support.tiny import tiny_llama_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())
