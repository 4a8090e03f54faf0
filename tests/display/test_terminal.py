"""In a terminal: colours where it is one, the width it has, bars of blocks."""

from __future__ import annotations

from io import BytesIO, StringIO, TextIOWrapper

import pytest

from patcher.display.parts import Cell, Weights, bar
from patcher.display.shown import Displayable
from patcher.display.tree import module_tree
from patcher.inspection.plan import Plan
from patcher.verification.comparing import Stage
from patcher.verification.layers import LayerErrors
from patcher.verification.verify import Verification, _errors

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
    lines = [line.split() for line in str(WRONG).splitlines() if "layers." in line or "embed" in line]

    assert [line[0] for line in lines] == [
        "model.embed",
        "model.layers.{0..19}",
        "model.layers.20",
        "model.layers.{21..29}",
    ]
    assert len(lines[1][2]) < len(lines[2][2])
    assert "it begins here, in mlp" in " ".join(lines[2])


@pytest.mark.parametrize("value", [float("inf"), 1e9])
def test_what_is_not_finite_or_large_is_the_longest_and_is_not_allowed(value: float) -> None:
    layers = LayerErrors("", 1e-5, (("right", 0.0), ("near", 1e-6), ("wrong", value)), "wrong")
    right, near, wrong = _errors(layers)
    assert [right[1], right[2]] == [Cell("", "good"), "the same"]
    assert near[1] == bar(1 / 3, "good")
    assert wrong[1] == bar(1.0 if value == float("inf") else 2.0, "bad")


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
