"""What documents name exists: files that they link to, names of ours that they tell people to write.

Fenced programs and commands run, those of docstrings too; `>>>` examples are run by pytest's `--doctest-modules`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import patcher
from patcher import Patcher, monkey_patching
from patcher.cli import app
from patcher.codegen import PatchConfig
from tests.support import fresh
from tests.support.imports import trees_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("tests/**/*.md")]
    if path.name != "CHANGELOG.md"
]
TABLES = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))

    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_changelog_says_what_this_release_brings() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n\n.*?\n- ", changes, re.M | re.S)


def ours(section: str) -> str:
    """The columns of a table that say what to write here."""
    body = TABLES.split(f"## {section}\n")[1].split("\n## ")[0]
    return "\n".join(line.split(" | ", 1)[1] for line in body.splitlines() if line.startswith("| "))


def test_names_with_dots_can_be_imported() -> None:
    names = set(re.findall(r"\bpatcher(?:\.[a-z_]+)*\.[A-Za-z_]+\b", TABLES))
    of_a_value = {*dir(Patcher), *inspect.signature(Patcher).parameters}
    names = {name for name in names if name.count(".") > 1 or name.split(".")[1] not in of_a_value}

    assert {"patcher.fusions.Fusion", "patcher.codegen.write", "patcher.codegen.generate"} <= names
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_registry_has_every_name_of_the_table() -> None:
    names = set(re.findall(r"`(\w+_(?:mapping|patches|recorders))`", ours("From `transformers.monkey_patching`")))

    assert len(names) == 11
    assert names == {name for name in monkey_patching.__all__ if hasattr(monkey_patching, name)}


def test_methods_and_arguments_of_a_patcher_exist() -> None:
    arguments = set(re.findall(r"\bPatcher\((\w+)=", TABLES))
    methods = set(re.findall(r"\b[Pp]atcher\.(\w+)\(", TABLES)) | set(re.findall(r"Patcher\([^)]*\)\.(\w+)\(", TABLES))

    assert arguments >= {"class_mapping", "extra_weight_conversions", "fusions"}
    assert arguments <= set(inspect.signature(Patcher).parameters)
    assert methods >= {"applied", "replace", "resolve", "from_fusion_config"}
    assert [name for name in methods if not hasattr(Patcher, name)] == []


def test_methods_of_a_config_exist() -> None:
    section = TABLES.split("## From a generator")[1]
    names = set(re.findall(r"config\.(\w+)\(", section)) | {"replace_function", "override_method", "modify_init"}

    assert names >= {"replace_class", "to_patcher", "add_import"}
    assert [name for name in names if not hasattr(PatchConfig("a.b", "c.py"), name)] == []


def test_options_of_codegen_exist() -> None:
    shown = CliRunner().invoke(app, ["codegen", "generate", "--help"], env={"COLUMNS": "200"}).output

    for option in ["-o", "-c", "--list", "--all", "--dry-run", "--diff", "-v", "--check", "--fix"]:
        assert option in shown


@pytest.mark.parametrize("name", patcher.__all__)
def test_every_public_name_begins_with_an_example_or_says_what_it_is(name: str) -> None:
    documentation = inspect.getdoc(getattr(patcher, name))

    assert documentation
    if inspect.isfunction(getattr(patcher, name)):
        example = documentation.split("\n\n")[1]
        assert example.startswith((">>> ", "```python\n"))


#: What users import from: everything else may change.
PUBLIC = {"patcher", "patcher.codegen", "patcher.fusions", "patcher.monkey_patching"}
PUBLIC |= {"patcher.presets"}


@pytest.mark.parametrize(
    "path", [*(ROOT / "examples").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")], ids=lambda path: path.name
)
def test_examples_get_by_with_public_names(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell) for cell in cells)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "patcher":
            names = {alias.name for alias in node.names}
            assert node.module in PUBLIC, ast.unparse(node)
            submodules = {module.rpartition(".")[2] for module in PUBLIC}
            assert names <= {*importlib.import_module(node.module).__all__, *submodules}, ast.unparse(node)
        elif isinstance(node, ast.Import):
            used = {alias.name for alias in node.names if alias.name.partition(".")[0] == "patcher"}
            assert used <= PUBLIC, ast.unparse(node)


# --- programs and commands -----------------------------------------------------------------------------------------

#: The repo that documents load: in tests its first layers, from a folder.
REPO = re.compile(r"HuggingFaceTB/SmolLM2-135M(-Instruct)?\b")


class Program(NamedTuple):
    """Blocks of one language that stand in one document or docstring: they run one after another."""

    file: str
    line: int
    language: str
    text: str


def programs_of(text: str, file: str, line: int = 1) -> list[Program]:
    """`line` is the first one of the text."""
    found: dict[str, Program] = {}
    for block in re.finditer(r"^( *)```(python|bash)\n(.*?)^ *```$", text, flags=re.S | re.M):
        place = line + text[: block.start()].count("\n")
        first = found.setdefault(block[2], Program(file, place, block[2], ""))
        found[block[2]] = first._replace(text=first.text + inspect.cleandoc(f"\n{block[3]}") + "\n")
    return list(found.values())


def all_programs() -> Iterator[Program]:
    for path in DOCUMENTS:
        yield from programs_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    for path, tree in trees_of(ROOT / "patcher").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(text := getattr(first.value, "value", None), str):
                    yield from programs_of(text, str(path.relative_to(ROOT)), first.lineno)


PROGRAMS = list(all_programs())


def test_the_readme_has_programs_and_commands() -> None:
    assert {program.language for program in PROGRAMS if program.file == "README.md"} == {"python", "bash"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.file}:{program.line} {program.language}")
def test_it_runs(program: Program, tmp_path: Path, smollm2_small: Path) -> None:
    here = tmp_path / "checkout"
    shutil.copytree(ROOT / "examples", here / "examples")
    shutil.copy(ROOT / "pyproject.toml", here)
    stand_ins = ROOT / "tests" / "support" / "stand_in_commands.py"
    subprocess.run([sys.executable, str(stand_ins), "python", "-m", "venv", str(tmp_path / "venv")], check=True)
    script = here / "program"
    script.write_text(REPO.sub(str(smollm2_small), program.text), encoding="utf-8")
    if program.language == "python":
        fresh.run_file(script, cwd=here)
    else:
        paths = {"PATH": f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        command = ["bash", "-euo", "pipefail", str(script)]
        done = subprocess.run(command, cwd=here, env={**os.environ, **paths}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
