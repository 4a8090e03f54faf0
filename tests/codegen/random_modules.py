"""Modules that hypothesis makes of fragments of modeling code, and what their imports must become."""

from __future__ import annotations

from hypothesis import strategies as st

# What a line is, and what it must become. `{i}` is the indentation.
LINES = [
    ("import torch", None),
    ("from torch import nn  # noqa: F401", None),
    ("from . import sibling", "from top.models import sibling"),
    ("from .. import cousin as c, other", "from top import cousin as c, other"),
    ("from .a.b import x, y", "from top.models.a.b import x, y"),
    ("from  ..deep  import (z)", "from top.deep import (z)"),
    (
        "from ..deep import (\n{i}    one,  # one\n\n{i}    two,\n{i})",
        "from top.deep import (\n{i}    one,  # one\n\n{i}    two,\n{i})",
    ),
    ("x = 1; y = (2,\n        3)", None),
    ("# a comment, from . import nothing", None),
    ('s = """\nfrom . import text\n  """', None),
    ("", None),
    ("f'{x!r:>{y}}'", None),
    ("lambda *a, **k: (yield)", None),
    ("x: int", None),
    ("@deco\n{i}class A(Base, metaclass=M): ...", None),
    ("def f(a, /, b, *, c=1, **k) -> 'T': return a  # same line", None),
    ("z = x if y else \\\n    z", None),
    ("\x0c", None),
    ("del x,", None),
]
BLOCKS = [
    "if TYPE_CHECKING:",
    "try:",
    "with open(x) as f, g():",
    "for i in range(3):",
    "class Model(nn.Module):",
    "async def run(self, x=(1, 2)):",
    "def forward(self, x):",
    "while x:",
]
Pair = tuple[str, str]


def _line(indent: str) -> st.SearchStrategy[Pair]:
    def fill(pair: tuple[str, str | None]) -> Pair:
        before, after = pair[0], pair[1] or pair[0]
        return tuple(indent + text.replace("{i}", indent) if text else text for text in (before, after))  # type: ignore[return-value]

    return st.sampled_from(LINES).map(fill)


@st.composite
def modules(draw: st.DrawFn, indent: str = "", unit: str = "") -> Pair:
    unit = unit or draw(st.sampled_from(["    ", "  ", "\t"]))
    before, after = [], []
    for _ in range(draw(st.integers(0, 4))):
        if len(indent) < 3 * len(unit) and draw(st.booleans()):
            head = draw(st.sampled_from(BLOCKS))
            inner = draw(modules(indent + unit, unit))
            tail = f"\n{indent}except ValueError:\n{indent}{unit}pass" if head == "try:" else ""
            for lines, text in zip((before, after), inner, strict=True):
                lines.append(f"{indent}{head}\n{indent}{unit}pass\n{text}{tail}")
        else:
            pair = draw(_line(indent))
            before.append(pair[0])
            after.append(pair[1])
    return "\n".join(before), "\n".join(after)
