"""What stock stacks and a layout cuts apart again is read as it is: where it is the same, and nowhere else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from patcher import Patcher
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import tiny_mixtral_config


@pytest.fixture
def no_conversion_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of stock raise for what is as large as the weights of experts."""

    def on_little(convert: Any) -> Any:
        def checked(self: Any, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            for tensors in input_dict.values():
                listed = tensors if isinstance(tensors, list) else [tensors]
                assert all(tensor.is_meta or tensor.numel() < 64 * 64 for tensor in listed)
            return convert(self, input_dict, *args, **kwargs)

        return checked

    for operation in (MergeModulelist, Concatenate):
        monkeypatch.setattr(operation, "convert", on_little(operation.convert))


EXPERTS = Patcher(fusions="sequential_experts")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


def weights_of(experts: Any) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": value for number, one in enumerate(experts) for name, value in one.named_parameters()}


@pytest.mark.usefixtures("no_conversion_of_values")
def test_experts_that_a_checkpoint_has_one_by_one_are_read_so(mixtral: Path, tmp_path: Path) -> None:
    """transformers stacks them, and a stack that is cut again is twice the time and twice the memory."""
    model = MixtralForCausalLM.from_pretrained(mixtral, patcher=EXPERTS)
    stored = load_file(mixtral / "model.safetensors")

    read = weights_of(model.model.layers[1].mlp.experts)
    for name, key in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        for number in range(model.config.num_local_experts):
            expected = stored[f"model.layers.1.block_sparse_moe.experts.{number}.{key}.weight"]
            assert torch.equal(read[f"{number}.{name}.weight"], expected)
    model.save_pretrained(tmp_path)
    assert same_checkpoint(tmp_path, mixtral)


def test_where_one_has_another_dtype_all_are_as_in_stock(mixtral: Path, tmp_path: Path) -> None:
    stored = load_file(mixtral / "model.safetensors")
    odd = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    save_file({**stored, odd: stored[odd].to(torch.float64)}, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(mixtral / "config.json", tmp_path)

    model, stock = (
        MixtralForCausalLM.from_pretrained(tmp_path, patcher=each, dtype="auto") for each in (EXPERTS, None)
    )
    (stack,) = (layer.mlp.experts.gate_up_proj for layer in stock.model.layers[:1])
    for number, expert in enumerate(model.model.layers[0].mlp.experts):
        joined = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        assert joined.dtype == stack.dtype
        assert torch.equal(joined, stack[number])


def test_what_shares_a_storage_in_a_file_is_not_shared_in_the_model(mixtral: Path, tmp_path: Path) -> None:
    """As a `.bin` has it whose experts were views of a stack; a save would take them for tied."""
    stored = load_file(mixtral / "model.safetensors")
    names = [key for key in stored if "layers.0" in key and ".w1." in key]
    stored |= zip(names, torch.stack([stored[key] for key in names]), strict=True)
    torch.save(stored, tmp_path / "pytorch_model.bin")
    shutil.copy(mixtral / "config.json", tmp_path)

    model = MixtralForCausalLM.from_pretrained(tmp_path, patcher=EXPERTS)
    places = {value.untyped_storage().data_ptr() for value in weights_of(model.model.layers[0].mlp.experts).values()}
    assert len(places) == 3 * model.config.num_local_experts
    model.save_pretrained(tmp_path / "saved")
    assert same_checkpoint(tmp_path / "saved", mixtral)
