"""Names and shapes are judged before a weight is read: a wrong load of any size fails in seconds."""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Concatenate, LlamaConfig, LlamaForCausalLM, WeightConverter, modeling_utils

from patcher import PatchedWeightsError, Patcher, PatcherError, UnmatchedPatchError, plan
from patcher.resolution import resolution
from tests.support import shared
from tests.support.replacements import OwnMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config


class GateUpMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


def joining(*sources: str, dim: int = 0) -> WeightConverter:
    return WeightConverter(list(sources), ["gate_up_proj.weight"], operations=[Concatenate(dim=dim)])


BOTH = ("gate_proj.weight", "up_proj.weight")
WRONG = {
    "no conversion": (Patcher({"LlamaMLP": GateUpMLP}), PatchedWeightsError, "gate_up_proj"),
    "one part": (
        Patcher({"LlamaMLP": GateUpMLP}, extra_weight_conversions=joining("gate_proj.weight")),
        PatchedWeightsError,
        ", the model has ",
    ),
    "other dimension": (
        Patcher({"LlamaMLP": GateUpMLP}, extra_weight_conversions=joining(*BOTH, dim=1)),
        PatchedWeightsError,
        ", the model has ",
    ),
    "parts that don't fit": (
        Patcher(
            {"LlamaMLP": GateUpMLP},
            extra_weight_conversions=joining("gate_proj.weight", "down_proj.weight"),
            strict=True,
        ),
        PatchedWeightsError,
        "failed for",
    ),
    "nothing fires": (
        Patcher({"LlamaMLP": OwnMLP}, extra_weight_conversions=joining("gate_porj.weight", "up_porj.weight")),
        UnmatchedPatchError,
        "took no tensor",
    ),
    "a filter": (
        Patcher({"LlamaMLP": OwnMLP}, filtered_weight_conversion_patterns="nothing"),
        UnmatchedPatchError,
        "matches no conversion",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_load_reads_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher, error, text = WRONG[case]
    folder = save_tiny(tiny_llama_config(), tmp_path)

    def read(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("a weight was read")

    monkeypatch.setattr("transformers.core_model_loading.spawn_materialize", read)
    monkeypatch.setattr("transformers.core_model_loading._materialize_copy", read)
    with pytest.raises(error, match=text) as caught:
        LlamaForCausalLM.from_pretrained(folder, patcher=patcher)
    assert plan(folder, patcher).problems[0] == str(caught.value)


def sparse_checkpoint(config: LlamaConfig, folder: Path) -> int:
    """A checkpoint of headers, and files of the right length that hold nothing; how many parameters it has."""
    with torch.device("meta"):
        sizes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, str] = {name: f"model-{number // 25}.safetensors" for number, name in enumerate(sizes)}
    for shard in dict.fromkeys(shards.values()):
        header: dict[str, Any] = {}
        end = 0
        for name in (name for name, home in shards.items() if home == shard):
            start, end = end, end + 2 * sizes[name].numel()
            header[name] = {"dtype": "BF16", "shape": list(sizes[name]), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": 0}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return sum(size.numel() for size in sizes.values())


def test_a_wrong_load_of_70_billion_parameters_fails_in_seconds(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    assert sparse_checkpoint(config, tmp_path) > 70e9
    started = time.perf_counter()
    with pytest.raises(PatchedWeightsError, match=r"model\.layers\.\{0\.\.79\}\.mlp\.gate_up_proj\.weight"):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=Patcher({"LlamaMLP": GateUpMLP}), dtype=torch.bfloat16)
    assert time.perf_counter() - started < 30


class LooksAtValues(Concatenate):
    """An operation that meta tensors don't suffice for."""

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        assert sum(float(tensor.sum()) for tensors in input_dict.values() for tensor in tensors) is not None
        return super().convert(input_dict, *args, **kwargs)


def test_an_operation_that_looks_at_values_is_judged_when_it_has_run(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)

    def patcher(*sources: str) -> Patcher:
        converter = WeightConverter(list(sources), ["gate_up_proj.weight"], operations=[LooksAtValues(dim=0)])
        return Patcher({"LlamaMLP": GateUpMLP}, extra_weight_conversions=converter)

    model = LlamaForCausalLM.from_pretrained(folder, patcher=patcher("gate_proj.weight", "up_proj.weight"))
    stock = shared.stock(folder, LlamaForCausalLM)
    joined = model.model.layers[0].mlp.gate_up_proj.weight
    assert joined.equal(
        torch.cat([stock.model.layers[0].mlp.gate_proj.weight, stock.model.layers[0].mlp.up_proj.weight])
    )
    with pytest.raises(PatcherError, match=", the model has "):
        LlamaForCausalLM.from_pretrained(folder, patcher=patcher("gate_proj.weight"))


def test_plan_leaves_the_garbage_collector_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)
    monkeypatch.setattr(gc, "disable", lambda: pytest.fail("it was turned off for the process"))
    assert plan(folder, Patcher({"LlamaMLP": OwnMLP})).ok


def test_a_dry_run_reads_nothing_and_leaves_nothing_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)
    before = dict(vars(modeling_utils))
    with monkeypatch.context() as patch:
        patch.setattr("transformers.core_model_loading._materialize_copy", lambda *_: pytest.fail("it was read"))
        assert plan(folder, Patcher({"LlamaMLP": OwnMLP}, fusions="qkv")).ok
    assert vars(modeling_utils) == before
    model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": OwnMLP}))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


# --- skeletons -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [tiny_llama_config, tiny_mixtral_config])
@pytest.mark.parametrize("fusions", [("qkv",), ("qkv", "gate_up"), ("sequential_experts",)])
def test_a_load_builds_no_skeleton_and_a_save_few(
    config: Any, fusions: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    patcher = Patcher(fusions=fusions, strict=False)
    folder = save_tiny(config(), tmp_path / "stock")
    built: list[Any] = []
    stock = resolution.init_empty_weights
    monkeypatch.setattr(resolution, "init_empty_weights", lambda **options: built.append(options) or stock(**options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every fusion finds something in every model
        loaded = AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)
        assert not built
        made = AutoModelForCausalLM.from_config(config(), patcher=patcher)
    built.clear()
    loaded.save_pretrained(tmp_path / "loaded")
    assert len(built) <= 1
    built.clear()
    made.save_pretrained(tmp_path / "made")
    assert len(built) <= 2


# --- how a load goes through the files of the package ----------------------------------------------------------------


def returns(load: Callable[[], object]) -> int:
    """How often a load comes back to a file that it has left; patterns, compat and comprehensions apart."""
    package, files = Path(resolution.__file__).parents[1], list[str]()

    def note(frame: Any, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package) and not frame.f_code.co_name.startswith("<"):
            place = file.relative_to(package).as_posix()
            if not place.startswith(("patterns", "compat/")) and files[-1:] != [place]:
                files.append(place)

    sys.setprofile(note)
    try:
        load()
    finally:
        sys.setprofile(None)
    return len(files) - len(set(files))


def test_a_load_comes_back_to_a_file_equally_often_however_many_layers_it_has(tmp_path: Path) -> None:
    """Each step is taken for all modules at once, so that a reader can follow it."""
    found = []
    for layers in (2, 9):
        folder = save_tiny(tiny_llama_config(num_hidden_layers=layers), tmp_path / str(layers))
        load = partial(LlamaForCausalLM.from_pretrained, folder, patcher=Patcher(fusions=["qkv"]))
        load()  # what is found out once
        found.append(returns(load))
    assert found[0] == found[1] <= 150
