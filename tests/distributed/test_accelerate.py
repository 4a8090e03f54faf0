"""FSDP2 by accelerate, with its load for little memory: in processes with the environment of `accelerate launch`.

accelerate makes no FSDP of processes on the CPU: that is told it for the test, and all else is its own.
"""

from __future__ import annotations

import inspect
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from torch.distributed import barrier
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from patcher import PatchedWeightsError, Patcher, original_optimizer_state_dict, original_state_dict
from tests.compatibility.outcomes import compared
from tests.support.processes import two_processes
from tests.support.sampling import sampled
from tests.support.split_replacements import NotSaved
from tests.support.splitting import ROUNDING, adamw, all_whole
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config, tiny_mixtral_config
from tests.support.trainer import MIDDLE, losses, trained, weights

pytestmark = pytest.mark.skipif(
    "fsdp_version" not in inspect.signature(FullyShardedDataParallelPlugin).parameters,
    reason="this release of accelerate has no FSDP2",
)

PATCHERS = {
    "llama": Patcher(fusions=["qkv", "gate_up"]),
    "mixtral": Patcher(fusions=["qkv", "sequential_experts"]),
    "values": Patcher({"LlamaMLP": NotSaved}, new_weights=["scale", "drawn"]),
}
CONFIGS: dict[str, Any] = {"llama": tiny_llama_config, "mixtral": tiny_mixtral_config, "values": tiny_llama_config}


def _launched(state_dict_type: str) -> None:
    """The environment that `accelerate launch` gives each process, and two of a kind that accelerate shards."""
    asked = ["--num_processes=2", "--num_machines=1", "--machine_rank=0", "--num_cpu_threads_per_process=1"]
    asked += ["--mixed_precision=no", "--dynamo_backend=no", "--use_fsdp", "--fsdp_version=2"]
    asked += ["--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "--fsdp_cpu_ram_efficient_loading=true"]
    asked += [f"--fsdp_state_dict_type={state_dict_type}"]
    # In one of them activation checkpointing of torch is around the layers.
    asked += [f"--fsdp_activation_checkpointing={state_dict_type == 'FULL_STATE_DICT'}", "program.py"]
    own = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ.update(prepare_multi_gpu_env(launch_command_parser().parse_args(asked)) | own)
    AcceleratorState._reset_state(reset_partial_state=True)  # a test before may have had one, in one process
    found = PartialState.__init__

    def told(self: PartialState, *args: Any, **kwargs: Any) -> None:
        found(self, *args, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = told
    PartialState(cpu=True)


def _load(folder: Path, name: str, patched: bool) -> Any:
    options: dict[str, Any] = {"patcher": PATCHERS[name]} if patched or name == "values" else {}
    if name == "mixtral":
        options["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, **options)


def _run(folder: Path, name: str, patched: bool) -> list[Any]:
    """Steps, a checkpoint, further steps; these again from the checkpoint; the weights at the end."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None  # of the last run
    inputs = tiny_inputs(CONFIGS[name](), seed=accelerator.process_index)
    inputs["labels"] = inputs["input_ids"]
    torch.manual_seed(0)  # of what `__init__` draws
    model = _load(folder, name, patched)
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    def steps(number: int) -> list[torch.Tensor]:
        found = []
        for _ in range(number):
            model.train()
            loss = model(**inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    place = folder / f"{name} {patched}"
    first = steps(2)
    accelerator.save_state(str(place / "state"))
    then = steps(2)
    accelerator.load_state(str(place / "state"))
    compared(steps(2), then, rounding=0)
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        place / "final", state_dict=state_dict, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    state = original_optimizer_state_dict(model, optimizer)["state"]
    found = [first, then, load_file(place / "final" / "model.safetensors"), state]
    accelerator.free_memory()
    return found


def _prepared(folder: Path, state_dict_type: str, rank: int) -> None:
    warnings.simplefilter("ignore")
    _launched(state_dict_type)
    for name in ["llama"] if state_dict_type == "SHARDED_STATE_DICT" else ["mixtral", "values"]:
        found, expected = (_run(folder, name, patched) for patched in (True, False))
        compared(found, expected, rounding=ROUNDING)


@pytest.mark.parametrize("state_dict_type", sampled(["FULL_STATE_DICT", "SHARDED_STATE_DICT"], {"SHARDED_STATE_DICT"}))
def test_a_run_is_that_of_stock_and_is_resumed(state_dict_type: str, tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        save_tiny(config(), tmp_path / name)
    two_processes(partial(_prepared, tmp_path, state_dict_type), tmp_path)


def _with_trainer(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    _launched("FULL_STATE_DICT")
    runs = {}
    for name, patched in {"ours": True, "stock": False}.items():
        whole = trained(_load(folder, "llama", patched), folder / name)
        assert whole.is_fsdp_enabled
        resumed = trained(_load(folder, "llama", patched), folder / f"{name} resumed", folder / name / MIDDLE)
        compared([losses(resumed), weights(resumed)], [losses(whole), weights(whole)], rounding=ROUNDING)
        whole.save_model(str(folder / f"{name} saved"))
        runs[name] = [losses(whole), all_whole(weights(whole)), original_state_dict(whole.model)]  # type: ignore[arg-type]
    compared(runs["ours"], runs["stock"], rounding=ROUNDING)
    for name, patched in {"ours": False, "stock": True}.items():  # torch would name one missing key
        with pytest.raises(PatchedWeightsError, match=r"(?s)number 2 is \S+self_attn\.\w+\.weight.*Or begin"):
            trained(_load(folder, "llama", patched), folder / "switched", folder / name / MIDDLE)
        barrier()
        (folder / name / MIDDLE / "model.safetensors").unlink(missing_ok=True)  # as where weights are in FSDP's shards
        with pytest.raises(PatchedWeightsError, match=r"without one if it had none\.$"):
            trained(_load(folder, "llama", patched), folder / "switched", folder / name / MIDDLE)


def test_a_trainer_is_that_of_stock_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    save_tiny(tiny_llama_config(), tmp_path / "llama")
    two_processes(partial(_with_trainer, tmp_path), tmp_path)
    found, expected = (load_file(tmp_path / f"{name} saved" / "model.safetensors") for name in ("ours", "stock"))
    compared(found, expected, rounding=ROUNDING)
