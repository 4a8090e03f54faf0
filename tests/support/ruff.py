"""Tests that run ruff."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

# a development tool, not installed where only the tests run
needs_ruff = pytest.mark.skipif(
    shutil.which("ruff", path=str(Path(sys.executable).parent)) is None and shutil.which("ruff") is None,
    reason="ruff is not installed",
)
