"""The API reference has a page for every public name, and no reference in it leads nowhere."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pdoc")
from patcher import errors, presets
from tests import reference


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("reference")
    assert reference.build(folder) == []
    return lambda name: (folder / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", reference.PAGES)
def test_every_public_name_is_on_its_page(module: str, pages: Callable[[str], str]) -> None:
    names = {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}
    if module == "patcher":
        names -= set(errors.__all__)  # on their own page
    assert names - {*re.findall('<section id="([^"]+)"', pages(module))} == set()


def test_there_are_pages_of_all_rooms_and_of_the_recipes(pages: Callable[[str], str]) -> None:
    index, recipes = pages("index"), pages("recipes")
    assert all(name.replace(".", "/") + ".html" in index for name in (*reference.PAGES, "recipes"))
    assert recipes.count("<tr>") == 1 + 12
    assert "]" + "(" not in recipes


def test_every_error_has_an_example() -> None:
    without = {name for name in errors.__all__ if ">>> " not in str(getattr(errors, name).__doc__)}
    assert without == {"PatcherError"}  # that of the module is its example


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("`patcher.nowhere`", "patcher.nowhere"),
        ("`patcher.aply(model)`", "patcher.aply"),
        ("`patcher.apply(model)`, `patcher.json`, `model.layers.0`", ""),
        ("`Verification.passes`", "Verification.passes"),
        ("see [there](nowhere.html)", "a link to nowhere.html"),
        ("see [there](../patcher.html#Nowhere)", "a link to ../patcher.html#Nowhere"),
        ("see [there](../patcher.html#Plan)", ""),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(
    text: str, broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(presets, "__doc__", text)
    found = reference.build(tmp_path)
    assert len(found) == bool(broken)
    assert all(each.startswith(f"patcher/presets.html: {broken}") for each in found)
