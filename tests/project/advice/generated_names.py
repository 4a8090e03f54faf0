"""Names in generated files: imports, helpers and blocks, and what a patch uses."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from typing import Any

import pytest

from patcher.codegen import generate
from patcher.codegen.files.projects import load_configs
from patcher.errors import PatcherWarning
from tests.codegen import cases
from tests.project.advice import Place, Steps, advice
from tests.project.advice.generated_files import a_case, calls, case_of, described, edited, importable, made
from tests.support.written_modules import written_module

case_of(
    "import_with_names_and_not_from",
    "was given names and is_from_import=False. Leave one of them out.",
    ([(', names=["loads"]', "")], lambda file: file.json is json),
    ([(", is_from_import=False", "")], lambda file: file.loads is json.loads),
)
case_of(
    "import_one_alias_for_two",
    "was given one alias for {} names. Write names=['name as other', ...].",
    ([('["loads", "dumps"], alias="j"', '["loads as l", "dumps as d"]')], lambda file: file.l is json.loads),
)
case_of(
    "missing_in_block",
    " Import it with config.add_import.",
    ([('1")', '1")\nconfig.add_import("math", names=["pi as x_of_another"])')], lambda file: file.y == math.pi + 1),
)
case_of(
    "helper_twice",
    "{}: {} adds {}, which is already a helper, added at {}. Rename one.",
    ([('pass")\nconfig.add_helper("def f', 'pass")\nconfig.add_helper("def g')], lambda file: file.f is not file.g),
)
case_of(
    "excluded_but_patch_uses_it",
    "keep it, or bind it another way: the config leaves it out",
    ([('config.exclude_from_output("g")\n', "")], lambda file: file.f(2) == 1),
    ([('t("g")\n', 't("g")\nconfig.add_helper("def g(x): return 7")\n')], lambda file: file.f(2) == 7),
)

#: what may bind a name in a modeling file, and can be left out of it
BINDING = {
    "an import": "from math import pi\n",
    "a class": "class pi:\n    pass\n",
    "a constant": "pi = 3\n",
    "a constant, changed": "pi: int = 3\npi += 1\n",
    "an import behind a guard": "import sys\n\nif sys:\n    from math import pi\n",
    "an import, or else a constant": "try:\n    from apex import pi\nexcept ImportError:\n    pi = 3\n",
    "an import, or else a class": "try:\n    from math import pi\nexcept ImportError:\n    class pi:\n        pass\n",
}  # fmt: skip
#: what can't
STAYING = ("pi, e = 3, 2\n", "for pi in (1, 2):\n    pass\n", "def f():\n    global pi\n    pi = 3\n")


@advice("already binds. Give it an alias{}.", ", or leave the original out: {}")
def an_import_of_a_known_name(at: Place) -> Steps:
    for source in (*BINDING.values(), *STAYING):
        case = a_case(source, 'config.add_import("cmath", names=["tau as pi"])\n')
        said = yield lambda case=case: made(at, case)  # type: ignore[misc]
        assert ("leave the original out" in said) is (source not in STAYING)
        if source not in STAYING:
            assert made(at, case, case.config + calls(said)).pi == math.tau
        assert made(at, case, edited(case.config, ("as pi", "as other"))).other == math.tau


@advice("has the name of something in {}. Rename it{}.")
def a_helper_of_a_known_name(at: Place) -> Steps:
    for source in (*BINDING.values(), *STAYING):
        case = a_case(source, "config.add_helper(\"def pi(): return 'mine'\")\n")
        said = yield lambda case=case: made(at, case)  # type: ignore[misc]
        if source not in STAYING:
            assert made(at, case, case.config + calls(said)).pi() == "mine"
        assert made(at, case, edited(case.config, ("pi", "other"))).other() == "mine"


@advice(
    "add config.add_import({}{}, is_from_import=False)",
    "add config.add_import({}, names=[{}])",
    "defined {}; add config.add_helper({})",
    "bound {}; add config.add_post_import_block with the statements that bind it there",
    "import it with config.add_import, or add it with config.add_helper or config.add_post_import_block",
)
def names_that_a_patch_uses(at: Place) -> Steps:
    case = cases.read("error_missing_import")
    config = "import xml.dom.minidom\n" + edited(case.config, ("loads, LIMIT", "xml.dom.minidom, LIMIT"))
    said = yield lambda: made(at, case, config)
    line = re.search(r"LIMIT: bound on line (\d+) of (\S+);", said)
    assert line
    text = (at.tmp / line[2]).read_text().splitlines()[int(line[1]) - 1]
    unknown = (
        'config.add_import("math", names=["e as unheard_of"])',
        'config.add_helper("def unheard_of(): pass")',
        'config.add_post_import_block("unheard_of = 7")',
    )
    followed = f"{config}{calls(said)}\nconfig.add_post_import_block({text!r})\n"
    for way in unknown:
        file = made(at, case, followed + way)
        found = file.A().forward(2)
        assert found[1:] == (
            importlib.import_module("os.path"),
            "2",
            importlib.import_module("xml.dom.minidom"),
            3,
            2,
            file.unheard_of,
        )


@advice("{} already binds. Give it an alias{}.", "the name of something in {}. Rename it{}.")
def a_name_that_is_left_out_in_part(at: Place) -> Steps:
    """A file that binds a name in several ways binds it until all of them are left out."""
    added = 'config.add_import("cmath", names=["tau as pi"])\n', "config.add_helper(\"def pi(): return 'mine'\")\n"
    parts = "import sys\n\nif not sys:\n    from math import pi\nelse:\n    pi = 3\n"
    for config, source in itertools.product(added, (parts, "pi = 3\nfor pi in (1, 2):\n    pass\n")):
        case = a_case(source, config)
        for left_out in ("config.exclude_from_output('pi')", "config.drop_import_names('pi')"):
            if "import" in source and "drop" in left_out:  # an import with a fallback, which goes with it
                file = made(at, case, config + left_out)
                assert file.pi == math.tau or file.pi() == "mine"
            elif "import" in source or "exclude" in left_out:
                said = yield lambda case=case, config=config + left_out: made(at, case, config)  # type: ignore[misc]
                if "import" in source:
                    file = made(at, case, config + left_out + calls(said))
                    assert file.pi == math.tau or file.pi() == "mine"
        right = edited(config, ("pi", "other"))
        assert hasattr(made(at, case, right), "other")


@advice("{} already binds. Give it an alias{}.", "the name of something in {}. Rename it{}.")
def a_name_whose_guard_does_more_than_import_it(at: Place) -> Steps:
    """A guard goes with its import where nothing else is in it but another value of the name; what else it does stays.

    A value that belongs to no import in that guard is no fallback, and stays as well until it is left out by its name.
    """
    added = 'config.add_import("cmath", names=["tau as pi"])\n', "config.add_helper(\"def pi(): return 'mine'\")\n"
    guard = "import sys\n\nif not sys:\n    from math import pi\nelse:\n    pi = 3\n"
    tried = "import sys\n\ntry:\n    from math import pi\nexcept ImportError:\n    sys.other = 1\n    pi = 3\n"
    more = f"{guard}    sys.mark_of_a_guard = 1\n"
    nested = f"{guard}    if sys:\n        setattr(sys, 'mark_of_a_guard', 1)\n"
    last = f"{tried}finally:\n    sys.mark_of_a_guard = 1\n"
    apart = "import sys\nfrom math import pi\n\nif not sys:\n    pi = 3\nelse:\n    sys.mark_of_a_guard = 1\n"
    for text, source in itertools.product(added, (guard, tried, more, nested, last, apart)):
        config = f"{text}config.drop_import_names('pi')\n"
        case, left_out = a_case(source, config), ""
        if source in (more, nested, apart):
            said = yield lambda case=case: made(at, case)  # type: ignore[misc]
            left_out = calls(said)
        file = made(at, case, config + left_out)
        assert file.pi == math.tau or file.pi() == "mine"
        assert hasattr(file.sys, "mark_of_a_guard") == ("mark_of" in source)
        vars(file.sys).pop("mark_of_a_guard", None)
    unrelated = a_case("import sys\n\nif sys:\n    pi = 3\n", f"{added[0]}config.drop_import_names('pi')\n")

    def warned(more: str) -> Any:
        with pytest.warns(PatcherWarning, match="names nothing that"):
            return made(at, unrelated, unrelated.config + more)

    said = yield lambda: warned("")
    assert warned(calls(said)).pi == math.tau


@advice("imported {}; add config.add_import with the absolute name of its module")
def a_name_that_a_config_imports_relatively(at: Place) -> Steps:
    package = at.tmp / "package_of_configs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text("LIMIT = 3\n")
    case = a_case("def f(x):\n    return x\n", "")
    own = described(at, case).source_module

    def file(name: str, more: str = "") -> Any:
        text = f'{cases.PRELUDE}from .base import LIMIT\n\nconfig = PatchConfig("{own}", "{name}.py")\n'
        (package / f"{name}.py").write_text(
            f'{text}@config.replace_function("f")\ndef f(x):\n    return x + LIMIT\n\n\n{more}'
        )
        with importable(at.tmp):
            (config,) = load_configs(str(package / f"{name}.py"))
            return written_module(generate(config), at.tmp / f"file_{name}.py")

    yield lambda: file("wrong")
    assert file("right", 'config.add_import("package_of_configs.base", names=["LIMIT"])\n').f(1) == 4


case_of(
    "dropped_but_used",
    "removes what {} still uses. Keep it, or bind {} another way{}.",
    ([('config.drop_import_names("pi")', "")], lambda file: file.f() == math.pi),
    ([('("pi")', '("pi")\nconfig.add_import("cmath", names=["tau as pi"])')], lambda file: file.f() == math.tau),
    ([('("pi")', '("pi")\nconfig.exclude_from_output("f")')], lambda file: not {"f", "pi"} & {*vars(file)}),
)


@advice("removes what {} still uses. Keep it, or bind {} another way{}.")
def a_name_that_the_module_uses_while_it_is_imported(at: Place) -> Steps:
    source = "from math import pi\n\nif pi > 4:\n    raise ValueError\n"
    case = a_case(source, 'config.drop_import_names("pi")\n')
    said = yield lambda: made(at, case)
    assert said.endswith("another way.")
    assert made(at, case, "").pi == math.pi
    assert made(at, case, case.config + 'config.add_import("cmath", names=["pi"])').pi == math.pi
    tried = a_case(
        "try:\n    from math import pi\nexcept ImportError:\n    pi = None\n\n\ndef f():\n    return pi\n", case.config
    )
    said = yield lambda: made(at, tried)
    assert "removes what 'f' still uses" in said
    assert made(at, tried, case.config + 'config.add_import("cmath", names=["tau as pi"])').f() == math.tau
    constant = a_case(source.partition("\nif")[0] + "TWICE = 2 * pi\n", case.config)
    said = yield lambda: made(at, constant)
    assert "or leave 'TWICE' out as well." in said
    assert not hasattr(made(at, constant, case.config + 'config.exclude_from_output("TWICE")'), "TWICE")


case_of(
    "excluded_but_used",
    ", or leave {} out as well",
    ([('config.exclude_from_output("Norm")', "")], lambda file: file.User.norm is file.Norm),
    ([('("Norm")', '("Norm")\nconfig.add_helper("class Norm: pass")')], lambda file: file.User.norm is file.Norm),
    ([('("Norm")', '("Norm", "User")')], lambda file: file.__all__ == []),
)

case_of(
    "renamed_to_a_local_name",
    "has to be written {} in a place where a variable of the patch is ",
    (
        [("x, rotate=None):\n    return rotate or turned(x)", "x, known=1):\n    return known or turned(x)")],
        lambda file: file.rotate(2) == 1,
    ),
)
case_of(
    "modify_init_rebinds",
    "has to be written {} in a place where a variable of the patch is ",
    (
        [("    init = init\n", "    other = init\n"), ("    init(self, a)", "    other(self, a)")],
        lambda file: file.A(3).a == 3,
    ),
)
case_of(
    "renamed_in_a_class_body",
    "has to be written {} in a place where a variable of the patch is ",
    ([("turn = turn = 1", "own = 1"), ("other = turn", "other = own")], lambda file: file.A.other == 1),
)
case_of(
    "renamed_global",
    "is assigned by a `global` statement. Only what is read can be renamed.",
    (
        [("    global turn\n    turn = x\n    return turn", "    turn = x\n    return turn")],
        lambda file: file.rotate(2) == 2,
    ),
)
case_of(
    "block_bound_later",
    "again further down. Rename it",
    ([('"LIMIT = 4"', '"OTHER = 4"')], lambda file: file.f(9) == 3 and file.OTHER == 4),
    ([('")', '")\nconfig.exclude_from_output("LIMIT")')], lambda file: file.f(9) == math.pi and file.LIMIT == 4),
)


@advice(
    "and {} {}. If that one is meant, write name_map={{}: {}}; if not, give the first another name, there or by "
    "name_map."
)
def a_name_that_means_something_else(at: Place) -> Steps:
    for code, (in_file, in_config) in {
        "pi = 4\n": (3, 4),
        "def pi(): return 4\n": (3, None),
        "from math import e as pi\n": (3, math.e),
        "from math import pow as pow\n": (pow, math.pow),
    }.items():
        name = "pow" if "pow" in code else "pi"
        patch = f"@config.replace_function('f')\ndef f(): return {name}\n"
        case = a_case("pi = 3\n\n\ndef f(): return 0\n", code + patch)
        said = yield lambda case=case: made(at, case)  # type: ignore[misc]
        (written,) = re.findall(r"name_map=\{.*?\}", said)
        assert made(at, case, edited(code + patch, ("'f'", f"'f', {written}"))).f() == in_file
        renamed = re.sub(rf"\b{name}\b(?! as)", "other", code)
        bound = f"config.add_post_import_block({renamed!r})\n"
        mapped = edited(patch, ("'f'", f"'f', name_map={{{name!r}: 'other'}}"))
        for followed in (renamed + bound + edited(patch, (name, "other")), code + bound + mapped):
            value = made(at, case, followed).f()
            assert value == in_config or value() == 4


@advice("{}: {} binds {}, which {} uses and has from {}. Give it another name.")
def a_builtin_that_is_bound(at: Place) -> Steps:
    for source in ("def f(x): return floor(x)\n", "from math import *\n\n\ndef f(x): return floor(x)\n"):
        name = "floor" if "*" in source else "max"
        case = a_case(source.replace("floor", name), f"config.add_import('operator', names=['index as {name}'])\n")
        yield lambda case=case: made(at, case)  # type: ignore[misc]
        assert made(at, case, edited(case.config, (f"as {name}", "as other"))).other(3) == 3
