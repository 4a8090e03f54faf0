"""In a terminal: colours where it is one, the width it has, bars of blocks."""

from __future__ import annotations

from io import StringIO

import pytest

from patcher import Benchmark, Patcher, Stage, Verification
from patcher.display.shown import Shown
from patcher.display.tree import Weights, module_tree
from patcher.inspection.plan import Plan
from patcher.verification.benchmark import Measured
from patcher.verification.gains import Gain
from patcher.verification.rounds import ALL

BENCHMARK = Benchmark("M", "", "", "", {}, "", {}, (
    Measured(Patcher(fusions="qkv"), {ALL: Gain(0.5, 1.0, 0.0, 9, True), "decode": Gain(3.0, 1.0, 0.0, 9, True)}),
))  # fmt: skip
WRONG = Verification("M", "", "", "float32", stages=(Stage("outputs", False, message="wrong"), Stage("save", True)))
PLAN = Plan(
    "M",
    problems=("Nothing fits.",),
    tree=module_tree(
        "M",
        [("layers.0.mlp", "MLP"), ("head", "Linear")],
        changed=[("layers.0.mlp", "MLP", "Mine")],
        weights=[Weights("missing", (), ("layers.0.mlp.up.weight",))],
    ),
)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "red", "other"),
    [(WRONG, "FAILED", "\x1b[32mpassed"), (PLAN, "missing:", "\x1b[1;36mMine")],
    ids=["verification", "plan"],
)
def test_a_terminal_has_colours_and_a_file_has_the_plain_text(
    value: Shown, red: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, terminal = StringIO(), Terminal()
    value.show(plain)
    value.show(terminal)

    assert plain.getvalue() == f"{value}\n"
    assert "\x1b" not in str(value)
    assert f"\x1b[1;31m{red}" in terminal.getvalue()
    assert other in terminal.getvalue()


def test_bars_are_beside_one_another_and_a_mark() -> None:
    whole, decode = [line for line in str(BENCHMARK).splitlines() if "█" in line]
    assert [line.split()[0] for line in (whole, decode)] == ["Patcher(fusions=['qkv'])", "decode"]
    assert whole.index("┊") == decode.index("█") + 7
    assert (whole.count("█"), decode.count("█")) == (3, 20)


def test_problems_are_said_first() -> None:
    text = str(PLAN)
    assert text.index("Nothing fits.") < text.index("MLP -> Mine")
    assert all(len(line) <= 119 for line in text.splitlines())
