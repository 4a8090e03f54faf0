"""Which text belongs to a class or function, in the situations where `inspect.getsource` errs."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from patcher.codegen import PatchConfig, generate
from patcher.errors import CodegenError

SOURCE = "class A:\n    def f(self):\n        return 1\n\n\ndef g(x):\n    return x\n"
CELL = '''
from patcher.codegen import PatchConfig
config = PatchConfig("modeling_extract", "out.py")

@config.replace_class("A")
class Fast:
    """{doc}"""

    def f(self):
        return 2

class Direct:
    def f(self):
        return "direct {doc}"
'''


@pytest.fixture(autouse=True)
def _source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modeling_extract.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def run_cell(number: int, doc: str) -> dict[str, Any]:
    """What a notebook does: the text of a cell is known to linecache only, and all cells are one module."""
    name, text = f"<ipython-input-{number}>", CELL.format(doc=doc)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    return space


def test_a_class_of_a_notebook_cell_that_was_run_again() -> None:
    run_cell(1, "first")
    space = run_cell(2, "second")
    text = generate(space["config"])
    assert '"""second"""' in text
    assert "first" not in text
    assert "@config" not in text
    assert "Made by: patcher.codegen.write(config)" in text


def test_a_class_of_a_notebook_cell_given_directly() -> None:
    space = run_cell(3, "third")
    config = PatchConfig("modeling_extract", "out.py")
    config.replace_class("A", replacement=space["Direct"])
    assert "direct third" in generate(config)


def test_a_config_that_stands_in_no_file_has_no_folder_to_write_to() -> None:
    from patcher.codegen import write

    with pytest.raises(CodegenError, match=r"isn't in a file, .* Give write\(config, output_dir=...\)\.$"):
        write(run_cell(4, "x")["config"])


def test_a_file_that_was_edited_after_its_import_is_not_read_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("def fast(x):\n    return 'old'\n")
    space: dict[str, Any] = {"__name__": "edited"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    assert linecache.getlines(str(path))  # known to Python, as after a traceback
    path.write_text("import math\n\n\ndef fast(x):\n    return 'new'\n")
    config = PatchConfig("modeling_extract", "out.py")
    with pytest.raises(CodegenError, match=r"no longer defines it where Python read it\. If the file was edited"):
        config.replace_function("g", replacement=space["fast"])


@pytest.mark.process
def test_generating_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from patcher.codegen import PatchConfig, generate\n"
        "generate(PatchConfig('transformers.models.llama.modeling_llama', 'out.py'))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_a_decorator_returns_is_what_it_was_given() -> None:
    config = PatchConfig("modeling_extract", "out.py")

    def g(x: int) -> int:
        return x

    assert config.replace_function("g")(g) is g
    assert config.add_helper(g) is g
    text = "def h(): pass"
    assert config.add_helper(text) is text
