"""The commands of CI: they are there, they parse, and the weekly workflow calls one of them."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.kinds import wants

ROOT = Path(__file__).parents[2]
COMMANDS = [path for path in sorted((ROOT / ".ci").iterdir()) if not path.suffix]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda path: path.name)
def test_a_command_can_be_run(command: Path) -> None:
    assert os.access(command, os.X_OK)
    subprocess.run(["bash", "-n", str(command)], check=True)


def test_a_command_says_what_it_lacks() -> None:
    done = subprocess.run([str(ROOT / ".ci" / "suite")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "which transformers: a version, newest, oldest, or main" in done.stderr


def workflow(name: str) -> tuple[str, list[str]]:
    """What a workflow runs, and the five fields of when it does."""
    read = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
    (when,) = read[True]["schedule"]  # `on` is a word for true
    (job,) = read["jobs"].values()
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    return command, when["cron"].split()


def test_what_ci_leaves_out_is_run_every_night(pytestconfig: pytest.Config) -> None:
    (expression,) = (each for each in pytestconfig.getini("addopts") if each.startswith("not "))
    assert not wants(expression, "nightly")
    command, when = workflow("nightly")
    assert when[2:] == ["*", "*", "*"]
    assert command == ".ci/suite newest -m nightly"


def test_the_main_branch_of_transformers_is_tried_every_week() -> None:
    command, when = workflow("transformers-main")
    assert when[2:4] == ["*", "*"]
    assert when[4].isdigit()
    assert command == '.ci/suite main -m "not (gpu or nightly)"'
    (branch,) = (
        line for line in (ROOT / ".ci" / "install").read_text().splitlines() if line.strip().startswith("main)")
    )
    assert "git+https://github.com/huggingface/transformers'" in branch


def test_every_release_of_python_that_is_promised_is_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d", each)]
    read = [
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8")) for name in ("pythons", "torch")
    ]
    jobs = [job for workflow in read for job in workflow["jobs"].values()]
    newest = jobs[1]["steps"][1]["with"]["python-version"]  # with the newest torch
    assert ["3.11", *jobs[0]["strategy"]["matrix"]["python"], newest] == promised  # .ci/run is on the first
    assert [job["steps"][2]["env"]["PYTHON"] for job in jobs] == ["python", "python"]
    assert project["requires-python"] == ">=3.11"
    assert workflow("pythons")[0] == ".ci/suite newest"


def test_the_newest_releases_that_are_promised_are_run_together() -> None:
    promised = re.search(
        r"^transformers 5\.17 to ([\d.]+), torch 2\.6 to ([\d.]+),",
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert promised is not None
    assert workflow("torch")[0] == ".ci/suite {}.0 torch=={}.0".format(*promised.groups())


def test_the_oldest_of_everything_is_what_the_package_promises() -> None:
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    run = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert run.keys() == {Requirement(each).name for each in promised}
    for requirement in map(Requirement, promised):
        (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
        assert Version(run[requirement.name]) == Version(floor), requirement
