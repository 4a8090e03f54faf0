"""The page of what the preset LIGER replaces is that of the installed transformers."""

from __future__ import annotations

import re

from tests.coverage.liger import PAGE, page


def test_the_page_that_ships_is_current() -> None:
    assert page() == PAGE.read_text("utf-8"), "write it: python -m tests.coverage.liger"


def test_it_shows_most_of_what_there_is() -> None:
    text = PAGE.read_text("utf-8")
    for kind, share in (("norms", 0.9), ("gated MLPs", 0.7)):
        replaced, every = map(int, re.findall(rf"- {kind}: (\d+) of (\d+) classes", text)[0])
        assert share * every <= replaced < every
    assert "| llama | `LlamaRMSNorm` | `LlamaMLP` |  |" in text
