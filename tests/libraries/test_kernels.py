"""Layers of the `kernels` package as values of a mapping: from a folder, in pure torch, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from kernels import LocalLayerRepository
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from patcher import Patcher, forward_of, like
from tests.support import fresh
from tests.support.local_kernels import written_kernels
from tests.support.tiny import tiny_llama_config

ROOT = Path(__file__).parents[2]
TOKENS = torch.arange(12)[None] + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_kernels(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_llama_config()).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_layer_from_a_folder_is_scoped_to_one_load(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    layer = kernels.get_local_kernel(folder).layers.Norm
    patcher = Patcher({like("LlamaRMSNorm"): forward_of(layer)})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model.model.norm).forward is layer.forward
    assert type(plain.model.norm) is LlamaRMSNorm
    torch.testing.assert_close(logits(model), logits(plain))
    model.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_a_repository_is_a_layer(folder: Path, checkpoint: Path) -> None:
    value = forward_of(LocalLayerRepository(folder, layer_name="Norm"))
    assert value == forward_of(kernels.get_local_kernel(folder).layers.Norm)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=Patcher({"LlamaRMSNorm": value}))
    torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(checkpoint)))


def test_a_layer_without_a_backward_refuses_training(folder: Path, checkpoint: Path) -> None:
    value = forward_of(LocalLayerRepository(folder, layer_name="InferenceNorm"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=Patcher({"LlamaRMSNorm": value}))
    logits(model)
    with pytest.raises(RuntimeError, match=r"InferenceNorm, in place of LlamaRMSNorm\.forward, has no backward pass"):
        model(TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.process
def test_beside_use_kernels() -> None:
    """In an interpreter of its own, in which transformers takes the installed release of the package."""
    fresh.run_pytest_alone("-p", "tests.support.any_kernels", "tests/libraries/use_kernels.py", HF_HUB_OFFLINE="1")
