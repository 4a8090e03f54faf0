"""Families that packages register under the entry point group `patcher.fusions`."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patcher import Patcher
from tests.project.advice import Place, Steps, advice, load, same
from tests.support.packages import lay_out

#: A family like `qkv` under another name.
SOURCE = """
from patcher.fusions import QKV

class Family(QKV):
    name = {name!r}
"""


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.startswith("advised_"):
                del sys.modules[name]
        importlib.invalidate_caches()


def package(name: str, family: str, folder: Path) -> None:
    module = f"advised_{name}"
    lay_out(name, {module: SOURCE.format(name=family)}, {family: f"{module}:Family"}, folder)


def uninstall(name: str, folder: Path) -> None:
    shutil.rmtree(folder / f"{name}-1.0.dist-info")
    importlib.invalidate_caches()


@advice(
    "Uninstall all but one of them, or pass an object of the family that is meant.",
)
def a_name_of_two_packages(at: Place) -> Steps:
    with on_path(at.tmp / "site"):
        package("one", "stacked", at.tmp / "site")
        package("two", "stacked", at.tmp / "site")
        yield lambda: Patcher(fusions="stacked")
        theirs: Any = importlib.import_module("advised_two").Family()
        assert same(load(at.llama, Patcher(fusions=theirs)), at.llama)
        uninstall("one", at.tmp / "site")
        sys.path.insert(0, str(at.tmp / "others"))
        try:
            assert same(load(at.llama, Patcher(fusions="stacked")), at.llama)
        finally:
            sys.path.pop(0)


@advice("under the entry point group {}. Install it: pip install {}")
def a_layout_of_a_package_that_is_not_installed(at: Place) -> Steps:
    with on_path(at.tmp / "site"):
        package("one", "stacked", at.tmp / "site")
        folder = at.tmp / "layout"
        load(at.llama, Patcher(fusions="stacked")).save_pretrained(folder, save_original_format=False)
    assert json.loads((folder / "config.json").read_text())["fusion_config"] == {"patcher": ["one/stacked"]}
    yield lambda: load(folder)
    with on_path(at.tmp / "site"):
        assert same(load(folder), at.llama)


@advice("{} there, and here it is one of {}. Uninstall {}, and install {}.")
def a_layout_of_another_package(at: Place) -> Steps:
    with on_path(at.tmp / "site"):
        package("one", "stacked", at.tmp / "site")
        folder = at.tmp / "layout"
        load(at.llama, Patcher(fusions="stacked")).save_pretrained(folder, save_original_format=False)
    with on_path(at.tmp / "other site"):
        package("two", "stacked", at.tmp / "other site")
        yield lambda: load(folder)
    with on_path(at.tmp / "site"):
        assert same(load(folder), at.llama)
