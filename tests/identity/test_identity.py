"""The identity law on real modeling files; `python -m tests.identity` runs it on all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.identity import law as identity

ROOT = Path(__file__).parents[2]


def test_a_sample_of_twenty() -> None:
    """In a process of its own: it forks, and imports what would stay behind in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.identity", "--sample", "20"],
        cwd=ROOT,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "20 of 20 hold" in done.stdout


def test_the_sample_holds_the_odd_files_and_is_always_the_same() -> None:
    names = identity.sample(60)
    assert len(names) == 60
    present = {
        name for name in identity.modeling_modules() if name.removeprefix("transformers.models.") in identity.ODD
    }
    assert present <= set(names)
    assert len(present) >= 10
    assert names == identity.sample(60)


SOURCE = b"import os\nfrom . import x\n\n\ndef f(): ...\n"
HEADER = b"# ---\n# words\n# ---\n"


@pytest.mark.parametrize(
    ("generated", "problem"),
    [
        (HEADER + b"import os\nfrom a import x\n\n\ndef f(): ...\n", ""),
        (HEADER + b"import os\nfrom a import x\n\n\ndef f(): pass\n", "line 5 changed"),
        (HEADER + b"import os\nfrom . import x\n\n\ndef f(): ...\n", "line 2 is still relative"),
        (HEADER + b"import os\nfrom a import y\n\n\ndef f(): ...\n", "line 2 imports something else"),
        (HEADER + b"import  os\nfrom a import x\n\n\ndef f(): ...\n", "line 1 changed"),
        (b"# ---\nx = 1\n# ---\n" + b"import os\nfrom a import x\n\n\ndef f(): ...\n", "line 2 of the header"),
        (b"import os\nfrom a import x\n\n\ndef f(): ...\n", "doesn't start with a header"),
    ],
)
def test_the_comparison_sees_every_change(generated: bytes, problem: str) -> None:
    assert problem in "\n".join(identity.text_problems(SOURCE, generated))
    assert bool(problem) == bool(identity.text_problems(SOURCE, generated))


def test_a_package_that_another_import_left_as_paths_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves `Path` objects in its spec once some of it is imported."""
    import transformers

    from patcher.source.modules import find_spec

    assert transformers.__spec__ is not None
    folders = [Path(str(folder)) for folder in transformers.__spec__.submodule_search_locations or []]
    monkeypatch.setattr(transformers.__spec__, "submodule_search_locations", folders)
    spec = find_spec("transformers.models.llama.modeling_llama")
    assert spec is not None
    assert str(spec.origin).endswith("modeling_llama.py")


BANNER = identity.BANNER.format(alarm="\U0001f6a8" * 48, path="src/a/modular_a.py", name="modular_a.py").encode()
TRUE = b"# The source was itself generated, from src/a/modular_a.py.\n"
IMPORTS = b"import os\nfrom a import x\n\n\ndef f(): ...\n"


@pytest.mark.parametrize(
    ("generated", "problem"),
    [
        (HEADER + TRUE + IMPORTS, ""),
        (HEADER + BANNER + IMPORTS, "the file doesn't start with a header"),
        (HEADER + TRUE.replace(b"modular", b"other") + IMPORTS, "line 1 changed"),
        (HEADER + IMPORTS, "the file doesn't start with a header"),
        (HEADER + TRUE + IMPORTS.replace(b"import x", b"import y"), "line 3 imports something else"),
    ],
)
def test_the_banner_is_the_one_more_difference(generated: bytes, problem: str) -> None:
    problems = identity.text_problems(BANNER + SOURCE, generated)
    assert problem in "\n".join(problems)
    assert bool(problems) == bool(problem)
