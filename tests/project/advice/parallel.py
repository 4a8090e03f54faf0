"""What is said of layers that processes can't share: two processes are told, and do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, TorchAoConfig
from transformers.distributed import DistributedConfig

from patcher import InvalidPatcherError, Patcher, fused_parameters
from patcher.fusions import QKV
from tests.project.advice import Place, Steps, advice, load, written
from tests.support.comparing import logits
from tests.support.processes import two_processes
from tests.support.replacements import JOINED, OTHERS_NAMES, SCALED_NORMS, OwnMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_llava_config, tiny_qwen3_config

#: Whether plans are added to that of the model, and experts are distributed by sizes of their own.
DEALS_EXPERTS = hasattr(DistributedConfig(), "ep_size")
TEXT = "model.language_model.layers.*.self_attn."
GATHERED = dict.fromkeys((f"{TEXT}k_proj", f"{TEXT}v_proj"), "colwise_gather_output")
if DEALS_EXPERTS:
    GATHERED |= dict.fromkeys((f"{TEXT}q_proj", f"{TEXT}o_proj"), "replicate")


def in_two(at: Place, work: Callable[[], object]) -> None:
    """Do something in two processes; what both raise of ours is raised here."""
    folder = at.tmp / f"processes-{len(list(at.tmp.iterdir()))}"
    folder.mkdir()

    def told(rank: int) -> None:
        try:
            work()
        except InvalidPatcherError as error:
            (folder / str(rank)).write_text(str(error))

    two_processes(told, folder)
    said = {(folder / str(rank)).read_text() for rank in range(2) if (folder / str(rank)).exists()}
    if said:
        (text,) = said
        raise InvalidPatcherError(text)


def shared(folder: Path, patcher: Patcher | None = None, quantization_config: Any = None, **asked: Any) -> Any:
    config = DistributedConfig(**({"tp_size": 2} | asked))
    options = {} if quantization_config is None else {"quantization_config": quantization_config}
    auto = AutoModelForImageTextToText if folder.name == "llava" else AutoModelForCausalLM
    return auto.from_pretrained(folder, patcher=patcher, distributed_config=config, **options)


def as_in_one(folder: Path, patcher: Patcher | None = None, **asked: Any) -> Callable[[], None]:
    expected = logits(shared(folder, tp_size=1))

    def work() -> None:
        torch.testing.assert_close(logits(shared(folder, patcher, **asked)), expected, atol=1e-4, rtol=1e-4)

    return work


def made(at: Place, config: PretrainedConfig) -> Path:
    return save_tiny(config, at.tmp / "model")


@advice("Take a tp_size that divides them, or leave the fusion out.")
def rows_that_processes_cannot_share(at: Place) -> Steps:
    folder = made(at, tiny_llama_config(intermediate_size=95))
    yield lambda: in_two(at, as_in_one(folder, Patcher(fusions="gate_up")))
    in_two(at, as_in_one(folder, Patcher(fusions="gate_up"), tp_size=1))
    if DEALS_EXPERTS:  # before, transformers itself shared equal pieces only
        in_two(at, as_in_one(folder, Patcher(fusions="qkv")))


@advice("Leave these modules out of the fusion: its modules=... say which it takes.")
def parts_that_are_shared_in_several_ways(at: Place) -> Steps:
    folder = save_tiny(tiny_llava_config(), at.tmp / "llava")
    vision, text = QKV(modules="model.vision_tower.**.self_attn"), QKV(modules="**.language_model.layers.1.self_attn")
    yield lambda: in_two(at, as_in_one(folder, Patcher(fusions=[text]), tp_plan=GATHERED))
    in_two(at, as_in_one(folder, Patcher(fusions=[vision]), tp_plan=GATHERED))


@advice("Leave {} out of tp_plan.")
def another_rule_for_what_is_joined(at: Place) -> Steps:
    layers = "model.layers.*.self_attn."
    wrong = {f"{layers}qkv_proj": "rowwise", f"{layers}o_proj": "rowwise"}
    said = yield lambda: in_two(at, as_in_one(at.llama, Patcher(fusions="qkv"), tp_plan=wrong))
    del wrong[written(said, r"Leave (.*) out of tp_plan")]
    in_two(at, as_in_one(at.llama, Patcher(fusions="qkv"), tp_plan=wrong))


@advice("Leave them out of tp_plan.")
def a_rule_for_what_is_replaced(at: Place) -> Steps:
    plan = {"model.layers.*.mlp.down_proj": "rowwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    yield lambda: in_two(at, as_in_one(at.llama, JOINED, tp_plan=plan))
    del plan["model.layers.*.mlp.down_proj"]
    in_two(at, as_in_one(at.llama, JOINED, tp_plan=plan))


@advice("Leave sequential_experts out; stacks of experts are sharded as in transformers.")
def experts_that_cannot_be_dealt(at: Place) -> Steps:
    asked = {"tp_size": 1, "fsdp_size": 2, "ep_size": 2} if DEALS_EXPERTS else {"enable_expert_parallel": True}
    patcher = Patcher(fusions=["sequential_experts", "qkv"])
    yield lambda: in_two(at, as_in_one(at.moe, patcher, **asked))
    in_two(at, as_in_one(at.moe, patcher.replace(fusions="qkv"), **asked))


@advice("Replace the module around it, or load without tensor parallelism.")
def a_converted_part_of_what_is_shared(at: Place) -> Steps:
    folder = made(at, tiny_qwen3_config())
    yield lambda: in_two(at, as_in_one(folder, SCALED_NORMS))
    in_two(at, as_in_one(folder, SCALED_NORMS, tp_size=1))
    in_two(at, as_in_one(folder, OTHERS_NAMES))


@advice("Leave the fusions and conversions out, or the quantizer, or load in one process.")
def a_quantizer_beside_what_is_shared(at: Place) -> Steps:
    patcher, quantizer = Patcher(fusions="qkv"), TorchAoConfig(Int8WeightOnlyConfig())
    yield lambda: in_two(at, lambda: shared(at.llama, patcher, quantization_config=quantizer))
    in_two(at, as_in_one(at.llama, patcher))
    assert load(at.llama, patcher, quantization_config=quantizer)


@advice("Load the model without tensor parallelism or a quantizer, or leave the fusion out.")
def parts_of_rows_in_blocks(at: Place) -> Steps:
    patcher = Patcher(fusions="qkv")
    yield lambda: in_two(at, lambda: fused_parameters(shared(at.llama, patcher)))
    assert len(fused_parameters(load(at.llama, patcher))) == 2
    in_two(at, lambda: fused_parameters(shared(at.llama, Patcher({"LlamaMLP": OwnMLP}))))
