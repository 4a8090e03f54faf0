"""Weights that a patcher adds: named in the files that have them, missed by no load, and kept by themselves."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModel, AutoModelForCausalLM, EncoderDecoderModel, LlamaForCausalLM
from transformers.models.bert.modeling_bert import BertSelfOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    PatcherWarning,
    load_new_weights,
    plan,
    report,
    save_new_weights,
    verify,
)
from tests.support import fresh, shared
from tests.support.offloaded import offloaded
from tests.support.tiny import tiny_bert_config, tiny_llama_config

IDS = torch.tensor([[3, 4, 5, 6]])


class Shifted(LlamaRMSNorm):  # type: ignore[misc]
    """A norm with a weight that no checkpoint of transformers has."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        self.shift = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states) + self.shift


class Gained(BertSelfOutput):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.hidden_size))


SHIFTED = Patcher({"LlamaRMSNorm": Shifted}, new_weights=r"norm\.shift$", name="shifted")
BOTH = SHIFTED | Patcher(fusions=["qkv", "gate_up"])


@pytest.fixture(scope="module")
def llama() -> Path:
    return shared.checkpoint(tiny_llama_config())


def trained(llama: Path, patcher: Patcher = SHIFTED, seed: int = 0) -> Any:
    """A model whose new weights are other than zero."""
    model = AutoModelForCausalLM.from_pretrained(llama, patcher=patcher)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("shift"):
                value.normal_(generator=generator)
    return model


def test_new_weights_of_a_part_with_a_patcher_of_its_own_are_named(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher(fusions="qkv"))
    model.model = SHIFTED.apply(model.model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata, names = file.metadata(), [name for name in file.keys() if name.endswith("shift")]  # noqa: SIM118
    assert json.loads(metadata["patcher_new_weights"]) == {"of": "shifted", "names": sorted(names)}
    with pytest.raises(PatchedWeightsError, match=r"norm\.shift"):
        AutoModelForCausalLM.from_pretrained(tmp_path, patcher=Patcher(fusions="qkv"))
    said = r"^model of LlamaForCausalLM were patched separately, .*: save_new_weights\(model\.model, folder\)"
    with pytest.raises(InvalidPatcherError, match=said):
        save_new_weights(model, tmp_path)
    save_new_weights(model.model, tmp_path / "new")
    load_new_weights(model.model, tmp_path / "new")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_new_weights_of_the_parts_of_a_model_are_named(tmp_path: Path) -> None:
    bert = str(shared.checkpoint(tiny_bert_config(), model_class=AutoModel))
    patcher = Patcher({"BertSelfOutput": Gained}, new_weights="gain", name="gained")
    together = EncoderDecoderModel.from_encoder_decoder_pretrained
    model: Any = together(bert, bert, encoder_patcher=patcher)
    torch.nn.init.normal_(model.encoder.encoder.layer[0].attention.output.gain)
    model.save_pretrained(tmp_path / "whole")

    with pytest.raises(PatchedWeightsError, match=r"encoder\.encoder\.layer\.\{0\.\.1\}.*\.gain\n.*of 'gained'"):
        EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    both = [load_new_weights, save_new_weights]
    save_new_weights(model.encoder, tmp_path / "new")
    for function in both:
        with pytest.raises(InvalidPatcherError, match=r"encoder of .*separately.*\(model\.encoder, folder\)"):
            function(model, tmp_path / "new")


def test_patchers_in_force_may_have_replacements_for_the_same_class(llama: Path, tmp_path: Path) -> None:
    """The inner one wins. Saving made one patcher of them, which raised."""
    other = Patcher({"LlamaRMSNorm": type("Other", (LlamaRMSNorm,), {})}, name="other")
    with other.applied():
        model = trained(llama)
    model.save_pretrained(tmp_path)

    with pytest.raises(PatchedWeightsError, match=r"of 'shifted \| other'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=SHIFTED)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)


# --- in a checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patcher", [SHIFTED, BOTH], ids=["classes", "with fusions"])
@pytest.mark.parametrize("size", ["5GB", "30KB"], ids=["one file", "shards"])
def test_files_name_the_new_weights_that_they_have(llama: Path, tmp_path: Path, patcher: Patcher, size: str) -> None:
    model = trained(llama, patcher)
    model.save_pretrained(tmp_path, max_shard_size=size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (size == "30KB")
    for path in files:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata(), [name for name in file.keys() if name.endswith("shift")]  # noqa: SIM118
        told = json.loads(metadata.get("patcher_new_weights", '{"of": "shifted", "names": []}'))
        assert told == {"of": "shifted", "names": sorted(names)}
        assert metadata["format"] == "pt"

    again = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    assert torch.equal(logits(again), logits(model))
    assert report(again).new_weights == report(model).new_weights
    assert len(report(again).new_weights) == 5
    again.save_pretrained(tmp_path / "again", max_shard_size=size)
    for path in files:
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_a_model_without_new_weights_is_saved_as_ever(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher(fusions="qkv")).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(llama).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "patcher", [None, Patcher(), Patcher(fusions="qkv")], ids=["no patcher", "empty", "another patcher"]
)
def test_a_load_that_does_not_know_their_owner_raises(saved: Path, patcher: Patcher | None) -> None:
    message = r"(?s)a patcher has added.*model\.norm\.shift.*They are of 'shifted'.*dropped_weights=\['.*shift\$'\]"
    with pytest.raises(PatchedWeightsError, match=message) as raised:
        AutoModelForCausalLM.from_pretrained(saved, patcher=patcher)
    if patcher is not None:
        assert plan(saved, patcher).problems == (str(raised.value),)
        assert plan(saved, SHIFTED).ok

    # What it says to write leaves them out, and nothing else.
    written = re.search(r"patcher=(Patcher\(dropped_weights=.*?\))\.", str(raised.value))
    assert written
    model = AutoModelForCausalLM.from_pretrained(saved, patcher=eval(written[1]) | (patcher or Patcher()))
    assert not any(name.endswith("shift") for name in model.state_dict())


def test_loosely_it_is_a_warning(saved: Path) -> None:
    with pytest.warns(PatcherWarning, match=r"They are of 'shifted'"):
        AutoModelForCausalLM.from_pretrained(saved, patcher=Patcher(strict=False))


def test_they_do_not_fail_a_verification(llama: Path) -> None:
    """It reloads what was saved in stock, which ignores them."""
    verified = verify(llama, SHIFTED, stages=["save", "reload"])
    assert [stage.name for stage in verified.stages if stage.passed] == ["load", "save", "reload"], verified.failures


def test_what_is_unexpected_and_nobody_s_is_transformers_affair(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"left.over": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file(
        tensors | {"left.over": torch.ones(2)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt", "patcher_new_weights": "{"},
    )
    with pytest.raises(PatchedWeightsError, match="that can't be read"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.process
def test_without_the_package_they_are_unexpected(saved: Path) -> None:
    done = fresh.run(
        "import sys, logging\nfrom transformers import LlamaForCausalLM\n"
        "model, info = LlamaForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "print(sorted(info['unexpected_keys']), 'patcher' in sys.modules)",
        saved,
    )
    assert "'model.norm.shift'" in done.stdout
    assert done.stdout.rstrip().endswith("False")


# --- by themselves -------------------------------------------------------------------------------------------------


def test_a_file_without_metadata_names_none(llama: Path, tmp_path: Path) -> None:
    """It is read as it is by who has the patcher; nobody else can be told whose they are."""
    model = trained(llama)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, patcher=SHIFTED)), logits(model))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name.rpartition(".")[2] for name in info["unexpected_keys"]} == {"shift"}


def test_two_of_them_take_turns_on_one_model(llama: Path, tmp_path: Path) -> None:
    first, second = trained(llama, seed=1), trained(llama, BOTH, seed=2)
    save_new_weights(first, tmp_path / "first")
    save_new_weights(second, tmp_path / "second")
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == [
        "README.md",
        "new_weights.safetensors",
        "patcher.json",
    ]
    assert load_file(tmp_path / "first" / "new_weights.safetensors").keys() == set(report(first).new_weights)

    allowed = [f"{Shifted.__module__}:Shifted"]
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher.load(tmp_path / "first", allowed=allowed))
    plain, pointers = logits(model), [value.data_ptr() for value in model.parameters()]
    for _ in range(2):
        load_new_weights(model, tmp_path / "first")
        assert torch.equal(logits(model), logits(first))
        with pytest.raises(InvalidPatcherError, match=r"with other fusions than that of the model.*Patcher\.load"):
            load_new_weights(model, tmp_path / "second")
        save_new_weights(trained(llama, seed=3), tmp_path / "third")
        load_new_weights(model, tmp_path / "third")
        assert torch.equal(logits(model), logits(trained(llama, seed=3)))
    assert [value.data_ptr() for value in model.parameters()] == pointers
    assert not torch.equal(plain, logits(model))


@pytest.mark.parametrize("made", ["from a config", "in memory"])
def test_a_model_that_was_not_loaded_has_them_too(llama: Path, tmp_path: Path, made: str) -> None:
    if made == "from a config":
        model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=BOTH)
    else:
        model = BOTH.apply(LlamaForCausalLM.from_pretrained(llama))
    save_new_weights(model, tmp_path)
    assert len(load_file(tmp_path / "new_weights.safetensors")) == 5


def test_those_of_a_model_without_a_checkpoint_need_no_declaration(tmp_path: Path) -> None:
    undeclared = Patcher({"LlamaRMSNorm": Shifted}, name="undeclared")
    made = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=undeclared)
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=undeclared)
    again.save_pretrained(tmp_path)  # the files still name them
    with pytest.raises(PatchedWeightsError, match=r"(?s)model\.norm\.shift.*They are of 'undeclared'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InvalidPatcherError, match="has no weights that a patcher declares as new"):
        save_new_weights(made, tmp_path)


def with_checkpointed_layers(model: Any) -> Any:
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    return model


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, nn.Sequential, partial(torch.compile, backend="eager"), with_checkpointed_layers]
)
def test_a_module_around_the_model_has_them_too(llama: Path, tmp_path: Path, wrap: Any) -> None:
    first, second = trained(llama, BOTH, seed=1), trained(llama, BOTH, seed=2)
    save_new_weights(wrap(first), tmp_path)
    names = load_file(tmp_path / "new_weights.safetensors").keys()
    assert names == set(report(first).new_weights)
    load_new_weights(wrap(second), tmp_path)
    assert torch.equal(logits(second), logits(first))
    with pytest.raises(InvalidPatcherError, match=r"Shifted contains none\. Pass the model itself"):
        save_new_weights(second.model.norm, tmp_path)


def test_those_on_the_disk_are_saved_and_not_loaded(llama: Path, tmp_path: Path) -> None:
    first = trained(llama, BOTH, seed=1)
    first.save_pretrained(tmp_path / "model")
    second = offloaded(tmp_path / "model", "a layer on disk", tmp_path / "offloaded", patcher=BOTH)
    save_new_weights(second, tmp_path / "new")
    save_new_weights(first, tmp_path / "expected")
    for name in ("new_weights.safetensors", "patcher.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    save_new_weights(trained(llama, BOTH, seed=2), tmp_path / "other")
    with pytest.raises(InvalidPatcherError, match=r"model\.layers\.1\.\S+\.shift of .* is on the disk.*in memory"):
        load_new_weights(second, tmp_path / "other")
    assert torch.equal(logits(second), logits(first))


def broken(folder: Path, change: str) -> None:
    path = folder / "new_weights.safetensors"
    tensors = load_file(path)
    if change == "no file":
        path.unlink()
    elif change == "bytes":
        path.write_bytes(b"12345678")
    elif change == "missing":
        save_file({name: value for name, value in tensors.items() if "layers.1" not in name}, path)
    elif change == "left over":
        save_file(tensors | {"model.other": torch.ones(1)}, path)
    elif change == "shape":
        save_file({name: value[1:].clone() for name, value in tensors.items()}, path)
    else:
        (folder / "patcher.json").write_text('{"schema": 1, "fusions": ["qkv"]}')


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("no file", InvalidPatcherError, r"can't be read \(FileNotFoundError.*save_new_weights"),
        ("bytes", InvalidPatcherError, r"can't be read \(SafetensorError"),
        ("missing", PatchedWeightsError, r"missing: model\.layers\.1\.input_layernorm\.shift"),
        ("left over", PatchedWeightsError, r"left over: model\.other"),
        ("shape", PatchedWeightsError, r"of another shape: .*found \(63,\), expected \(64,\)"),
        ("patcher", InvalidPatcherError, r"with other class_mapping, fusions, new_weights than that of the model"),
    ],
)
def test_what_does_not_fit_is_not_written(
    llama: Path, tmp_path: Path, change: str, error: type[Exception], message: str
) -> None:
    save_new_weights(trained(llama, seed=1), tmp_path)
    broken(tmp_path, change)
    model = trained(llama, seed=2)
    before = logits(model)
    with pytest.raises(error, match=message):
        load_new_weights(model, tmp_path)
    assert torch.equal(logits(model), before)


def test_a_model_without_any_is_told_what_to_write(llama: Path, tmp_path: Path) -> None:
    for patcher in (None, Patcher(fusions="qkv")):
        with pytest.raises(InvalidPatcherError, match=r"has no weights that a patcher declares as new.*new_weights="):
            save_new_weights(AutoModelForCausalLM.from_pretrained(llama, patcher=patcher), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_card_says_how_they_are_loaded(llama: Path, tmp_path: Path) -> None:
    model = trained(llama)
    save_new_weights(model, tmp_path)
    text = (tmp_path / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code
    names: dict[str, Any] = {"Shifted": Shifted}
    exec(code[1].replace("[...]", "[Shifted]").replace('"."', repr(str(tmp_path))), names)
    assert torch.equal(logits(names["model"]), logits(model))
    assert "`model.layers.{0..1}.input_layernorm.shift`" in text
