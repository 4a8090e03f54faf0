"""A sample of the generated forwards of `python -m tests.fuzz`: accepted means equal, and enough are accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from patcher.fusions.proof.frames import State
from patcher.fusions.proof.values import Value, roots_of
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


@pytest.mark.parametrize("left_out", ["unknown calls", pytest.param("writes", marks=pytest.mark.nightly)])
def test_a_proof_that_leaves_something_out_is_found(
    left_out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(self: State, reason: str, node: Any, values: Any) -> Value:
        return Value(roots_of(values))

    if left_out == "writes":
        monkeypatch.setattr(State, "effect", lambda *arguments: None)
    else:
        monkeypatch.setattr(State, "unknown", unknown)

    results = (compared(program(seed), tmp_path / f"trusting_{seed}.py") for seed in range(200))

    assert any(result.status == "wrong" for result in results)
