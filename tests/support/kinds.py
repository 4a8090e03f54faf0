"""Kinds of tests, which are markers: `pyproject.toml` says what each is. The README's command runs tests of no kind.

Where all tests of a folder are of one kind, `FOLDERS` says so, and a run that leaves them out doesn't import them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path

import pytest

__all__ = ["FOLDERS", "KINDS", "kind_of", "starts_no_process", "wants"]

KINDS = ("process", "libraries", "project", "real", "gpu", "nightly")
#: What has tests of one kind only, below `tests/`.
FOLDERS = {
    "benchmarks": "project",
    "codegen/test_gallery.py": "project",
    "compatibility": "libraries",
    "coverage": "project",
    "display/test_in_a_browser.py": "project",
    "distributed": "process",
    "fuzz": "project",
    "gpu": "gpu",
    "identity": "project",
    "libraries": "libraries",
    "llm_compressor": "libraries",
    "lockstep": "libraries",
    "project": "project",
    "soak": "project",
    "support/adapters.py": "libraries",
    "support/fresh.py": "process",
    "support/trainer.py": "libraries",
}
ROOT = Path(__file__).parents[1]


def kind_of(path: Path) -> str:
    """The kind of all tests in a file or folder, "" if they are of several, or of none."""
    if not path.is_relative_to(ROOT):
        return ""
    path = path.relative_to(ROOT)
    return next((FOLDERS[each] for place in (path, *path.parents) if (each := place.as_posix()) in FOLDERS), "")


def wants(expression: str, kind: str) -> bool:
    """Whether a run with `-m EXPRESSION` may run tests of a kind, beside others that they are of as well."""
    others = [each for each in KINDS if each != kind]
    beside = chain.from_iterable(combinations(others, number) for number in range(len(others) + 1))
    return any(_matches(expression, {kind, *each}) for each in beside)


def _matches(expression: str, markers: set[str]) -> bool:
    # An expression of `-m` is one of Python, of names and `and`, `or`, `not`.
    return bool(eval(expression or "True", {}, {name: name in markers for name in KINDS}))


def starts_no_process(test: Callable[[], pytest.Item | None]) -> None:
    """Have whatever starts an interpreter, or forks, fail in a test that is not of a kind that may.

    Args:
        test: says which test runs.
    """
    allowed = {"process", "libraries", "project", "real", "gpu"}

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen":
            command = arguments[1]
            if "python" not in Path(str(command[0] if isinstance(command, list | tuple) else command)).name:
                return  # git, or a formatter
        elif event not in ("os.fork", "patcher.tests.fresh"):
            return
        running = test()
        if running is not None and not allowed.intersection(mark.name for mark in running.iter_markers()):
            raise AssertionError(f"{running.nodeid} starts a process, and is not marked so: @pytest.mark.process")

    sys.addaudithook(hook)
