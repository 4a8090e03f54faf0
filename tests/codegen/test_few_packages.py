"""Files are generated, listed and checked where nothing is installed but what reads and writes source."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import patcher

ROOT = Path(patcher.__file__).parents[1]
NEEDED = ("typer", "rich", "packaging")
CONFIG = """
from patcher.codegen import ModelingCodeGenerator, PatchConfig, create_patch_from_external

config = PatchConfig("transformers.models.{name}.modeling_{name}", "patched_modeling_{name}.py")
config.drop_import_names("nothing_of_this_name")
config.patches.append(create_patch_from_external("{norm}", "kernels", "Norm"))


@config.replace_function("rotate_half")
def rotate(x):
    return x.roll(x.shape[-1] // 2, -1)
"""
PROGRAM = """
import sys
sys.path[:0] = [{packages!r}]
sys.argv = ["patcher", "codegen", *sys.argv[1:]]
try:
    from patcher.cli import main
    main()
finally:
    found = {{name.partition(".")[0] for name in sys.modules}}
    assert found.isdisjoint({{"torch", "transformers", "safetensors", "accelerate", "numpy", "regex"}}), found
"""


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Distributions and what they require to run here."""
    found, left = set[str](), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        if name not in found:
            found.add(name)
            left += [match[0] for each in required if "extra ==" not in each and (match := re.match(r"[\w.-]+", each))]
    return found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of nothing but these packages, transformers' text and this library."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "patcher").symlink_to(ROOT / "patcher")
    for name in with_dependencies(NEEDED):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    transformers = importlib.metadata.distribution("transformers")
    for top in {file.parts[0] for file in transformers.files or () if file.parts[0].startswith("transformers")}:
        (folder / top).symlink_to(Path(str(transformers.locate_file(top))))
    return folder


@pytest.mark.process
def test_generated_listed_and_checked(packages: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    for name, norm in (("llama", "LlamaRMSNorm"), ("mixtral", "MixtralRMSNorm")):
        (project / f"{name}_patch_gen_config.py").write_text(CONFIG.format(name=name, norm=norm))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM.format(packages=str(packages)), *arguments],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TERM": "dumb"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--list").count("2 patches") == 2
    assert run("--all", "--diff").count("wrote ") == 2
    assert run("--check").endswith("2 checked\n")
    text = (project / "generated" / "patched_modeling_mixtral.py").read_text("utf-8")
    assert "\nfrom kernels import Norm as MixtralRMSNorm\n" in text
