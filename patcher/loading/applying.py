"""A patcher without a load: for what is built in a block, and for a model that is already in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.models import kept_in_fp32, named_parameters
from patcher.compat.parallel import unsplit_class, unsplit_config
from patcher.construction.class_rules import ClassRules
from patcher.construction.in_force import Block, InForce, entered, unpatched
from patcher.construction.init_hooks import in_force
from patcher.errors import InvalidPatcherError
from patcher.layouts.sharded import whole
from patcher.loading.checks import Diagnostics
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.patterns import compress
from patcher.spec.fingerprints import check_pins
from patcher.spec.patcher import Patcher


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    block = Block((InForce(patcher, origin),))
    check_pins(patcher)
    with in_force(block, ClassRules((*block.entries, *entered())), models=True):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    Diagnostics().adding_matches(block.entries, block.matched).warn()


def apply(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """See `Patcher.apply`."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidPatcherError(
            f"Patcher.apply takes a model of transformers, found {type(model).__name__}; "
            "take the model out of its wrapper."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise InvalidPatcherError(
            "Patcher.apply can't take a quantized model: its weights can't be given back. "
            "Load it again with patcher=..."
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise InvalidPatcherError(
            "Patcher.apply can't take a model whose weights are offloaded. "
            "Load it again with patcher=..., device_map=..."
        )
    record = record_of(model)
    # Of a model that is split over processes a whole one in each, which knows nothing of the split.
    state_dict = {key: whole(value.detach()) for key, value in model.state_dict().items()}
    for key in record.new_weights if record is not None else ():
        state_dict.pop(key, None)  # they belong to the patcher that is left behind
    weights = saved_state_dict(model, state_dict)
    devices = {tensor.device for tensor in weights.values()}
    options: dict[str, Any] = {"dtype": model.dtype}
    if len(devices) == 1 and devices != {torch.device("cpu")}:
        options["device_map"] = {"": devices.pop()}
    model_class = record.model_class if record is not None else unsplit_class(model)
    # By this patcher alone, whatever is in force around us.
    config = unsplit_config(model.config)
    options |= {"config": config, "state_dict": weights, "output_loading_info": True}
    loaded: Any = unpatched(lambda: model_class.from_pretrained(None, patcher=patcher, **options))
    result, found = loaded
    _check_complete(patcher, result, found["missing_keys"])
    _keep_dtypes(model, result, weights)
    if getattr(model, "generation_config", None) is not None:
        result.generation_config = deepcopy(model.generation_config)
    result.train(model.training)
    return result  # type: ignore[no-any-return]


def _check_complete(patcher: Patcher, result: PreTrainedModel, missing: Iterable[str]) -> None:
    """What a model in memory lacks, something has been replaced in: initialised anew it would be another model."""
    record = record_of(result)
    parameters = {name for name, _ in named_parameters(result)}  # buffers keep what was computed
    absent = sorted(parameters.intersection(missing).difference(record.new_weights if record is not None else ()))
    if absent and patcher.strict:
        raise InvalidPatcherError(
            f"Patcher.apply finds no weights for {', '.join(compress(absent)[:3])}: the model has layers of others "
            "there. Apply the patcher first, and replace layers then."
        )


def _keep_dtypes(model: PreTrainedModel, result: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """A load casts everything to one dtype: give back what had another one."""
    others = {key for key, value in weights.items() if value.is_floating_point() and value.dtype != model.dtype}
    for name, tensor in result.state_dict(keep_vars=True).items():
        if name in others and tensor.shape == weights[name].shape:
            tensor.data = weights[name]
            others.remove(name)
    record = record_of(result)
    others.difference_update(record.dropped_weights if record is not None else ())
    # A load keeps them itself, some in float16 alone.
    converted = [key for key in others if not kept_in_fp32(model, key)[model.dtype != torch.float16]]
    if converted:
        raise InvalidPatcherError(
            f"Patcher.apply can't convert weights of several dtypes: {', '.join(compress(sorted(converted))[:3])} "
            f"would become {model.dtype}. Cast the model to one dtype first, with model.to(...)."
        )
