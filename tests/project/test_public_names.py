"""What `import patcher` gives, and what it costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import patcher

NAMES = """
    Benchmark ClassDiff CodegenError Diff Exported ForwardOf Fusion InvalidPatcherError Like Part PatchConflictError
    PatchConstructionError PatchedWeightsError Patcher PatcherError PatcherWarning Plan PresetDriftError Report
    Resolution Stage UnmatchedPatchError Verification VerificationError __version__ benchmark checkpoint_metadata
    checkpoint_weights compare diff export fingerprint forward_of fused_parameters install like load_checkpoint_weights
    load_new_weights load_original_optimizer_state_dict load_original_state_dict original_optimizer_state_dict
    original_state_dict plan report save_new_weights verify
""".split()
MODULES = ["codegen", "errors", "fusions", "monkey_patching", "presets"]


def test_these_names_are_public() -> None:
    assert sorted(patcher.__all__) == NAMES
    assert dir(patcher) == sorted([*NAMES, *MODULES])


@pytest.mark.parametrize("name", [*NAMES, *MODULES])
def test_each_is_there(name: str) -> None:
    found = getattr(patcher, name)
    assert name.startswith("__") or found.__name__.rpartition(".")[2] == name
    scope: dict[str, object] = {}
    exec(f"from patcher import {name}", scope)
    assert scope[name] is found


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match=r"module 'patcher' has no attribute 'Pacher'; write patcher\.Patcher"):
        _ = patcher.Pacher
    for module in (patcher, patcher.presets, patcher.fusions, patcher.codegen):
        assert not hasattr(module, "Pacher")
        with pytest.raises(patcher.PatcherError, match="has no attribute 'Xyzzy'; dir"):
            _ = module.Xyzzy


def test_the_version_is_that_of_the_installation() -> None:
    assert patcher.__version__ == importlib.metadata.version("patcher")


@pytest.mark.parametrize(
    "statement", ["import patcher", "from patcher import __version__, PatcherError", "from patcher import errors"]
)
def test_it_imports_nothing_heavy(statement: str) -> None:
    code = f"import sys\n{statement}\nassert not {{'torch', 'transformers', 'rich'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_patcher_imports_no_tokenizers() -> None:
    """A load without a processor doesn't need them; importing them takes longer than importing this package."""
    code = "import sys, transformers.modeling_utils\nbefore = set(sys.modules)\nfrom patcher import Patcher\n"
    code += "print(*(name for name in sys.modules if 'token' in name.partition('.')[2] and name not in before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.nightly
def test_any_name_installs_the_hook_where_there_are_models() -> None:
    code = (
        "import transformers\nbefore = transformers.PreTrainedModel.from_pretrained\nfrom patcher import {name}\n"
        "assert transformers.PreTrainedModel.from_pretrained != before"
    )
    for name in ("Fusion", "PatcherError"):
        program = code.format(name=name)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
