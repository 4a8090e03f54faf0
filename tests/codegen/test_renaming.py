"""The law of renaming: code that calls a name of its module otherwise computes the same, or is refused."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from patcher.errors import CodegenError
from patcher.source.renaming import renaming
from patcher.source.texts import Text, applied

# `old` is what the module of the patch calls something, and `new` what the file calls it.
FRAGMENTS = [
    "out.append(old)",
    "out.append([old for old in x])",
    "out.append([old for _ in x])",
    "out.append([y for y in [old]])",
    "out.append([old for y in x if (lambda old: old)(y)])",
    "out.append((lambda old: old)(3))",
    "out.append((lambda x=old: x)())",
    "out.append(dict(old=old, new=1))",
    "out.append(type('T', (), dict(old=1, new=2)).old)",
    "match type('T', (), dict(old=1, new=2))():\n    case object(old=y): out.append(y)",
    "out.append([new for new in x])",
    "def g(old=old): return old\nout.append(g())",
    "def g(old): return old\nout.append(g(1))",
    "def g(): return old\nout.append(g())",
    "def g(new=2): return old, new\nout.append(g())",
    "def g():\n    def h(): return old\n    old = 4\n    return h()\nout.append(g())",
    "class C:\n    old = old\n    def m(self): return old, self.old\nout.append(C().m())",
    "class C:\n    new = 3\n    def m(self): return old, self.new\nout.append(C().m())",
    "for old in x: out.append(old)",
    "with open_(old) as old: out.append(old)",
    "try:\n    fail()\nexcept ValueError as old: out.append(str(old))",
    "new = 5\nout.append(new)",
    "import math as old\nout.append(old.pi)",
    "global old\nold = 9\nout.append(old)",
    "def g(y):\n    def h():\n        nonlocal y\n        y = old\n    h()\n    return y\nout.append(g(1))",
    "out.append((old := 3))",
    "out.append(f'{old!r} old')",
]


def run(text: str, name: str) -> Any:
    import contextlib

    def fail() -> None:
        raise ValueError("3")

    space: dict[str, Any] = {name: 7, "open_": contextlib.nullcontext, "fail": fail}
    try:
        exec(text, space)
    except SyntaxError as error:  # such as a `global` behind a use
        return type(error)
    try:
        space["f"]([1, 2], out := [])
    except (NameError, UnboundLocalError) as error:
        return type(error)
    return out, space.get(name)


def variables(text: str) -> set[str]:
    """The names that anything in a function binds, those of comprehensions too."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return names | {node.asname for node in nodes if isinstance(node, ast.alias) and node.asname}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4))
@example(["out.append(old)", "new = 5\nout.append(new)"])
def test_code_under_another_name_does_the_same(fragments: list[str]) -> None:
    body = textwrap.indent("\n".join(fragments), "    ")
    text = f"def f(x, out):\n{body}\n"
    before = run(text, "old")
    if before is SyntaxError:
        return
    try:
        after = applied(text, renaming(Text(text), {"old": "new"}))
    except CodegenError as error:
        message = str(error)
    else:
        assert run(after, "new") == before, after
        return
    # Refused only where there is a variable of one of the names, or a global that is bound.
    assert any(
        [
            f"'old' has to be written 'new' in a place where a variable of the patch is called {name!r}" in message
            and name in variables(text)
            for name in ("old", "new")
        ]
        + [
            "`global`" in message and "global old" in text,
            "f-string" in message and "f'{old" in text,
        ]
    )


def test_a_name_that_an_f_string_shows_is_refused_and_a_variable_does() -> None:
    names = {"old": "newer"}
    with pytest.raises(CodegenError, match="'old', a name in an f-string, has to be written differently"):
        renaming(Text('f"{old=}"'), names)
    text = Text('value = old\nf"old={value}"')
    assert applied(text.text, renaming(text, names)) == 'value = newer\nf"old={value}"'
