"""The process-wide registry: the contract of the one of transformers, and none of its leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.jamba import modeling_jamba
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher.monkey_patching as registry
from patcher import Patcher, report
from patcher.monkey_patching import (
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from tests import real_models
from tests.support import fresh, shared
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import tiny_jamba_config, tiny_llama_config


class MyMLP(LlamaMLP):
    pass


class OtherMLP(LlamaMLP):
    pass


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    clear_patch_mapping()
    yield
    clear_patch_mapping()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def mlp_of(model: nn.Module) -> type[nn.Module]:
    return type(model.model.layers[0].mlp)


@pytest.mark.parametrize("name", ["register", "unregister", "clear", "get"])
def test_both_spellings_are_one_function(name: str) -> None:
    assert getattr(registry, f"{name}_monkey_patch_mapping") is getattr(registry, f"{name}_patch_mapping")
    assert registry.apply_monkey_patches is registry.apply_patches


def test_loads_are_patched_until_cleared(llama: Path) -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is MyMLP
    assert mlp_of(AutoModelForCausalLM.from_config(tiny_llama_config())) is MyMLP
    assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP  # by hand, only inside of a block
    with apply_patches():
        assert type(LlamaMLP(tiny_llama_config())) is MyMLP
    clear_patch_mapping()
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is LlamaMLP


def test_expressions_and_exact_names(llama: Path) -> None:
    register_patch_mapping({".*MLP": OtherMLP})
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is OtherMLP
    register_patch_mapping({"LlamaMLP": MyMLP})
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is MyMLP
    unregister_patch_mapping(["LlamaMLP"])
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is OtherMLP


def test_a_patcher_wins_over_the_registry_key_by_key(llama: Path) -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    model = AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": OtherMLP}))
    assert mlp_of(model) is OtherMLP
    model = AutoModelForCausalLM.from_pretrained(
        llama, patcher=Patcher({"LlamaRMSNorm": nn.Identity}, dropped_weights="norm")
    )
    assert mlp_of(model) is MyMLP
    assert [origin for _, origin in report(model).patchers] == ["patcher=", "monkey_patching"]


def test_nothing_is_checked_strictly(llama: Path) -> None:
    class Bare(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.unknown = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    register_patch_mapping({"LlamaMLP": Bare, "NoSuchClass": MyMLP})
    assert mlp_of(AutoModelForCausalLM.from_pretrained(llama)) is Bare


@pytest.mark.parametrize(
    ("mapping", "error", "text"),
    [
        ("LlamaMLP", TypeError, "must be a mapping of class names to replacements, got 'LlamaMLP'"),
        ({"LlamaMLP": object}, TypeError, "must be a subclass of nn.Module, got object"),
        (
            {"LlamaMLP": nn.Identity()},
            TypeError,
            "must be a subclass of nn.Module, got an instance of Identity",
        ),
        ({"LlamaMLP": "MyMLP"}, TypeError, "'LlamaMLP' must be a subclass of nn.Module, got an instance of str"),
        ({3: MyMLP}, ValueError, "a key is the name of a class, an expression, or like"),
        ({"Llama(MLP": MyMLP}, ValueError, r"'Llama\(MLP' isn't a regular expression"),
        ({"": MyMLP}, ValueError, r"a key is the name of a class, an expression, or like\(\.\.\.\), found ''"),
        ({"(a{999}){999}": MyMLP}, ValueError, "too large to be compiled .it repeats more than 1,000 times"),
        ({"a{99999999999999999999}": MyMLP}, ValueError, "the expression is too large to be compiled"),
        (
            {"LlamaMLP": type("M", (MyMLP,), {"conversion_mapping": [3]})},
            ValueError,
            "3 .int. isn't a weight transform",
        ),
    ],
)
def test_errors_are_clear_and_register_nothing(mapping: object, error: type[Exception], text: str) -> None:
    both = {"LlamaRMSNorm": nn.Identity, **mapping} if isinstance(mapping, dict) else mapping
    with pytest.raises(error, match=text):
        register_patch_mapping(both)  # type: ignore[arg-type]
    assert get_patch_mapping() == {}


def test_a_registered_key_is_overwritten_only_on_request() -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    with pytest.raises(ValueError, match=r"'LlamaMLP' has a patch registered already, MyMLP\. Pass overwrite=True"):
        register_patch_mapping({"LlamaRMSNorm": nn.Identity, "LlamaMLP": OtherMLP})
    assert get_patch_mapping() == {"LlamaMLP": MyMLP}
    register_patch_mapping({"LlamaMLP": OtherMLP}, overwrite=True)
    assert get_patch_mapping() == {"LlamaMLP": OtherMLP}


def test_unregistering_what_is_not_there_changes_nothing() -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    with pytest.raises(ValueError, match=r"'LlamaMPL' was not found in .* Did you mean 'LlamaMLP'\?"):
        unregister_patch_mapping(["LlamaMLP", "LlamaMPL"])
    with pytest.raises(ValueError, match="'3' was not found"):
        unregister_patch_mapping([3])  # type: ignore[list-item]
    assert get_patch_mapping() == {"LlamaMLP": MyMLP}


def test_what_is_got_is_a_copy() -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    get_patch_mapping()["LlamaRMSNorm"] = nn.Identity
    assert get_patch_mapping() == {"LlamaMLP": MyMLP}


def test_inside_of_a_block_names_are_what_they_were_and_what_they_construct_is_another() -> None:
    register_patch_mapping({"LlamaMLP": MyMLP})
    elsewhere: list[type] = []
    with apply_patches():
        assert modeling_llama.LlamaMLP is LlamaMLP
        assert type(modeling_llama.LlamaMLP(tiny_llama_config())) is MyMLP
        thread = threading.Thread(target=lambda: elsewhere.append(type(LlamaMLP(tiny_llama_config()))))
        thread.start()
        thread.join()
    assert elsewhere == [LlamaMLP]


def test_a_name_that_a_class_is_bound_to_counts_as_well() -> None:
    module = types.ModuleType("transformers.models.made_up.modeling_made_up")
    exec("from torch.nn import LayerNorm as MadeUpNorm\ndef build():\n    return MadeUpNorm(4)", vars(module))
    sys.modules[module.__name__] = module

    class Norm(nn.LayerNorm):
        pass

    try:
        register_patch_mapping({"MadeUpNorm": Norm})
        with apply_patches():
            assert type(module.build()) is Norm
            assert type(nn.LayerNorm(4)) is nn.LayerNorm
        assert type(module.build()) is nn.LayerNorm
    finally:
        del sys.modules[module.__name__]


def test_an_exception_in_a_block_leaves_nothing() -> None:
    before = snapshot()
    register_patch_mapping({"LlamaMLP": MyMLP})
    with pytest.raises(RuntimeError, match="on purpose"), apply_patches():
        raise RuntimeError("on purpose")
    assert changes(before) == []


def test_classes_in_tables_are_replaced() -> None:
    class Layer(modeling_jamba.JambaMambaDecoderLayer):
        pass

    register_patch_mapping({"JambaMambaDecoderLayer": Layer})
    model = AutoModelForCausalLM.from_config(tiny_jamba_config())
    assert Layer in {type(layer) for layer in model.model.layers}
    assert modeling_jamba.ALL_DECODER_LAYER_TYPES["mamba"] is modeling_jamba.JambaMambaDecoderLayer


def test_recorders_are_put_on_the_model_never_on_its_class(llama: Path) -> None:
    class Attention(nn.Module):
        def __init__(self, config: object, layer_idx: int) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden_states * self.scale, hidden_states[..., :1]

    stock = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    ids = torch.arange(6)[None]
    register_patch_mapping({"LlamaAttention": Attention})
    patched = AutoModelForCausalLM.from_pretrained(llama)
    assert len(patched(ids, output_attentions=True).attentions) == 2
    assert patched(ids, output_attentions=True).attentions[0].shape == (1, 6, 1)
    patch_output_recorders(stock.model)
    assert stock.model._can_record_outputs["attentions"] is Attention
    assert type(stock.model)._can_record_outputs["attentions"] is modeling_llama.LlamaAttention
    clear_patch_mapping()
    fresh = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    assert fresh(ids, output_attentions=True).attentions[0].shape == (1, 4, 6, 6)


@pytest.mark.process
def test_transformers_own_tests_pass_with_only_the_import_changed(tmp_path: Path) -> None:
    source = own_test_file()
    line = "from transformers.monkey_patching import ("
    assert source.count(line) == 1
    test = tmp_path / "test_monkey_patching.py"
    test.write_text(source.replace(line, "from patcher.monkey_patching import ("), encoding="utf-8")
    done = fresh.run_pytest(test, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def own_test_file() -> str:
    """transformers' test of its registry, out of its source distribution: fetched, never kept in this repository."""
    version = transformers.__version__
    folder = real_models.cache_folder() / f"sdist-{version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "-d", str(folder), f"transformers=={version}"]
    if not list(folder.glob("*.tar.gz")):
        done = subprocess.run(command, capture_output=True, text=True)
        if not list(folder.glob("*.tar.gz")):
            message = (
                f"the source distribution of transformers {version} can't be fetched: {done.stderr.strip()[-500:]}"
            )
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        member = archive.extractfile(f"transformers-{version}/tests/test_monkey_patching.py")
        assert member is not None
        return member.read().decode()
