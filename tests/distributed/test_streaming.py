"""Weights that stream out of models that two processes share, and into them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from patcher import (
    Patcher,
    PatcherWarning,
    checkpoint_metadata,
    checkpoint_weights,
    load_checkpoint_weights,
    load_new_weights,
    save_new_weights,
)
from tests.support.checkpoints import tensors
from tests.support.processes import two_processes
from tests.support.replacements import JOINED
from tests.support.splitting import split_by_hand
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config, tiny_qwen2_moe_config

DEALS_EXPERTS = hasattr(DistributedConfig(), "ep_size")
CONFIGS = {
    "llama": tiny_llama_config(num_key_value_heads=2),
    "tied": tiny_llama_config(tie_word_embeddings=True),
    # Sizes that two processes can't share evenly, and some of which one has nothing.
    "odd": tiny_llama_config(hidden_size=30, head_dim=10, num_attention_heads=3, num_key_value_heads=1, vocab_size=41),
    "mixtral": tiny_mixtral_config(),
    "shared expert": tiny_qwen2_moe_config(),
}
PATCHERS = {
    "llama": [Patcher(fusions=["qkv", "gate_up"]), JOINED],
    "tied": [Patcher(fusions=["qkv"])],
    "odd": [Patcher(fusions=["qkv", "gate_up"])],
    "mixtral": [Patcher(fusions=["sequential_experts", "qkv"])],
    "shared expert": [Patcher(fusions=["sequential_experts", "qkv"])],
}
WAYS: dict[str, dict[str, int] | None] = {
    "FSDP2": {"fsdp_size": 2},
    "FSDP2 by hand": None,
    "tensor parallelism": {"tp_size": 2},
    "experts": {"tp_size": 2, "ep_size": 2},
}


def loaded(folder: Path, way: str, patcher: Patcher | None, **options: Any) -> Any:
    sizes = WAYS[way]
    if sizes is None:
        return split_by_hand(AutoModelForCausalLM.from_pretrained(folder, patcher=patcher))
    config = DistributedConfig(**sizes, **options)
    return AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, distributed_config=config)


def as_bytes(weights: Any) -> dict[str, bytes]:
    return {name: repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes() for name, tensor in weights}


def _there_and_back(folder: Path, name: str, way: str, patcher: Patcher | None, rank: int) -> None:
    place = folder / name
    expected, model = tensors(place), loaded(place, way, patcher)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert as_bytes(checkpoint_weights(model)) == expected
    assert as_bytes(checkpoint_weights(model, only_on=1)) == (expected if rank == 1 else {})
    if rank == 0:  # no process waits for another
        assert checkpoint_metadata(model).keys() == expected.keys()
    # The parts of one tensor come far apart.
    stock = AutoModelForCausalLM.from_pretrained(place)
    weights = list(reversed([(key, value.clone()) for key, value in checkpoint_weights(stock)]))
    held = [(parameter, parameter.to_local().data_ptr()) for parameter in model.parameters() if _is_split(parameter)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    load_checkpoint_weights(model, weights)
    assert as_bytes(checkpoint_weights(model)) == expected
    assert [(one, one.to_local().data_ptr()) for one, _ in held] == held
    ids = {"input_ids": torch.arange(3, 15)[None]}
    with torch.no_grad():
        found, wanted = model.eval()(**ids).logits, stock.eval()(**ids).logits
    found = found.full_tensor() if isinstance(found, DTensor) else found
    assert torch.allclose(found, wanted, atol=1e-5)
    assert as_bytes(checkpoint_weights(model)) == expected  # after a forward, which may leave them whole
    # Into a stock model of one process.
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.fill_(0.5)
    load_checkpoint_weights(stock, checkpoint_weights(model))
    assert as_bytes(checkpoint_weights(stock)) == expected


def _is_split(parameter: Any) -> bool:
    return isinstance(parameter, DTensor)


#: Odd sizes transformers itself refuses under tensor parallelism; experts have a test of their own.
CASES = [
    (name, way)
    for name, way in product(CONFIGS, WAYS)
    if way != "experts" and (name, way) != ("odd", "tensor parallelism")
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_there_and_back(name: str, way: str, tmp_path: Path) -> None:
    save_tiny(CONFIGS[name], (tmp_path / name))
    patchers: list[Patcher | None] = [None, *PATCHERS[name]]

    def work(rank: int) -> None:
        for patcher in patchers:
            _there_and_back(tmp_path, name, way, patcher, rank)

    two_processes(work, tmp_path)


class Shifted(LlamaRMSNorm):  # type: ignore[misc]
    """A norm with a weight that no checkpoint of transformers has."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        self.shift = nn.Parameter(torch.zeros(hidden_size))


def test_new_weights_are_kept_of_what_is_split(tmp_path: Path) -> None:
    save_tiny(CONFIGS["llama"], tmp_path / "llama")
    patcher = Patcher({"LlamaRMSNorm": Shifted}, new_weights=r"norm\.shift$") | Patcher(fusions="qkv")

    def work(rank: int) -> None:
        for way in ("FSDP2", "FSDP2 by hand"):
            model, other = (loaded(tmp_path / "llama", way, patcher) for _ in range(2))
            assert isinstance(model.model.norm.shift, DTensor)
            with torch.no_grad():
                for number, (name, value) in enumerate(model.named_parameters()):
                    value.fill_(number) if name.endswith("shift") else None
            save_new_weights(model, tmp_path / way)
            dist.barrier()
            load_new_weights(other, tmp_path / way)
            found, expected = (as_bytes(checkpoint_weights(each)) for each in (other, model))
            assert found == expected
            assert sum(name.endswith("shift") for name in found) == 5
            stock = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
            with pytest.warns(PatcherWarning, match=r"left over: model\.layers\.\{0\.\.1\}\.input_layernorm\.shift"):
                load_checkpoint_weights(stock, checkpoint_weights(model), strict=False)

    two_processes(work, tmp_path)


@pytest.mark.skipif(not DEALS_EXPERTS, reason="dealt by another plan, which saves them otherwise")
def test_experts_that_are_dealt_to_processes(tmp_path: Path) -> None:
    save_tiny(CONFIGS["mixtral"], tmp_path / "mixtral")

    def work(rank: int) -> None:
        for patcher in (None, Patcher(fusions="qkv")):
            _there_and_back(tmp_path, "mixtral", "experts", patcher, rank)

    two_processes(work, tmp_path)
