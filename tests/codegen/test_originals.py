"""The fingerprint of the code under each patch: it changes with what the code does, and with nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from patcher.codegen import PatchConfig, create_patch_from_external, generate, write
from patcher.codegen.files.output import changed_originals
from patcher.codegen.generation.header import recorded
from patcher.errors import CodegenError
from patcher.source.scopes import find, fingerprint

#: a source with two variants of each part: what is added in front or behind in the second makes no difference
SOURCE = '''
import math

from torch import nn


class Norm(nn.Module):
    """Normalizes."""

    def __init__(self, size: int = 1):
        super().__init__()
        self.size = size{norm_init}

    def forward(self, x):
        """Forward."""
        return x * math.pi{norm_forward}

    @property
    def eps(self):
        return 1{norm_eps}

    @eps.setter
    def eps(self, value):
        self.value = value{norm_eps_setter}


class Model(nn.Module):
    class Inner:
        def f(self):
            return 1{inner_f}

    def forward(self, x: int) -> int:
        return rotate(x){model_forward}


if math:

    def rotate(x):
        return x{rotate}

else:

    def rotate(x):
        return 0{rotate_else}


def unpatched(x):
    return x{unpatched}
'''
#: the hole of the source, and the name of what is patched there
PATCHED = {
    "norm_init": "Norm.__init__",
    "norm_forward": "Norm.forward",
    "norm_eps": "Norm.eps",
    "rotate": "rotate",
    "rotate_else": "rotate",
}
HOLES = re.findall(r"\{(\w+)\}", SOURCE)
CODE = [" + 1", "; pass", " or math.e", " if 1 else 2"]
NO_CODE = ["  # a comment", "  # type: ignore", "\n\n", " "]
#: edits of the whole text that no patch has to know of
FORMATTING = [
    ("x * math.pi", "(x\n            * math.pi)"),
    ('"""Forward."""', '"""Forward,\n        in other words."""'),
    ('"""Normalizes."""', "'Normalizes more.'"),
    ("size: int = 1", "size: float | None = 1"),
    ("def forward(self, x):", "def forward(self, x: float) -> float:"),
    ("    def rotate(x):", "    # Copied from elsewhere\n    def rotate(x) -> None:"),
    ("return rotate(x)", "return (rotate(x))"),
]


def patched(module: str) -> PatchConfig:
    config = PatchConfig(module, "out.py")
    config.modify_init("Norm", "def init(original_init, self, size):\n    original_init(self, size)")
    config.override_method("Norm.forward", "def forward(self, x):\n    return x")
    config.override_method("Norm.eps", "@property\ndef eps(self):\n    return 2")
    config.override_method("Model.extra", "def extra(self):\n    return 2", new=True)
    config.replace_function("rotate", "def rotate(x):\n    return 2")
    return config


def filled(holes: dict[str, str]) -> str:
    return SOURCE.format(**{name: holes.get(name, "") for name in HOLES})


@settings(max_examples=60, deadline=None)
@given(
    code=st.dictionaries(st.sampled_from(HOLES), st.sampled_from(CODE), max_size=2),
    quiet=st.dictionaries(st.sampled_from(HOLES), st.sampled_from(NO_CODE), max_size=3),
    edits=st.sets(st.sampled_from(FORMATTING)),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_the_alarm_is_of_the_patches_whose_code_changed(
    place: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    code: dict[str, str],
    quiet: dict[str, str],
    edits: set[tuple[str, str]],
    newline: str,
) -> None:
    module = place(filled({}))
    config = patched(module)
    path = write(config, tmp_path_factory.mktemp("out"), diff=True)
    assert changed_originals(config, path) == ()
    text = filled(quiet | code)
    for old, new in sorted(edits):
        text = text.replace(old, new, 1)
    place(text.replace("\n", newline), module)
    changes = changed_originals(config, path)
    assert {change.target for change in changes} == {PATCHED[hole] for hole in code if hole in PATCHED}
    # a file of the new source has nothing to say
    assert changed_originals(config, write(config, path.parent)) == ()


def test_what_appears_where_a_patch_adds_and_what_goes_away(place: Callable[..., str], tmp_path: Path) -> None:
    module = place("class A:\n    pass\n\n\ndef f():\n    return 1\n")
    config = PatchConfig(module, "out.py")
    config.override_method("A.g", "def g(self):\n    return 2")
    config.replace_function("f", "def f():\n    return 2")
    path = write(config, tmp_path, diff=True)
    assert recorded(path.read_text())["A.g"] == "none"
    place("class A:\n    def g(self):\n        return 3\n", module)
    changes = changed_originals(config, path)
    assert {change.target: change.is_gone for change in changes} == {"A.g": False, "f": True}
    assert "and is gone" in str(changes[1])


def test_what_is_left_out_counts_where_something_takes_its_place(place: Callable[..., str], tmp_path: Path) -> None:
    source = "def f():\n    return 1\n\n\ndef g():\n    return 1\n\n\nX = 1\nY = 1\n"
    config = PatchConfig(place(source), "out.py")
    config.exclude_from_output("f", "g", "X", "Y")
    config.add_helper("def f():\n    return 2")
    config.add_post_import_block("X = 2")
    path = write(config, tmp_path, diff=True)
    assert set(recorded(path.read_text())) == {"f", "X"}
    place(source.replace("1", "7"), config.source_module)
    assert [(c.target, c.call) for c in changed_originals(config, path)] == [
        ("X", "exclude_from_output('X')"),
        ("f", "exclude_from_output('f')"),
    ]


def test_of_many_patches_the_fingerprints_stand_at_the_patches(place: Callable[..., str], tmp_path: Path) -> None:
    """The header stays short, and every one of them is found again."""
    names = [f"a_function_with_a_long_name_{number}" for number in range(120)]
    source = "".join(
        f"def {name}():\n    return 1\n\n\nclass {name.title()}:\n    def f(self): ...\n\n\n" for name in names
    )
    config = PatchConfig(place(source), "out.py", "For " + "a long reason, " * 60)
    for name in names:
        config.replace_function(name, f"def {name}():\n    return 2", description="why " * 30)
        config.override_method(f"{name.title()}.f", "def f(self):\n    return 2")
        config.add_import("math", names=[f"pi as {name}_pi"])
    path = write(config, tmp_path, diff=True)
    text = path.read_text()
    header = text[: text.index("# ---", 10)].splitlines()
    assert len(header) + 1 <= 12
    assert "replace function (120 times); override method (120 times)" in "\n".join(header)
    assert recorded(text) == {
        name: fingerprint(find(ast.parse(source), name)) for patch in config.patches for name in [patch.definition]
    }
    place(source.replace("return 1", "return 3", 1), config.source_module)
    assert [change.target for change in changed_originals(config, path)] == [names[0]]


@pytest.mark.parametrize("count", [1, 5, 12, 16, 25, 40, 80])
def test_the_header_is_shortened_step_by_step(place: Callable[..., str], count: int) -> None:
    names = [f"function_{number}" for number in range(count)]
    config = PatchConfig(place("".join(f"def {name}():\n    return 1\n\n\n" for name in names)), "out.py")
    for name in names:
        config.replace_function(name, f"def {name}():\n    return 2", description="a reason of some length " * 5)
    text = generate(config)
    header = text[: text.index("# ---", 10)]
    assert header.count("\n") + 1 <= 12
    assert all(re.search(rf"\b{name}\b", header) for name in names) == (count <= 40)
    assert ("(80 times)" in header) == (count == 80)
    assert len(recorded(text)) == count


def test_the_header_counts_the_longest_kind_of_changes_first(place: Callable[..., str]) -> None:
    names = [f"Class{number}" for number in range(60)]
    config = PatchConfig(place("".join(f"class {name}:\n    def f(self): ...\n\n\n" for name in names)), "out.py")
    for name in names[:2]:
        config.replace_class(name, f"class {name}:\n    pass")
    for name in names[2:]:
        config.override_method(f"{name}.f", "def f(self):\n    return 2")
    header = " ".join(generate(config).partition("# ---")[2].partition("# ---")[0].replace("#", " ").split())
    assert "Differs: replace class Class0, Class1; override method (58 times)" in header


def test_an_external_patch_of_a_method(place: Callable[..., str], tmp_path: Path) -> None:
    module = place("class A:\n    def f(self):\n        return 1\n")
    config = PatchConfig(module, "out.py")
    config.patches.append(create_patch_from_external("A.f", "math", "pi"))
    path = write(config, tmp_path, diff=True)
    place("class A:\n    def f(self):\n        return 2\n", module)
    (change,) = changed_originals(config, path)
    assert (change.target, change.call) == ("A.f", "create_patch_from_external('A.f')")
    with pytest.raises(CodegenError, match=r"can't be found"):
        changed_originals(PatchConfig("nothing_there_of_this_name", "out.py"), path)
