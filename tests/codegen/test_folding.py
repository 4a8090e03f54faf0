"""Definitions that are one line while a file is edited come back to the byte, and hide nothing that is asked for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from patcher.codegen import PatchConfig, generate
from patcher.source.folding import Folded, fold
from patcher.source.scopes import bound_names
from tests.codegen.random_modules import modules

SHAPES = {
    "decorators and comments": "@a\n@b(\n    1\n)\nclass A:\n    x = 1\n    # last\n\n# of B\ndef B(): pass\n",
    "no newline at the end": "class A:\n    x = 1\n\n\ndef B(x):\n    return x",
    "windows": "class A:\r\n    x = '''\r\nclass C: ...  # folded 0\r\n'''\r\n\r\ndef B():\r\n    pass\r\n",
    "on one line": "class A: x = 1\ndef B(): pass\n",
    "beside another": "y = 1; z = 2\nclass A: x = 1; y = 2\nasync def B(): return 1\n",
    "of one name": "class A:\n    x = 1\nclass A:\n    x = 2\ndef B(): ...\n",
    "form feeds": "class A:\n    x = 1\n\x0c\ndef B():\n    return '\x0c'\n",
    "tabs": "if x:\n\tclass A:\n\t\tx = 1\nclass A:\n\tx = 2\ndef B():\n\treturn 1\n",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("touched", [set(), {"A"}, {"B"}, {"A", "B"}])
def test_unfolded_it_is_what_it_was(text: str, touched: set[str]) -> None:
    folded = fold(text, ast.parse(text), touched)
    assert folded.unfold(folded.text) == text
    names = {node.name for node in ast.parse(folded.text).body if hasattr(node, "name") and len(node.body) == 1}
    assert len(folded.hidden) == len({"A", "B"} - touched) or text.count("class A") > 1
    assert {"A", "B"} - touched <= names


@settings(max_examples=60, deadline=None)
@given(modules(), st.sets(st.sampled_from(["A", "f", "Model", "run", "forward"])))
def test_any_module(pair: tuple[str, str], touched: set[str]) -> None:
    text, _ = pair
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    folded = fold(text, tree, touched)
    assert folded.unfold(folded.text) == text
    assert bound_names(ast.parse(folded.text)).keys() == bound_names(tree).keys()
    definitions = [part for part in folded.hidden if not part[0].isspace()]  # the others are statements of those left
    hidden = {node.name for part in definitions for node in ast.parse(part).body if hasattr(node, "name")}
    assert hidden.isdisjoint(touched)


def test_what_binds_names_of_the_module_stays_in_sight() -> None:
    text = "def f():\n    global found\n    found = 1\n\n\ndef g():\n    return found\n"
    folded = fold(text, ast.parse(text), set())
    assert len(folded.hidden) == 1
    assert bound_names(ast.parse(folded.text)).keys() == {"f", "g", "found"}


MEMBERS = """\
class A(Base):
    x = (
        1,
    )

    def __init__(self):
        pass

    @deco
    def f(self):
        y = 1
        return y
        # last

    # of g
    @property
    def g(self): return 1

    @g.setter
    def g(self, value):
        self.y = value

    class B:
        def f(self):
            return 1

    def h(self):
        return A(
            1,
        )

    def i(self):
        global found
        found = 1
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t"])
def test_methods_that_no_edit_touches_are_one_line(newline: str, indent: str) -> None:
    text = MEMBERS.replace("    ", indent).replace("\n", newline)
    hidden = {}
    for touched in ("A", "A.f", "A.g.setter", "A.B.f"):
        folded = fold(text, ast.parse(text), {touched})
        assert folded.unfold(folded.text) == text
        assert ("# last" in folded.text) == (touched in ("A.f", "A.B.f"))
        found = [re.search(r"(?:class|def) (\w+)", part) for part in folded.hidden]
        hidden[touched] = " ".join(match[1] for match in found if match)
    assert hidden == {"A": "f g g B", "A.f": "g g B", "A.g.setter": "f B", "A.B.f": "g g"}


ASSIGNMENTS = {
    "a table": ("TABLE = {\n    1: 2,\n}  # of numbers\nx = 1\n", ["TABLE"]),
    "windows": ("TABLE = [\r\n    1,\r\n]\r\nx = 1\r\n", ["TABLE"]),
    "on one line": ("TABLE = {1: 2}\n", []),
    "beside another": ("x = 1; A = [\n]\nB = [\n]; y = 2\n", []),
    "no newline at the end": ('A = """\nB = ...  # folded 0\n"""', ["A"]),
    "what is looked at": ("__all__ = [\n    'A',\n]\n", []),
    "what binds another name": ("A = [\n    B := 1,\n]\n", []),
    "several names": ("A = B = [\n]\nC, D = [\n1, 2]\nE.f = [\n]\nG: list = [\n]\n", []),
    "what is edited": ("touched = [\n    1,\n]\n", []),
}


@pytest.mark.parametrize(("text", "names"), ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_an_assignment_over_several_lines_is_one_line(text: str, names: list[str]) -> None:
    folded = fold(text, ast.parse(text), {"touched"})
    assert [part.split()[0] for part in folded.hidden] == names
    assert bound_names(ast.parse(folded.text)).keys() == bound_names(ast.parse(text)).keys()
    assert folded.unfold(folded.text) == text


def test_a_comment_that_ends_a_body_is_folded_with_it() -> None:
    text = "class A:\n    x = 1\n    # still A\n# of B\nB = 1\n"
    assert fold(text, ast.parse(text), set()).hidden == ["class A:\n    x = 1\n    # still A"]


PATCHES = {
    "strings that run on": """
def forward(self, x):
    '''What it does.

      deeper

    as before.
    '''
    a = '''first
    second'''
    b = ("one"
         "two")
    c = "one\\
    two"
    d = f'''{x}
  {a}'''
    return a, b, c, d
""",
    "a docstring that stands at the left": """
def forward(self):
    '''Does
  this.
    '''
    x = 1
    return x
""",
    "functions in functions": """
def forward(self, x):
    # first
    @staticmethod
    def inner(y):
        "Inner."
        z = (
            y +
      1
        )

        # of z
        return z  # it

    if x: y = 1; z = 2
    else:
        y = 2
        z = y

    try:
        y = 3
        z = 4
    finally:
        # nothing

        y = 4
        z = 5
    # last
    return inner(
        x,
    )
    # behind
""",
    "a variable of the function around": """
def forward(self, x):
    y = 1
    z = 2

    def inner():
        nonlocal y
        y = Old(x)

    inner()
    return y, z
""",
    "names of the file": """
def forward(self, x):
    global found
    found = x
    a = 1
    b = Old(a)
    c = 1
    d = [Old for Old in (a, b)]
    return c, d
""",
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_is_folded_is_moved_and_renamed_as_what_is_parsed(
    patch: str, newline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = patch.replace("\n", "\n    ")
    original = f"Old = New = found = len\n\n\nclass A:\n    def forward(self): ...\n\n\nclass B:{inner}\n"
    name = f"modeling_folded_{len(patch)}_{len(newline)}"
    (tmp_path / f"{name}.py").write_bytes(original.replace("\n", newline).encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    config = PatchConfig(name, "out.py")
    config.override_method("A.forward", patch, name_map={"Old": "New"})
    config.override_method("A.more", patch, new=True)
    config.override_method("B.more", patch, name_map={"Old": "New"}, new=True)
    folded = generate(config)
    monkeypatch.setattr(Folded, "fold_statements", lambda *_: None)
    assert folded == generate(config)
