"""Libraries that are extras: a test says which it needs."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def needs(module: str) -> Any:
    """The module. Where it isn't installed the test is skipped, by name; under CI's newest dependencies it fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("PATCHER_TESTS_ALL_EXTRAS"):
            pytest.fail(f"{module} can't be imported, and all extras should be installed: {error}", pytrace=False)
        pytest.skip(f"{module} isn't installed")
