"""Streams of weights: the checkpoint of a model, one tensor after the other, out of a model and into one.

    a trainer's model, fused                             an engine's, stock
    qkv_proj.weight  -->  q_proj, k_proj, v_proj  -->  q_proj.weight, k_proj.weight, v_proj.weight

Both directions convert the state dict as a save does, layer by layer, so names and values are those of its files. A
tensor that is a view of one of the model's is read and written there. Others are computed when it is the turn of their
layer, and converted back when all tensors of the layer have arrived.
"""

from __future__ import annotations

import reprlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import state_tensors, state_to_save, without_tied
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.layouts.carried import is_quantized
from patcher.layouts.sharded import distribute_like, full_tensor, local_tensor, reshard_modules
from patcher.loading.integration import integrations
from patcher.loading.saving import SavePlan, load_if_offloaded, plan_original_format
from patcher.loading.state_dicts import check_in_memory, load_original_state_dict, model_of_transformers, not_written
from patcher.patterns import compress

#: How the weights of adapters are handled.
Adapters: TypeAlias = Literal["merged", "left out"]


def checkpoint_weights(
    model: nn.Module, *, only_on: int | None = None, adapters: Adapters | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that `save_pretrained` would write, one after the other.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, checkpoint_weights
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="gate_up"))
    >>> for name, tensor in checkpoint_weights(model):
    ...     if ".mlp." in name:
    ...         print(name, tuple(tensor.shape))
    model.layers.0.mlp.gate_proj.weight (16, 8)
    model.layers.0.mlp.up_proj.weight (16, 8)
    model.layers.0.mlp.down_proj.weight (8, 16)

    For engines that receive the weights of a model in training: see `examples/weight_sync.py`. Names, shapes, dtypes
    and values are those of the files, for patched models and any other model of transformers: stacked experts come one
    by one if the checkpoint has them so, tied weights once. Tensors that a conversion only splits are views of the
    model's own; others are computed when it is the turn of their layer, so little memory is needed beyond the model.

    The tensors are detached, share the memory of the model, and are valid until it trains on. Those of a model that is
    split over processes (tensor and expert parallelism, FSDP2) are whole, and each process has to iterate over all.

    Args:
        model: a model of transformers, or one around it, as `DistributedDataParallel` is.
        only_on: the rank that receives tensors; in other processes the loop ends without any, once all are gathered.
        adapters: for a model with adapters of PEFT: "merged" merges the active ones into the weights, as
            `merge_and_unload` does, and "left out" ignores them. The model is not changed.

    Raises:
        PatchedWeightsError: some of it can't be restored, or a quantizer can't save it. Layers are checked when it is
            their turn; `checkpoint_metadata` checks all of them.
        InvalidPatcherError: `adapters` isn't given for a model with adapters, or they can't be merged.
    """
    return _Checkpoint(model, adapters).values(only_on)


def checkpoint_metadata(model: nn.Module, *, adapters: Adapters | None = None) -> dict[str, torch.Tensor]:
    """Return the names, shapes and dtypes that `checkpoint_weights` will yield, as tensors on the meta device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, checkpoint_metadata
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> up_proj = checkpoint_metadata(LlamaForCausalLM(config))["model.layers.0.mlp.up_proj.weight"]
    >>> up_proj.shape, up_proj.dtype
    (torch.Size([16, 8]), torch.float32)

    For engines that allocate before they receive. No value is read or gathered, so a single process may call it.

    Args:
        model: as in `checkpoint_weights`.
        adapters: as in `checkpoint_weights`.

    Raises:
        PatcherError: as in `checkpoint_weights`.
    """
    checkpoint = _Checkpoint(model, adapters)
    tensors = {name: value for part in checkpoint.parts for name, value in part.on_meta(part.state).items()}
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}


def load_checkpoint_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], strict: bool = True
) -> None:
    """Write a stream of tensors, by their names in the checkpoint and in any order, into a model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, checkpoint_weights, load_checkpoint_weights
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> trained = LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv"))
    >>> model = LlamaForCausalLM(config)
    >>> load_checkpoint_weights(model, checkpoint_weights(trained))
    >>> torch.equal(model.lm_head.weight, trained.lm_head.weight)
    True

    The inverse of `checkpoint_weights`, whichever of the two models is patched. Weights are written in place, so
    optimizers, compiled graphs and CUDA graphs stay valid. The parts of one tensor may come far apart. Values are cast
    to the dtypes of the model; adapters are left as they are. If a model is split over processes, each of them has to
    be given the same tensors in the same order, and keeps its shards.

    Args:
        model: as in `checkpoint_weights`.
        weights: the names and tensors, or a mapping of them.
        strict: raise for tensors that are missing, left over or of another shape; False warns. What fits is written.

    Raises:
        PatchedWeightsError: tensors are missing, left over or of another shape.
        InvalidPatcherError: weights that aren't tensors with names; or the model can't be written to in place: it is
            quantized, or partly on the disk.
    """
    _write(_Checkpoint(model, "left out"), weights.items() if isinstance(weights, Mapping) else weights, strict)


class _Checkpoint:
    """What a model is saved as.

    Attributes:
        model: the model of transformers.
        merging: name of a tensor -> (a function that returns its module with an adapter merged, its name in that).
        state: the tensors of the state dict, without adapters, and tied ones only by the name that is saved.
        tied: name that isn't saved -> the name by which its tensor is.
        parts: the plans for parts of the model, in the order of a save.
    """

    def __init__(self, model: nn.Module, adapters: Adapters | None) -> None:
        self.model = model_of_transformers(model)
        quantizer: Any = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None and not quantizer.is_serializable():
            raise PatchedWeightsError(
                f"The weights of {type(self.model).__name__} are quantized by {type(quantizer).__name__}, which can't "
                "save them, so they have no checkpoint. Stream those of the model that isn't quantized."
            )
        reshard_modules(self.model)
        self.merging: dict[str, tuple[Callable[[], nn.Module], str]] = {}
        state = self._without_adapters(state_to_save(self.model), adapters, model)
        objects = {**state, **(tensors := state_tensors(self.model))}
        self.state = {name: state[name] for name in without_tied(self.model, state, tensors)}
        saved = {id(objects[name]): name for name in self.state}
        self.tied = {name: saved.get(id(objects[name]), "") for name in state if name not in self.state}
        tied = {id(objects[name]) for name in self.tied}
        self.parts = replace(plan_original_format(self.model), unstacks=True).split(self.state)
        for part in self.parts[:1]:  # which often shows whether the rest can be saved
            part.on_meta(part.state)
        for name in sorted(self.merging):
            is_plain = type(local_tensor(state[name])) in (torch.Tensor, nn.Parameter)
            if not is_plain or id(state[name]) in tied:
                what = "tied to another that has no adapter" if is_plain else "quantized, and would be rounded"
                raise InvalidPatcherError(
                    f'An adapter can\'t be merged into {name}: it is {what}. Write adapters="left out", and give the '
                    "engine the adapter."
                )

    def _without_adapters(self, state: dict[str, Any], adapters: Adapters | None, around: nn.Module) -> dict[str, Any]:
        """Return the state dict with the base layers of adapters in the place of the adapted modules."""
        adapted = {
            path: module
            for integration in integrations()
            for path, module in integration.adapted(self.model, adapters == "merged", around).items()
        }
        if adapters not in get_args(Adapters) and (adapted or adapters is not None):
            where = next(iter(adapted), "No module")
            raise InvalidPatcherError(
                f"{where} has an adapter, and adapters={adapters!r} doesn't say what becomes of it. "
                'Write adapters="merged" for weights that compute what the model does, or adapters="left out".'
            )
        result: dict[str, Any] = {}
        for name, value in state.items():
            heads = accumulate(name.split("."), "{}.{}".format) if adapted else ()
            if (path := next((path for path in heads if path in adapted), None)) is None:
                result[name] = value
                continue
            module, merge = adapted[path]
            for key, tensor in state_tensors(module).items():
                result[f"{path}.{key}"] = tensor
                if merge is not None:
                    self.merging[f"{path}.{key}"] = merge, key
        return result

    @torch.no_grad()
    def _convert(self, part: SavePlan) -> dict[str, torch.Tensor]:
        """Return what a part is saved as."""
        part.on_meta(part.state)  # raises if a conversion would change the model
        return _saved_views(part, {name: self._read(name) for name in part.state})

    def values(self, only_on: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in the order of a save."""
        rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        if only_on is not None and only_on not in range(size):
            raise InvalidPatcherError(
                f"only_on={only_on!r} isn't one of the {size} processes, so no process would get the weights. Write "
                "the rank of one, only_on=0, or leave it out."
            )
        is_receiver = only_on in (None, rank)
        if not is_receiver and not any(isinstance(value, DTensor) for value in self.state.values()):
            return  # no collective operation needs this process
        for part in self.parts:
            tensors = self._convert(part)
            for name in list(tensors):
                tensor = tensors.pop(name)
                if is_receiver:
                    yield name, tensor.contiguous() if type(tensor) is torch.Tensor else tensor
                del tensor  # before the next one is computed

    def _read(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.state[name]
        if name in self.merging:
            merge, key = self.merging[name]
            value = merge().state_dict()[key]
        if type(local_tensor(value)) not in (torch.Tensor, nn.Parameter):
            return value  # of a quantizer
        if isinstance(value, DTensor):
            gathered: torch.Tensor = full_tensor(value.detach())
            return gathered.contiguous()
        return load_if_offloaded(self.model, name, value.detach())


class _NoCopies(TorchFunctionMode):
    """Makes `contiguous()` return its tensor, so that operations split tensors without copying the pieces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _saved_views(plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a state dict is saved as, as views of its tensors where possible."""
    with suppress(Exception), _NoCopies():  # an operation may need contiguous tensors
        return plan.saved_state_dict(state_dict)
    return plan.saved_state_dict(state_dict)


class _Part:
    """A part of a model that is written to."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.shapes = {name: tuple(value.shape) for name, value in plan.on_meta(plan.state).items()}
        self.left = set(self.shapes)  # the tensors that haven't arrived
        #: those that have, and aren't views of the model's tensors: they are converted together
        self.waiting: dict[str, torch.Tensor] = {}
        self._gathered: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._storages: list[tuple[int, int]] = []

    def current(self, name: str) -> torch.Tensor:
        """Return the values that the model has for a tensor, gathered if it is split."""
        if not self._views:
            self._gathered = {name: full_tensor(value.detach()) for name, value in self.plan.state.items()}
            self._views = _saved_views(self.plan, self._gathered)
            storages = [value.untyped_storage() for value in self._gathered.values()]
            self._storages = sorted((item.data_ptr(), item.data_ptr() + item.nbytes()) for item in storages)
        return self.waiting.get(name, self._views[name])

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor through its view, or keep it until all of the part have arrived."""
        target = self.current(name)
        index = bisect_right(self._storages, (target.data_ptr(), sys.maxsize)) - 1
        start, end = self._storages[max(0, index)]
        if start <= target.data_ptr() < end and target.device.type != "meta":
            target.copy_(tensor)
        else:
            self.waiting[name] = tensor.clone()

    def close(self) -> None:
        """Distribute the tensors that were gathered, and convert those that have waited."""
        for name, value in self._gathered.items():
            if isinstance(split := self.plan.state[name], DTensor):
                split.copy_(distribute_like(value, split))
        if self.waiting:
            result = load_original_state_dict(self.plan.model, self.waiting, strict=False)
            if result.unexpected_keys:
                name = result.unexpected_keys[0]
                raise not_written(name, self.plan.model, "is made by a conversion that can't be reversed")
        self.waiting, self._gathered, self._views = {}, {}, {}


@torch.no_grad()
def _write(checkpoint: _Checkpoint, weights: Any, strict: bool) -> None:
    """Write a stream into a model, and check at the end that it was complete."""
    parts, tied = list(map(_Part, checkpoint.parts)), checkpoint.tied
    part_of = {name: part for part in parts for name in part.shapes}
    _check_writable(checkpoint.model, checkpoint.state)
    problems: dict[str, list[str]] = {"missing": [], "left over": [], "of another shape": [], "not as tied": []}
    arrived: dict[str, str] = {}  # saved name -> the first name by which its tensor has arrived
    for item in weights if isinstance(weights, Iterable) else (weights,):
        match item:
            case [str(name), torch.Tensor() as tensor]:
                saved = tied.get(name, name)
            case _:
                raise InvalidPatcherError(
                    f"load_checkpoint_weights takes pairs of a name and a torch.Tensor, found {reprlib.repr(item)}. "
                    "torch.from_numpy(array) makes a tensor of an array."
                )
        part = part_of.get(saved)
        if part is None or (name not in part.left and name not in tied):
            problems["left over"] += [name] * (name not in tied)
            continue
        part.left.discard(name)
        shape, first = part.shapes[saved], arrived.setdefault(saved, name)
        if tensor.shape != shape:
            problems["of another shape"].append(f"{name}: found {tuple(tensor.shape)}, expected {shape}")
        elif first == name:
            part.write(saved, full_tensor(tensor))
        elif not torch.equal(current := part.current(saved), full_tensor(tensor).to(current)):
            problems["not as tied"].append(f"{name}: it is one with {first}, of which other values have come")
        if not part.left:
            part.close()
    for part in parts:
        part.close()
    problems["missing"] = sorted((name for part in parts for name in part.left), key=dot_natural_key)
    lines = [f"  {kind}: {name}\n" for kind, names in problems.items() for name in compress(names)]
    if not lines:
        return
    text = (
        "These weights aren't those of the model's checkpoint. patcher.checkpoint_metadata(model) lists them.\n"
        + "".join(lines)
        + "What fits has been written, so the model is partly updated. Pass all tensors of one checkpoint, or write "
        "strict=False to keep the other values."
    )
    if strict:
        raise PatchedWeightsError(text)
    warn(text)


def _check_writable(model: PreTrainedModel, state: Mapping[str, Any]) -> None:
    """Raise for a model that can't be written to in place."""
    tensors = [local_tensor(value) for value in state_tensors(model).values() if not is_quantized(value)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or is_quantized(value):
            raise not_written(name, model, "is quantized")
        check_in_memory(name, value, model)
        if local_tensor(value).untyped_storage().data_ptr() not in storages:
            raise not_written(name, model, "is made by its state_dict(), and no module holds it")
