"""Questions about a model before a load: `plan`, `verify`, `diff`, the command line, checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import patcher
from patcher import InvalidPatcherError, Patcher
from patcher.cli import values
from tests.project.advice import OwnMLP, Place, Steps, advice, load, written
from tests.support.tiny import tiny_llama_config

QKV = Patcher(fusions="qkv")


# --- which model ---------------------------------------------------------------------------------------------------


@advice(
    'a model is given by its repo, its folder or its config, found {} ({}); write "./folder", the name of a repo, or '
    "for a model in memory model.config."
)
def a_model_in_memory(at: Place) -> Steps:
    model = load(at.llama)
    said = yield lambda: patcher.plan(model, QKV)
    assert len(said) < 500
    assert patcher.plan(written(said, r"memory (model\.config)\.", model=model), QKV).ok
    with in_folder(at.llama.parent):
        assert patcher.plan(f"./{at.llama.name}", QKV).ok


@advice("There is no such folder: write the path of one that is there, or a repo that can be reached.")
def a_folder_that_is_not_there(at: Place) -> Steps:
    for call in (patcher.plan, patcher.diff):
        yield lambda call=call: call(str(at.tmp / "absent"), QKV)  # type: ignore[misc]
        call(at.llama, QKV)


@advice("It has no config.json: write the folder of a model; for an adapter, that of its base model.")
def a_folder_above(at: Place) -> Steps:
    yield lambda: patcher.plan(at.tmp, QKV)
    load(at.llama).save_pretrained(at.tmp / "model")
    assert patcher.plan(at.tmp / "model", QKV).ok


@advice("found {}; write model_class=AutoModel.")
def something_for_a_class_of_model(at: Place) -> Steps:
    said = yield lambda: patcher.plan(at.llama, QKV, model_class=nn.Linear)
    found = written(said, r"model_class=(AutoModel)\.$", AutoModel=AutoModel)
    assert patcher.plan(at.llama, QKV, model_class=found).ok


@advice("pass model_class=, or trust_remote_code=True if the repo has its code.")
def an_architecture_that_there_is_not(at: Place) -> Steps:
    config = tiny_llama_config(architectures=["NoSuchModel"])
    yield lambda: patcher.plan(config, QKV)
    assert patcher.plan(config, QKV, model_class=LlamaForCausalLM).ok


class UnknownConfig(LlamaConfig):
    model_type = "no_such_type"


@advice("No Auto class supports {}, and it names no architecture; pass model_class=.")
def a_config_that_no_auto_class_knows(at: Place) -> Steps:
    config = UnknownConfig(**tiny_llama_config().to_diff_dict())
    config.architectures = None
    yield lambda: patcher.plan(config, QKV)
    assert patcher.plan(config, QKV, model_class=LlamaForCausalLM).replaced == ()


# --- which checkpoint ----------------------------------------------------------------------------------------------


@advice("Pass checkpoint=, a folder, a file or an index, or a config in place of the folder.")
def a_folder_without_weights(at: Place) -> Steps:
    shutil.copy(at.llama / "config.json", at.tmp)
    yield lambda: patcher.plan(at.tmp, QKV)
    assert patcher.plan(at.tmp, QKV, checkpoint=at.llama).ok
    assert patcher.plan(at.tmp, QKV, checkpoint=at.llama / "model.safetensors").ok
    assert patcher.plan(load(at.llama).config, QKV).ok


@advice("isn't a checkpoint that can be read by name and shape; pass a .safetensors or .bin file, or an index.")
def a_file_of_another_kind(at: Place) -> Steps:
    yield lambda: patcher.plan(at.llama, QKV, checkpoint=at.llama / "config.json")
    assert patcher.plan(at.llama, QKV, checkpoint=at.llama / "model.safetensors").ok


@advice("plan can't read GGUF files; load the model, save it, and plan that folder.")
def a_gguf_file(at: Place) -> Steps:
    yield lambda: patcher.plan(at.llama, QKV, gguf_file="model.gguf")
    load(at.llama).save_pretrained(at.tmp / "model")
    assert patcher.plan(at.tmp / "model", QKV).ok


class NoArguments(OwnMLP):
    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(())


@advice("doesn't fit a call of it, {}: {}. Give it the parameters of what it replaces.")
def a_forward_of_other_parameters(at: Place) -> Steps:
    def wrong() -> None:
        raise InvalidPatcherError(patcher.plan(at.llama, Patcher({"LlamaMLP": NoArguments})).problems[0])

    yield wrong
    assert patcher.plan(at.llama, Patcher({"LlamaMLP": OwnMLP})).ok


# --- a model that is loaded ----------------------------------------------------------------------------------------


@advice("report takes a model, found {}; write report(model).")
def a_report_of_a_folder(at: Place) -> Steps:
    said = yield lambda: patcher.report(str(at.llama))  # type: ignore[arg-type]
    model = load(at.llama, QKV)
    assert written(said, r"write (.*)\.$", report=patcher.report, model=model).fused


@advice("diff needs a patcher for {}, which isn't loaded; write diff(model, Patcher(...)).")
def a_diff_without_a_patcher(at: Place) -> Steps:
    yield lambda: patcher.diff(at.llama)
    assert patcher.diff(at.llama, QKV).classes


@advice("has no config class; write diff(config, patcher).")
def a_diff_of_a_class_without_a_config(at: Place) -> Steps:
    yield lambda: patcher.diff(transformers_base(), QKV)
    assert patcher.diff(tiny_llama_config(), QKV).classes


def transformers_base() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


@advice("dtype={} can't be compared; write one of {}.")
def a_dtype_that_is_none(at: Place) -> Steps:
    said = yield lambda: patcher.verify(at.llama, QKV, dtype=torch.int8)
    for name in said.partition("write one of ")[2].removesuffix(".").split(", "):
        assert eval(name, {"torch": torch}).is_floating_point


@advice("tolerance={} can't be met; write 0, for bitwise equality, or more.")
def a_tolerance_below_zero(at: Place) -> Steps:
    yield lambda: patcher.compare(at.llama, at.llama, quick=True, tolerance=-1.0)
    assert patcher.compare(at.llama, at.llama, quick=True, tolerance=0.0).passed


# --- the command line ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    with contextlib.chdir(folder):
        yield


def command(*words: str) -> str:
    """What a command answers; what it says when it fails is the error."""
    from typer.testing import CliRunner

    from patcher.cli import app

    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if result.exit_code:
        raise InvalidPatcherError(result.stderr)
    return result.stdout


@advice("{} takes {}, found {}; write '{}'.", "define {} in it")
def a_class_for_a_path_that_is_none(at: Place) -> Steps:
    (at.tmp / "my_modules.py").write_text("")
    with in_folder(at.tmp):
        said = yield lambda: command("plan", str(at.llama), "--module", "my_patches:MyMLP")
        where = said.partition("write '")[2].partition("'")[0]
        assert where.endswith("=my_patches:MyMLP")
        where = where.replace("{0..3}", "{0..1}").replace("my_patches", "my_modules")
    with in_folder(at.tmp):
        yield lambda: command("plan", str(at.llama), "--module", where)
    del sys.modules["my_modules"]
    source = "from transformers.models.llama.modeling_llama import LlamaMLP\nclass MyMLP(LlamaMLP): ...\n"
    (at.tmp / "my_modules.py").write_text(source)
    with in_folder(at.tmp):
        assert "MyMLP" in command("plan", str(at.llama), "--module", where)
    del sys.modules["my_modules"]


@advice("{} takes {}, found {}; write '{}'.", "define {} in it")
def a_constant_that_is_none(at: Place) -> Steps:
    (at.tmp / "my_patches.py").write_text("")
    with in_folder(at.tmp):
        said = yield lambda: command("plan", str(at.llama), "--patcher", "PATCHER")
        instead = said.partition("write '")[2].partition("'")[0]
    with in_folder(at.tmp):
        yield lambda: command("plan", str(at.llama), "--patcher", instead)
    del sys.modules["my_patches"]
    (at.tmp / "my_patches.py").write_text("from patcher import Patcher\nPATCHER = Patcher(fusions='qkv')\n")
    with in_folder(at.tmp):
        assert values.patchers_of({"--patcher": [instead]}) == [QKV]
