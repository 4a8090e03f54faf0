"""Stands in for `pip`, `python` and `patcher` where a test runs the commands of a document.

    python stand_in_commands.py python -m venv FOLDER   # FOLDER/bin then holds the stand-ins

It installs nothing and starts no program that another test or CI runs, but checks what it is asked for: that extras
and versions are those of the project, that modules and files are there. `patcher` is the real command.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path


def pip(*arguments: str) -> None:
    assert arguments[0] == "install", arguments
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for requirement in arguments[1:]:
        if requirement.startswith("."):
            assert requirement == "." or requirement[1:].strip("[]") in extras, requirement
        elif not requirement.startswith("-"):
            assert requirement in extras["dev"], requirement


def python(*arguments: str) -> None:
    match arguments:
        case ("-m", "venv", folder):
            (Path(folder) / "bin").mkdir(parents=True, exist_ok=True)
            for name in ("pip", "python", "python3.11", "patcher"):
                command = shlex.join([sys.executable, str(Path(__file__).resolve()), name])
                path = Path(folder) / "bin" / name
                path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
                path.chmod(0o755)
        case ("-m", module, *_):
            assert importlib.util.find_spec(module), module
        case (file, *_):
            compile(Path(file).read_text(encoding="utf-8"), file, "exec")


def patcher(*arguments: str) -> None:
    from patcher.cli import main

    sys.argv = ["patcher", *arguments]
    main()


if __name__ == "__main__":
    {"pip": pip, "python": python, "python3.11": python, "patcher": patcher}[sys.argv[1]](*sys.argv[2:])
