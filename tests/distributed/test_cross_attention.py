"""Tensor parallelism of an encoder-decoder whose cross attention has keys and values joined, in two processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BartConfig, BartForConditionalGeneration
from transformers.distributed import DistributedConfig

import patcher
from patcher import Patcher, PatcherError
from patcher.layouts.carried import fused_modules
from tests.support.processes import two_processes
from tests.support.tiny import ENCODER_DECODER_SIZES, randomize

INPUTS = {
    "input_ids": torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0)),
    "decoder_input_ids": torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(1)),
}
#: transformers has none for the model: by the names of stock, as a user writes it
PLAN = {
    f"model.decoder.layers.*.{attention}.{name}": style
    for attention in ("self_attn", "encoder_attn")
    for name, style in {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**ENCODER_DECODER_SIZES, max_position_embeddings=64)).eval()
    randomize(model)
    folder = tmp_path_factory.mktemp("bart")
    model.save_pretrained(folder)
    return folder


def load(folder: Path, plan: dict[str, str], **options: Any) -> Any:
    asked = DistributedConfig(**copy.deepcopy({"tp_size": 2, "tp_plan": plan}))
    return BartForConditionalGeneration.from_pretrained(folder, distributed_config=asked, **options)


def joined(plan: dict[str, str], module: str, parts: str) -> dict[str, str]:
    """A plan with one rule for what is joined in some modules."""
    found = dict(plan)
    for key in plan:
        path, _, name = key.rpartition(".")
        if path.endswith(module) and name.removesuffix("_proj") in parts:
            found[f"{path}.{parts}_proj"] = found.pop(key)
    return found


def test_as_in_one_process(folder: Path, tmp_path: Path) -> None:
    stock = BartForConditionalGeneration.from_pretrained(folder)
    expected = stock(**INPUTS).logits.detach()
    generated = stock.generate(INPUTS["input_ids"], max_new_tokens=6, do_sample=False)
    original = stock.state_dict()
    of_kv = joined(PLAN, "encoder_attn", "kv")
    of_both = joined(of_kv, "self_attn", "qkv")

    def work(rank: int) -> None:
        for plan, fusions in ((of_both, ["qkv", "kv"]), (of_kv, ["kv"])):
            model = load(folder, plan, patcher=Patcher(fusions=fusions))
            blocks = {f"{path}.{one.fused[0]}": one.blocks for path, _, c in fused_modules(model) for one in c.layouts}
            assert blocks["model.decoder.layers.1.encoder_attn.kv_proj.weight"] == 2
            weight = model.get_parameter("model.decoder.layers.1.encoder_attn.kv_proj.weight")
            assert weight.to_local().shape == (64, 64)
            torch.testing.assert_close(model(**INPUTS).logits, expected, atol=1e-4, rtol=1e-4)
            found = model.generate(INPUTS["input_ids"], max_new_tokens=6, do_sample=False)
            assert torch.equal(found, generated)
            gathered = patcher.original_state_dict(model)
            assert all(torch.equal(gathered[key], value) for key, value in original.items())
        model.save_pretrained(tmp_path / "saved")

    two_processes(work, tmp_path)
    saved, tensors = (load_file(one / "model.safetensors") for one in (tmp_path / "saved", folder))
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())


def test_heads_that_processes_cannot_share_are_refused(tmp_path: Path) -> None:
    config = BartConfig(**ENCODER_DECODER_SIZES | {"decoder_attention_heads": 1}, max_position_embeddings=64)
    BartForConditionalGeneration(config).save_pretrained(tmp_path)

    def work(rank: int) -> None:
        with pytest.raises(PatcherError, match=r"1 heads of 64 rows can't be sharded equally among 2 processes"):
            load(tmp_path, joined(PLAN, "encoder_attn", "kv"), patcher=Patcher(fusions="kv"))
        with pytest.raises(PatcherError, match=r"tp_plan names layers .*\n.*encoder_attn\.k_proj: part of .*kv_proj"):
            load(tmp_path, PLAN, patcher=Patcher(fusions="kv"))

    two_processes(work, tmp_path)
