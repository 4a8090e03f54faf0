"""What has no values is given none: torch takes a tenth of a millisecond a layer to initialise nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher
from patcher.construction.meta_init import NoValues
from tests.support.tiny import save_tiny, tiny_llama_config


class Initialised(TorchDispatchMode):
    """The operations inside of it that give random values to tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default) and args[0].is_meta:
            self.run.append(str(func))
        return func(*args, **(kwargs or {}))


class SameMLP(LlamaMLP):
    pass


@pytest.mark.parametrize("patcher", [None, Patcher(), Patcher(fusions="qkv"), Patcher({"LlamaMLP": SameMLP})])
def test_a_patched_load_initialises_nothing_on_meta(patcher: Patcher | None, tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(attention_bias=True, mlp_bias=True), tmp_path)

    with Initialised() as initialised:
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher)

    assert bool(initialised.run) == (patcher is None)


@pytest.mark.parametrize("bias", [False, True])
def test_what_has_values_is_initialised_as_ever(bias: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(5, 4, bias=bias)
    torch.manual_seed(0)
    with NoValues():
        with torch.device("meta"):
            nn.Linear(3, 2, bias=bias)
            nn.Embedding(3, 2)
        real = nn.Linear(5, 4, bias=bias)

    assert all(torch.equal(one, other) for one, other in zip(real.parameters(), stock.parameters(), strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_can_not_be_initialised_is_an_error(device: str) -> None:
    with NoValues(), pytest.raises(ValueError, match="fewer than 2 dimensions"):
        nn.init.kaiming_uniform_(torch.empty(3, device=device))
