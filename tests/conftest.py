"""Fixtures for all tests. Nothing heavy is imported here, so that collecting stays fast."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import real_models
from tests.support import kinds
from tests.support.sampling import leave_to_the_night

# Before anything imports transformers or torch, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' bars follow it
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# What `-n` starts inherits it: threads of two workers that wait for each other's cores take several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Remote code is copied here: not into the home of whoever runs the tests.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="patcher-tests-modules-")

REAL_MODEL_FIXTURES = frozenset(real_models.MODELS)
T = TypeVar("T")


_running: list[pytest.Item] = []
kinds.starts_no_process(lambda: _running[-1] if _running else None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a run leaves out isn't imported either."""
    kind = kinds.kind_of(collection_path)
    return True if kind and not kinds.wants(config.getoption("markexpr"), kind) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if kind := kinds.kind_of(item.path):
            item.add_marker(kind)
        if REAL_MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("real")
    leave_to_the_night(items)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector needn't walk through all of torch again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to each worker, so that each imports and prepares less, until one has nothing left and steals."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all is installed that a test could need, a browser too, a test that is skipped is a hole."""
    gc.unfreeze()  # what is frozen at the end counts as leaked to some libraries, which say so
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter is not None else {}
    if os.environ.get("PATCHER_TESTS_SKIP_NONE") and stats.get("skipped"):
        reporter.write_line("PATCHER_TESTS_SKIP_NONE is set, and tests were skipped.", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
    if (shared := sys.modules.get("tests.support.shared")) is not None:  # it imports torch
        shared.remove()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _what_is_shared_is_only_read() -> Iterator[None]:
    yield
    from tests.support import shared

    assert not (changed := shared.changed()), f"this test has written to {', '.join(changed)}, which others read"


def _prepared(model: Callable[[], T]) -> T:
    """A real model's folder. CI fails without it: a green run has tested on real weights."""
    try:
        return model()
    except real_models.ModelUnavailableError as error:
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(f"{model.__name__}: {error}", pytrace=False)
        pytest.skip(f"real model {model.__name__} not available: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _prepared(real_models.smollm2)


@pytest.fixture(scope="session")
def smollm2_small() -> Path:
    return _prepared(real_models.smollm2_small)


@pytest.fixture(scope="session")
def smollm2_moe() -> Path:
    return _prepared(real_models.smollm2_moe)


@pytest.fixture(scope="session")
def minilm() -> Path:
    return _prepared(real_models.minilm)


@pytest.fixture(scope="session")
def albert() -> Path:
    return _prepared(real_models.albert)


@pytest.fixture(scope="session")
def rxnfp() -> dict[str, Path]:
    return _prepared(real_models.rxnfp)
