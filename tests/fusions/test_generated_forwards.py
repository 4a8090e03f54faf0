"""A sample of the generated forwards of `python -m tests.fuzz`: accepted means equal, and enough are accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from patcher.fusions import purity, sharing
from tests.fuzz.compare import compared
from tests.fuzz.generator import forward_of, program


def test_what_is_accepted_computes_and_trains_as_before(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(90):
        source = program(seed)
        result = compared(source, tmp_path / f"generated_{seed}.py")
        counts[result.status] += 1
        assert result.status != "wrong", f"seed {seed}: {result.reason}\n{forward_of(source)}"

    assert counts["same"] > 35
    assert counts["refused"] > 10


@pytest.mark.parametrize("left_out", ["writes", pytest.param("unknown calls", marks=pytest.mark.nightly)])
def test_an_analysis_that_leaves_something_out_is_found(
    left_out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if left_out == "writes":
        monkeypatch.setattr(sharing, "check", lambda *given: None)
    else:
        call = purity.Body.call

        def trusting(self: purity.Body, node: Any) -> purity.Called:
            is_value, reason = call(self, node)
            return (True, "") if "isn't known" in reason else (is_value, reason)

        monkeypatch.setattr(purity.Body, "call", trusting)

    results = (compared(program(seed), tmp_path / f"trusting_{seed}.py") for seed in range(200))

    assert any(result.status == "wrong" for result in results)
