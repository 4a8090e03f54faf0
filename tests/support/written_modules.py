"""Modules of Python from files of their own, so that their source can be read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def written_module(source: str, path: Path) -> Any:
    """Write a module of Python to a file, and import it under the name of the file; it doesn't stay imported."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module
