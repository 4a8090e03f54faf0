"""The files of the runtime layout (row 20): of names of their own, alone in their folder, read as what they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher, plan, report
from patcher.checkpoints.headers import is_default, is_layout
from patcher.fusions import QKV, Decision
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.hub_server import serving
from tests.support.offloaded import offloaded
from tests.support.replacements import JOINED
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config, tiny_mixtral_config

BOTH = Patcher(fusions=["qkv", "gate_up"])
SHARDED = "100KB"


def weights(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if is_layout(file.name) or is_default(file.name)}


def change_config(folder: Path, **changes: Any) -> None:
    """Change what `config.json` says; None takes it out."""
    path = folder / "config.json"
    said = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def same(one: Any, other: Any) -> bool:
    inputs = tiny_inputs(tiny_llama_config())
    with torch.no_grad():
        return torch.equal(one(**inputs)[0], other(**inputs)[0])


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def fused(stock: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(stock, patcher=BOTH)


@pytest.fixture(scope="module")
def kept(fused: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    fused.save_pretrained(folder, save_original_format=False)
    return folder


@pytest.fixture
def layout(kept: Path, tmp_path: Path) -> Path:
    """A folder to change."""
    return Path(shutil.copytree(kept, tmp_path / "layout"))


# --- what is written -------------------------------------------------------------------------------------------------


def test_weights_lie_under_the_name_of_the_variant(fused: Any, layout: Path, tmp_path: Path) -> None:
    fused.save_pretrained(tmp_path / "sharded", save_original_format=False, max_shard_size=SHARDED)

    names = {file.name for file in layout.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.patcher.safetensors"}
    names = weights(tmp_path / "sharded")
    assert "model.safetensors.index.patcher.json" in names
    assert {name.split("-")[0] for name in names} == {"model.patcher", "model.safetensors.index.patcher.json"}
    assert len(names) > 3
    for folder in (layout, tmp_path / "sharded"):
        assert "model.patcher" not in (folder / "config.json").read_text()
        assert same(AutoModelForCausalLM.from_pretrained(folder), fused)


@pytest.mark.parametrize(
    "patcher", [Patcher(), Patcher(fusions="siblings"), Patcher(fusions="sequential_experts")], ids=str
)
def test_a_model_that_is_patched_after_its_load_saves_the_original(patcher: Patcher, tmp_path: Path) -> None:
    """The conversions of its checkpoint have had nothing to do in its load."""
    checkpoint = shared.checkpoint(tiny_mixtral_config())
    MixtralForCausalLM.from_pretrained(checkpoint, patcher=Patcher(fusions="qkv")).save_pretrained(
        tmp_path / "layout", save_original_format=False
    )
    patcher.apply(MixtralForCausalLM.from_pretrained(tmp_path / "layout")).save_pretrained(tmp_path / "saved")
    assert same_checkpoint(tmp_path / "saved", checkpoint)


FORMS: dict[str, dict[str, Any]] = {
    "the layout": {"save_original_format": False},
    "the layout, sharded": {"save_original_format": False, "max_shard_size": SHARDED},
    "the original format": {},
    "the original format, sharded": {"max_shard_size": SHARDED},
}


@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_nothing_that_an_earlier_save_left_lies_beside_it(before: str, after: str, fused: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.mine.safetensors").touch()
    fused.save_pretrained(tmp_path / "folder", **FORMS[before])
    fused.save_pretrained(tmp_path / "folder", **FORMS[after])
    fused.save_pretrained(tmp_path / "fresh", **FORMS[after])

    left = weights(tmp_path / "folder") - weights(tmp_path / "fresh")
    if after.startswith("the layout"):
        assert not left
    else:  # what of its own transformers leaves is its own affair
        assert not any(map(is_layout, left))
        assert before.startswith("the original") or not left
    assert (tmp_path / "folder" / "model.mine.safetensors").exists()
    if not left:
        assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "folder"), fused)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.safetensors"])
def test_weights_of_another_program_go_too(name: str, fused: Any, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    fused.save_pretrained(tmp_path, save_original_format=False)

    assert weights(tmp_path) == {"model.patcher.safetensors"}


def unpatched(layout: Path) -> PreTrainedModel:
    return LlamaForCausalLM(tiny_llama_config())


def taken_back(layout: Path) -> PreTrainedModel:
    return Patcher().apply(AutoModelForCausalLM.from_pretrained(layout))


def loaded_from_it(layout: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(layout)
    return model


@pytest.mark.parametrize("made", [unpatched, taken_back, loaded_from_it], ids=["unpatched", "taken back", "loaded"])
def test_a_model_in_the_original_format_takes_its_place(
    made: Callable[[Path], PreTrainedModel], layout: Path, stock: Path
) -> None:
    model = made(layout)
    model.save_pretrained(layout)

    assert weights(layout) == {"model.safetensors"}
    if made is not unpatched:
        assert same_checkpoint(layout, stock)
    assert same(AutoModelForCausalLM.from_pretrained(layout), model)


@pytest.mark.libraries
def test_by_a_trainer_as_well(layout: Path, stock: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(layout)
    Trainer(model, TrainingArguments(str(layout), report_to=[], use_cpu=True)).save_model()

    assert weights(layout) == {"model.safetensors"}
    assert same_checkpoint(layout, stock)


@pytest.mark.libraries
def test_adapters_are_saved_beside_it(layout: Path) -> None:
    from peft import LoraConfig

    model = AutoModelForCausalLM.from_pretrained(layout)
    model.add_adapter(LoraConfig(target_modules=["o_proj"]))
    for original_format in (True, False):
        model.save_pretrained(layout, save_original_format=original_format)
        assert weights(layout) == {"model.patcher.safetensors"}
        assert (layout / "adapter_model.safetensors").exists()


def test_what_is_refused_leaves_the_folder_as_it_is(fused: Any, stock: Path, layout: Path) -> None:
    before = {file: file.read_bytes() for file in layout.iterdir()}
    nameless = LlamaForCausalLM.from_pretrained(stock, patcher=JOINED)
    with pytest.raises(PatchedWeightsError, match="nothing can load by name"):
        nameless.save_pretrained(layout, save_original_format=False)
    with pytest.raises(InvalidPatcherError, match=r"variant='fp16' was requested together with save_orig"):
        fused.save_pretrained(layout, save_original_format=False, variant="fp16")
    for model in (fused, LlamaForCausalLM(tiny_llama_config())):
        with pytest.raises(InvalidPatcherError, match=r"variant='patcher' is how weights in a runtime layout are"):
            model.save_pretrained(layout, variant="patcher")
    with pytest.raises(InvalidPatcherError, match=r"distributed_checkpoint=True writes .* Leave it out"):
        fused.save_pretrained(layout, distributed_checkpoint=True)

    assert {file: file.read_bytes() for file in layout.iterdir()} == before


def test_another_variant_is_in_the_original_format(fused: Any, layout: Path) -> None:
    fused.save_pretrained(layout, variant="fp16")

    assert {file.name for file in layout.glob("model*")} == {"model.fp16.safetensors"}
    assert same(LlamaForCausalLM.from_pretrained(layout, variant="fp16"), fused)


def test_tensors_that_are_given_are_written_to_it(fused: Any, tmp_path: Path) -> None:
    given = {name: value.clone() for name, value in fused.state_dict().items()}
    given["model.norm.weight"] += 1
    fused.save_pretrained(tmp_path, save_original_format=False, state_dict=dict(given))

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights(tmp_path) == {"model.patcher.safetensors"}
    assert all(torch.equal(value, given[name]) for name, value in again.state_dict().items())


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "stock")
    fused = LlamaForCausalLM.from_pretrained(folder, patcher=BOTH)
    fused.save_pretrained(tmp_path / "layout", save_original_format=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "layout")

    assert "lm_head.weight" not in load_file(tmp_path / "layout" / "model.patcher.safetensors")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert same(again, fused)
    again.save_pretrained(tmp_path / "back")
    assert same_checkpoint(tmp_path / "back", folder)


def test_what_lies_on_the_disk_is_written_and_read(fused: Any, stock: Path, tmp_path: Path) -> None:
    out = tmp_path / "layout"
    model = offloaded(stock, "a layer on disk", tmp_path / "offload", patcher=BOTH)
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(out, save_original_format=False)
    assert weights(out) == {"model.patcher.safetensors"}
    again = offloaded(out, "a layer on disk", tmp_path / "again")

    assert same(again, fused)
    with pytest.warns(UserWarning, match="offloaded modules"):  # over the files that its own weights are read from
        again.save_pretrained(out)
    assert weights(out) == {"model.safetensors"}
    assert same(AutoModelForCausalLM.from_pretrained(out), fused)


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"config": tiny_llama_config()}, {"variant": "patcher"}], ids=list)
def test_a_layout_that_nothing_names_is_refused(options: dict[str, Any], layout: Path) -> None:
    match = r'model\.patcher\.safetensors holds weights in a runtime layout, and the config\.json in .* "fusion_c'
    change_config(layout, fusion_config=None)
    with pytest.raises(PatchedWeightsError, match=match):
        LlamaForCausalLM.from_pretrained(layout, **options)
    if "config" in options:
        (layout / "config.json").unlink()
        with pytest.raises(PatchedWeightsError, match=match):
            LlamaForCausalLM.from_pretrained(layout, **options)
    with pytest.raises(PatchedWeightsError, match=match):
        plan(tiny_llama_config(), Patcher(), checkpoint=layout)


def test_a_file_that_a_config_names_is_what_it_is(layout: Path, fused: Any) -> None:
    change_config(layout, transformers_weights="model.patcher.safetensors")
    assert same(LlamaForCausalLM.from_pretrained(layout), fused)
    change_config(layout, fusion_config=None)
    with pytest.raises(PatchedWeightsError, match="holds weights in a runtime layout"):
        LlamaForCausalLM.from_pretrained(layout)


def test_weights_twice_are_refused(layout: Path, stock: Path) -> None:
    shutil.copy(stock / "model.safetensors", layout)
    with pytest.raises(PatchedWeightsError, match=r"holds weights twice: model\.patcher\.safetensors, .* Delete one"):
        LlamaForCausalLM.from_pretrained(layout)
    with pytest.raises(PatchedWeightsError, match="holds weights twice"):
        plan(layout, Patcher())
    (layout / "model.patcher.safetensors").unlink()
    assert same(LlamaForCausalLM.from_pretrained(layout), LlamaForCausalLM.from_pretrained(stock))


def test_a_later_checkpoint_of_another_program_is_what_counts(layout: Path, stock: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stock / name, layout)
    model = AutoModelForCausalLM.from_pretrained(layout)

    assert not report(model).fused
    assert same(model, LlamaForCausalLM.from_pretrained(stock))
    with pytest.raises(PatchedWeightsError, match="holds weights in a runtime layout"):
        LlamaForCausalLM.from_pretrained(layout, variant="patcher")


def test_a_plan_goes_by_the_layout(layout: Path) -> None:
    for planned in (
        plan(layout, Patcher()),
        plan(tiny_llama_config(), Patcher(), checkpoint=layout),
        plan(tiny_llama_config(), Patcher(), checkpoint=layout / "model.patcher.safetensors"),
        plan(layout, Patcher(), fusion_config={}),
    ):
        assert planned.ok, planned.problems
        assert len(planned.fused) == 4
        assert planned.checkpoint.endswith("model.patcher.safetensors")


def test_a_tensor_of_it_that_is_missing_is_an_error_whatever_config_is_given(layout: Path) -> None:
    file = layout / "model.patcher.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.gate_up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    for options in ({}, {"config": tiny_llama_config()}, {"fusion_config": {}}):
        with pytest.raises(PatchedWeightsError, match=r"layers\.1\.mlp\.gate_up_proj\.weight"):
            LlamaForCausalLM.from_pretrained(layout, **options)


def test_a_module_that_another_release_does_not_fuse_is_an_error(
    layout: Path, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = QKV.decide

    def decide(self: QKV, path: str, *args: Any) -> Decision | None:
        if path == "model.layers.1.self_attn":
            return Decision(refusal="its forward is another by now")
        return stock(self, path, *args)

    monkeypatch.setattr(QKV, "decide", decide)
    message = r"fusions, 'qkv', 'gate_up', .* not fused here:\n  model\.layers\.1\.self_attn\nPatcher\(fusions=\['qkv'"
    for options in ({}, {"config": tiny_llama_config()}, {"patcher": Patcher(fusions="qkv", strict=False)}):
        with pytest.raises(PatchedWeightsError, match=message):
            LlamaForCausalLM.from_pretrained(layout, **options)
    with pytest.raises(PatchedWeightsError, match=message):
        LlamaForCausalLM.from_pretrained(
            None, config=AutoConfig.from_pretrained(layout), state_dict=dict(fused.state_dict())
        )
    (problem,) = plan(layout, Patcher()).problems
    assert re.search(message, problem)


def test_a_fusion_beyond_those_of_the_layout_is_named_by_its_weights(tmp_path: Path) -> None:
    folder = save_tiny(tiny_mixtral_config(), tmp_path / "stock")
    model = MixtralForCausalLM.from_pretrained(folder, patcher=Patcher(fusions="sequential_experts"))
    model.save_pretrained(tmp_path / "layout", save_original_format=False)
    with pytest.raises(PatchedWeightsError, match=r"(?s)Not in the checkpoint.*qkv_proj.*unused.*q_proj"):
        MixtralForCausalLM.from_pretrained(tmp_path / "layout", patcher=Patcher(fusions="qkv"))


def test_a_name_that_the_config_has_lost_is_missed(layout: Path) -> None:
    change_config(layout, fusion_config={"patcher": ["qkv"]})
    with pytest.raises(PatchedWeightsError, match=r"'qkv', .* not fused here:\n  model\.layers\.\{0\.\.1\}\.mlp\n"):
        LlamaForCausalLM.from_pretrained(layout)


def test_a_part_of_the_model_may_have_nothing_of_a_fusion(tmp_path: Path) -> None:
    """An Auto class takes the text model out of such a checkpoint, and gives it the config of that alone."""
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    folder, patcher = tmp_path / "stock", Patcher(fusions=["patch_embeddings", "gate_up"])
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).save_pretrained(folder)
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(folder, patcher=patcher)
    whole.save_pretrained(tmp_path / "layout", save_original_format=False)

    part = AutoModelForCausalLM.from_pretrained(tmp_path / "layout")

    expected = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions="gate_up")).state_dict()
    assert len(report(whole).fused) > len(report(part).fused) > 0
    assert all(torch.equal(value, expected[name]) for name, value in part.state_dict().items())


def test_what_a_head_has_and_the_layout_has_not_is_no_affair_of_it(layout: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(layout)

    assert len(report(model).fused) == 4  # lm_head is left over and score is new, as without fusions


# --- on the hub ------------------------------------------------------------------------------------------------------

HUB = """
import sys
from pathlib import Path
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from patcher import PatchedWeightsError, Patcher, plan, report
from tests.support.hub_server import COMMIT, REPO
from tests.support.tiny import tiny_llama_config

config = tiny_llama_config()
for load in (
    lambda: AutoModelForCausalLM.from_pretrained(REPO),
    lambda: LlamaForCausalLM.from_pretrained(REPO, revision=COMMIT, config=config, fusion_config={}),
    lambda: AutoModelForCausalLM.from_pretrained(REPO, subfolder="below", config=config),
    lambda: AutoModelForCausalLM.from_pretrained("someone/tiny", subfolder="twice"),
    lambda: AutoModelForCausalLM.from_pretrained("someone/tiny", subfolder="original"),
):
    try:
        model = load()
    except PatchedWeightsError as error:
        print(error)
    else:
        print(len(report(model).fused))
print(len(plan(REPO, Patcher()).fused), len(plan(config, Patcher(), checkpoint=REPO, subfolder="below").fused))
"""


@pytest.mark.process
def test_on_the_hub_it_is_what_it_is_in_a_folder(fused: Any, layout: Path, stock: Path, tmp_path: Path) -> None:
    fused.save_pretrained(layout / "below", save_original_format=False)
    shutil.copytree(stock, layout / "original")
    shutil.copytree(stock, layout / "twice")
    for name in ("config.json", "model.patcher.safetensors"):
        shutil.copy(layout / name, layout / "twice")
    with serving(layout) as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", HUB]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | online)
    assert done.returncode == 0, done.stderr
    one, two, three, twice, *rest = done.stdout.splitlines()

    assert [one, two, three] == ["4"] * 3
    assert twice.startswith("someone/tiny holds weights twice: model.patcher.safetensors, in the runtime layout")
    assert rest == ["0", "4 4"]


def test_it_is_not_pushed_where_others_may_lie(fused: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidPatcherError, match="an upload deletes nothing"):
        fused.save_pretrained(tmp_path / "out", push_to_hub=True, save_original_format=False)
    assert not (tmp_path / "out").exists()
