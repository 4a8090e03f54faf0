"""A patched model as a folder that anyone loads with `trust_remote_code=True`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.repocard import metadata_load
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.dynamic_module_utils import get_imports
from transformers.models.llama.modeling_llama import LlamaMLP
from typer.testing import CliRunner

import patcher
from patcher import CodegenError, InvalidPatcherError, Patcher, VerificationError
from patcher.cli import app
from tests.support import fresh, replaced_elsewhere, shared, tiny
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits
from tests.support.hub_uploads import taking_uploads
from tests.support.remote_code import remote_code_model
from tests.support.small_configs import small_configs


class OwnMLP(LlamaMLP):
    """The same, in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class WrongMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class HelpedMLP(LlamaMLP):
    """Uses another package."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return replaced_elsewhere.halved(2 * super().forward(x))


MLP = Patcher({"LlamaMLP": OwnMLP})
PATCHERS = {"class": MLP, "fused": Patcher(fusions=["qkv", "gate_up"]), "both": MLP | Patcher(fusions=["qkv"])}


@pytest.fixture(scope="module")
def sharded() -> Path:
    return shared.checkpoint(tiny.tiny_llama_config(num_key_value_heads=2), max_shard_size="100KB")


@pytest.fixture
def original(sharded: Path, tmp_path: Path) -> Path:
    """As a repo has it: with files of a tokenizer, other weights, and what a training left behind."""
    folder = tmp_path / "original"
    shutil.copytree(sharded, folder)
    card = "---\nlicense: apache-2.0\nbase_model: someone/tiny\n---\n\n# Tiny\n"
    files = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "LICENSE": "free", "README.md": card}
    files |= {"pytorch_model.bin": "old", "optimizer.pt": "moments", "tf_model.h5": "old", ".gitattributes": "lfs"}
    for name, text in {**files, "trainer_state.json": "{}"}.items():
        (folder / name).write_text(text)
    others = ("checkpoint-5/model.safetensors", "checkpoint-5/tokenizer_config.json", "runs/events.out", *IN_FOLDERS)
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{{}} {name}")
    return folder


#: More templates of a tokenizer, and a second tokenizer of a processor (InstructBLIP).
IN_FOLDERS = ("additional_chat_templates/tool_use.jinja", "qformer_tokenizer/tokenizer_config.json")


@pytest.mark.parametrize("name", PATCHERS)
def test_what_is_written_is_the_patched_model(name: str, original: Path, tmp_path: Path) -> None:
    exported = patcher.export(original, PATCHERS[name], tmp_path / f"own_{name}", quick=True)
    assert exported.verification is not None
    assert exported.verification.passed
    model: Any = AutoModelForCausalLM.from_pretrained(exported.folder, trust_remote_code=True)
    stock = LlamaForCausalLM.from_pretrained(original)
    assert type(model).__module__.endswith(".modeling_llama")
    assert type(model) is not LlamaForCausalLM
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=0)
    assert hasattr(model.model.layers[0].self_attn, "qkv_proj") is (name != "class")
    assert type(AutoModelForCausalLM.from_pretrained(exported.folder)) is LlamaForCausalLM  # nobody trusts it


def test_files_are_those_of_the_original(original: Path, tmp_path: Path) -> None:
    exported = patcher.export(original, MLP, tmp_path / "own", verify=False)
    weights = sorted(each.name for each in original.glob("*.safetensors*"))
    assert len(weights) > 2
    copied = [*weights, "tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json", *IN_FOLDERS]
    assert sorted(exported.files) == sorted([*copied, "README.md", "config.json", "modeling_llama.py"])
    for each in copied:
        assert (exported.folder / each).read_bytes() == (original / each).read_bytes()
    config, before = (json.loads((each / "config.json").read_text()) for each in (exported.folder, original))
    assert config.pop("auto_map") == dict(exported.auto_map)
    assert config == before


def test_the_card_says_what_differs_and_how_it_was_verified(original: Path, tmp_path: Path) -> None:
    exported = patcher.export(original, MLP, tmp_path / "own", quick=True)
    card = (exported.folder / "README.md").read_text()
    about = metadata_load(exported.folder / "README.md")
    assert about == {"license": "apache-2.0", "base_model": "someone/tiny", "library_name": "transformers"}
    assert "- replace class `LlamaMLP`" in card
    assert "replace class `LlamaMLP`" in exported.changes[0]
    code = (exported.folder / exported.modeling_file).read_text()
    assert "# GENERATED FILE: change the patcher that it is made from, not this file.\n" in code
    assert "# Made by: patcher export, or patcher.export(model, patcher, folder)\n" in code
    assert 'AutoModelForCausalLM.from_pretrained("own", trust_remote_code=True)' in card
    assert f"of transformers {transformers.__version__}" in card
    assert "| outputs | passed | max abs 0" in card
    assert f"torch {torch.__version__.partition('+')[0]}" in card
    unverified = patcher.export(original, MLP, tmp_path / "other", verify=False)
    assert "It was not verified." in (unverified.folder / "README.md").read_text()


def test_helpers_of_the_file_are_explained(original: Path, tmp_path: Path) -> None:
    exported = patcher.export(original, PATCHERS["both"], tmp_path / "own", verify=False)
    helpers = [change for change in exported.changes if change.startswith("add `")]
    assert "add `Refit`: Converts original tensors by `forth`" in "\n".join(helpers)
    assert all("`: " in change for change in helpers)


def test_several_auto_classes(original: Path, tmp_path: Path) -> None:
    folder = patcher.export(original, PATCHERS["both"], tmp_path / "own", verify=False).folder
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    stock = AutoModel.from_pretrained(original)
    ids = tiny.tiny_inputs(base.config)["input_ids"]
    with torch.no_grad():
        found, expected = (each.eval()(input_ids=ids).last_hidden_state for each in (base, stock))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert hasattr(base.layers[0].self_attn, "qkv_proj")
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert (
        auto_map["AutoModelForSequenceClassification"] == f"modeling_llama.{LlamaForSequenceClassification.__name__}"
    )


@pytest.mark.process
@pytest.mark.parametrize("name", PATCHERS)
def test_where_this_package_is_not_installed(name: str, original: Path, tmp_path: Path) -> None:
    """It is loaded, trained for a step, saved with its file, and loaded again; stock reads what was saved."""
    folder = patcher.export(original, PATCHERS[name], tmp_path / "own", verify=False).folder
    code = f"""
import sys
sys.modules["patcher"] = None
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

ids = torch.arange(3, 27).view(2, 12)
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
model(ids, labels=ids).loss.backward()
torch.optim.SGD(model.parameters(), 0.1).step()
model.eval().save_pretrained("saved")
with torch.no_grad():
    expected = model(ids).logits
    again = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
    assert type(again).__module__ != LlamaForCausalLM.__module__
    assert torch.equal(again.eval()(ids).logits, expected)
    stock = LlamaForCausalLM.from_pretrained("saved")
    torch.testing.assert_close(stock.eval()(ids).logits, expected, atol=1e-5, rtol=0)
    torch.save(expected, "expected.pt")
"""
    fresh.run(code, cwd=tmp_path)
    stock = LlamaForCausalLM.from_pretrained(original)
    ids = torch.arange(3, 27).view(2, 12)
    stock(ids, labels=ids).loss.backward()  # type: ignore[operator]
    torch.optim.SGD(stock.parameters(), 0.1).step()
    with torch.no_grad():
        found = torch.load(tmp_path / "expected.pt")
        torch.testing.assert_close(stock.eval()(ids).logits, found, atol=1e-4, rtol=0)  # type: ignore[operator]


def test_packages_that_only_deepspeed_needs_are_not_required(tmp_path: Path) -> None:
    """A load with `trust_remote_code` requires all that a file imports; DistilBERT's imports deepspeed in a method."""
    config = transformers.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=48, n_layers=1, n_heads=2)
    original = tiny.save_tiny(config, tmp_path / "original", model_class=transformers.DistilBertForMaskedLM)
    exported = patcher.export(original, Patcher(fusions=["qkv"]), tmp_path / "fused", quick=True)
    assert "deepspeed" not in get_imports(exported.folder / exported.modeling_file)
    model = transformers.AutoModelForMaskedLM.from_pretrained(exported.folder, trust_remote_code=True)
    assert hasattr(model.distilbert.transformer.layer[0].attention, "qkv_proj")


def test_packages_that_a_class_imports_are_told(original: Path, tmp_path: Path) -> None:
    """A load with `trust_remote_code` fails where one of them isn't installed."""
    exported = patcher.export(original, Patcher({"LlamaMLP": HelpedMLP}), tmp_path / "own", quick=True)
    assert "the package `tests`, without which it isn't loaded" in exported.changes
    assert "It needs tests, torch and transformers." in (exported.folder / "README.md").read_text()


def test_auto_classes_that_load_a_part_are_left_to_transformers(tmp_path: Path) -> None:
    """`AutoModelForTextEncoding` takes the text config of Mllama, which no code of a repo is given."""
    config = next(small_configs(transformers.MllamaConfig))
    cls = transformers.MllamaForConditionalGeneration
    original = tiny.save_tiny(config, tmp_path / "original", model_class=cls)
    gate_up = Patcher(fusions=["gate_up"])
    exported = patcher.export(original, gate_up, tmp_path / "fused", model_class=cls, verify=False)
    model = transformers.AutoModelForTextEncoding.from_pretrained(exported.folder, trust_remote_code=True)
    assert type(model) is transformers.MllamaTextModel


def test_a_save_of_an_untrained_model_is_the_original(original: Path, tmp_path: Path) -> None:
    folder = patcher.export(original, PATCHERS["both"], tmp_path / "own", verify=False).folder
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(tmp_path / "saved")
    LlamaForCausalLM.from_pretrained(original).save_pretrained(tmp_path / "stock")
    assert same_checkpoint(tmp_path / "saved", tmp_path / "stock")


def test_to_a_hub(original: Path, tmp_path: Path) -> None:
    with taking_uploads(tmp_path / "cache") as hub:
        exported = patcher.export(
            original, MLP, tmp_path / "own", verify=False, push_to_hub="me/mine", token="hf_none"
        )
        assert exported.address.endswith("/me/mine/commit/1")
        assert exported.address in str(exported)
        assert set(hub.files) == set(exported.files)
        assert all(data == (exported.folder / name).read_bytes() for name, data in hub.files.items())
    assert '"me/mine", trust_remote_code=True' in (exported.folder / "README.md").read_text()


# --- what is refused leaves nothing ---------------------------------------------------------------------------------


def no_model(folder: Path) -> Path:
    for each in folder.glob("*model*"):
        each.unlink()
    return folder


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "a wrong patch": (
        VerificationError,
        r"the LlamaForCausalLM of modeling_llama.py isn't the same as that of transformers:\n  outputs: ",
        lambda at: (at, Patcher({"LlamaMLP": WrongMLP})),
    ),
    "no patcher": (InvalidPatcherError, r"export\(model, .*, folder\)", lambda at: (at, "qkv")),
    "what a file can't do": (
        CodegenError,
        r"^no modeling file can do what the patcher does: from_patcher\(\) can't write .*module_mapping",
        lambda at: (at, Patcher(module_mapping={"model.layers.0.mlp": OwnMLP})),
    ),
    "no weights": (InvalidPatcherError, "has no weights .* save_pretrained first", lambda at: (no_model(at), MLP)),
    "no model": (InvalidPatcherError, "isn't a model that can be used", lambda at: (at / "checkpoint-5", MLP)),
}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_nothing(name: str, is_there: bool, original: Path, tmp_path: Path) -> None:
    kind, message, given = REFUSED[name]
    target = tmp_path / "own"
    if is_there:
        target.mkdir()
    with pytest.raises(kind, match=message):
        patcher.export(*given(original), target, quick=True)
    assert not any(target.iterdir()) if is_there else not target.exists()


def test_a_folder_in_which_something_is(original: Path, tmp_path: Path) -> None:
    for target in (original, original / "config.json"):
        with pytest.raises(
            InvalidPatcherError, match=r"is not an empty folder; export\(..., folder\) writes into a new"
        ):
            patcher.export(original, MLP, target)
    assert (original / "config.json").is_file()
    with pytest.raises(
        InvalidPatcherError, match=r"export doesn't take variant=; it takes cache_dir, local_files_only"
    ):
        patcher.export(original, MLP, tmp_path / "own", variant="fp16")


def test_weights_of_a_variant_are_written_by_save_pretrained_first(original: Path, tmp_path: Path) -> None:
    stock = LlamaForCausalLM.from_pretrained(original)
    stock.save_pretrained(tmp_path / "halves", variant="fp16")
    with pytest.raises(InvalidPatcherError, match="has no weights"):
        patcher.export(tmp_path / "halves", MLP, tmp_path / "own")
    LlamaForCausalLM.from_pretrained(tmp_path / "halves", variant="fp16").save_pretrained(tmp_path / "whole")
    assert patcher.export(tmp_path / "whole", MLP, tmp_path / "own", verify=False).files


def test_a_model_that_brings_its_code(tmp_path: Path) -> None:
    remote_code_model(tmp_path / "remote")
    mine = Patcher({"TinyRemoteMLP": nn.Identity})
    with pytest.raises(
        InvalidPatcherError, match=r"TinyRemote\w+ is a class of transformers_modules\..*codegen.PatchConfig"
    ):
        patcher.export(tmp_path / "remote", mine, tmp_path / "own", trust_remote_code=True)


def test_the_command(original: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["export", str(original), str(tmp_path / "own"), *arguments])

    done = run("--fusion", "gate_up", "--quick", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["folder"] == str(tmp_path / "own")
    assert told["verification"]["passed"]
    assert told["auto_map"]["AutoModelForCausalLM"] == "modeling_llama.LlamaForCausalLM"
    done = run("--fusion", "gate_up")
    assert done.exit_code == 2
    assert "is not an empty folder" in done.stderr
    shutil.rmtree(tmp_path / "own")
    done = run("--fusion", "gate_up", "--no-verify")
    assert done.exit_code == 0, done.output
    assert f"{len(told['files'])} files, not verified" in done.stdout
