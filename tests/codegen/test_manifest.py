"""The manifest of a generated file: what it says is so, it is checked, and two machines write the same."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patcher.codegen import check, write
from patcher.codegen.files.projects import load_configs
from tests.support.ruff import needs_ruff

SOURCE = """import json
import os

from torch import nn


class Norm(nn.Module):
    def __init__(self, size):
        self.size = size

    def forward(self, x):
        return json.dumps(x)


def rotate(x):
    return os.path.join(x)


class Head:
    turned = rotate


def gone():
    pass
"""
CONFIG = """from patcher.codegen import PatchConfig, create_patch_from_external

config = PatchConfig("modeling_listed", "out.py", "A äccount.")
config.patches.append(create_patch_from_external("rotate", "math", "sin", "quick"))


@config.override_method("Norm.forward", description="no json")
# with a comment
@staticmethod
def forward(x):
    return   x


@config.modify_init("Norm")
def init(original_init, self, size):
    original_init(self, size)
    self.more = helper(pi)


@config.add_helper_after("Norm", description="helps")
def helper(x):
    return x


config.add_import("math", names=["pi", "tau as t"])
config.add_post_import_block("LIMIT = t", "a limit")
config.exclude_from_output("gone")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "modeling_listed.py").write_text(SOURCE)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "listed_patch_gen_config.py").write_text(CONFIG, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("listed_patch_gen_config", None)


def written(**options: bool) -> tuple[Path, dict[str, Any]]:
    (config,) = load_configs("configs/listed_patch_gen_config.py")
    path = write(config, manifest=True, **options)
    text = path.with_suffix(".manifest.json").read_text("utf-8")
    assert "äccount" in text
    assert str(path.parents[2]) not in text
    return path, json.loads(text)


@pytest.mark.parametrize("formatted", [False, pytest.param(True, marks=needs_ruff)])
def test_it_says_what_the_file_is_made_of(project: Path, formatted: bool) -> None:
    path, content = written(formatted=formatted)
    assert content["source"] == {"module": "modeling_listed", "release": None, "file": "modeling_listed.py"}
    assert content["file"] == "out.py"
    assert content["config"] == "configs/listed_patch_gen_config.py:3"
    assert content["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    patches = {patch["target"] + "|" + patch["kind"]: patch for patch in content["patches"]}
    assert patches["Norm.forward|override method"]["description"] == "no json"
    assert list(patches) == ["Norm|modify init", "Norm.forward|override method", "rotate|external"]  # as in the text
    assert {name: int(patch["from"].rpartition(":")[2]) for name, patch in patches.items()} == {
        "Norm|modify init": 15,
        "Norm.forward|override method": 10,
        "rotate|external": 4,
    }
    assert patches["rotate|external"]["replacement"] == "math.sin"
    lines = path.read_text("utf-8").split("\n")
    starts = {
        "Norm|modify init": ["def __init__(self, size):", "self.more = helper(pi)"],
        "Norm.forward|override method": ["@staticmethod", "return x"],
        "rotate|external": ["from math import sin as rotate", ""],
    }
    for name, (first, last) in starts.items():
        ((start, end),) = patches[name]["lines"]
        assert lines[start - 1].strip() == first
        assert " ".join(lines[end - 1].split()).endswith(last)
        assert len(patches[name]["original"]) == 8
        # above it stands where it is from
        around = "\n".join(lines[max(start - 4, 0) : start])
        assert f"# from {patches[name]['from']}" in around
    (helper,) = content["helpers"]
    assert (helper["name"], helper["after"], helper["description"]) == ("helper", "Norm", "helps")
    assert ast.parse("\n".join(lines[helper["lines"][0][0] - 1 : helper["lines"][0][1]])).body
    assert content["imports"] == ["from math import pi, tau as t"]
    assert content["code"] == [{"description": "a limit", "from": "configs/listed_patch_gen_config.py:26"}]
    assert content["orphaned"] == ["json", "os"]
    assert content["dropped"] == []
    assert content["excluded"] == [{"name": "gone", "original": None}]


def test_it_is_checked_and_fixed_where_there_is_one(project: Path) -> None:
    path, content = written()
    manifest = path.with_suffix(".manifest.json")
    good = manifest.read_bytes()
    (result,) = check(["configs/listed_patch_gen_config.py"])
    assert result.ok
    manifest.write_text(json.dumps(content | {"sha256": "0" * 64}))
    (result,) = check(["configs/listed_patch_gen_config.py"])
    assert not result.ok
    assert "out.manifest.json (as the config says)" in result.drift
    (result,) = check(["configs/listed_patch_gen_config.py"], fix=True)
    assert result.fixed
    assert manifest.read_bytes() == good
    manifest.unlink()  # it is optional
    (result,) = check(["configs/listed_patch_gen_config.py"])
    assert result.ok


def test_equal_input_gives_an_equal_manifest(project: Path) -> None:
    path, content = written()
    assert (path, content) == written()
    assert not any(str(part) in json.dumps(content) for part in (project, project.name))
