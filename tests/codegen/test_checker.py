"""The drift check, discovery, and the command line on a project of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from patcher.cli.codegen import app, codegen
from patcher.codegen import check
from patcher.codegen.files.projects import discover, load_configs, read_settings
from patcher.errors import CodegenError
from tests.codegen.checked import CONFIG, SOURCE
from tests.support.ruff import needs_ruff


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = "configs"\n')
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "modeling_checked.py").write_text(SOURCE)
    (tmp_path / "configs" / "one").mkdir(parents=True)
    (tmp_path / "configs" / "one" / "one_patch_gen_config.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def generated(project: Path) -> Path:
    code, _ = run("--all", "--diff")
    assert code == 0
    return project / "configs" / "one" / "generated" / "patched_modeling_checked.py"


def test_no_drift(generated: Path) -> None:
    assert [str(result) for result in check()] == ["configs/one/one_patch_gen_config.py: ok"]
    assert check("configs/one/one_patch_gen_config.py") == check()  # one config, not one a letter
    assert run("--check") == (0, "configs/one/one_patch_gen_config.py: ok\n1 checked\n")


def test_an_edited_file_drifts_and_is_fixed(generated: Path) -> None:
    text = generated.read_text()
    generated.write_text(text.replace("x + 1", "x + 2"))
    code, output = run("--check")
    assert code == 1
    assert "configs/one/one_patch_gen_config.py: drifted" in output
    assert "-    return x + 2\n+    return x + 1\n" in output
    assert generated.read_text() != text  # only looked at
    code, output = run("--check", "--fix")
    assert (code, generated.read_text()) == (0, text)
    assert "configs/one/one_patch_gen_config.py: fixed" in output
    assert run("--check")[0] == 0


def test_an_edited_diff_and_other_newlines_drift(generated: Path) -> None:
    diff = generated.with_suffix(".diff")
    good = diff.read_bytes()
    diff.write_text("nothing")
    code, output = run("--check")
    assert code == 1
    assert "patched_modeling_checked.diff (as the config says)" in output
    diff.write_bytes(good)
    generated.write_bytes(generated.read_bytes().replace(b"\n", b"\r\n"))
    code, output = run("--check")
    assert code == 1
    assert "differs in newlines only" in output


def test_a_diff_is_optional(generated: Path) -> None:
    generated.with_suffix(".diff").unlink()
    assert run("--check")[0] == 0


def test_a_missing_file_drifts(project: Path) -> None:
    code, output = run("--check")
    assert code == 1
    assert "patched_modeling_checked.py (on the disk: missing)" in output


def test_a_changed_source_drifts(generated: Path, project: Path) -> None:
    source = project / "lib" / "modeling_checked.py"
    source.write_text(SOURCE.replace("return f(x)", "return f(x) * 2"))
    code, output = run("--check")
    assert code == 1
    assert "+    return f(x) * 2" in output


def test_a_config_that_cannot_be_imported_is_a_failure(generated: Path, project: Path) -> None:
    broken = project / "configs" / "broken_patch_gen_config.py"
    broken.write_text("import nothing_of_this_name\n")
    code, output = run("--check")
    assert code == 1
    assert (
        f"configs/broken_patch_gen_config.py: can't be checked\n{broken}:1: the config can't be imported: "
        "ModuleNotFoundError: No module named 'nothing_of_this_name'\n"
    ) in output
    assert "configs/one/one_patch_gen_config.py: ok" in output  # the others are checked all the same
    code, output = run("--list")
    assert code == 1
    assert f"error: configs/broken_patch_gen_config.py: {broken}:1: the config can't be imported" in output


#: what a config holds, and the line of it, and of a module that it imports, which the message names
UNIMPORTABLE = {
    "an import": ("x = 1\nimport nothing_of_this_name\n", "{config}:2: ", "'nothing_of_this_name'"),
    "a name": ("\n\nnobody\n", "{config}:3: ", "name 'nobody' is not defined"),
    "a syntax error": ("x = 1\ny = (\n", "{config}:2: ", "'(' was never closed (broken_patch_gen_config.py, line 2)"),
    "an error in what it imports": (
        "x = 1\nimport failing_beside_it\n",
        "{config}:2: ",
        "ZeroDivisionError: division by zero, at {beside}:4",
    ),
    "an error of a config method": (
        "from patcher.codegen import PatchConfig\n\nPatchConfig('a.b', 'c.txt')\n",
        "{config}:3: ",
        "isn't the name of a Python file",
    ),
}


@pytest.mark.parametrize("case", UNIMPORTABLE)
@pytest.mark.parametrize("by", ["path", "name"])
def test_a_config_that_cannot_be_imported_is_named_with_its_line(case: str, by: str, project: Path) -> None:
    text, place, reason = UNIMPORTABLE[case]
    config, beside = project / "broken_patch_gen_config.py", project / "failing_beside_it.py"
    config.write_text(text)
    beside.write_text("def f():\n    raise SystemError\n\n1 / 0\n")
    code, output = run("broken_patch_gen_config.py" if by == "path" else "broken_patch_gen_config")
    assert code == 1
    assert output.startswith(f"error: {place.format(config=config)}")
    assert reason.format(beside=beside) in output
    assert not list(project.glob("**/generated"))


def test_a_target_that_is_gone_is_a_failure(generated: Path, project: Path) -> None:
    (project / "lib" / "modeling_checked.py").write_text("def g(x):\n    return x\n")
    code, output = run("--check")
    assert code == 1
    assert "replace_function('f') names no function of modeling_checked. It has: g." in output


def test_generate_one_by_path_and_by_name(project: Path) -> None:
    code, output = run("configs/one/one_patch_gen_config.py", "-o", "elsewhere", "-v")
    assert code == 0
    assert "replace function f: more" in output
    assert (project / "elsewhere" / "patched_modeling_checked.py").is_file()
    (project / "lib" / "a_config.py").write_text(CONFIG.replace("config", "mine"))
    code, output = run("a_config", "--config-name", "mine", "--output-dir", "named")
    assert code == 0
    assert (project / "named" / "patched_modeling_checked.py").is_file()


def test_a_dry_run_writes_nothing(project: Path) -> None:
    code, output = run("configs/one/one_patch_gen_config.py", "--dry-run")
    assert code == 0
    assert "would create" in output
    code, output = run("configs/one/one_patch_gen_config.py", "--dry-run", "--diff")
    assert "+    return x + 1\n" in output
    assert not (project / "configs" / "one" / "generated").exists()
    run("--all")
    assert "would leave as it is" in run("--all", "--dry-run")[1]
    (project / "configs" / "one" / "generated" / "patched_modeling_checked.py").write_text("x\n")
    assert "would change" in run("--all", "--dry-run")[1]


def test_the_list(project: Path) -> None:
    line = "configs/one/one_patch_gen_config.py: modeling_checked -> patched_modeling_checked.py, 1 patch\n"
    assert run("--list") == (0, line)
    (project / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = "lib"\n')
    for option in ("--list", "--all"):
        assert "no *_patch_gen_config.py here" in run(option)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name a config, or use --list, --all or --check."),
        (["x.py", "--fix"], "CONFIG goes with -o, -c, --dry-run, --diff, --format, -v only. Leave --fix out."),
        (["nothing_of_this_name"], "nothing_of_this_name: there is no module 'nothing_of_this_name'. Give the name"),
        (["tests.nothing_here"], "tests.nothing_here: there is no module 'tests.nothing_here'. Give the name"),
        (["gone.py"], "there is no such config. Give the path of a file, or the name of a module."),
        (["configs/one/one_patch_gen_config.py", "-c", "other"], "there is no PatchConfig named 'other'"),
        (["lib/modeling_checked.py"], "this module defines no PatchConfig. Write `config = PatchConfig(...)`."),
        (["configs"], "configs:1: this module defines no PatchConfig."),
        (
            ["verify", "configs/one/one_patch_gen_config.py", "--model-config", "no/such/folder"],
            "'no/such/folder' isn't a model that can be used here. There is no such folder",
        ),
    ],
)
def test_wrong_arguments(project: Path, arguments: list[str], message: str) -> None:
    code, output = run(*arguments)
    assert code != 0
    assert message in " ".join(output.replace("│", " ").split())


@needs_ruff
def test_formatting_is_a_setting_of_the_project(project: Path) -> None:
    path = project / "configs" / "one" / "one_patch_gen_config.py"
    path.write_text(CONFIG.replace("x + 1", "x +   1"))
    (project / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = ["configs"]\nformat = true\n')
    assert run("--all")[0] == 0
    written = project / "configs" / "one" / "generated" / "patched_modeling_checked.py"
    assert "return x + 1" in written.read_text()
    assert run("--check")[0] == 0
    assert check(formatted=False)[0].drift


def test_two_folders_with_a_config_of_one_name_and_a_neighbour(project: Path) -> None:
    two = project / "configs" / "two"
    two.mkdir()
    (two / "one_patch_gen_config.py").write_text(
        "from shared_of_two import config as base\nfrom patcher.codegen import PatchConfig\n"
        "config = PatchConfig('modeling_checked', 'two.py')\nconfig.include(base)\n"
    )
    (two / "shared_of_two.py").write_text(CONFIG)
    assert run("--all")[0] == 0
    assert (two / "generated" / "two.py").is_file()
    assert [result.ok for result in check()] == [True, True]


def test_a_config_in_a_second_package_of_one_name_is_refused(project: Path) -> None:
    for folder in ("one", "other"):
        package = project / folder / "package_twice"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "a_patch_gen_config.py").write_text(CONFIG)
    load_configs("one/package_twice/a_patch_gen_config.py")
    message = (
        r"other/package_twice/a_patch_gen_config\.py: this config is the module 'package_twice\.a_patch_gen_config', "
    )
    with pytest.raises(CodegenError, match=message + ".*one/package_twice.* is imported by that name. Rename one"):
        load_configs("other/package_twice/a_patch_gen_config.py")


def test_a_config_in_a_package_may_import_relatively(project: Path) -> None:
    package = project / "configs" / "package_of_configs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(CONFIG)
    (package / "three_patch_gen_config.py").write_text(
        "from patcher.codegen import PatchConfig\nfrom .base import config as base, f\n"
        "config = PatchConfig('modeling_checked', 'three.py')\n"
        "config.replace_function('f', replacement=f, description='again')\n"
    )
    assert run("--all")[0] == 0
    text = (package / "generated" / "three.py").read_text()
    assert "@config" not in text
    assert "# Made by: patcher codegen configs/package_of_configs/three_patch_gen_config.py" in text


def test_hidden_folders_are_not_searched(project: Path) -> None:
    for name in (".venv", "node_modules"):
        (project / "configs" / name).mkdir()
        (project / "configs" / name / "x_patch_gen_config.py").touch()
    assert [path.name for path in discover(read_settings())] == ["one_patch_gen_config.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.patcher.codegen]\nsearch = 'x'\n", r"has no setting 'search'. It has search_root and format\.$"),
        ("[tool.patcher.codegen]\nsearch_root = 'x'\n", r"search_root in .* names 'x', which isn't a folder"),
        ("[tool", "the project's settings can't be read"),
    ],
)
def test_wrong_settings(project: Path, text: str, message: str) -> None:
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(CodegenError, match=message):
        read_settings()


def test_a_module_with_several_configs(project: Path) -> None:
    path = project / "configs" / "several_patch_gen_config.py"
    path.write_text(
        "from patcher.codegen import PatchConfig\n"
        "a = PatchConfig('modeling_checked', 'a.py')\nb = PatchConfig('modeling_checked', 'b.py')\nalias = a\n"
    )
    assert [config.target_file for config in load_configs(str(path))] == ["a.py", "b.py"]
    assert [config.target_file for config in load_configs(str(path), "b")] == ["b.py"]


def test_as_a_part_of_another_command(project: Path) -> None:
    """As the main command mounts it: options may stand before and behind the module."""
    main = typer.Typer()
    main.command()(codegen)
    main.command("other")(lambda: None)
    result = CliRunner().invoke(main, ["codegen", "configs/one/one_patch_gen_config.py", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "would create" in result.output


#: what is typed, one after the other; the exit status; and what is printed, among other things
TYPED: list[tuple[str, int, str]] = [
    ("--list", 0, "{config}: modeling_checked -> patched_modeling_checked.py, 1 patch\n"),
    ("{config} --dry-run", 0, "would create {file} ("),
    ("{config} -v --diff", 0, "  replace function f: more\nwrote {file} and patched_modeling_checked.diff\n"),
    ("{config} -o elsewhere -c config", 0, "wrote elsewhere/patched_modeling_checked.py\n"),
    ("--all --dry-run", 0, "would leave as it is {file} ("),
    ("--check", 0, "{config}: ok\n1 checked\n"),
    ("edit", 0, ""),
    ("--check", 1, "-    return 0\n+    return x + 1\n"),
    ("--check --fix", 0, "{config}: fixed\n1 checked\n"),
    ("{config} --check", 0, "{config}: ok\n1 checked\n"),
    ("--all --diff --verbose", 0, "wrote {file} and patched_modeling_checked.diff\n"),
    (
        "{config} --config-name other",
        1,
        "configs/one/one_patch_gen_config.py:1: there is no PatchConfig named 'other'.",
    ),
    ("gone.py", 1, "gone.py: there is no such config."),
    ("upstream", 0, ""),
    ("--check --fix", 1, "patches code that has changed since the file was made\n"),
    ("{config}", 0, "taken over: what replace_function('f') at "),
    ("--check --fix", 0, "{config}: ok\n"),
    ("{config} --fix", 2, "Leave --fix out."),
]


@pytest.mark.process
@pytest.mark.nightly
def test_every_option_in_a_shell(project: Path) -> None:
    file = project / "configs" / "one" / "generated" / "patched_modeling_checked.py"
    for typed, status, expected in TYPED:
        names = {"config": "configs/one/one_patch_gen_config.py", "file": file}
        if typed == "upstream":
            (project / "lib" / "modeling_checked.py").write_text(SOURCE.replace("return x\n", "return x * 1\n"))
            continue
        if typed == "edit":
            file.write_text(file.read_text().replace("return x + 1", "return 0"))
            continue
        done = shell(project, *typed.format(**names).split())
        assert done.returncode == status, (typed, done.stdout, done.stderr)
        assert expected.format(**names) in done.stdout + done.stderr, typed
    assert "return x + 1" in file.read_text()


@pytest.mark.process
@needs_ruff
def test_formatting_in_a_shell(project: Path) -> None:
    config = project / "configs" / "one" / "one_patch_gen_config.py"
    config.write_text(CONFIG.replace("x + 1", "x +   1"))
    assert shell(project, str(config), "--format").returncode == 0
    assert shell(project, str(config), "--format", "--check").returncode == 0
    assert shell(project, str(config), "--check").returncode == 1


@pytest.mark.process
def test_as_a_module(project: Path) -> None:
    done = shell(project, "--list")
    assert done.returncode == 0, done.stderr
    assert "one_patch_gen_config.py" in done.stdout


def shell(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parents[2]), str(project / "lib"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", "from patcher.cli import main; main()", "codegen", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TERM": "dumb", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
