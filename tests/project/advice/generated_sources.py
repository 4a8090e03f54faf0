"""Where a generated file comes from, the text of a patch and the modeling module; and where it goes."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from patcher.codegen import PatchConfig, generate, write
from tests.codegen import cases
from tests.codegen.checked import SOURCE
from tests.project.advice import Place, Steps, advice
from tests.project.advice.generated_files import a_case, case_of, described, edited, importable, made
from tests.support.written_modules import written_module

case_of(
    "lambda",
    "was given a lambda, which has no text of its own. Write it as a def.",
    (
        [("replacement=lambda x: x)", "replacement=g)"), ("config.", "def g(x):\n    return 1\n\n\nconfig.")],
        lambda file: file.f(2) == 1,
    ),
)
case_of(
    "builtin",
    "Give a class or a function, its text, or use create_patch_from_external.",
    (
        [("replacement=math.gcd", "replacement=g"), ("config.", "def g(x):\n    return 1\n\n\nconfig.")],
        lambda file: file.f(2) == 1,
    ),
    ([("replacement=math.gcd", '"def g(x): return 1"')], lambda file: file.f(2) == 1),
    (
        [
            (
                'replace_function("f", replacement=math.gcd)',
                'patches.append(create_patch_from_external("f", "math", "gcd"))',
            )
        ],
        lambda file: file.f is math.gcd,
    ),
)
case_of(
    "executed_function",
    "Define it in a file, give its text as a string, or use create_patch_from_external.",
    (
        [('space = {}\nexec("def g(x):\\n    return x", space)', "def g(x):\n    return 1"), ('space["g"]', "g")],
        lambda file: file.f(2) == 1,
    ),
    ([('replacement=space["g"]', '"def g(x): return 1"')], lambda file: file.f(2) == 1),
    (
        [
            (
                'replace_function("f", replacement=space["g"])',
                'patches.append(create_patch_from_external("f", "math", "sqrt"))',
            )
        ],
        lambda file: file.f(4) == 2,
    ),
)
case_of(
    "made_at_run_time",
    "if it was made by type(), write it as a definition.",
    (
        [('type("Made", (), {})', "Made"), ("config.", "class Made:\n    mark = 1\n\n\nconfig.")],
        lambda file: file.A.mark == 1,
    ),
)
case_of(
    "changed_later",
    "Write the change into the definition.",
    ([("factor = 1", "factor = 2"), ("B.factor = 2\n", "")], lambda file: file.A.factor == 2),
)
TWICE = "def g():\n    class B:\n        mark = 1\n    return B\n\n\nclass B:\n    mark = 2\n\n\n"


@advice("If the file was edited since, start again; if the class is defined twice, give one a name of its own; ")
def a_class_that_is_not_where_it_was(at: Place) -> Steps:
    case = cases.read("error_decorated_edit")
    yield lambda: made(at, case)
    again = edited(
        case.config, ('import linecache\n\nlinecache.cache[__file__] = (1, None, ["x = 1\\n"], __file__)\n', "")
    )
    assert hasattr(made(at, case, edited(again, ("pass", "mark = 1"))).A, "mark")
    twice = TWICE + 'config.replace_class("A", B)\n'
    yield lambda: made(at, case, twice)
    assert (
        made(
            at, case, edited(twice, ("class B:\n        mark", "class C:\n        mark"), ("return B", "return C"))
        ).A.mark
        == 2
    )


@advice("Correct the name, or install the package in this environment.", "Name the module that defines the classes.")
def a_module_that_is_not_there(at: Place) -> Steps:
    case = cases.read("error_source_unknown")
    said = yield lambda: made(at, case)
    right = said.partition("(nearest: ")[2].partition(")")[0]
    assert made(at, case, edited(case.config, ("modeling_caes", right))).x == 1
    unknown = cases.read("error_source_unknown_package")
    yield lambda: made(at, unknown)
    installed = at.tmp / "package_that_nobody_has"
    installed.mkdir()
    (installed / "__init__.py").touch()
    (installed / "models.py").write_text("x = 2\n")
    assert made(at, unknown).x == 2
    (installed / "folder").mkdir()
    for name in ("math", "package_that_nobody_has.folder"):
        wrong = edited(unknown.config, ("package_that_nobody_has.models", name))
        yield lambda wrong=wrong: made(at, unknown, wrong)  # type: ignore[misc]
        assert made(at, unknown, edited(wrong, (name, "package_that_nobody_has.models"))).x == 2


@advice(
    "Give a dotted name, such as 'transformers.models.llama.modeling_llama'.",
    "Give one such as 'patched_modeling_llama.py', and the folder to write(output_dir=...).",
    "this config isn't in a file, so there is no folder beside it to write to. Give write(config, output_dir=...).",
)
def a_source_and_a_target(at: Place) -> Steps:
    case = cases.read("error_source_no_name")
    said = yield lambda: made(at, case)
    name = said.partition("such as '")[2].partition("'")[0]
    config = described(at, case, edited(case.config, ("a-b.c", name)))
    assert "class LlamaForCausalLM" in generate(config)
    for wrong in ("../out.py", str(at.tmp / "out.py"), "out.txt"):
        said = yield lambda wrong=wrong: PatchConfig(name, wrong)  # type: ignore[misc]
    target = said.partition("such as '")[2].partition("'")[0]
    assert write(PatchConfig("json.decoder", target), output_dir=at.tmp / "out") == at.tmp / "out" / target

    names: dict[str, Any] = {"PatchConfig": PatchConfig}
    exec("config = PatchConfig('json.decoder', 'of_text.py')", names)
    yield lambda: write(names["config"])
    assert write(names["config"], output_dir=at.tmp / "out").is_file()


@advice("give PatchConfig the full dotted name of {}, from its top package on, or correct the import.")
def an_import_from_above_the_top(at: Place) -> Steps:
    case = a_case("from .beside import x\n", "")
    own = described(at, case).source_module
    models = at.tmp / own.split(".")[0] / "models"
    (models / "beside.py").write_text("x = 1\n")
    with importable(models):
        yield lambda: generate(PatchConfig("modeling_case", "out.py"))
    with importable(at.tmp):
        assert written_module(generate(PatchConfig(own, "out.py")), at.tmp / "full.py").x == 1
    far = cases.read("error_relative_beyond_the_top")
    yield lambda: made(at, far)
    assert made(at, dataclasses.replace(far, source="from math import pi as x\n")).x == math.pi


@advice(
    "patched, or uses what is patched. Use generate() or write() for this config.",
    "can't be imported: {}: {}\nIts text is generate(config); import that to see more.",
)
def a_patcher_of_a_config_that_has_none(at: Place) -> Steps:
    source = "import torch\n\n\nclass A(torch.nn.Module):\n    pass\n"
    case = a_case(source, 'config.add_import("json")\n')
    with importable(at.tmp):
        config = described(at, case)
        yield config.to_patcher
        assert written_module(generate(config), at.tmp / "generated.py").json is json
        assert "import json" in write(config, at.tmp / "out").read_text()

        config = described(at, case, 'config.add_post_import_block("raise ZeroDivisionError")')
        yield config.to_patcher
        with pytest.raises(ZeroDivisionError):
            written_module(generate(config), at.tmp / "generated.py")


@advice("{}: this file can't be read, as it isn't in UTF-8. Save it as UTF-8.")
def files_that_are_no_text(at: Place) -> Steps:
    path = at.tmp / "modeling_checked.py"
    with importable(at.tmp):
        for wrong in ("latin-1", "utf-16"):
            path.write_text(f"# é\n{SOURCE}", wrong)
            yield lambda: generate(PatchConfig("modeling_checked", "out.py"))
            path.write_text(f"# é\n{SOURCE}", "utf-8")
            assert "# é" in generate(PatchConfig("modeling_checked", "out.py"))


@advice(
    "{}: create_patch_from_external({}) can't do patch_type={}. Give the kind of the target: REPLACE_CLASS, "
    "REPLACE_FUNCTION or OVERRIDE_METHOD.",
    "Other arguments than the first ones have names here: write name_map=... or patch_type=...",
)
def arguments_as_another_generator_has_them(at: Place) -> Steps:
    source = "class A:\n    def g(self): return 1\n\n\ndef f(): return A\n"
    call = 'config.patches.append(create_patch_from_external("{}", "math", "gcd", {}))\n'
    kinds = {"A": "REPLACE_CLASS", "f": "REPLACE_FUNCTION", "A.g": "OVERRIDE_METHOD"}
    for target, kind in kinds.items():
        imported = "from patcher.codegen import PatchType\n"
        for wrong in ("patch_type=PatchType.INIT_MODIFICATION", "PatchType.CLASS_REPLACEMENT"):
            case = a_case(source, imported + call.format(target, wrong))
            yield lambda case=case: made(at, case)  # type: ignore[misc]
        file = made(at, case, imported + call.format(target, f"patch_type=PatchType.{kind}"))
        assert math.gcd in (file.A, file.f, getattr(file.A, "g", None))
    replaced = 'config.replace_function("f", "def f(): return B", {}{{"B": "A"}})\n'
    case = a_case(source, replaced.format(""))
    yield lambda: made(at, case)
    file = made(at, case, replaced.format("name_map="))
    assert file.f() is file.A
