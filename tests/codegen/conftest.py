"""Generated files, and the sources that they are generated from."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from patcher.codegen import CheckResult, PatchConfig, check, write
from tests.codegen.drifting import CONFIG, NEW, OLD, excerpt


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[PatchConfig], ModuleType]]:
    """Writes the file of a config and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def load(config: PatchConfig) -> ModuleType:
        config.target_file = f"generated_{tmp_path.name.replace('-', '_')}_{len(names)}.py"
        names.append(write(config, tmp_path).stem)
        return importlib.import_module(names[-1])

    yield load
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Writes a module, a new one for each name."""
    root = tmp_path_factory.mktemp("originals")
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))

        def put(text: str, name: str = "") -> str:
            name = name or f"modeling_{root.name}_{next(numbers)}"
            (root / f"{name}.py").write_bytes(text.encode())
            importlib.invalidate_caches()
            return name

        yield put


@pytest.fixture
def drifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A project whose file was generated from the older of two releases, and the newer one in its place."""
    package = tmp_path / "lib" / "drifting" / "models"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text("")
    config = tmp_path / "moe_patch_gen_config.py"
    config.write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)

    def install(release: str) -> None:
        (package / "modeling_mixtral.py").write_text(excerpt(release))

    def checked(**options: bool) -> CheckResult:
        (result,) = check([config], **options)
        return result

    def written(**options: bool) -> Path:
        from patcher.codegen.files.projects import load_configs

        return write(load_configs(str(config))[0], **options)

    install(OLD)
    path = written(diff=True)
    install(NEW)
    yield SimpleNamespace(config=config, path=path, checked=checked, written=written, install=install)
    sys.modules.pop("moe_patch_gen_config", None)
