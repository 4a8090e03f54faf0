"""What the command refuses, what it does with a config that fails, and files that can't be read."""

from __future__ import annotations

import itertools
import os
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patcher.cli.codegen import app
from patcher.codegen import PatchConfig, check, generate
from patcher.codegen.files.projects import load_configs, read_settings
from patcher.errors import CodegenError
from tests.codegen.checked import CONFIG, SOURCE


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "modeling_checked.py").write_text(SOURCE)
    for name in "ac":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_patch_gen_config.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_a_config_that_fails_keeps_no_other_from_its_file(project: Path) -> None:
    (project / "b").mkdir()
    (project / "b" / "b_patch_gen_config.py").write_text("import nothing_of_this_name\n")
    code, output = run("--all")
    assert code == 1
    assert "error: b/b_patch_gen_config.py: " in output
    assert "No module named 'nothing_of_this_name'" in output
    assert output.endswith("1 of 3 configs failed: b/b_patch_gen_config.py")
    assert [(project / name / "generated").is_dir() for name in "abc"] == [True, False, True]


def test_two_configs_of_one_file(project: Path) -> None:
    code, output = run("--all", "-o", "out")
    assert code == 1
    path = Path("out", "patched_modeling_checked.py")
    assert f"{path} is the file of a/a_patch_gen_config.py already. Give one another target_file." in output
    assert path.is_file()
    config = project / "c" / "c_patch_gen_config.py"
    config.write_text(CONFIG.replace("patched_modeling_checked.py", "other.py"))
    assert run("--all", "-o", "out")[0] == 0


OPTIONS = {
    "CONFIG": ["a/a_patch_gen_config.py"],
    "-o": ["-o", "out"],
    "-c": ["-c", "config"],
    **{option: [option] for option in ("--list", "--all", "--dry-run", "--diff", "--check", "--fix", "-v")},
}
#: which pairs act together, in a command that also names a config where neither says of what
TOGETHER = {
    frozenset(pair.split())
    for pair in (
        "CONFIG -o;CONFIG -c;CONFIG --dry-run;CONFIG --diff;CONFIG --check;CONFIG -v;"
        "-o -c;-o --all;-o --dry-run;-o --diff;-o --check;-o -v;"
        "-c --dry-run;-c --diff;-c -v;"
        "--all --dry-run;--all --diff;--all -v;--dry-run --diff;--dry-run -v;--diff -v;"
        "--check --fix"
    ).split(";")
}


def test_options_act_together_or_are_refused(project: Path) -> None:
    assert run("--all")[0] == 0
    for one, other in itertools.combinations(OPTIONS, 2):
        pair = {one, other}
        more = [] if pair & {"CONFIG", "--list", "--all", "--check"} else OPTIONS["CONFIG"]
        arguments = [*OPTIONS[one], *OPTIONS[other], *more]
        code, output = run(*arguments)
        if pair in TOGETHER:
            assert code in ((0, 1) if "--check" in pair or "-o" in pair else (0,)), (arguments, output)
            assert "Usage" not in output, arguments
        else:
            assert code == 2, (arguments, output)
            assert "Leave " in output, (arguments, output)


def test_refusals_can_be_followed(project: Path) -> None:
    for arguments, left_out in (
        (["--list", "--all"], "--all"),
        (["--check", "--dry-run"], "--dry-run"),
        (["a/a_patch_gen_config.py", "--all"], "a/a_patch_gen_config.py"),
    ):
        code, output = run(*arguments)
        assert code == 2
        assert f"Leave {'CONFIG' if '/' in left_out else left_out} out" in output
        assert run(*(each for each in arguments if each != left_out))[1].count("Leave") == 0


UNREADABLE = {
    "an encoding that nobody knows": (b"# coding: of-nobody\nx = 1\n", 1),
    "a byte of another encoding": (b"x = 1\ny = '\xff'\n", 2),
    "a byte further down": (b"x = 1\n\n\ny = '\xff'\n", 4),
    "another encoding": (b"# coding: latin-1\n\nx = '\xe4'\n", 1),
}


@pytest.mark.parametrize(("data", "line"), UNREADABLE.values(), ids=UNREADABLE)
def test_files_in_another_encoding(project: Path, data: bytes, line: int) -> None:
    source = project / "modeling_checked.py"
    source.write_bytes(data)
    with pytest.raises(CodegenError) as told:
        generate(PatchConfig("modeling_checked", "out.py"))
    assert str(told.value) == f"{source}:{line}: this file can't be read, as it isn't in UTF-8. Save it as UTF-8."
    source.write_text(SOURCE)

    config = project / "a" / "a_patch_gen_config.py"
    assert run("--all")[0] == 0
    config.write_bytes(data)
    for asked in (["--check"], ["--list"], ["--all"], [str(config)]):
        code, output = run(*asked)
        assert code == 1
        assert "latin-1" in str(data) or f"{config}:{line}: this file can't be read" in output

    # What is on the disk in the place of a generated file is text of whatever kind: it differs.
    generated = project / "c" / "generated" / "patched_modeling_checked.py"
    generated.write_bytes(data)
    (result,) = check([project / "c" / "c_patch_gen_config.py"])
    assert result.drift
    assert not result.error
    assert run("c/c_patch_gen_config.py", "--dry-run")[0] == 0
    assert run("--check", "c/c_patch_gen_config.py", "--fix")[0] == 0


def test_syntax_errors_have_their_line(project: Path) -> None:
    source, config = project / "modeling_checked.py", project / "a" / "a_patch_gen_config.py"
    source.write_text("x = 1\ny = (\n")
    with pytest.raises(CodegenError, match=r"modeling_checked\.py does not parse: '\(' was never closed, on line 2"):
        generate(PatchConfig("modeling_checked", "out.py"))
    source.write_text(SOURCE)
    config.write_text("x = 1\ny = (\n")
    (result,) = check([config])
    assert result.error.startswith(f"{config}:2: the config can't be imported: SyntaxError: '(' was never closed")


def test_settings_of_the_generator_that_configs_come_from(project: Path) -> None:
    settings = project / "pyproject.toml"
    old = '[tool.patchgen]\nsearch_root = "a"\npackage_prefix = "models"\nlegacy_patches_prefix = "models.patches"\n'
    settings.write_text(old)
    assert read_settings().search_root == (project / "a",)
    assert run("--list")[1].count("1 patch") == 1
    settings.write_text(f'{old}\n[tool.patcher.codegen]\nsearch_root = "c"\n')
    assert read_settings().search_root == (project / "c",)
    settings.write_text('[tool.patchgen]\nroot = "a"\n')
    with pytest.raises(CodegenError, match=r"\[tool\.patchgen\] has no setting 'root'"):
        read_settings()


def test_a_hundred_configs_are_listed_from_one_start(project: Path) -> None:
    for number in range(100):
        (project / "a" / f"more_{number}_patch_gen_config.py").write_text(CONFIG)
    code, output = run("--list")
    assert code == 0
    assert output.count("modeling_checked ->") == 102


@pytest.mark.parametrize("by", ["path", "name", "package"])
def test_a_config_is_read_from_its_text_and_nothing_is_written_beside_it(by: str, project: Path) -> None:
    """Python itself goes by the second and the size of a file: it would run the bytecode of the former text."""
    config, beside = project / "a" / "a_patch_gen_config.py", project / "said_beside.py"
    if by == "package":
        (project / "a" / "__init__.py").touch()
    if by == "name":
        config = config.rename(project / config.name)
    for number in (1, 2, 3):
        config.write_text(
            "from patcher.codegen import PatchConfig\nfrom said_beside import BODY\n\n"
            f"config = PatchConfig('modeling_checked', 'out_{number}.py')\nconfig.replace_function('f', BODY)\n"
        )
        beside.write_text(f"BODY = 'def f(x):\\n    return {number}'\n")
        sys.modules.pop("said_beside", None)
        for file in (config, beside):
            os.utime(file, (1e9, 1e9))
            if number == 1:
                py_compile.compile(str(file))
        (found,) = load_configs(config.stem if by == "name" else str(config))
        assert found.target_file == f"out_{number}.py"
        assert f"return {number}" in generate(found)
    compiled = {file.name.partition(".")[0] for file in project.rglob("*.pyc")}
    assert compiled == {config.stem, beside.stem}  # those that this test has put there
