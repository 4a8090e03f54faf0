"""Installing the hook: when it happens, what it leaves as it was, and what it says when a seam is gone."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    modeling_utils,
    pipelines,
)
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import InvalidPatcherError, Patcher, PatcherError, report
from patcher.compat import seams
from patcher.compat.seams import seams_in
from tests.support import fresh
from tests.support.tiny import save_tiny, tiny_llama_config


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.process
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
USED = """
import sys
from transformers import PreTrainedModel
assert "patcher" not in sys.modules
exec(sys.argv[1])
assert hasattr(PreTrainedModel.from_pretrained, "__wrapped__")
"""


@pytest.mark.process
@pytest.mark.parametrize("use", USES)
def test_using_any_public_name_installs_the_hook(use: str) -> None:
    fresh.run(USED, use)


#: What is imported after the package, which alone imports nothing: modules that bring that of all models in the middle
#: of their own import, or at its end, or in several threads.
LATER = {
    "an Auto class": "from transformers import AutoModel; AutoModel.from_config",
    "a model": "import transformers.models.llama.modeling_llama",
    "what that imports": "import transformers.modeling_layers",
    "another library": "import peft",
    "transformers first": "",
    "threads": """
import threading
names = ["modeling_layers", "trainer", "quantizers.base", "models.llama.modeling_llama", "pipelines"]
lines = [f"import transformers.{name}" for name in names]
lines += ["patcher.Patcher", "from patcher import report", "import patcher.monkey_patching"]
threads = [threading.Thread(target=exec, args=(line, globals())) for line in lines]
for each in threads:
    each.start()
for each in threads:
    each.join()
""",
}
IMPORTED = """
import sys
if not sys.argv[1]:
    import transformers.modeling_utils
import patcher
assert (not sys.argv[1]) == ("torch" in sys.modules)
exec(sys.argv[1])
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM._from_config(config, patcher=patcher.Patcher(fusions="gate_up"))
assert type(model.model.layers[0].mlp).__name__ == "FusedLlamaMLP"
assert not [each for each in sys.meta_path if getattr(each, "name", "") == "patcher"]
"""


@pytest.mark.process
@pytest.mark.parametrize("later", LATER)
def test_the_package_installs_the_hook_whatever_is_imported_in_which_order(later: str) -> None:
    """Python looks the method up before it makes the patcher that is passed to it."""
    if later == "another library":
        pytest.importorskip("peft")
    run(IMPORTED, LATER[later])


@pytest.mark.process
def test_a_release_without_a_seam_can_be_imported_beside_the_package() -> None:
    """Only what is used of the package raises."""
    gone = """
import sys, patcher
from patcher.source.importing import when_imported
when_imported("transformers.modeling_utils", lambda module: delattr(module.PreTrainedModel, "post_init"))
sys.meta_path[:2] = sys.meta_path[1::-1]  # before the package looks
from transformers import PreTrainedModel
try:
    patcher.Patcher
except patcher.PatcherError as error:
    print(error)
"""
    assert "PreTrainedModel.post_init is gone" in run(gone)


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


SHOWN = [
    (PreTrainedModel.from_pretrained, "pretrained_model_name_or_path"),
    (LlamaForCausalLM.from_pretrained, "pretrained_model_name_or_path"),
    (LlamaForCausalLM._from_config, "config"),
    (AutoModelForCausalLM.from_pretrained, "pretrained_model_name_or_path"),
    (AutoModel.from_config, "config"),
    (pipelines.pipeline, "task"),
]


@pytest.mark.parametrize(("function", "first"), SHOWN, ids=lambda each: getattr(each, "__qualname__", each))
def test_editors_are_shown_the_argument(function: Callable[..., Any], first: str) -> None:
    """What completes arguments in a notebook goes by the signature."""
    parameters = inspect.signature(function).parameters
    assert (next(iter(parameters)), list(parameters)[-2:]) == (first, ["patcher", "kwargs"])
    assert parameters["patcher"].default is None
    assert parameters["patcher"].annotation == Patcher | None


@pytest.mark.process
def test_auto_classes_that_are_imported_later_show_the_argument() -> None:
    run(
        "import patcher; patcher.install(); from transformers import AutoModel; from inspect import signature; "
        "assert 'patcher' in signature(AutoModel.from_pretrained).parameters"
    )


@pytest.mark.parametrize("value", ["LlamaMLP", {"LlamaMLP": object}, 3, patcher.Patcher])
def test_patcher_must_be_a_patcher(value: object) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"patcher= takes a patcher.Patcher, found .*write for instance patcher=Patcher\("
    ):
        LlamaForCausalLM.from_pretrained("nowhere", patcher=value)
    with pytest.raises(InvalidPatcherError, match=r"patcher= takes a patcher.Patcher"):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=value)


MODEL = "transformers.modeling_utils:PreTrainedModel"


@pytest.mark.parametrize(
    ("seam", "library", "what"),
    [
        (
            ("transformers.modeling_utils:PreTrainedModel._no_such_method",),
            transformers,
            r"PreTrainedModel\._no_such_method is gone",
        ),
        (
            ("transformers.modeling_utils:PreTrainedModel.post_init", "no_parameter"),
            transformers,
            r"post_init has no parameter no_parameter",
        ),
        (("accelerate.utils:no_such_function",), accelerate, r"utils\.no_such_function is gone"),
    ],
)
def test_a_seam_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, seam: object, library: ModuleType, what: str
) -> None:
    monkeypatch.setattr(seams, "USED", (seam,))
    known = re.escape(f"{library.__name__} {library.__version__}")
    with pytest.raises(
        PatcherError, match=rf"doesn't know {known}: .*{what}\. Install a release of {library.__name__}"
    ):
        seams.check_used()


HOOKS = [f"patcher.loading.hooks.{name}" for name in ("making", "recorders", "saves")]


def go_around(monkeypatch: pytest.MonkeyPatch, place: str) -> str:
    """Have transformers be as if a place were elsewhere; the name that it has."""
    (seam,) = (each for each in seams_in("patcher.loading.hooks.loads", *HOOKS) if each.name == place)
    owner, name = seams.find(seam.place, *seam.parameters)
    hooked = inspect.getattr_static(owner, name)
    plain = inspect.unwrap(getattr(owner, name))
    for holder in (owner, modeling_utils) if seam.follow else (owner,):
        monkeypatch.setattr(holder, name, classmethod(plain) if isinstance(hooked, classmethod) else plain)
    return seam.name


QKV = Patcher(fusions="qkv", strict=False)
SAME_NAMES = Patcher({"LlamaMLP": type("OtherMLP", (LlamaMLP,), {})}, strict=False)


@pytest.mark.parametrize("patched", [QKV, SAME_NAMES], ids=["fusion", "class"])
@pytest.mark.parametrize(
    "place",
    [
        "PreTrainedModel.get_init_context",
        "get_model_conversion_mapping",
        "convert_and_load_state_dict_in_model",
        "PreTrainedModel._finalize_model_loading",
    ],
)
def test_a_seam_that_a_load_goes_around_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, patched: Patcher
) -> None:
    """Weights would be random, or a model as shipped; `strict=False` allows that only where nothing is to patch."""
    save_tiny(tiny_llama_config(), tmp_path)
    with monkeypatch.context() as changed:
        name = go_around(changed, place)
        with pytest.raises(PatcherError, match=rf"{re.escape(name)} is not called where a model is loaded"):
            LlamaForCausalLM.from_pretrained(tmp_path, patcher=patched)
    made = report(LlamaForCausalLM.from_pretrained(tmp_path, patcher=patched))
    assert made.fused or made.replaced


def test_a_seam_that_a_save_goes_around_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file would have what no other load reads."""
    save_tiny(tiny_llama_config(), tmp_path / "stock")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "stock", patcher=QKV)
    with monkeypatch.context() as changed:
        name = go_around(changed, "remove_tied_weights_from_state_dict")
        with pytest.raises(PatcherError, match=rf"{re.escape(name)} is not called where a model is loaded, or saved"):
            model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    model.save_pretrained(tmp_path / "saved")
    written = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("stock", "saved")]
    assert written[0] == written[1]


OLD = """
import sys
import torch, transformers.modeling_utils
exec(sys.argv[1])
try:
    exec(sys.argv[2])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "use", ["from patcher import Patcher; Patcher(fusions='qkv')", "from patcher.fusions import Projections"]
)
@pytest.mark.parametrize(
    ("gone", "library", "what"),
    [
        ("torch.compiler.is_compiling", "torch", "module 'torch.compiler' has no attribute 'is_compiling'"),
        (
            "transformers.modeling_utils.local_torch_dtype",
            "transformers",
            "cannot import name 'local_torch_dtype' from 'transformers.modeling_utils' ({file})",
        ),
    ],
)
def test_what_a_release_of_a_library_lacks_is_named(gone: str, library: str, what: str, use: str) -> None:
    what = what.format(file=modeling_utils.__file__)
    assert fresh.run(OLD, f"del {gone}", use).stdout == (
        f"PatcherError This release of patcher doesn't know {library} {version(library)}: {what}. "
        f"Install a release of {library} that patcher's metadata lists, or a newer patcher.\n"
    )


@pytest.mark.process
def test_a_torch_that_does_not_tell_an_export_from_a_compilation_is_one_that_works() -> None:
    """So are releases before 2.7."""
    use = "from patcher.compat.models import is_exporting; assert is_exporting is torch.compiler.is_compiling"
    assert fresh.run(OLD, "vars(torch.compiler).pop('is_exporting', None)", use).stdout == ""
