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
from tests.codegen.random_modules import Pair, modules


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
    assert body(text) == re.sub(r"(?<=from )top", name.split(".")[0], expected)


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
