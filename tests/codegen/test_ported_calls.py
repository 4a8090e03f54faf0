"""Calls that configs of other generators make, each in a config of its own: what is patched, the calls, the result."""

from __future__ import annotations

import ast
import copy
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from patcher.codegen import (
    ModelingCodeGenerator,
    PatchConfig,
    PatchKind,
    PatchType,
    create_patch_from_external,
    generate,
)
from patcher.codegen.files.projects import load_configs
from patcher.errors import CodegenError, PatcherWarning
from tests.codegen.cases import body

BASE = """
from patcher.codegen import PatchConfig

config = PatchConfig("ported_modeling", "base.py")


class Base: ...


config.add_import("json", names=["loads"])
config.add_post_import_block("LIMIT = 3")
config.drop_import_names("pi")


@config.add_helper
def helped(x):
    return loads(x)


@config.add_helper_after("Base")
class Behind(Base):
    pass


@config.override_method("Base.forward")
def base_forward(self, x: "BaseOutput") -> "_BaseState":
    baseline = Base2
    return BaseOutput(_BaseState, x, baseline, Base)
"""


class Ported(NamedTuple):
    source: str
    calls: str
    expected: str


PORTED = {
    "lists of another config": Ported(
        "from math import pi\n\n\nclass A:\n    pass\n",
        """
        from ported_base import config as other
        config.additional_imports.extend(other.additional_imports)
        config.post_import_blocks.extend(other.post_import_blocks)
        config.helpers.extend(h for h in other.helpers if h.__name__ != "unknown")
        config.drop_imported_names.update(other.drop_imported_names)
        """,
        "from json import loads\nLIMIT = 3\ndef helped(x):\n    return loads(x)\nclass A:\n    pass\n",
    ),
    "plain functions and texts": Ported(
        "x = 1\n",
        """
        def plain(x):
            return x

        class Plain:
            pass

        config.helpers.append(plain)
        config.helpers += [Plain]
        config.helpers.insert(0, "def first(): return 0")
        config.post_import_blocks.append("y = 2")
        config.drop_imported_names |= {"unused"}
        """,
        "y = 2\ndef first(): return 0\ndef plain(x):\n    return x\nclass Plain:\n    pass\nx = 1\n",
    ),
    "helpers of another config, one by one": Ported(
        "class Base: ...\n",
        """
        from ported_base import config as other
        for helper in other.helpers:
            if helper.__name__ == "Behind":
                config.add_helper_after("Base", helper)
        """,
        "class Base: ...\nclass Behind(Base):\n    pass\n",
    ),
    "words that names begin with": Ported(
        "Base2 = 2\nclass BaseMoeOutput: ...\nclass _BaseMoeState: ...\n"
        "class BaseMoe:\n    def forward(self, x): ...\n",
        """
        from ported_base import base_forward
        config.override_method("BaseMoe.forward", replacement=base_forward, name_map={"Base": "BaseMoe"})
        """,
        "Base2 = 2\nclass BaseMoeOutput: ...\nclass _BaseMoeState: ...\nclass BaseMoe:\n"
        '    def forward(self, x: "BaseMoeOutput") -> "_BaseMoeState":\n        baseline = Base2\n'
        "        return BaseMoeOutput(_BaseMoeState, x, baseline, BaseMoe)\n",
    ),
    "one name of two spellings": Ported(
        "import torch.nn.functional as F\nfrom os import path as p\n",
        """
        config.add_import("torch.nn", names=["functional as F"])
        config.add_import("os.path", alias="p", is_from_import=False)
        """,
        "import torch.nn.functional as F\nfrom os import path as p\n",
    ),
    "an import of a module": Ported("x = 1\n", 'config.add_import("json")', "import json\nx = 1\n"),
    "new methods in the order of the config": Ported(
        "class A:\n    def f(self): ...\n",
        """
        for name in ("z", "a", "m"):
            config.override_method(f"A.{name}", f"def {name}(self): return {name!r}", new=True)
        """,
        "class A:\n    def f(self): ...\n    def z(self): return 'z'\n    def a(self): return 'a'\n"
        "    def m(self): return 'm'\n",
    ),
    "what is imported instead": Ported(
        "class Norm: ...\ndef rope(): ...\nclass A:\n    def f(self): ...\n",
        """
        from patcher.codegen import PatchType, create_patch_from_external as external
        config.patches.append(external("Norm", "kernels", "FastNorm", patch_type=PatchType.CLASS_REPLACEMENT))
        config.patches.append(external("rope", "kernels", "rope", patch_type=PatchType.FUNCTION_REPLACEMENT))
        config.patches.append(external("A.f", "kernels", "f", patch_type=PatchType.METHOD_OVERRIDE))
        """,
        "from kernels import FastNorm as Norm\nfrom kernels import rope\nclass A:\n    from kernels import f\n",
    ),
    "an import with its fallback, bound by the config": Ported(
        "import sys\nif sys.flags:\n    from fast import kernel\nelse:\n    kernel = None\n"
        "def f(): return kernel, sys\n",
        'config.drop_import_names("kernel")\nconfig.add_post_import_block("kernel = print")',
        "import sys\nkernel = print\ndef f(): return kernel, sys\n",
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ported_base.py").write_text(BASE)
    (tmp_path / "ported_modeling.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ported_base", "ported_modeling", "ported_patch_gen_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def described(place: Path, source: str, calls: str) -> Any:
    """The config with some calls, for a module of this text."""
    (place / "ported_modeling.py").write_text(source)
    calls = "\n".join(line.removeprefix("        ") for line in calls.strip("\n").split("\n"))
    path = place / "ported_patch_gen_config.py"
    path.write_text(
        "from patcher.codegen import PatchConfig\n\n"
        f'config = PatchConfig(source_module="ported_modeling", target_file="out.py")\n{calls}\n'
    )
    return load_configs(str(path))[0]


def tree(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("ported", PORTED.values(), ids=PORTED)
@pytest.mark.filterwarnings("ignore:drop_import_names:patcher.errors.PatcherWarning")
def test_ported(ported: Ported, place: Path) -> None:
    config = described(place, ported.source, ported.calls)
    for name in ("additional_imports", "post_import_blocks", "drop_imported_names"):
        setattr(config, name, copy.copy(getattr(config, name)))
    assert tree(body(generate(config))) == tree(ported.expected)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config.post_import_blocks))):
        if isinstance(other, PatchConfig):
            assert generate(other) == generate(config)
        else:
            assert other == config.post_import_blocks


def test_a_name_that_one_release_does_not_import_is_told(place: Path) -> None:
    config = described(place, "from math import pi, e\n", 'config.drop_import_names("p", "e")')
    with pytest.warns(
        PatcherWarning, match=r"drop_import_names\('p'\) names nothing that ported_modeling imports\. Nearest: pi\."
    ) as told:
        text = generate(config)
    assert [(Path(each.filename).name, each.lineno) for each in told] == [("ported_patch_gen_config.py", 4)]
    assert body(text) == "from math import pi\n"


RENAMED = {
    ("Model", "Net"): {
        "Model": "Net",
        "ModelOutput": "NetOutput",
        "_ModelState": "_NetState",
        "__Model": "__Model",
        "Models": "Models",
        "Model2": "Model2",
        "Model_X": "Model_X",
        "MyModel": "MyModel",
        "model": "model",
    },
    ("rotate", "turn"): {"rotate": "turn", "rotate_half": "rotate_half", "rotateX": "rotateX", "_rotate": "_rotate"},
}


@pytest.mark.parametrize("pair", RENAMED, ids=str)
def test_which_names_a_name_map_means(place: Path, pair: tuple[str, str]) -> None:
    (place / "ported_modeling.py").write_text("def f(): ...\n")
    names = RENAMED[pair]
    bound = "".join(f"{name} = 0\n" for name in {*names, *names.values()})
    (place / "ported_modeling.py").write_text(f"{bound}def f(): ...\n")
    config = PatchConfig("ported_modeling", "out.py")
    config.replace_function("f", f"def f(): return [{', '.join(names)}]", name_map=dict([pair]))
    (function,) = (node for node in ast.parse(generate(config)).body if isinstance(node, ast.FunctionDef))
    assert ast.unparse(function) == f"def f():\n    return [{', '.join(names.values())}]"


def test_the_longest_name_counts_and_an_import_in_the_patch_stays(place: Path) -> None:
    (place / "ported_modeling.py").write_text("AX = BY = 1\ndef f(): ...\n")
    config = PatchConfig("ported_modeling", "out.py")
    patch = "def f():\n    from json import loads as Ab\n    import math as Ac\n    return Ab, Ac, AaX, AaCX\n"
    names = {"Aa": "A", "AaC": "B", "AaCX": "BY", "Ab": "Missing", "Ac": "Missing"}
    config.replace_function("f", patch, name_map=names)
    assert "return Ab, Ac, AX, BY" in generate(config)


def test_the_generator_by_its_name(place: Path) -> None:
    (place / "ported_modeling.py").write_text("from math import pi\n")
    config = PatchConfig("ported_modeling")
    assert config.target_file == "patched_modeling.py"
    generator = ModelingCodeGenerator(config)
    generator.load_source()
    assert generator.source_code == "from math import pi\n"
    path = place / "deep" / "out.py"
    assert generator.generate(path) == path.read_text() == generate(config) == generator.generate()


def test_names_and_files_are_checked_where_they_are_assigned() -> None:
    config = PatchConfig("ported_modeling")
    config.target_file = "other.py"
    with pytest.raises(CodegenError, match=r"target_file='\.\./up\.py' isn't the name of a Python file"):
        config.target_file = "../up.py"
    assert config.target_file == "other.py"
    assert PatchType is PatchKind
    assert [PatchKind.CLASS_REPLACEMENT.name, PatchKind.METHOD_OVERRIDE.name] == ["REPLACE_CLASS", "OVERRIDE_METHOD"]


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("f", PatchType.CLASS_REPLACEMENT, "does not fit: 'f' is a function"),
        ("A", PatchType.FUNCTION_REPLACEMENT, "does not fit: 'A' is a class"),
        ("A", PatchType.METHOD_OVERRIDE, "names no method"),
        ("A.g", PatchType.FUNCTION_REPLACEMENT, "names no function of the module"),
        ("A", PatchType.INIT_MODIFICATION, r"can't do patch_type=MODIFY_INIT. Give the kind of the target"),
    ],
)
def test_an_import_of_another_kind_is_refused(place: Path, target: str, kind: PatchKind, message: str) -> None:
    (place / "ported_modeling.py").write_text("def f(): ...\nclass A:\n    def g(self): ...\n")
    config = PatchConfig("ported_modeling", "out.py")

    def patched() -> None:
        config.patches.append(create_patch_from_external(target, "kernels", "x", patch_type=kind))
        generate(config)

    with pytest.raises(CodegenError, match=message):
        patched()


def test_arguments_in_another_order_are_refused() -> None:
    config = PatchConfig("ported_modeling", "out.py")
    with pytest.raises(CodegenError, match=r"was given description=\{'A': 'B'\}, which isn't a text.*write name_map="):
        config.replace_function("f", "def f(): ...", {"A": "B"})  # type: ignore[call-overload]
    with pytest.raises(CodegenError, match=r"write name_map=\.\.\. or patch_type=\.\.\."):
        create_patch_from_external("f", "kernels", "x", PatchType.CLASS_REPLACEMENT)  # type: ignore[arg-type]
