"""Writing: where to, what, and that it happens wholly or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patcher.codegen import PatchConfig, generate, write
from patcher.codegen.files.output import run_ruff
from patcher.errors import CodegenError
from tests.support.ruff import needs_ruff


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PatchConfig:
    (tmp_path / "modeling_written.py").write_text("import os\n\n\ndef f(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = PatchConfig("modeling_written", "patched_modeling_written.py", "A test.")
    config.replace_function("f", "def f(x):\n    return  x + 1", "one more")
    return config


def test_the_header_says_what_where_from_and_how(config: PatchConfig) -> None:
    header = generate(config).partition("import os")[0]
    assert header.splitlines() == [
        "# " + "-" * 88,
        "# GENERATED FILE: change the config that it is made from, not this file.",
        "# Source:  modeling_written",
        "# About:   A test.",
        "# Made by: patcher codegen tests/codegen/test_writer.py",
        "# Differs: replace function f b482dbe8",
        "# " + "-" * 88,
    ]


def test_the_header_names_the_version_of_the_source() -> None:
    import transformers

    text = generate(PatchConfig("transformers.models.llama.modeling_llama", "out.py"))
    assert f"# Source:  transformers.models.llama.modeling_llama (transformers {transformers.__version__})\n" in text


def test_file_and_diff(config: PatchConfig, tmp_path: Path) -> None:
    path = write(config, tmp_path / "deep" / "out", diff=True)
    assert path == tmp_path / "deep" / "out" / "patched_modeling_written.py"
    assert path.read_text() == generate(config)
    diff = path.with_suffix(".diff").read_text()
    assert diff.startswith("--- a/modeling_written.py\n+++ b/patched_modeling_written.py\n")
    assert "-    return x\n" in diff
    assert "+    return  x + 1\n" in diff
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.with_suffix(".diff").name, path.name]


def test_the_default_folder_is_beside_the_config(config: PatchConfig, tmp_path: Path) -> None:
    config.config_file = str(tmp_path / "some_patch_gen_config.py")
    Path(config.config_file).touch()
    assert write(config) == tmp_path / "generated" / "patched_modeling_written.py"


def test_nothing_is_written_when_the_second_file_fails(
    config: PatchConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(config, tmp_path / "out", diff=True).read_bytes()
    config.add_import("json")
    write_bytes = Path.write_bytes

    def fails(self: Path, data: bytes) -> int:
        if self.suffix == ".diff":
            raise OSError(28, "No space left on device", str(self))
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(CodegenError, match="can't be written: No space left on device"):
        write(config, tmp_path / "out", diff=True)
    assert (tmp_path / "out" / "patched_modeling_written.py").read_bytes() == old
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_folder_that_is_a_file(config: PatchConfig, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(CodegenError, match=r"taken can't be written: (File exists|Not a directory)"):
        write(config, tmp_path / "taken")


@needs_ruff
def test_formatting_is_asked_for(config: PatchConfig, tmp_path: Path) -> None:
    assert "return  x + 1" in write(config, tmp_path / "plain").read_text()
    assert "return x + 1" in write(config, tmp_path / "formatted", formatted=True).read_text()


def test_formatting_without_ruff(config: PatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(CodegenError, match=r"formatting needs ruff, which is not installed\. Run `pip install ruff`"):
        run_ruff("x = 1\n", "out.py", config.where)


@needs_ruff
def test_what_ruff_refuses(config: PatchConfig) -> None:
    with pytest.raises(CodegenError, match=r"ruff (check|format) failed on out\.py"):
        run_ruff("def f(\n", "out.py", config.where)


@pytest.mark.process
def test_equal_input_gives_equal_text_in_another_process(tmp_path: Path) -> None:
    code = (
        "from patcher.codegen import PatchConfig, generate\n"
        "config = PatchConfig('transformers.models.llama.modeling_llama', 'out.py')\n"
        "for name in ('d', 'a', 'c', 'b'):\n"
        "    config.add_import('json', names=[f'loads as {name}'])\n"
        "    config.override_method(f'LlamaMLP.{name}', f'def f(self): return {name}')\n"
        "print(generate(config))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1


def test_a_diff_beside_the_file_follows_it(config: PatchConfig, tmp_path: Path) -> None:
    diff = write(config, tmp_path / "out", diff=True).with_suffix(".diff")
    before = diff.read_text()
    config.add_helper("def more():\n    pass")
    write(config, tmp_path / "out")
    assert diff.read_text() != before
    assert "more" in diff.read_text()


def test_the_diff_keeps_newlines_and_is_a_patch(config: PatchConfig, tmp_path: Path) -> None:
    """As git applies it."""
    source = tmp_path / "modeling_written.py"
    source.write_bytes(b"import os\r\n\r\n\r\ndef f(x):\r\n    return x\r\n\x0c\r\nlast = 1")
    text = write(config, tmp_path / "out", diff=True).read_bytes()
    diff = (tmp_path / "out" / "patched_modeling_written.diff").read_bytes()
    assert diff.endswith(b"\\ No newline at end of file\n") or b"last" not in diff
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    (tmp_path / "patched_modeling_written.py").write_bytes(source.read_bytes())
    diff = diff.replace(b"a/modeling_written.py", b"a/patched_modeling_written.py")
    subprocess.run([git, "apply", "-"], input=diff, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "patched_modeling_written.py").read_bytes() == text
