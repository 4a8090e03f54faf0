"""Installing the hook: when it happens, what it leaves as it was, and what it says when a seam is gone."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel, modeling_utils

import patcher
from patcher import InvalidPatcherError, Patcher, PatcherError, report
from patcher.compat import hooks
from patcher.compat.hooks import check
from tests.support.tiny import save_tiny, tiny_llama_config


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert (
        run("import sys, patcher; print(sorted({'torch', 'transformers', 'rich', 'accelerate'} & set(sys.modules)))")
        == "[]\n"
    )


USES = [
    "from patcher import Patcher",
    "import patcher; patcher.report",
    "import patcher; patcher.install()",
    "from patcher.monkey_patching import clear_patch_mapping",
]
# Each in a process that hasn't imported patcher, forked from one that has imported what takes seconds.
EACH_BY_ITSELF = """
import os, sys
from transformers import PreTrainedModel
for use in sys.argv[1:]:
    child = os.fork()
    if not child:
        assert "patcher" not in sys.modules
        exec(use)
        print(use, "->", hasattr(PreTrainedModel.from_pretrained, "__wrapped__"), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_using_any_public_name_installs_the_hook() -> None:
    assert run(EACH_BY_ITSELF, *USES).splitlines() == [f"{use} -> True" for use in USES]


def test_installing_twice_hooks_once() -> None:
    before = inspect.getattr_static(PreTrainedModel, "from_pretrained")
    patcher.install()
    assert inspect.getattr_static(PreTrainedModel, "from_pretrained") is before


def test_all_public_names_exist() -> None:
    for name in patcher.__all__:
        assert getattr(patcher, name) is not None
    assert set(patcher.__all__) <= set(dir(patcher))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = patcher.nonsense


def test_the_hook_keeps_signature_and_documentation() -> None:
    assert "pretrained_model_name_or_path" in inspect.signature(PreTrainedModel.from_pretrained).parameters
    assert PreTrainedModel.from_pretrained.__doc__
    assert "save_directory" in inspect.signature(PreTrainedModel.save_pretrained).parameters


@pytest.mark.parametrize("value", ["LlamaMLP", {"LlamaMLP": object}, 3, patcher.Patcher])
def test_patcher_must_be_a_patcher(value: object) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"patcher= takes a patcher.Patcher, found .*write patcher=Patcher\("
    ):
        LlamaForCausalLM.from_pretrained("nowhere", patcher=value)
    with pytest.raises(InvalidPatcherError, match=r"patcher= takes a patcher.Patcher"):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=value)


@pytest.mark.parametrize(
    ("seam", "library", "what"),
    [
        ((PreTrainedModel, "_no_such_method", ()), transformers, r"PreTrainedModel\._no_such_method is gone"),
        ((PreTrainedModel, "post_init", ("no_parameter",)), transformers, r"post_init has no parameter no_parameter"),
        ((accelerate.utils, "no_such_function", ()), accelerate, r"utils\.no_such_function is gone"),
    ],
)
def test_a_seam_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, seam: object, library: ModuleType, what: str
) -> None:
    monkeypatch.setattr(hooks, "_checked", False)
    monkeypatch.setattr(hooks, "USED", (seam,))
    known = re.escape(f"{library.__name__} {library.__version__}")
    with pytest.raises(
        PatcherError, match=rf"doesn't know {known}: .*{what}\. Install a release of {library.__name__}"
    ):
        check()


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (PreTrainedModel, "get_init_context", lambda *args: [torch.device("meta")]),
        (modeling_utils, "patch_output_recorders", lambda model: None),
    ],
    ids=["contexts", "stands"],
)
def test_a_seam_that_a_load_goes_around_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, other: Callable[..., Any]
) -> None:
    """Nothing would be patched, and `strict=False` allows that only where nothing is there to patch."""
    save_tiny(tiny_llama_config(), tmp_path)
    monkeypatch.setattr(owner, name, other)
    patched = Patcher(fusions="qkv", strict=False)
    with pytest.raises(PatcherError, match=rf"{owner.__name__}\.{name} is not called in a load"):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=patched)
    monkeypatch.undo()
    assert report(LlamaForCausalLM.from_pretrained(tmp_path, patcher=patched)).fused
