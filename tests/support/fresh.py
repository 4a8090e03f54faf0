"""Programs in a process of their own that doesn't import torch and transformers, since it has them.

    >>> from tests.support.fresh import run
    >>> run("import sys; print(sys.argv[1], 'torch' in sys.modules, 'patcher' in sys.modules)", "hello").stdout
    'hello True False\\n'

Each is a fork of one server, which has imported the two and nothing of this project; starting an interpreter takes
seconds instead. A program that is about importing them still needs one: `subprocess.run([sys.executable, ...])`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

__all__ = ["run", "run_file", "run_pytest"]

ROOT = Path(__file__).parents[2]
#: multiprocessing has one such server: another list of what it imports would replace this one.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"])


def run(
    code: str,
    *arguments: object,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    warn: str = "ignore",
    check: bool = True,
    seconds: float = 300,
) -> CompletedProcess[str]:
    """Run a program as `python -W WARN -c CODE ARGUMENTS` does, and return what it printed.

    Args:
        code: the program.
        arguments: its `sys.argv[1:]`.
        cwd: where it runs, and what it imports from first.
        environment: variables beside those of this process. Those that torch and transformers read when they are
            imported come too late.
        warn: what is done with its warnings, an action of `warnings.simplefilter`.
        check: whether a program that fails raises, with its errors.
        seconds: after which it is killed.
    """
    sys.audit("patcher.tests.fresh")
    texts = tuple(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        for file in files:
            file.touch()
        variables = {**os.environ, **(environment or {})}
        process = FORKS.Process(target=_program, args=(code, texts, cwd, variables, warn, *files))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        printed, errors = (file.read_text("utf-8") for file in files)
    assert process.exitcode is not None
    done = CompletedProcess(["python", "-c", code, *texts], process.exitcode, printed, errors)
    assert not check or not done.returncode, f"exit code {done.returncode}\n{errors}"
    return done


def run_file(path: Path, *arguments: object, **options: Any) -> CompletedProcess[str]:
    """Run a file as `python PATH ARGUMENTS` does."""
    code = "import runpy, sys; sys.argv.pop(0); sys.path[0] = sys.argv[0].rpartition('/')[0]; "
    return run(code + "runpy.run_path(sys.argv[0], run_name='__main__')", path, *arguments, **options)


def run_pytest(*arguments: object, **options: Any) -> CompletedProcess[str]:
    """Run `python -m pytest ARGUMENTS`."""
    code = "import pytest, sys; raise SystemExit(pytest.main(sys.argv[1:]))"
    # A plugin of pytest is imported already, by what transformers imports.
    flags = ("-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    return run(code, *flags, *arguments, check=False, **options)


def run_pytest_alone(*arguments: str, **environment: str) -> None:
    """Run `python -m pytest ARGUMENTS` in an interpreter that has imported nothing, and have all of it pass.

    Args:
        environment: variables beside those of this process, which also torch and transformers see.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "-m", ""],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout


def _program(
    code: str, arguments: tuple[str, ...], cwd: Path, variables: dict[str, str], warn: str, out: Path, err: Path
) -> None:
    for number, file in ((1, out), (2, err)):
        opened = os.open(file, os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c", *arguments]
    sys.path[:0] = ["", *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    warnings.simplefilter(warn)  # type: ignore[arg-type]
    exec(compile(code, "<string>", "exec"), vars(main))
