"""Who imports whom: in the tests themselves, and that each rule of the architecture sees what breaks it."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

from tests.support.architecture import (
    circles,
    frame_users,
    not_public,
    private_attributes,
    private_imports,
    reached,
    upward,
)
from tests.support.imports import Module, modules_of, parse


@cache
def ours() -> dict[str, Module]:
    return modules_of(Path(__file__).parents[1])


def is_test(module: str) -> bool:
    return module.rpartition(".")[2].startswith(("test_", "conftest"))


def imported_by(module: Module) -> set[str]:
    return {name for each in module.imports for name in (each.module, f"{each.module}.{each.name}")}


def test_no_test_is_imported() -> None:
    modules = ours()
    imported = {name: {each for each in imported_by(module) if is_test(each)} for name, module in modules.items()}

    assert len([name for name in modules if is_test(name)]) > 40
    assert {name: found for name, found in imported.items() if found} == {}


def test_support_stands_by_itself() -> None:
    modules = ours()
    support = [name for name in modules if name.startswith("tests.support")]
    others = {
        name: {each for each in imported_by(modules[name]) if each.startswith("tests.") and each in modules}
        for name in support
    }

    assert len(support) > 8
    assert {each for found in others.values() for each in found} <= {"tests.real_models", *support}


# --- the rules see what breaks them --------------------------------------------------------------------------------


def package(**sources: str) -> dict[str, Module]:
    """Modules of a package `p`: `a__b` stands for `p.a.b`, `a____init__` for the package `p.a`."""
    found = {"p": parse("p", sources.pop("__init__", ""), is_package=True)}
    for name, source in sources.items():
        is_package = name.endswith("____init__")
        module = "p." + name.removesuffix("____init__").replace("__", ".")
        found[module] = parse(module, source, is_package=is_package)
    return found


LATE = "def f():\n    from p import a\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a\n"


@pytest.mark.parametrize(
    ("back", "found"),
    [
        ("import p.a", True),
        ("from p import a", True),
        ("from . import a", True),
        ("from .a import x", True),
        (LATE, True),
        ("import importlib\ndef f():\n    return importlib.import_module('p.a').x\n", True),
        ("class C:\n    def f(self):\n        import p.a\n", True),
        ("try:\n    import p.a\nexcept ImportError:\n    pass\n", True),
        (TYPES, False),
        (TYPES + "else:\n    from p import a\n", True),
        ('"""from p import a"""\nx = "import p.a"\n', False),
        ("import os", False),
    ],
)
def test_a_circle_is_seen_however_it_is_closed(back: str, found: bool) -> None:
    assert bool(circles(package(a="from p.b import f", b=back))) is found


def test_a_circle_through_a_package_is_seen() -> None:
    modules = package(a____init__="from p.a.one import x", a__one="from p.a import y")
    assert circles(modules) == ["p.a <- p.a.one <- p.a"]
    assert circles(package(a____init__="from p.a.one import x", a__one="", a__two="from p.a import one")) == []


def test_a_late_import_is_exempt_where_it_is_said_to_be() -> None:
    modules = package(a="from p.b import f", b="class C:\n    def f(self):\n        from p import a\n")
    assert circles(modules, {("p.b", "C.f")}) == []
    assert circles(modules, {("p.b", "C.g")}) != []
    assert upward(modules, ["", "b", "a"], {("p.b", "C.f")}) == []
    assert upward(modules, ["", "b", "a"]) == ["p.b:3 imports p.a"]


def test_an_upward_import_and_a_room_of_nowhere_are_seen() -> None:
    modules = package(low="", low__x="", high__y="from p.low.x import z", stray="")
    assert upward(modules, ["", "low", "high"]) == ["p.stray: 'stray' is not in the order"]
    assert upward(modules, ["", "high", "low", "stray"]) == ["p.high.y:1 imports p.low.x"]
    assert upward(package(low=LATE, a=""), ["", "low", "a"]) == ["p.low:2 imports p.a"]


def test_what_an_import_brings_along_is_seen() -> None:
    modules = package(
        a____init__="from p.b import x", a__runtime="", b="import heavy.parts\ndef f():\n    import late"
    )
    assert reached("p.a.runtime", modules) == {"p.a.runtime", "p.a", "p", "p.b", "heavy.parts", "heavy"}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from email import message_from_string", ""),
        ("import email", ""),
        ("from email.message import Message", ""),  # public, see below
        ("from email import message", ""),
        ("from email.parser import Parser", "p.a:1 imports email.parser.Parser"),
        ("from email import parser", "p.a:1 imports email.parser"),
        ("import email.parser", "p.a:1 imports email.parser"),
        ("def f():\n    import email.parser as other", "p.a:2 imports email.parser"),
        ("from email.message import _formatparam", "p.a:1 imports email.message._formatparam"),
        ("import email\nemail.parser.Parser", "p.a:2 uses email.parser"),
        ("import sys\nsys.modules['email.parser']", "p.a:2 uses email.parser"),
        ("import sys\nsys.modules.get('email.parser')", "p.a:2 uses email.parser"),
        ("import importlib\nimportlib.import_module('email.parser')", "p.a:2 imports email.parser"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from email.parser import Parser", ""),
    ],
)
def test_private_names_of_a_library_are_seen(source: str, found: str) -> None:
    shown = private_imports(package(a=source), "email", {"email.message"}, is_module)
    assert shown == ([found] if found else [])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(model):\n    return model._theirs", "p.a:2 uses _theirs"),
        ("def f(model):\n    model._theirs = 1", "p.a:2 uses _theirs"),
        ("def f(model):\n    return getattr(model, '_theirs', None)", "p.a:2 uses _theirs"),
        ("def f(self):\n    return self._theirs", "p.a:2 uses _theirs"),  # of a class that ours inherits
        ("class C:\n    def __init__(self):\n        self._ours = 1\ndef f(c):\n    return c._ours", ""),
        (
            "class C:\n    def f(self):\n        object.__setattr__(self, '_ours', 1)\ndef f(c):\n    return c._ours",
            "",
        ),
        ("def _theirs():\n    pass\ndef f(m):\n    return m._theirs", "p.a:4 uses _theirs"),  # a namesake
        ("class C:\n    _ours: int\ndef f(c):\n    return c._ours + c.__class__ + c.theirs", ""),
        ("def f(module):\n    return module._modules", ""),  # known
    ],
)
def test_private_attributes_of_others_are_seen(source: str, found: str) -> None:
    assert private_attributes(package(a=source), {"_modules"}) == ([found] if found else [])


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nclass C:\n    def f(self):\n        return sys._getframe(1)",
        "from sys import _getframe\nclass C:\n    def f(self):\n        return _getframe(1)",
        "import inspect\nclass C:\n    def f(self):\n        return [each for each in inspect.stack()]",
    ],
)
def test_who_looks_at_frames_is_seen(source: str) -> None:
    assert frame_users(package(a=source, b="import inspect\ninspect.signature(len)")) == {"p.a:C.f"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from p import public", ""),
        ("import p.room", ""),
        ("from p.room import open_", ""),
        ("from p import room", ""),
        ("import p.presets.one", ""),  # its own
        ("from p import hidden", "p.presets:1 imports p.hidden"),
        ("from p.room import closed", "p.presets:1 imports p.room.closed"),
        ("import p.other", "p.presets:1 imports p.other"),
        ("def f():\n    from p.other import x", "p.presets:2 imports p.other.x"),
    ],
)
def test_what_is_not_public_is_seen(source: str, found: str) -> None:
    module = parse("p.presets", source, is_package=True)
    assert not_public(module, "p", {"p": ["public"], "p.room": ["open_"]}) == ([found] if found else [])
