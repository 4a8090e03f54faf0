"""Models of which parts are on the disk are saved as the stock model is: tensors, shards and index."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Transpose, WeightConverter
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import PatchedWeightsError, Patcher
from tests.support import shared
from tests.support.beside import LINEAR_EXPERTS
from tests.support.checkpoints import saved, tensors
from tests.support.offloaded import places
from tests.support.replacements import JOIN, JOINED, JoinedMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config, tiny_qwen2_moe_config

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")


class Reordered(LlamaMLP):
    """The layers of the original, the last one first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._modules["gate_proj"] = self._modules.pop("gate_proj")


class Transposed(LlamaMLP):
    """`down_proj` holds its matrix the other way round, under the same name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.down_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act_fn(self.gate_proj(x)) * self.up_proj(x)) @ self.down_proj.weight


class InHalves(LlamaMLP):
    """The rows of `up_proj` are in two layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.up_proj
        self.upper = torch.nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)
        self.lower = torch.nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.cat([self.upper(x), self.lower(x)], dim=-1)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


CUT = WeightConverter("mlp.up_proj.weight", ["mlp.upper.weight", "mlp.lower.weight"], operations=[Chunk(dim=0)])
TURN = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)])
PATCHERS = {
    "fusions": Patcher(fusions=["qkv", "gate_up"]),
    "a conversion and a fusion": JOINED | Patcher(fusions="qkv"),
    "another order": Patcher({"LlamaMLP": Reordered}),
    "a conversion into two": Patcher({"LlamaMLP": InHalves}, extra_weight_conversions=CUT),
    "a conversion to the same name": Patcher({"LlamaMLP": Transposed}, extra_weight_conversions=TURN),
}


def offloaded(folder: Path, where: Path, patcher: Patcher | None = None, *on_disk: str) -> Any:
    stock = shared.stock(folder)
    device_map = places(stock, lambda path: any(part in f"{path}." for part in on_disk or (".1.",)), whole=True)
    return AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, device_map=device_map, offload_folder=where)


@pytest.mark.crossed
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("asked", PATCHERS.values(), ids=PATCHERS)
def test_the_tensors_are_those_of_stock(asked: Patcher, tied: bool, tmp_path: Path) -> None:
    """Shards are cut where those of a model in memory are: stock cuts those of an offloaded one by its parameters."""
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=tied), tmp_path / "stock")
    model, stock = offloaded(folder, tmp_path / "ours", asked), offloaded(folder, tmp_path / "theirs")
    in_memory = AutoModelForCausalLM.from_pretrained(folder, patcher=asked)
    for size in ("15KB", "40KB", "60KB", "5GB"):
        found = saved(model, tmp_path / f"our {size}", max_shard_size=size)
        stock.save_pretrained(tmp_path / f"their {size}", max_shard_size=size)
        assert tensors(tmp_path / f"our {size}") == tensors(tmp_path / f"their {size}"), size
        assert found == saved(in_memory, tmp_path / f"in memory {size}", max_shard_size=size), size
    # Over what was written in shards.
    ours, theirs = saved(model, tmp_path / "our 15KB"), saved(stock, tmp_path / "their 15KB")
    assert ours.keys() == theirs.keys()
    assert ours["model.safetensors"] == theirs["model.safetensors"]


@pytest.mark.parametrize("config", [tiny_mixtral_config, tiny_qwen2_moe_config])
def test_experts_come_together_whatever_the_size_of_a_shard(config: Any, tmp_path: Path) -> None:
    folder = save_tiny(config(), tmp_path / "stock")
    asked = Patcher(fusions=["sequential_experts", "qkv"])
    model = offloaded(folder, tmp_path / "ours", asked)
    for size in ("15KB", "60KB", "5GB"):
        model.save_pretrained(tmp_path / f"our {size}", max_shard_size=size)
        assert tensors(tmp_path / f"our {size}") == tensors(folder), size


def test_experts_that_a_class_holds_one_by_one_are_saved_whole(tmp_path: Path) -> None:
    """Stock holds them as one tensor, so its shards are cut elsewhere; the checkpoint is the same."""
    folder = save_tiny(tiny_qwen2_moe_config(), tmp_path / "stock")
    model = offloaded(folder, tmp_path / "ours", LINEAR_EXPERTS)
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_what_is_on_the_disk_is_read_when_its_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from patcher.loading import saving

    config = tiny_llama_config(num_hidden_layers=4)
    folder = save_tiny(config, tmp_path / "stock")
    model = offloaded(folder, tmp_path / "ours", Patcher(fusions="qkv"), "layers")
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0
    stock = saving.load_offloaded_parameter

    def noted(model: Any, name: str) -> torch.Tensor:
        nonlocal most
        value = stock(model, name)
        held.append(weakref.ref(value))
        most = max(most, sum(tensor.nbytes for each in held if (tensor := each()) is not None))
        return value

    monkeypatch.setattr(saving, "load_offloaded_parameter", noted)
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    layer = sum(value.nbytes for name, value in model.state_dict().items() if ".layers.0." in name)
    assert len(held) == sum(".layers." in name for name in model.state_dict())
    assert 0 < most <= layer * 1.5


def test_what_has_no_reverse_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    class OneWay(Chunk):
        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    class Joining(type(JOIN.operations[0])):  # type: ignore[misc]
        @property
        def reverse_op(self) -> Any:
            return OneWay(dim=0)

    asked = JOINED.replace(
        class_mapping={"LlamaMLP": JoinedMLP},
        extra_weight_conversions=WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[Joining(dim=0)]
        ),
    )
    folder = save_tiny(tiny_llama_config(), tmp_path / "stock")
    model = offloaded(folder, tmp_path / "ours", asked)
    with pytest.raises(PatchedWeightsError, match="has no reverse"):
        model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
