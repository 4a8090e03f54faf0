"""The `patcher` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patcher.cli import app

CONFIG = """
from patcher.codegen import PatchConfig

config = PatchConfig("transformers.models.llama.modeling_llama", "patched.py")
config.replace_function("rotate_half", "def rotate_half(x):\\n    return x\\n")
"""


def test_codegen_is_a_command_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_patch_gen_config.py").write_text(CONFIG)
    (tmp_path / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = "."\n')
    run = CliRunner().invoke(app, ["codegen", "llama_patch_gen_config.py", "--diff"])
    assert run.exit_code == 0, run.output
    assert "def rotate_half(x):\n    return x\n" in (tmp_path / "generated" / "patched.py").read_text()
    assert CliRunner().invoke(app, ["codegen", "--check"]).exit_code == 0
    assert "patched.py, 1 patches" in CliRunner().invoke(app, ["codegen", "--list"]).output


@pytest.mark.parametrize("arguments", [["--help"], ["codegen", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['patcher', *{arguments!r}]\n"
        "from patcher.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
        "heavy = {'torch', 'transformers', 'libcst', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "codegen" in done.stdout
