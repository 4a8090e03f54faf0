"""Configs of generated files, and the files: a modeling module and a config of it, as texts.

Most are the errors of `tests/codegen/cases`, whose configs are edited here as the messages say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patcher.codegen import PatchConfig, generate
from patcher.codegen.files.projects import load_configs
from tests.codegen import cases
from tests.project.advice import Place, Steps, advice
from tests.support.written_modules import written_module

#: what is to be written in the place of what, in a config
Edit = tuple[str, str]


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """A folder on the path of imports; the modules of cases that come from there don't stay imported."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [
            name for name in sys.modules if name.startswith("package_of_") or name.endswith("_patch_gen_config")
        ]:
            del sys.modules[name]


def edited(text: str, *edits: Edit) -> str:
    for old, new in edits:
        assert old in text, (old, text)
        text = text.replace(old, new)
    return text


def described(at: Place, case: cases.Case, config: str | None = None) -> PatchConfig:
    """The config of a case, its own or another one of the same module."""
    number = len(list(at.tmp.glob("package_of_*")))
    name = f"{case.name}_{number}"
    text = (case.config if config is None else config).replace(f"package_of_{case.name}.", f"package_of_{name}.")
    return cases.load(cases.lay_out(dataclasses.replace(case, name=name, config=text), at.tmp))


def made(at: Place, case: cases.Case, config: str | None = None) -> Any:
    """The file that a config describes, imported."""
    description = described(at, case, config)
    with importable(at.tmp):
        return written_module(generate(description), at.tmp / f"file_of_{description.source_module.split('.')[0]}.py")


def a_case(source: str, config: str) -> cases.Case:
    return cases.Case("advice", (), source, config, "", "")


def calls(said: str) -> str:
    """The calls of methods of the config that a message holds, as lines."""
    found = re.findall(r"config\.\w+\((?:'\w+'|\w+|.*?=.*?)\)", said)
    assert found, said
    return "".join(f"\n{call}" for call in found)


def case_of(name: str, text: str, *ways: tuple[list[Edit], Callable[[Any], bool]]) -> None:
    """A file of `tests/codegen/cases`, what its error advises, and for each way to follow that whether it arrives."""

    @advice(text, name=f"error_{name}")
    def steps(at: Place) -> Steps:
        case = cases.read(f"error_{name}")
        yield lambda: made(at, case)
        for edits, arrives in ways:
            assert arrives(made(at, case, edited(case.config, *edits))), edits


BINDING_CLASSES = (
    "try:\n    from math import pi\nexcept ImportError:\n    class pi:\n        def f(self):\n            pass\n",
    "import sys\n\nif sys:\n    from math import pi\nelse:\n    class pi:\n        def f(self):\n            pass\n",
)


# --- which definition, and how -------------------------------------------------------------------------------------

case_of(
    "target_is_a_function",
    "Use replace_function.",
    (
        [("replace_class", "replace_function"), ("class A:\n    pass", "def A():\n    return 1")],
        lambda file: file.f() == 1,
    ),
)
case_of(
    "target_is_a_class",
    "Use replace_class, or override_method for one of its methods.",
    (
        [("replace_function", "replace_class"), ("def f():\n    pass", "class f:\n    mark = 1")],
        lambda file: file.A.mark == 1,
    ),
    (
        [('replace_function("A")', 'override_method("A.f")'), ("f():\n    pass", "f(self):\n    return 1")],
        lambda file: file.A().f() == 1,
    ),
)


@advice("Leave them out with config.exclude_from_output({}), and use add_helper.", "Use replace_class({}).")
def one_of_several_overloads(at: Place) -> Steps:
    case = cases.read("error_overloads")
    yield lambda: made(at, case)
    replaced = edited(case.config, ("override_method", "replace_class"), ("A.run", "A"), ("def", "class A:\\n  def"))
    assert made(at, case, replaced).A().run(1) == 2
    function = 'config.replace_function("turn", "def turn(x): return 2")'
    said = yield lambda: made(at, case, function)
    without = f"{calls(said)}\nconfig.add_helper('def turn(x): return 2')"
    assert made(at, case, without).turn(1) == 2


case_of(
    "method_of_a_function",
    "{} is a function in {}, and has no methods. Use replace_function({}).",
    (
        [('override_method("f.forward"', "replace_function('f'"), ("(self): pass", "(): return 1")],
        lambda file: file.f() == 1,
    ),
)
case_of(
    "function_with_dot",
    "names no function of the module. For a method, use override_method.",
    ([("replace_function", "override_method"), ("pass", "return 1")], lambda file: file.A().f() == 1),
)


@advice("names no method. Write override_method('Class.method'), or use replace_function for a function.")
def a_method_without_its_class(at: Place) -> Steps:
    source = "def forward(x):\n    return x\n\n\nclass A:\n    def forward(self, x):\n        return x\n"
    case = a_case(source, 'config.override_method("forward", "def forward(self, x): return 1")')
    yield lambda: made(at, case)
    assert made(at, case, edited(case.config, ('("forward', '("A.forward'))).A().forward(2) == 1
    function = edited(case.config, ("override_method", "replace_function"), ("self, ", ""))
    assert made(at, case, function).forward(2) == 1


@advice("names no definition of {}: {} is imported there, from {}. Patch that module, or bind the name yourself with ")
def a_class_that_is_only_imported(at: Place) -> Steps:
    case = cases.read("error_imported_not_defined")
    said = yield lambda: made(at, case)
    place = "package_of_error_imported_not_defined."
    described(at, case, f'config = PatchConfig("{place}layers", "out.py")\n' + case.config)
    folder = max(at.tmp.glob(f"{place[:-1]}_*"))
    (folder / "layers.py").write_text("class Norm:\n    pass\n")
    config = load_configs(str(at.tmp / f"{folder.name.removeprefix('package_of_')}_patch_gen_config.py"))[0]
    with importable(at.tmp):
        assert "class Norm: pass" in generate(config)
    own = (
        f"config.{said.partition('yourself with ')[2].partition(' and')[0]}\nconfig.add_helper('class Norm: mark = 1')"
    )
    assert made(at, case, own).A.norm.mark == 1


@advice("would not always take effect: {} also imports {}, on line {}. {}", "Add config.drop_import_names({}).")
def a_class_that_is_imported_and_defined(at: Place) -> Steps:
    for found in ("from math import pi", "import sys\nif sys:\n    from math import pi"):
        case = a_case(f"{found}\n\n\nclass pi:\n    pass\n", 'config.replace_class("pi", "class N: mark = 1")\n')
        said = yield lambda case=case: made(at, case)  # type: ignore[misc]
        assert made(at, case, case.config + calls(said)).pi.mark == 1


@advice(
    "Leave both out with config.drop_import_names({}) and config.exclude_from_output({}), ",
    "and add a {} of your own with add_helper in the place of the patch.",
)
def a_class_that_is_imported_or_defined(at: Place) -> Steps:
    patches = (
        'config.replace_class("pi", "class N: mark = 1")\n',
        'config.override_method("pi.f", "def f(self): return 1")\n',
    )
    for source in BINDING_CLASSES:
        for patch in patches:
            case = a_case(source + "\n\ndef user():\n    return pi\n", patch)
            said = yield lambda case=case: made(at, case)  # type: ignore[misc]
            # Without the import alone there may be no class at all.
            yield lambda case=case, said=said: made(at, case, case.config + calls(said).splitlines()[1])  # type: ignore[misc]
            helper = "\nconfig.add_helper('class pi: mark = 1')"
            assert made(at, case, calls(said) + helper).user().mark == 1


case_of(
    "excluded_and_patched",
    "{}: exclude_from_output({}) leaves out what {} at {} patches. Remove one.",
    ([('config.exclude_from_output("Norm")\n', "")], lambda file: hasattr(file, "Norm")),
    ([('config.replace_class("Norm", "class N: pass")\n', "")], lambda file: not hasattr(file, "Norm")),
)
case_of(
    "excluded_from_a_tuple",
    "{}: {} can't take {} out of __all__ in line {} of {}, which isn't a list. Leave {} out.",
    ([('config.exclude_from_output("Norm")\n', "")], lambda file: file.__all__ == ["User", "Norm"]),
)
case_of(
    "decorators_replaced",
    "{} is of no use: {} at {} replaces {} with its decorators. Remove one.",
    ([('config.drop_decorators("Experts", "dispatched")\n', "")], lambda file: "forward" not in vars(file.Experts)),
)
case_of(
    "decorators_no_names",
    "drop_decorators({}) names no decorator. Add their names.",
    ([('("Experts")', '("Experts", "dispatched")')], lambda file: file.Experts().forward(2) == 2),
)
case_of(
    "given_twice",
    "is given twice: {} at {} already changes it. Remove one.",
    ([('config.replace_class("A", "class C: pass")\n', ""), ("pass", "mark = 1")], lambda file: file.A.mark == 1),
)
case_of(
    "conflict",
    "{} is replaced as a whole, {} would be lost. Write it into the replacement.",
    (
        [
            ('config.modify_init("A", "def f(original_init, self): pass")\n', ""),
            ("class B: pass", "class B:\\n    def __init__(self): self.mark = 1"),
        ],
        lambda file: file.A().mark == 1,
    ),
)
case_of(
    "nested_class",
    "names a part of a method or of a nested class. Use replace_class({}) for all that is around.",
    (
        [('"A.Inner", "class B: pass"', '"A", "class A:\\n    class Inner: mark = 1"')],
        lambda file: file.A.Inner.mark == 1,
    ),
)
case_of(
    "nested_class_by_external",
    "names a nested class. Use replace_class({}) for all that is around.",
    (
        [
            ('config.patches.append(create_patch_from_external("A.Inner", "math", "pi"))', "REPLACED"),
            ("REPLACED", 'config.replace_class("A", "class A:\\n    from math import pi as Inner")'),
        ],
        lambda file: file.A.Inner > 3,
    ),
)
case_of(
    "external_of_a_part",
    "which isn't a name that a module has. For a method of a class write override_method, with a function that calls ",
    (
        [
            ('config.patches.append(create_patch_from_external("User.forward", "kernels", "Fast.forward"))', "CALLED"),
            ("CALLED", 'config.override_method("User.forward", "def forward(self, x):\\n    return x.bit_length()")'),
        ],
        lambda file: file.User().forward(8) == 4,
    ),
)
case_of(
    "patch_does_not_compile",
    "{} would not compile: {}. The line is {}: look at the patch that it comes from.",
    ([(r"nonlocal x\n    x = 1", "return 1")], lambda file: file.A().f() == 1),
)
case_of(
    "original_name_taken",
    "Write the original's code into the replacement.",
    ([("return rope(q)", "return q + 1")], lambda file: file.rope(1) == 2 and file.original_rope(1) == 1),
)
case_of(
    "new_method_exists",
    "says new=True, and {} has a method {}. Leave new out to replace it.",
    ([(", new=True", ""), ("return x", "return 1")], lambda file: file.MLP().forward(2) == 1),
)
case_of(
    "misspelt_method",
    "If {} is to be a new method, write override_method(..., new=True).",
    ([("forwrad", "forward"), ("return x", "return 1")], lambda file: file.MLP().forward(2) == 1),
    ([('forwrad"', 'forwrad", new=True'), ("return x", "return 1")], lambda file: file.MLP().forwrad(2) == 1),
)
case_of(
    "method_calls_itself",
    "Write the original's code into the patch, or use replace_class with a class that inherits from it.",
    ([("A.f(self) + 1", "1 + 1")], lambda file: file.A().f() == 2),
    (
        [
            (
                'override_method("A.f")\ndef f(self):\n    return A.f(self) + 1',
                'replace_class("A")\nclass B(A):\n    pass',
            ),
            ("    pass", "    def f(self):\n        return super().f() + 1"),
            ("@config", "class A:\n    pass\n\n\n@config"),
        ],
        lambda file: file.A().f() == 2,
    ),
)
case_of(
    "modify_init_without_original",
    "Add original_init in front.",
    (
        [("(self):\n    pass", "(original_init, self):\n    original_init(self)\n    self.mark = 1")],
        lambda file: file.A().mark == 1,
    ),
)
case_of(
    "modify_init_name_taken",
    "and {} has a method of that name. Use override_method for its __init__.",
    (
        [
            ('modify_init("A"', 'override_method("A.__init__"'),
            ("f(original_init, self): original_init(self)", "f(self): self.mark = 1"),
        ],
        lambda file: file.A().mark == 1,
    ),
)
case_of(
    "modify_init_inherited",
    "Use override_method('{}.__init__') with a super().__init__() in it.",
    (
        [
            ('modify_init("A")', 'override_method("A.__init__")'),
            ("(original_init, self)", "(self)"),
            ("print(original_init)", "super().__init__()\n    self.mark = 1"),
        ],
        lambda file: file.A().mark == 1,
    ),
)
