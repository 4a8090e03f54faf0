"""Generated files, written and imported for one test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from patcher.codegen import PatchConfig, write


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[PatchConfig], ModuleType]]:
    """Writes the file of a config and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def load(config: PatchConfig) -> ModuleType:
        config.target_file = f"generated_{tmp_path.name.replace('-', '_')}_{len(names)}.py"
        names.append(write(config, tmp_path).stem)
        return importlib.import_module(names[-1])

    yield load
    for name in names:
        del sys.modules[name]
