"""Every case of `tests/codegen/cases`: what it generates to the byte, or how it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher.codegen import generate, write
from patcher.errors import CodegenError
from tests.codegen import cases

CASES = [cases.read(name) for name in cases.names()]
OUTPUTS = [case for case in CASES if case.kind == "output"]
ERRORS = [case for case in CASES if case.kind == "error"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("case", OUTPUTS, ids=lambda case: case.name)
def test_output(case: cases.Case, folder: Path) -> None:
    config = cases.load(cases.lay_out(case, folder))
    written = write(config, folder / "out")
    data = written.read_bytes()
    assert cases.body(data.decode()) == case.on_disk(case.expected).decode("utf-8-sig")
    compile(data, "out.py", "exec")
    assert generate(config) == generate(config)


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
def test_error(case: cases.Case, folder: Path) -> None:
    path = cases.lay_out(case, folder)
    message = case.expected.rstrip("\n").replace("{config}", str(path)).replace("{folder}", str(folder))
    with pytest.raises(CodegenError, match=f"^{re.escape(message)}$"):
        write(cases.load(path), folder / "out")
    assert not (folder / "out").exists()
