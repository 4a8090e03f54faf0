"""Tensor and expert parallelism, in two processes: as in one, and saved as it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MiniMaxConfig,
    Olmo2Config,
    Phi3Config,
    modeling_utils,
)
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import patcher
from patcher import InvalidPatcherError, PatchConflictError, Patcher
from patcher.compat.models import in_plan
from patcher.fusions import QKV
from patcher.layouts.carried import fused_modules
from patcher.layouts.layouts import Rows
from patcher.layouts.sources import JoinedRows, in_blocks
from tests.support import shared
from tests.support.beside import LINEAR_EXPERTS
from tests.support.bringing import BringingMLP
from tests.support.checkpoints import files
from tests.support.comparing import logits
from tests.support.processes import two_processes
from tests.support.replacements import JOINED, SCALED_NORMS, JoinedMLP, OwnLayer
from tests.support.sampling import sampled
from tests.support.tiny import (
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen3_config,
)

TENSORS = {"tp_size": 2}
EXPERTS = {"tp_size": 2, "ep_size": 2}
#: Before, experts were dealt by another plan.
DEALS_EXPERTS = hasattr(DistributedConfig(), "ep_size")
BOTH = Patcher(fusions=["qkv", "gate_up"])
STOCK_PLAN = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
STOCK_PLAN |= {"model.layers.*.self_attn.o_proj": "rowwise"}
FUSED_PLAN = {"model.layers.*.self_attn.qkv_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}

CONFIGS = {
    "llama": tiny_llama_config(num_attention_heads=8, num_key_value_heads=2),
    "biases": tiny_llama_config(attention_bias=True, mlp_bias=True),
    "square": tiny_llama_config(intermediate_size=64),
    "tied": tiny_llama_config(tie_word_embeddings=True),
    "norms of heads": tiny_qwen3_config(),
    "gathered": Olmo2Config(**tiny_llama_config().to_diff_dict() | {"model_type": "olmo2"}),
    "packed": Phi3Config(**tiny_llama_config().to_diff_dict() | {"model_type": "phi3"}),
    "mixtral": tiny_mixtral_config(),
    "shared expert": tiny_qwen2_moe_config(),
}


class TurnedMLP(LlamaMLP):
    """Has the weight of its gate the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(x @ self.gate_proj.weight) * self.up_proj(x))


TURNED = Patcher(
    {"LlamaMLP": TurnedMLP},
    extra_weight_conversions=WeightConverter(
        "mlp.gate_proj.weight", "mlp.gate_proj.weight", operations=[Transpose(0, 1)]
    ),
)


class JoinedLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = JoinedMLP(config)  # type: ignore[assignment]


@dataclass(frozen=True)
class Case:
    folder: str
    patched: Patcher
    asked: dict[str, Any]
    blocks: int = 0

    def load(self, folder: Path, **options: Any) -> Any:
        asked = DistributedConfig(**copy.deepcopy(self.asked))
        return AutoModelForCausalLM.from_pretrained(folder, patcher=self.patched, distributed_config=asked, **options)


CASES = {
    "qkv": Case("llama", Patcher(fusions="qkv"), TENSORS, 2),
    "gate_up": Case("llama", Patcher(fusions="gate_up"), TENSORS, 2),
    "both": Case("llama", BOTH, TENSORS, 4),
    "biases": Case("biases", BOTH, TENSORS, 8),
    "tied": Case("tied", BOTH, TENSORS, 4),
    "norms of heads": Case("norms of heads", BOTH, TENSORS, 4),
    "outputs that are gathered": Case("gathered", BOTH, TENSORS, 2),
    "some layers": Case("llama", Patcher(fusions=[QKV("model.layers.1.self_attn"), "gate_up"]), TENSORS, 3),
    "auto": Case("llama", BOTH, {"tp_plan": "auto"}, 4),
    "a plan by the names of the fused": Case(
        "llama", BOTH, TENSORS | {"tp_plan": FUSED_PLAN}, 4 if DEALS_EXPERTS else 2
    ),
    "experts": Case("mixtral", Patcher(fusions=["sequential_experts", "qkv"]), TENSORS, 2),
    "experts and a shared one": Case(
        "shared expert", Patcher(fusions=["sequential_experts", *BOTH.fusions]), TENSORS, 4
    ),
    "a class mapping with conversions": Case("llama", JOINED, TENSORS),
    "one with weights of the same names and shapes": Case("square", TURNED, TENSORS),
    "that and a fusion": Case("llama", JOINED.replace(fusions="qkv"), TENSORS, 2),
    "joined in a layer of a class mapping": Case(
        "biases", BOTH.replace(class_mapping={"LlamaDecoderLayer": OwnLayer}), TENSORS, 8
    ),
    "joined in a layer that has all of its weights": Case(
        "llama", JOINED.replace(class_mapping={"LlamaDecoderLayer": JoinedLayer}, fusions="qkv"), TENSORS
    ),
    "experts of a class mapping": Case("shared expert", LINEAR_EXPERTS, TENSORS),
    "one of two layers that brings its conversions": Case(
        "llama", Patcher(module_mapping={"model.layers.1.mlp": BringingMLP}, fusions=["qkv"]), TENSORS, 2
    ),
}
if DEALS_EXPERTS:
    CASES["dealt stacks"] = Case("mixtral", Patcher(fusions="qkv"), EXPERTS, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared.checkpoint(config) for name, config in CONFIGS.items()}


def stock_in_one_process(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def in_blocks_of(model: nn.Module) -> list[str]:
    """The parameters whose rows lie in two blocks."""
    return [
        f"{path}.{layout.fused[0]}"
        for path, _, carried in fused_modules(model)
        for layout in carried.layouts
        if isinstance(layout, Rows) and layout.blocks == 2
    ]


def step(model: Any) -> torch.Tensor:
    """One step of training, and the loss before it."""
    inputs = tiny_inputs(model.config)
    loss = model.train()(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    return loss.detach()


def weights(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in files(folder).items() if name.startswith("model")}


def as_original(model: Any, folder: Path) -> None:
    found = patcher.original_state_dict(model)
    expected = stock_in_one_process(folder).state_dict()
    assert [name for name in found if name in expected] == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


#: What others have a part of, both fusions and biases first of all.
NIGHTLY = {"qkv", "gate_up", "tied", "norms of heads", "some layers", "auto", "that and a fusion"}


@pytest.mark.parametrize("name", sampled(CASES, CASES.keys() - NIGHTLY))
def test_as_in_one_process(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    case, folder = CASES[name], folders[CASES[name].folder]
    stock = stock_in_one_process(folder)
    expected = logits(stock)
    generated = stock.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False)
    known = {in_plan(name) for name, _ in (*stock.named_modules(), *stock.named_parameters())}
    idle = {rule for rule in stock.tp_plan if rule not in known}
    loss = step(stock)

    def work(rank: int) -> None:
        model = case.load(folder)
        assert len(in_blocks_of(model)) == case.blocks
        known = {in_plan(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
        assert {rule for rule in model.tp_plan if rule not in known} <= idle
        if isinstance(plan := case.asked.get("tp_plan"), dict):
            assert model.config.distributed_config.tp_plan == plan
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
        for cache in ({}, {"cache_implementation": "static"}):
            found = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False, **cache)
            assert torch.equal(found, generated)
        as_original(model, folder)
        for name in in_blocks_of(model):
            owner = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            with pytest.raises(PatchConflictError, match=r"is rows of .*, which processes share"):
                assert getattr(owner, "v_proj" if "qkv" in name else "up_proj").weight is None
        model.save_pretrained(tmp_path / "saved")
        model.save_pretrained(tmp_path / "in shards", max_shard_size="40KB")
        before = model.state_dict()
        before.update({key: value.clone() for key, value in before.items()})  # with what it says of its layout
        torch.testing.assert_close(step(model), loss, atol=1e-5, rtol=1e-5)
        trained = patcher.original_state_dict(model)
        for key, value in stock.state_dict().items():
            torch.testing.assert_close(
                trained[key], value, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
            )
        model.load_state_dict(before)
        as_original(model, folder)
        patcher.load_original_state_dict(model, trained | stock.state_dict())
        for name in in_blocks_of(model):  # rows that lie part by part aren't taken for rows in blocks
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
                patcher.load_original_state_dict(model, {name: torch.empty(before[name].shape)}, strict=False)
        torch.testing.assert_close(logits(model), logits(stock), atol=1e-4, rtol=1e-4)

    two_processes(work, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())
    if saved.keys() == tensors.keys():
        assert files(tmp_path / "saved")["model.safetensors"] == files(folder)["model.safetensors"]
        stock_in_one_process(folder).save_pretrained(tmp_path / "stock in shards", max_shard_size="40KB")
        assert weights(tmp_path / "in shards") == weights(tmp_path / "stock in shards")
    else:  # the buffer of a class, and what stock's tensor parallelism unties
        assert saved.keys() - tensors.keys() <= {"lm_head.weight", *(key for key in saved if key.endswith(".offset"))}
    assert torch.equal(logits(stock_in_one_process(tmp_path / "saved")), expected)


@pytest.mark.parametrize("name", ["both", "biases", "experts"])
def test_the_runtime_layout_goes_from_any_number_of_processes_to_any_other(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    case, folder = CASES[name], folders[CASES[name].folder]
    stock = stock_in_one_process(folder)
    one = AutoModelForCausalLM.from_pretrained(folder, patcher=case.patched)
    one.save_pretrained(tmp_path / "of one", save_original_format=False)

    def work(rank: int) -> None:
        model = case.load(folder)
        model.save_pretrained(tmp_path / "of two", save_original_format=False)
        again, info = case.load(tmp_path / "of one", output_loading_info=True)
        assert not any(info.values())
        experts = {key: value for key, value in one.state_dict().items() if ".experts." in key}  # of all processes
        assert not patcher.load_original_state_dict(again, experts, strict=False).unexpected_keys
        as_original(again, folder)
        torch.testing.assert_close(logits(again), logits(stock), atol=1e-4, rtol=1e-4)

    two_processes(work, tmp_path)
    assert (
        files(tmp_path / "of two")["model.patcher.safetensors"]
        == files(tmp_path / "of one")["model.patcher.safetensors"]
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "of two")
    assert torch.equal(logits(again), logits(one))


class OfHeadsUnknown(QKV):
    """Does not say how many rows a head has."""

    def rows_together(self, module: nn.Module) -> int:
        return 0


def tiny_minimax_config() -> MiniMaxConfig:
    """The other half of its layers has a `qkv_proj` of its own."""
    layers = {"layer_types": ["full_attention", "linear_attention"], "block_size": 8, "head_dim": 16}
    return MiniMaxConfig(**tiny_mixtral_config().to_diff_dict() | {"model_type": "minimax"} | layers)


FIVE = tiny_mixtral_config(num_local_experts=5)
UNEVEN = tiny_llama_config(num_attention_heads=3, num_key_value_heads=3, head_dim=16, hidden_size=48)
#: config, patcher, what is asked for, the error
REFUSED: dict[str, tuple[Any, Patcher, dict[str, Any], str]] = {
    "one head of keys": (
        tiny_llama_config(num_key_value_heads=1),
        Patcher(fusions="qkv"),
        TENSORS,
        r"layers.0.self_attn.k_proj: 1 heads of 16 rows can't be sharded equally among 2 processes",
    ),
    "three heads": (UNEVEN, Patcher(fusions="qkv"), TENSORS, "q_proj: 3 heads of 16 rows can't be sharded equally"),
    "rows": (tiny_llama_config(intermediate_size=95), BOTH, TENSORS, "gate_proj: 95 rows can't be sharded equally"),
    "parts by their names": (
        tiny_llama_config(),
        BOTH,
        TENSORS | {"tp_plan": STOCK_PLAN},
        r"tp_plan names layers that are parts of others .*\n  model\.layers\.\{0\.\.1\}\.self_attn\.k_proj: part of",
    ),
    "a way that isn't known": (
        tiny_llama_config(),
        BOTH,
        TENSORS | {"tp_plan": dict.fromkeys(FUSED_PLAN, "rowwise")},
        "'rowwise' for it, and 'colwise' for its parts" if DEALS_EXPERTS else "to hold for joined rows",
    ),
    "a part of what is shared": (
        CONFIGS["norms of heads"],
        SCALED_NORMS,
        TENSORS,
        "gives it a share of its inputs or outputs",
    ),
    "heads that aren't known": (
        tiny_llama_config(),
        Patcher(fusions=[OfHeadsUnknown()]),
        TENSORS,
        "belong together, as those of a head do, is not known",
    ),
    "parts of a packed layer": (
        CONFIGS["packed"],
        Patcher(fusions="split"),
        TENSORS,
        r"layers\.0\.\S*_proj: how to shard .* is not known. Leave these modules out of the fusion",
    ),
    "another layer of the name": (
        tiny_minimax_config(),
        Patcher(fusions="qkv"),
        TENSORS,
        r"also matches model.layers.1.self_attn.qkv_proj, a layer of the model that isn't sharded",
    ),
    "stages": (tiny_llama_config(), BOTH, {"pp_size": 2}, "pp_size"),
}
if DEALS_EXPERTS:
    REFUSED["a plan for what is replaced"] = (
        tiny_llama_config(),
        JOINED,
        TENSORS | {"tp_plan": {"model.layers.*.mlp.down_proj": "rowwise"}},
        "the patched model has other layers there. Leave them out of tp_plan",
    )
else:  # it takes the place of that of the model
    REFUSED["a plan without what is joined"] = (
        tiny_llama_config(),
        Patcher(fusions=QKV("model.layers.1.self_attn")),
        TENSORS | {"tp_plan": STOCK_PLAN},
        "tp_plan has rules for their parts only. Name them in tp_plan",
    )
REFUSED["dealt experts"] = (
    tiny_mixtral_config(),
    Patcher(fusions="sequential_experts"),
    EXPERTS if DEALS_EXPERTS else TENSORS | {"enable_expert_parallel": True},
    "ep_size distributes stacks of experts, and these are layers. Leave sequential_experts out",
)
if DEALS_EXPERTS:
    REFUSED["stacks in another way"] = (
        tiny_mixtral_config(),
        Patcher(fusions="sequential_experts"),
        TENSORS | {"tp_plan": {"model.layers.*.mlp.experts.down_proj": "packed_colwise"}},
        "tp_plan names layers that are parts of others",
    )


def test_what_cannot_be_shared_raises_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: save_tiny(config, tmp_path / name) for name, (config, *_) in REFUSED.items()}
    monkeypatch.setattr(modeling_utils, "convert_and_load_state_dict_in_model", None)

    def work(rank: int) -> None:
        for name, (_, patched, asked, match) in REFUSED.items():
            with pytest.raises(InvalidPatcherError, match=match):
                Case("", patched, asked).load(folders[name])

    two_processes(work, tmp_path)


def test_sizes_of_one_share_nothing(folders: dict[str, Path]) -> None:
    one = dict.fromkeys(("tp_size", "fsdp_size", "pp_size"), 1)
    expected = logits(AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=BOTH))
    for asked in (one, {}) if DEALS_EXPERTS else (one,):  # before, transformers raised for sizes that aren't given
        assert torch.equal(logits(Case("llama", BOTH, asked).load(folders["llama"])), expected)


def test_the_config_of_a_shared_model_shares_nothing(folders: dict[str, Path]) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.distributed_config = DistributedConfig(**TENSORS)
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=BOTH, config=config)
    assert not in_blocks_of(model)
    expected = logits(AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=BOTH))
    assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:Passing `tp_plan` directly:FutureWarning")
def test_a_plan_as_an_argument_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = logits(stock_in_one_process(folders["llama"]))

    def work(rank: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=BOTH, tp_plan="auto")
        assert model.model.layers[0].self_attn.qkv_proj.weight.to_local().shape == (48, 64)
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)

    two_processes(work, tmp_path)


@settings(deadline=None)
@given(heads=st.lists(st.integers(1, 4), min_size=1, max_size=4), width=st.integers(1, 3), blocks=st.integers(1, 4))
def test_blocks_hold_their_share_of_every_part(heads: list[int], width: int, blocks: int) -> None:
    parts = [torch.arange(number * width * blocks)[:, None] + 1000 * part for part, number in enumerate(heads)]
    names = tuple(f"{number}.weight" for number in range(len(parts)))
    layout = Rows(names, "joined.weight", tuple(tuple(part.shape) for part in parts), blocks=blocks)
    (joined,) = layout.fuse(parts)
    source = JoinedRows([(part, 0, len(part)) for part in parts], blocks)
    assert list(joined.shape) == source.get_shape()
    for process, rows in enumerate(joined.chunk(blocks)):
        assert torch.equal(rows, torch.cat([part.chunk(blocks)[process] for part in parts]))
    for start in range(len(joined)):
        for stop in range(start, len(joined) + 1, 2):
            assert torch.equal(source[start:stop], joined[start:stop])
    assert torch.equal(in_blocks(layout, torch.cat(parts))[...], joined)
    assert all(torch.equal(*pair) for pair in zip(layout.separate([joined]), parts, strict=True))
