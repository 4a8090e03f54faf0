"""More operations: what torch.func, torch.export, torch.distributed, accelerate, generation and PEFT do to a model."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module
from peft import FourierFTConfig, HRAConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from patcher import original_state_dict
from patcher.patterns import parents
from patcher.verification.passes import fitted, floating_tensors
from tests.coverage.checks import tensors_in
from tests.lockstep.operations import (
    BLOCKS,
    LISTS,
    OTHERS,
    NotHereError,
    Seen,
    adapter,
    changed,
    check_loadable,
    chosen,
    evaluated,
    fill_adapters,
    loaded,
    loss_of,
    operation,
    train,
)
from tests.lockstep.subjects import Side, Stock, saved_tensors

# --- torch -----------------------------------------------------------------------------------------------------------


def arguments_of(side: Side) -> dict[str, Any]:
    """Return the arguments of the model itself."""
    first = side.passes[0]
    if first.path or first.method != "forward":
        raise NotHereError
    return fitted(first.arguments, side.model)


@operation
def compiled(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    torch._dynamo.reset()
    with evaluated(side.model):
        seen["outputs"] = list(floating_tensors(torch.compile(side.model, backend="eager")(**arguments_of(side))))
    torch._dynamo.reset()
    return side.model


@operation
def exported(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    arguments = arguments_of(side)
    with evaluated(side.model):
        program = torch.export.export(side.model, (), arguments, strict=False)
        seen["outputs"] = list(floating_tensors(program.module()(**arguments)))
    return side.model


@operation
def called_with_other_parameters(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    values = {name: 1.1 * parameter.detach() for name, parameter in side.model.named_parameters()}
    with evaluated(side.model):
        seen["outputs"] = list(floating_tensors(functional_call(side.model, values, (), arguments_of(side))))
    return side.model


@operation
def recorded(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    more = {"output_hidden_states": True, "output_attentions": choice.random() < 0.5}
    with evaluated(side.model):
        seen["outputs"] = list(floating_tensors(side.model(**arguments_of(side), **more)))
    return side.model


@operation
def a_backward_hook_runs(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    module = side.model.get_submodule(chosen(choice, stock.paths(*BLOCKS, *OTHERS)))
    gradients: list[Any] = []

    def record(module: Any, inputs: Any, outputs: Any) -> None:
        gradients.extend(None if value is None else value.clone() for value in (*inputs, *outputs))

    handle = module.register_full_backward_hook(record)
    side.model.zero_grad()
    loss_of(side, side.model).backward()
    side.model.zero_grad()
    handle.remove()
    seen["gradients"] = gradients
    return side.model


# --- torch.distributed and accelerate --------------------------------------------------------------------------------


@operation
def state_dicts_of_torch_distributed(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    optimizer = torch.optim.AdamW(side.model.parameters(), lr=1e-3)
    train(side, side.model, optimizer, steps=1)
    values = {name: value.clone() for name, value in get_model_state_dict(side.model).items()}
    state = get_optimizer_state_dict(side.model, optimizer)
    with changed(copy.deepcopy(side.model)) as model:
        set_model_state_dict(model, values)
    resumed = torch.optim.AdamW(model.parameters(), lr=1e-3)
    set_optimizer_state_dict(model, resumed, state)
    train(side, model, resumed, steps=1)
    return model


@operation
def sharded(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    model = copy.deepcopy(side.model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in (layer for path in stock.paths(*LISTS) for layer in model.get_submodule(path)):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(side, model, torch.optim.SGD(model.parameters(), lr=0.01), steps=1)
        for name, value in original_state_dict(model).items():
            seen[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    finally:
        distributed.destroy_process_group()
    return side.model


@operation
def offloaded(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    model = copy.deepcopy(side.model)
    with tempfile.TemporaryDirectory() as folder:
        if choice.random() < 0.5:
            disk_offload(model, folder, execution_device=torch.device("cpu"))
            seen["outputs"] = side.run(model)
            return side.model
        cpu_offload(model, execution_device=torch.device("cpu"))
        seen["outputs"] = side.run(model)
        remove_hook_from_module(model, recurse=True)
        model.tie_weights()
        return model


@operation
def loaded_with_a_layer_on_the_disk(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    check_loadable(side.model)
    path = chosen(choice, stock.paths(*LISTS))
    layer = f"{path}.{choice.randrange(len(side.model.get_submodule(path)))}"
    around = {*parents(layer)}
    children = {name for name in stock.modules if name.rpartition(".")[0] in around} - around - {""}
    tensors = [*stock.model.named_parameters(), *stock.model.named_buffers()]
    own = {name for name, _ in tensors if name.rpartition(".")[0] in around}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as disk:
        side.model.save_pretrained(folder)
        devices = dict.fromkeys(sorted(children | own), "cpu") | {layer: "disk"}
        model = loaded(side, seen, folder, device_map=devices, offload_folder=disk, **side.loading)
        seen["outputs"], seen["tensors"] = side.run(model), saved_tensors(model)
    return side.model


# --- generation and adapters -----------------------------------------------------------------------------------------

GENERATION: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "a static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "no cache": {"use_cache": False},
    "sampling": {"do_sample": True, "top_k": 5},
    "embeddings": {},
}


@operation
def generated_in_another_way(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not side.model.can_generate():
        raise NotHereError
    way, ids = choice.choice(list(GENERATION)), torch.tensor([[5, 6, 7, 8], [1, 9, 10, 11]])
    ids = ids[:1] if way == "prompt lookup" else ids
    with evaluated(side.model):
        prompt = {"inputs_embeds": side.model.get_input_embeddings()(ids)} if way == "embeddings" else {"inputs": ids}
        torch.manual_seed(0)
        options = {"max_new_tokens": 5, "do_sample": False} | GENERATION[way]
        seen["tokens"] = side.model.generate(**prompt, **options)
    return side.model


@operation
def another_kind_of_adapter(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    targets = adapter(side, stock, choice).target_modules
    configs = [
        IA3Config(target_modules=targets, feedforward_modules=[]),
        LoHaConfig(r=2, target_modules=targets),
        LoKrConfig(r=2, target_modules=targets),
        OFTConfig(r=2, oft_block_size=0, target_modules=targets),
        HRAConfig(r=2, target_modules=targets),
        FourierFTConfig(n_frequency=10, target_modules=targets),
        LoraConfig(r=2, target_modules=targets),
    ]
    model = get_peft_model(side.model, choice.choice(configs))
    if choice.random() < 0.3 and isinstance(model.active_peft_config, LoraConfig):
        model.add_adapter("other", LoraConfig(r=3, target_modules=targets))
        model.set_adapter("other")
    fill_adapters(model, choice, model.base_model.prefix)
    seen["outputs"] = side.run(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for file in Path(folder).rglob("adapter_model.safetensors"):
            seen[file.parent.name if file.parent != Path(folder) else "default"] = tensors_in(file.parent)
    base = model.merge_and_unload() if choice.random() < 0.6 else model.unload()
    return base.requires_grad_(True)
