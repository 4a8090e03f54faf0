"""The core knows no integration: each can be taken out, and the core's tests pass; how many seams there are in all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import patcher
from patcher.compat.seams import Seam, find, seams_in
from patcher.integrations import INTEGRATIONS
from tests.support import fresh
from tests.support.imports import modules_of

ROOT = Path(__file__).parents[2]
#: What loads, saves, reports and takes state dicts, without any other library.
CORE_TESTS = (
    "construction/test_construction.py",
    "construction/test_recorders.py",
    "fusions/test_saved_layout.py",
    "inspection/test_reporting.py",
    "loading/test_apply_to_memory.py",
    "loading/test_giving_back.py",
    "loading/test_loading.py",
    "loading/test_offloaded_saves.py",
    "loading/test_state_dicts.py",
    "loading/test_strictness.py",
)


def seams() -> list[Seam]:
    names = [name for name in modules_of(ROOT / "patcher") if ".loading.hooks" in name or ".integrations" in name]
    assert {name.split(".")[2] for name in names if name.startswith("patcher.integrations.")} == INTEGRATIONS.keys()
    for name in names:
        __import__(name)
    return list(seams_in(*names))


def test_there_are_few_seams_and_each_is_there() -> None:
    patcher.install()
    found = seams()
    assert len({seam.place for seam in found}) == len(found) <= 30
    for seam in found:
        __import__(seam.module)
        owner, name = find(seam.place, *seam.parameters)
        assert hasattr(getattr(owner, name), "__wrapped__"), seam.place
        brought_by = {module for modules in INTEGRATIONS.values() for module in modules}
        assert seam.function.__module__.startswith("patcher.loading.hooks.") or seam.module in brought_by


def test_seams_are_declared_nowhere_else() -> None:
    declared = {
        name
        for name in modules_of(ROOT / "patcher")
        if (file := ROOT / f"{name.replace('.', '/')}.py").exists() and re.search(r"^@seam\(", file.read_text(), re.M)
    }
    assert all(name.startswith(("patcher.loading.hooks.", "patcher.integrations.")) for name in declared)


def test_there_are_few_context_variables() -> None:
    text = "".join(file.read_text("utf-8") for file in (ROOT / "patcher").rglob("*.py"))
    assert len(re.findall(r"= ContextVar\(", text)) <= 6


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project, to be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("patcher", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def take_away(copy: Path, name: str) -> None:
    """Delete an integration, and its line in the table."""
    path = copy / "patcher" / "integrations" / name
    shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    table = copy / "patcher" / "integrations" / "__init__.py"
    text = table.read_text("utf-8")
    assert len(re.findall(rf'^    "{name}": .*\n', text, re.M)) == 1
    table.write_text(re.sub(rf'^    "{name}": .*\n', "", text, flags=re.M), encoding="utf-8")


def run_core_tests(copy: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in CORE_TESTS]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # before the project itself
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 100
    assert " skipped" not in done.stdout


def test_the_core_works_without_any(copy: Path) -> None:
    for name in INTEGRATIONS:
        take_away(copy, name)
    run_core_tests(copy)


@pytest.mark.nightly
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_core_works_without_each(name: str, copy: Path) -> None:
    take_away(copy, name)
    run_core_tests(copy)


def test_an_integration_is_imported_when_its_library_is() -> None:
    program = """
import sys
from patcher import Patcher
assert "patcher.integrations.peft" not in sys.modules
assert "patcher.integrations.trainer" not in sys.modules
import peft, transformers.trainer
assert "patcher.integrations.peft" in sys.modules
assert "patcher.integrations.trainer" in sys.modules
"""
    fresh.run(program)
    assert "patcher.integrations.quantizers" in sys.modules
