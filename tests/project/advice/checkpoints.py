"""Files and data that nobody should have written: checkpoints, configs, expressions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import patcher
from patcher import Patcher
from tests.project.advice import OwnMLP, Place, Steps, advice, load, same, written
from tests.project.advice.loads import PARTS, changed
from tests.support.remote_code import remote_code_model
from tests.support.replacements import JOINED

OWN = Patcher(fusions="gate_up")
INDEX = "model.safetensors.index.json"


# --- files that are broken -----------------------------------------------------------------------------------------


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def shards_named(name: str) -> Callable[[Path], None]:
    """Change an index so that one tensor, or with a suffix of another kind the last, lies in another file."""

    def change(file: Path) -> None:
        index = json.loads(file.read_text())
        index["weight_map"]["model.norm.weight"] = name
        file.write_text(json.dumps(index))

    return change


def in_config(**values: Any) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | values))


#: A file of a checkpoint, and what may have become of it.
BROKEN: list[tuple[str, Callable[[Path], Any]]] = [
    ("*-00001-of-*.safetensors", as_folder),
    ("*-00001-of-*.safetensors", Path.unlink),
    ("*-00001-of-*.safetensors", lambda file: file.write_bytes(file.read_bytes()[:4])),
    ("*.index.json", lambda file: file.write_bytes(b"{")),
    ("*.index.json", shards_named("../elsewhere.safetensors")),
    ("*.index.json", shards_named("z.bin")),
    ("config.json", as_folder),
    ("config.json", lambda file: file.write_text("{")),
    ("config.json", lambda file: file.write_text('"llama"')),
    ("config.json", in_config(model_type=["llama"])),
    ("config.json", in_config(num_hidden_layers=10**7)),
    ("pytorch_model.bin", lambda file: file.write_bytes(b"")),
]


@advice(
    "Fetch its config.json again, or install the release of transformers that knows it.",
    "{} is missing, and a load needs it: fetch it.",
    "{} can't be read as a load would read it: {}. Fetch it again, from a source that you trust.",
    "the config of {} says {}={}, and at most {} make sense. Fetch it again, or correct it.",
)
def files_that_are_broken(at: Place) -> Steps:
    good = at.tmp / "good"
    load(at.llama).save_pretrained(good / "sharded", max_shard_size="100KB")
    (good / "bin").mkdir()
    shutil.copy(at.llama / "config.json", good / "bin")
    torch.save(load_file(at.llama / "model.safetensors"), good / "bin" / "pytorch_model.bin")
    for number, (pattern, change) in enumerate(BROKEN):
        source = good / ("bin" if pattern.endswith(".bin") else "sharded")
        folder = shutil.copytree(source, at.tmp / str(number))
        file = next(folder.glob(pattern))
        change(file)
        yield lambda folder=folder: patcher.plan(folder, OWN)  # type: ignore[misc]
        if file.is_dir():
            file.rmdir()
        shutil.copy(source / file.name, file)  # fetched again
        assert patcher.plan(folder, OWN).ok
        assert same(load(folder, OWN), at.llama)


@advice("It has code of its own: if you trust that, pass trust_remote_code=True (--trust-remote-code).")
def code_that_is_not_trusted(at: Place) -> Steps:
    folder = remote_code_model(at.tmp / "remote")
    said = yield lambda: patcher.plan(folder, OWN, trust_remote_code=False)
    trusted = written(said, r"pass trust_remote_code=(\w+)")
    assert patcher.plan(folder, OWN, trust_remote_code=trusted).ok


@advice("checkpoint= is a {}; pass a folder, a file, an index or a repo.")
def a_state_dict_for_a_checkpoint(at: Place) -> Steps:
    yield lambda: patcher.plan(at.llama, OWN, checkpoint={"lm_head.weight": (128, 64)})  # type: ignore[arg-type]
    assert patcher.plan(at.llama, OWN, checkpoint=at.llama / "model.safetensors").ok


# --- weights that are joined ---------------------------------------------------------------------------------------


@advice("The checkpoint holds {}. Take one of them out.")
def a_checkpoint_in_both_layouts(at: Place) -> Steps:
    parts, joined = [f"model.layers.0.{part}" for part in PARTS], "model.layers.0.mlp.gate_up_proj.weight"
    both = changed(
        at.llama,
        at.tmp / "both",
        lambda tensors: tensors.update({joined: torch.cat([tensors[part] for part in parts])}),
    )
    said = yield lambda: load(both, JOINED)
    assert all(key in said for key in (joined, *parts))
    for name, gone in (("parts", [joined]), ("joined", parts)):
        folder = changed(both, at.tmp / name, lambda tensors, gone=gone: [tensors.pop(key) for key in gone])  # type: ignore[misc]
        assert same(load(folder, JOINED), at.llama)


@advice(
    "Take a checkpoint that fits the config; or load this one without the patcher, with "
    "ignore_mismatched_sizes=True, save that, and load it with the patcher."
)
def a_part_of_another_shape(at: Place) -> Steps:
    key = f"model.layers.0.{PARTS[1]}"
    folder = changed(at.llama, at.tmp / "wide", lambda tensors: tensors.update({key: torch.ones(7, 64)}))
    said = yield lambda: load(folder, JOINED)
    assert key in said
    load(folder, None, ignore_mismatched_sizes=True).save_pretrained(at.tmp / "fits")
    assert same(load(at.tmp / "fits", JOINED), at.tmp / "fits")


# --- data ----------------------------------------------------------------------------------------------------------


@advice(
    'found {} ({}); write {"{}": ["qkv"]} for fusions of patcher, or {"patch_embeddings": True} for one of ',
    'holds a list of names of fusions, found {} ({}); write {"{}": ["qkv"]}.',
)
def fusion_configs_of_other_forms(at: Place) -> Steps:
    for wrong in (["qkv"], "qkv", True, {"patcher": "qkv"}, {"patcher": {"qkv": True}}):
        said = yield lambda wrong=wrong: load(at.llama, fusion_config=wrong)  # type: ignore[misc]
        model = load(at.llama, fusion_config=written(said, r"write (\{.*?\})(?: for|\.$)"))
        assert hasattr(model.model.layers[0].self_attn, "qkv_proj")
        assert same(model, at.llama)
        # Not the other half: what transformers makes of its own fusion_config stays for the process.


@advice("write smaller numbers in braces, or + in their place")
def an_expression_of_many_repeats(at: Place) -> Steps:
    yield lambda: Patcher(new_weights="a{5000}")
    assert Patcher(new_weights=["a{500}", "a+"])


@advice("Take out repeats inside of repeats, and alternatives that match the same: 'a+$' finds what '(a+)+$' does.")
def an_expression_that_takes_too_long(at: Place) -> Steps:
    extra = {f"model.layers.0.mlp.{name}": torch.ones(1) for name in ("a" * 3000 + "!", "aaa")}
    folder = changed(at.llama, at.tmp / "long", lambda tensors: tensors.update(extra))
    slow = Patcher({"LlamaMLP": OwnMLP}, dropped_weights=["(a+)+$", "!$"])
    said = yield lambda: load(folder, slow)
    quick = written(said, r"the same: ('.*?') finds")
    assert same(load(folder, slow.replace(dropped_weights=[quick, "!$"])), at.llama)
