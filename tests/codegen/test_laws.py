"""Laws of the generator, over modules that hypothesis makes of fragments of modeling code."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from patcher.codegen import PatchConfig, generate
from tests.codegen.cases import body

# What a line is, and what it must become. `{i}` is the indentation.
LINES = [
    ("import torch", None),
    ("from torch import nn  # noqa: F401", None),
    ("from . import sibling", "from top.models import sibling"),
    ("from .. import cousin as c, other", "from top import cousin as c, other"),
    ("from .a.b import x, y", "from top.models.a.b import x, y"),
    ("from  ..deep  import (z)", "from  top.deep  import (z)"),
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], str]]:
    """Puts a source where it can be found, under a name of its own each time. Returns its module."""
    root = tmp_path_factory.mktemp("laws")
    numbers = itertools.count()

    with pytest.MonkeyPatch.context() as patch:

        def put(source: bytes) -> str:
            top = f"top{next(numbers)}"
            package = root / top / "models"
            package.mkdir(parents=True)
            (package / "modeling_made.py").write_bytes(source)
            (package / "__init__.py").touch()
            (package.parent / "__init__.py").touch()
            importlib.invalidate_caches()  # the folder was listed before
            return f"{top}.models.modeling_made"

        patch.syspath_prepend(str(root))
        yield put


@settings(max_examples=150, deadline=None)
@given(pair=modules(), newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), mark=st.booleans())
def test_without_patches_only_imports_change(
    place: Callable[[bytes], str], pair: Pair, newline: str, ends: bool, mark: bool
) -> None:
    source, expected = ((text + ("\n" if ends else "")).replace("\n", newline) for text in pair)
    name = place((b"\xef\xbb\xbf" if mark else b"") + source.encode())
    text = generate(PatchConfig(name, "out.py"))
    assert text.startswith("\ufeff") == mark
    assert body(text) == re.sub(r"(?<=from )( ?)top", rf"\g<1>{name.split('.')[0]}", expected)


@settings(max_examples=50, deadline=None)
@given(pair=modules())
def test_generating_from_a_generated_file_changes_nothing_more(place: Callable[[bytes], str], pair: Pair) -> None:
    once = generate(PatchConfig(place(pair[0].encode()), "out.py"))
    twice = generate(PatchConfig(place(once.encode()), "out.py"))
    # the first header is part of the text now, below the second
    assert twice.endswith("\n" + once)
    assert twice.count("# GENERATED FILE") == 2


SOURCE = '''
"""A module."""
from math import e, pi

from .other import thing


class A:
    def f(self):
        return pi

    def g(self):
        return e


class B(A): ...


def h(x):
    return x


class C:
    def __init__(self):
        self.x = thing


class Unused:
    pass


def unused():
    pass
'''
INDEPENDENT: list[Callable[[PatchConfig], object]] = [
    lambda c: c.override_method("A.f", "def f(self):\n    return 1", "one"),
    lambda c: c.override_method("A.g", "def f(self):\n    return 2"),
    lambda c: c.override_method("B.new", "def f(self):\n    return 3"),
    lambda c: c.override_method("C.another", "def f(self):\n    return 4"),
    lambda c: c.replace_function("h", "def f(x):\n    return loads(x)"),
    lambda c: c.modify_init("C", "def f(original_init, self):\n    original_init(self)"),
    lambda c: c.add_import("json", names=["loads"]),
    lambda c: c.add_import("json", names=["dumps"]),
    lambda c: c.add_import("decimal", is_from_import=False),
    lambda c: c.drop_import_names("pi"),
    lambda c: c.drop_import_names("e"),
    lambda c: c.exclude_from_output("Unused"),
    lambda c: c.exclude_from_output("unused"),
    lambda c: c.add_helper_after("C", "def after_c(): pass"),
    lambda c: c.add_helper("def on_top(): pass"),
]


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(len(INDEPENDENT))))
def test_the_order_of_independent_patches_does_not_matter(place: Callable[[bytes], str], order: list[int]) -> None:
    module = place(SOURCE.encode())
    straight, shuffled = (PatchConfig(module, "out.py") for _ in range(2))
    for describe in INDEPENDENT:
        describe(straight)
    for index in order:
        INDEPENDENT[index](shuffled)
    assert generate(shuffled) == generate(straight)
