"""Models that transformers splits over processes while it loads them (`DistributedConfig(fsdp_size=2)`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    PatcherError,
    original_state_dict,
)
from tests.compatibility.outcomes import compared
from tests.compatibility.rows import Row
from tests.compatibility.subjects.data_parallel import split_by_transformers
from tests.distributed.comparing import assert_same_weights
from tests.support.beside import FUSED_QKV
from tests.support.bringing import BringingMLP
from tests.support.checkpoints import files
from tests.support.processes import two_processes
from tests.support.replacements import JOINED
from tests.support.split_replacements import CONVERTING, IN_BFLOAT16, TURNED_EXPERTS, WITH_VALUES
from tests.support.splitting import (
    all_whole,
    logits,
    split,
)
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config, tiny_qwen2_moe_config

BOTH = Patcher(fusions=["qkv", "gate_up"])


class OtherNorm(MixtralRMSNorm):
    """Beside what transformers converts."""


MORE = (
    Row("`qkv` and `gate_up`", BOTH, tiny_llama_config),
    Row("`qkv` and `sequential_experts`", Patcher(fusions=["qkv", "sequential_experts"]), tiny_mixtral_config),
    Row("a class mapping beside experts", Patcher({"MixtralRMSNorm": OtherNorm}), tiny_mixtral_config),
    Row("one of two layers", Patcher(module_mapping={"**.1.mlp": BringingMLP}), tiny_llama_config),
    Row("queries, keys and values of other sizes", FUSED_QKV, tiny_llama_config),
)


@pytest.mark.parametrize("row", MORE, ids=lambda row: row.name)
def test_it_is_loaded_trained_and_saved_as_the_stock_model(row: Row, tmp_path: Path) -> None:
    """The rows of the compatibility table do the same in its cells."""
    split_by_transformers(row, tmp_path)


# --- whatever the sizes ----------------------------------------------------------------------------------------------


def random_config(seed: int) -> Any:
    """Sizes that two processes can't share evenly, too."""
    draw = random.Random(seed)
    groups, per_group, width = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([2, 6, 10])
    heads = groups * per_group
    return tiny_llama_config(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        hidden_size=heads * width,
        intermediate_size=draw.randrange(3, 40),
        vocab_size=draw.randrange(40, 60),
        attention_bias=draw.random() < 0.5,
        mlp_bias=draw.random() < 0.3,
        tie_word_embeddings=draw.random() < 0.3,
    )


def _any_sizes(folder: Path, seeds: range, rank: int) -> None:
    ids = torch.arange(3, 15)[None]
    for seed in seeds:
        patcher = Patcher(fusions=random.Random(seed).choice([["qkv"], ["gate_up"], ["qkv", "gate_up"]]))
        place = folder / str(seed)
        options = {"dtype": [torch.float32, torch.bfloat16][seed % 2]}
        stock = AutoModelForCausalLM.from_pretrained(place, **options, **split())
        model = AutoModelForCausalLM.from_pretrained(place, **options, **split(), patcher=patcher)
        whole = AutoModelForCausalLM.from_pretrained(place, **options, patcher=patcher)
        inputs = {"input_ids": ids}
        assert torch.equal(logits(model, inputs), logits(whole, inputs)), seed
        assert_same_weights(model, stock, rounding=0)
        for name, each in {"ours": model, "stock": stock}.items():
            each.save_pretrained(folder / f"{seed} {name}")
        dist.barrier()
        assert files(folder / f"{seed} ours") == files(folder / f"{seed} stock"), seed


def test_sizes_that_two_processes_cannot_share_evenly(tmp_path: Path) -> None:
    seeds = range(6)
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        save_tiny(random_config(seed), tmp_path / str(seed))
    two_processes(partial(_any_sizes, tmp_path, seeds), tmp_path)


# --- conversions, and values that no checkpoint has ------------------------------------------------------------------


def _as_one_process(folder: Path, rank: int) -> None:
    patchers = {**CONVERTING, **WITH_VALUES, **IN_BFLOAT16, "stacked and turned": TURNED_EXPERTS}
    inputs = {"input_ids": torch.arange(3, 15)[None]}
    for name, patcher in patchers.items():
        options = {"dtype": torch.bfloat16 if name in IN_BFLOAT16 else torch.float32}
        place = folder / ("experts" if patcher is TURNED_EXPERTS else "llama")
        torch.manual_seed(0)  # of what `__init__` draws
        one = AutoModelForCausalLM.from_pretrained(place, patcher=patcher, **options)
        torch.manual_seed(rank)
        model = AutoModelForCausalLM.from_pretrained(place, patcher=patcher, **options, **split())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), name
        assert torch.equal(logits(model, inputs), logits(one, inputs)), name
        if name == "in thirds":  # it rounds, which can't be reversed
            compared(all_whole(dict(model.state_dict())), dict(one.state_dict()), rounding=0)
            with pytest.raises(PatchedWeightsError, match="doesn't restore the values that it converts"):
                model.save_pretrained(folder / name)
            continue
        compared(original_state_dict(model), original_state_dict(one), rounding=0)
        for (key, buffer), other in zip(model.named_buffers(), one.buffers(), strict=True):
            assert torch.equal(buffer, other), f"{name}: {key}"
        if rank == 0:
            one.save_pretrained(folder / f"{name} one")
        model.save_pretrained(folder / f"{name} two")
        dist.barrier()
        assert files(folder / f"{name} two") == files(folder / f"{name} one"), name
        if name not in WITH_VALUES and name not in IN_BFLOAT16:
            assert files(folder / f"{name} two") == files(place), name


def test_conversions_are_those_of_one_process(tmp_path: Path) -> None:
    for name, config in {"llama": tiny_llama_config(), "experts": tiny_qwen2_moe_config()}.items():
        (tmp_path / name).mkdir()
        save_tiny(config, tmp_path / name)
    two_processes(partial(_as_one_process, tmp_path), tmp_path)


# --- the forms of a config, and of a save ----------------------------------------------------------------------------


def _forms(folder: Path, rank: int) -> None:
    inputs = {"input_ids": torch.arange(3, 15)[None]}
    expected = logits(AutoModelForCausalLM.from_pretrained(folder / "llama", patcher=BOTH), inputs)
    forms: dict[str, tuple[Any, bool]] = {
        "a dict": ({"fsdp_size": 2}, True),
        "sizes of 1": (DistributedConfig(tp_size=1, fsdp_size=1, pp_size=1), False),
        "sizes of 1 beside": (DistributedConfig(tp_size=1, fsdp_size=2), True),
    }
    if DistributedConfig().tp_size == 1:  # in 5.17 transformers itself can't load with it
        forms["nothing"] = (DistributedConfig(), False)
    if hasattr(DistributedConfig(), "fsdp_plan"):  # came after 5.17
        plan = {"model.layers.*.self_attn.qkv_proj": "free_full_weight"}
        forms["a plan for a fused name"] = (DistributedConfig(fsdp_size=2, fsdp_plan=plan), True)
    for name, (config, is_split) in forms.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "llama", patcher=BOTH, distributed_config=config)
        assert all(isinstance(parameter, DTensor) is is_split for parameter in model.parameters()), name
        assert torch.equal(logits(model, inputs), expected), name

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", patcher=BOTH, **split())
    model.save_pretrained(folder / "layout", save_original_format=False)
    model.save_pretrained(folder / "shards", max_shard_size="50KB", is_main_process=rank == 0)
    model.model.save_pretrained(folder / "part")
    dist.barrier()
    assert (folder / "layout" / "model.patcher.safetensors").exists()
    for again in (
        AutoModelForCausalLM.from_pretrained(folder / "layout"),
        AutoModelForCausalLM.from_pretrained(folder / "layout", **split()),
        AutoModelForCausalLM.from_pretrained(folder / "shards", patcher=BOTH, **split()),
    ):
        assert torch.equal(logits(again, inputs), expected)
    base = AutoModel.from_pretrained(folder / "part", **split())
    compared(all_whole(dict(base.state_dict())), original_state_dict(model.model), rounding=0)
    for split_model in (model, AutoModelForCausalLM.from_pretrained(folder / "llama", **split())):
        with pytest.raises(InvalidPatcherError, match=r"can't take a model that is split over processes"):
            BOTH.apply(split_model)
    assert model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False).shape == (1, 14)
    heads = AutoModelForCausalLM.from_pretrained(
        folder / "llama", patcher=BOTH, attn_implementation="eager", **split()
    )
    assert len(heads(**inputs, output_attentions=True).attentions) == 2

    for refused in ({"pp_size": 2},):
        with pytest.raises(InvalidPatcherError, match="together with a distributed_config"):
            AutoModelForCausalLM.from_pretrained(
                folder / "llama", patcher=BOTH, distributed_config=DistributedConfig(**refused)
            )
    with pytest.raises(PatcherError, match=r"q_proj is rows of qkv_proj .* split over processes"):
        model.model.layers[0].self_attn.q_proj = torch.nn.Linear(64, 64, bias=False)
    part = model.model.layers[0].self_attn.k_proj.weight
    wanted = original_state_dict(model)["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(part.full_tensor(), wanted)
    writes: list[Callable[[], object]] = [
        lambda: part.detach().zero_(),
        lambda: part.data.copy_(part),
        lambda: torch.nn.init.zeros_(part),
        lambda: part.data.__setitem__(0, 1.0),
    ]
    for write in writes:  # nobody would see it
        with pytest.raises(PatcherError, match="Write to the parameter that holds them"):
            write()
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight.zero_()
    assert not model.model.layers[0].self_attn.k_proj.weight.full_tensor().any()
    with pytest.raises(PatcherError, match="no fusion describes it"):  # in both processes
        AutoModelForCausalLM.from_pretrained(folder / "llama", patcher=JOINED, **split()).save_pretrained(
            folder / "nowhere", save_original_format=False
        )


def test_other_forms_of_configs_and_saves(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    save_tiny(tiny_llama_config(), tmp_path / "llama")
    two_processes(partial(_forms, tmp_path), tmp_path)
