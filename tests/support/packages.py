"""Small packages that are really installed: by pip, into a folder, without an index."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import fresh

#: A build backend in the project itself: a wheel is a zip file with a few texts.
_BACKEND = """
import tomllib, zipfile
from pathlib import Path


def build_wheel(directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    files = {path.name: path.read_text() for path in Path("src").glob("*.py")}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {version}\\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: backend\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    ((group, entries),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    files[f"{info}/entry_points.txt"] = "\\n".join(lines)
    files[f"{info}/RECORD"] = "".join(f"{file},,\\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(directory) / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return f"{name}-{version}-py3-none-any.whl"
"""


def install(name: str, modules: Mapping[str, str], fusions: Mapping[str, str], folder: Path, target: Path) -> None:
    """Install a package that registers families of fusions.

    Args:
        name: of the package.
        modules: module -> its source.
        fusions: name -> what is registered under it, `module:Class`.
        folder: where its project is written.
        target: the folder that gets it, for `sys.path`.
    """
    project = folder / name
    (project / "src").mkdir(parents=True)
    for module, source in modules.items():
        (project / "src" / f"{module}.py").write_text(source)
    (project / "backend.py").write_text(_BACKEND)
    lines = ["[build-system]", "requires = []", 'build-backend = "backend"', 'backend-path = ["."]']
    lines += ["[project]", f'name = "{name}"', 'version = "1.0"']
    lines += ['[project.entry-points."patcher.fusions"]', *(f'"{key}" = "{value}"' for key, value in fusions.items())]
    (project / "pyproject.toml").write_text("\n".join(lines) + "\n")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(project)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def lay_out(name: str, modules: Mapping[str, str], fusions: Mapping[str, str], target: Path) -> None:
    """Put a package into a folder as pip leaves it there: for a test of one process that needs several."""
    info = target / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = ["[patcher.fusions]", *(f"{key} = {value}" for key, value in fusions.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in modules.items():
        (target / f"{module}.py").write_text(source)
    importlib.invalidate_caches()


def run_with(target: Path | None, code: str, *arguments: str) -> str:
    """What code prints in a process that has the packages of a folder, or none of them."""
    return fresh.run(code, *arguments, environment={"PYTHONPATH": str(target)} if target is not None else {}).stdout
