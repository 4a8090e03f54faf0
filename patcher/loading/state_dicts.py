"""State dicts in the layout of transformers: of a patched model, and into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model  # type: ignore[import-untyped]
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import named_modules, state_tensors, ties
from patcher.layouts.carried import carriers, separated
from patcher.layouts.either_layout import in_original_layout
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sharded import keep_pieces, split_like, whole
from patcher.loading.checkpoint_names import converted_to_parameters
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.stock_view import carriers_in
from patcher.patterns import in_state_dict, inside
from patcher.resolution.resolution import skeleton


@torch.no_grad()
def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that a patched model would have in transformers: its names, in its order.

    ```python
    import torch
    from transformers import AutoModelForCausalLM
    from patcher import Patcher, load_original_state_dict, original_state_dict

    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    stock = AutoModelForCausalLM.from_pretrained(repo)
    model = AutoModelForCausalLM.from_pretrained(repo, patcher=Patcher(fusions="qkv"))
    stock.load_state_dict(original_state_dict(model))   # all keys match
    load_original_state_dict(model, stock.state_dict())  # and back
    ```

    Tensors share the memory of the model where they can, as in `model.state_dict()`. Weights that are offloaded, or
    sharded over processes, are gathered: of the latter each process has to call this.
    What the patcher has added comes last. For files there is `save_pretrained`.

    Args:
        model: any module, also one around a patched model, as `DistributedDataParallel` is, or a layer of one.

    Raises:
        PatchedWeightsError: something in it can't be restored.
    """
    result, _ = separated(carriers_in(model), _gathered(model))
    for path, part, record in patched_models(model):
        prefix = inside(in_state_dict(path))
        own = {key.removeprefix(prefix): value for key, value in result.items() if key.startswith(prefix)}
        result = {key: value for key, value in result.items() if not key.startswith(prefix)}
        result |= {f"{prefix}{key}": value for key, value in _as_in_transformers(part, record, own).items()}
    return result


def load_original_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load a state dict in the layout of transformers into a patched model: the inverse of `original_state_dict`.

    ```python
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from patcher import Patcher, load_original_state_dict

    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_pretrained(repo, patcher=Patcher(fusions="qkv"))
    model.save_pretrained("out")
    load_original_state_dict(model, load_file("out/model.safetensors"))
    ```

    `model.load_state_dict` takes that layout too. This is for tools that look at the names of the model first, as
    `torch.distributed.checkpoint` does, and for conversions after which a tensor has the name and shape that it had
    before. It takes the names of a checkpoint as well, and none for weights that are tied. Of a model that is sharded
    over processes each has to call this, with whole tensors or with DTensors; what is whole is taken from the first.

    Args:
        model: any module, also one around a patched model, or a layer of one.
        strict: as in `torch.nn.Module.load_state_dict`.
        assign: as in `torch.nn.Module.load_state_dict`.

    Returns:
        What `torch.nn.Module.load_state_dict` does: the `missing_keys`, in the layout of transformers, and the
        `unexpected_keys`.

    Raises:
        RuntimeError: as `torch.nn.Module.load_state_dict`: keys are missing or unexpected, shapes differ.
    """
    given = dict(state_dict)
    filled = []
    for path, part in named_modules(model):
        if isinstance(part, PreTrainedModel):
            prefix = inside(in_state_dict(path))
            for name, source in ties(part).items():
                if f"{prefix}{name}" not in given and f"{prefix}{source}" in given:
                    given[f"{prefix}{name}"] = given[f"{prefix}{source}"]
                    filled.append(part)
    keep_pieces(model)
    own = {in_state_dict(name): value for name, value in state_tensors(model).items()}
    for each in carriers(model):  # what lies in blocks is made of its parts alone
        for layout in each.carried.layouts:
            if lies_in_blocks(layout):
                own.pop(f"{each.prefix}{layout.fused[0]}")
    given = {name: split_like(value, own.get(name)) for name, value in given.items()}
    with in_original_layout():
        result = model.load_state_dict(given, strict=strict, assign=assign)
    for part in filled if assign else ():
        part.tie_weights()
    return result


def patched_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel, PatchRecord]]:
    """(path, model, record) of each patched model, but for those inside of others."""
    around: list[str] = []
    for path, part in named_modules(model):
        record = record_of(part)
        if record is not None and isinstance(part, PreTrainedModel) and not path.startswith(tuple(around)):
            around.append(inside(path))
            yield path, part, record


def _gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model, with what is offloaded or sharded."""
    state_dict: dict[str, torch.Tensor] = model.state_dict()
    if any(value.is_meta for value in state_dict.values()):
        state_dict = {**state_dict, **get_state_dict_offloaded_model(model)}
    return {key: whole(value) for key, value in state_dict.items()}


def _as_in_transformers(
    model: PreTrainedModel, record: PatchRecord, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state dict of a patched model with the names of parameters of transformers, in their order."""
    stock = {key: value.to("meta") for key, value in skeleton(record.model_class, model.config).state_dict().items()}
    own = {name for name in state_dict if name not in stock}
    if own:
        # What a conversion of the patcher takes from a checkpoint, one of transformers may take otherwise.
        made, taken, _ = converted_to_parameters(model, {name: state_dict[name] for name in own}, stock)
        state_dict = {name: value for name, value in state_dict.items() if name not in taken} | made
    names = [*(name for name in stock if name in state_dict), *(name for name in state_dict if name not in stock)]
    return {name: state_dict[name] for name in names}
