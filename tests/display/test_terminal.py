"""In a terminal: colours where it is one, the width it has, bars of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper

import pytest

from patcher.display.parts import Bar, Chart
from patcher.display.shown import Displayable
from patcher.display.tree import Weights, module_tree
from patcher.inspection.plan import Plan
from patcher.verification.comparing import Stage
from patcher.verification.layers import LayerErrors
from patcher.verification.verify import Verification

LAYERS = [f"model.layers.{number}" for number in range(30)]
ERRORS = LayerErrors(
    "a short row",
    1e-5,
    (("model.embed", 0.0), *((path, 3e-7) for path in LAYERS[:20]), *((path, 0.02) for path in LAYERS[20:])),
    "model.layers.20.mlp",
)
WRONG = Verification("M", "", "", "float32", stages=(Stage("outputs", False, message="wrong", layers=ERRORS),))
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


class Bars(Displayable):
    def __init__(self, chart: Chart) -> None:
        self.chart = chart

    def _headline(self) -> str:
        return "Bars"

    def _parts(self) -> Iterator[Chart]:
        yield self.chart


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "red", "other"),
    [(WRONG, "FAILED", "\x1b[32m█"), (PLAN, "missing:", "\x1b[1;36mMine")],
    ids=["verification", "plan"],
)
def test_a_terminal_has_colours_and_a_file_has_the_plain_text(
    value: Displayable, red: str, other: str, monkeypatch: pytest.MonkeyPatch
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


def test_bars_of_layers_that_look_alike_are_one() -> None:
    lines = [line.split() for line in str(WRONG).splitlines() if "layers" in line or "embed" in line]

    assert [line[0] for line in lines[-4:]] == [
        "model.embed",
        "model.layers.{0..19}",
        "model.layers.20",
        "model.layers.{21..29}",
    ]
    assert "┊" in lines[-4]  # what is allowed, where no bar is over it
    assert len(lines[-3][1]) < len(lines[-2][1])
    assert "it begins here, in mlp" in " ".join(lines[-2])


def test_long_labels_of_bars_are_wrapped() -> None:
    label = "Patcher(class_mapping={'A': forward_of(Mine)}, fusions=['qkv', 'gate_up'])"
    gain = Bar(label, 0.9, text="0.90  better")
    lines = str(Bars(Chart("", [gain, Bar("load", 1.0, True, "", "1.00")], 1.0, is_share=True))).splitlines()[-3:]
    assert "".join(line.partition("█")[0].strip() + " " for line in lines) == f"{label} load "
    assert len({line.index("█") for line in lines if "█" in line}) == 1
    assert "█" not in lines[0]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e9])
def test_what_is_not_finite_is_the_longest_and_is_not_allowed(value: float) -> None:
    chart = Chart("", [Bar("a", value)], 1e-5)
    assert (chart.share(value), chart.tone(chart.rows[0])) == (1.0, "bad")


def test_problems_are_said_first() -> None:
    text = str(PLAN)
    assert text.index("Nothing fits.") < text.index("MLP -> Mine")
    assert all(len(line) <= 119 for line in text.splitlines())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_replaced(encoding: str) -> None:
    file = TextIOWrapper(BytesIO(), encoding=encoding)
    PLAN.show(file)
    file.flush()
    assert "Nothing fits." in file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
