"""The benchmarks run, and print every figure of the budgets: once through, with figures that mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import bench_cross_attention, bench_patch_embeddings, bench_projections
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.measuring import ratio, taking_turns

ROOT = Path(__file__).parents[2]


def test_all_benchmarks_are_listed() -> None:
    assert {path.stem for path in (ROOT / "tests" / "benchmarks").glob("bench_*.py")} == set(BENCHMARKS)


def test_candidates_take_turns_and_are_compared_turn_by_turn() -> None:
    order: list[str] = []
    times = taking_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, warm_up=1)

    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [len(each) for each in times.values()] == [2, 2]
    assert ratio({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 3.0]}, "a", "b") == 2.0


@pytest.mark.nightly
def test_patch_embeddings() -> None:
    # In a process of its own: transformers' `fusion_config` stays in force for the process.
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bench_patch_embeddings", "1", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for name, _, _, budget in bench_patch_embeddings.MODULES:
        (found,) = [line for line in done.stdout.splitlines() if line.startswith(name)]
        assert (">=" in found) == (budget is not None)
    assert "transformers' own fusion_config" in done.stdout


@pytest.mark.nightly
def test_cross_attention(capsys: pytest.CaptureFixture[str]) -> None:
    bench_cross_attention.main(1, "Whisper")

    shown = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        for what in ("first step of the decoder", "projections"):
            assert f"Whisper tiny, {dtype}, {what}, with kv / stock" in shown


@pytest.mark.nightly
def test_projections(smollm2_small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_projections.main(1, smollm2_small)

    shown = capsys.readouterr().out
    for figure in ("float32, with qkv and gate_up / without", "bfloat16, with qkv and gate_up / without"):
        assert f"load and first forward, {figure}" in shown
    assert "with qkv and gate_up / stock" in shown
    assert "decode step, bfloat16, stock" in shown
