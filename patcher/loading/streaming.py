"""Weights that stream: the checkpoint of a model as one tensor after the other, out of a model and into one.

    a trainer's model, fused                             an engine's, stock
    qkv_proj.weight  -->  q_proj, k_proj, v_proj  -->  q_proj.weight, k_proj.weight, v_proj.weight

Both ways follow what a save makes of the state dict, layer by layer, so names and values are those of its files. What
is a view of one of the model's tensors is read and written there; what a conversion computes is made when its layer's
turn comes, and converted back when all of the layer has come.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import (
    named_modules,
    state_tensors,
    state_to_save,
    without_tied,
)
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.layouts.carried import is_quantized
from patcher.layouts.sharded import distribute_like, local_tensor, reshard_modules, whole
from patcher.loading.integration import integrations
from patcher.loading.saving import SavePlan, load_if_offloaded, plan_original_format
from patcher.loading.state_dicts import load_original_state_dict
from patcher.patterns import compress, inside

#: What becomes of adapters.
Adapters: TypeAlias = Literal["merged", "left out"]


def checkpoint_weights(
    model: nn.Module, *, only_on: int | None = None, adapters: Adapters | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors that `save_pretrained` would write, one after the other.

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

    For engines that are given the weights of a model which trains: `examples/weight_sync.py`. Names, shapes, types and
    values are those of the files, of patched models and of any other of transformers: experts that are stacked come
    one by one where the checkpoint has them so, tied weights once. What a conversion only cuts is a view of the
    model's own tensor; all else is made when the turn of its layer comes, so little more is in memory than the model.

    The tensors are detached, share the memory of the model, and are meant to be used up before it trains on. Of a
    model that is split over processes (tensor and expert parallelism, FSDP2) they are whole, and each process has to
    go through all of them.

    Args:
        model: a model of transformers, or one around it, as `DistributedDataParallel` is.
        only_on: the one process that is given tensors; the loop of the others ends without any, once all are gathered.
        adapters: of a model with adapters of PEFT, whether the active ones are "merged" into its weights, as
            `merge_and_unload` would do it, or are "left out". The model stays what it is.

    Raises:
        PatchedWeightsError: something in it can't be restored, or a quantizer can't save it. Layers are looked at when
            their turn comes; `checkpoint_metadata` looks at all of them.
        InvalidPatcherError: what becomes of adapters isn't given, or can't be done.
    """
    return _Checkpoint(model, adapters).values(only_on)


def checkpoint_metadata(model: nn.Module, *, adapters: Adapters | None = None) -> dict[str, torch.Tensor]:
    """The names, shapes and types that `checkpoint_weights` will give, as tensors on the meta device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, checkpoint_metadata
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> found = checkpoint_metadata(LlamaForCausalLM(config))["model.layers.0.mlp.up_proj.weight"]
    >>> found.shape, found.dtype
    (torch.Size([16, 8]), torch.float32)

    For engines that need them before they receive. No value is read or gathered, so one process may call it alone.

    Args:
        model: as in `checkpoint_weights`.
        adapters: as in `checkpoint_weights`.

    Raises:
        PatcherError: as in `checkpoint_weights`.
    """
    checkpoint = _Checkpoint(model, adapters)
    made = {name: value for part in checkpoint.parts for name, value in checkpoint.shown(*part).items()}
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in made.items()}


def load_checkpoint_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], strict: bool = True
) -> None:
    """Write a stream of tensors, by the names of the checkpoint and in any order, into a model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, checkpoint_weights, load_checkpoint_weights
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> trained = LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv"))
    >>> model = LlamaForCausalLM(config)
    >>> load_checkpoint_weights(model, checkpoint_weights(trained))
    >>> torch.equal(model.lm_head.weight, trained.lm_head.weight)
    True

    The inverse of `checkpoint_weights`, whichever of the two models is patched. All is written in place: storages
    stay, and with them optimizers, compiled graphs and CUDA graphs. The parts of one tensor may come far apart. Values
    take the types that the model has; adapters stay, and are not merged. Of a model that is split over processes each
    has to be given the same tensors in the same order, and keeps its part of them.

    Args:
        model: as in `checkpoint_weights`.
        weights: the names and tensors, or a mapping of them.
        strict: raise for what is missing, left over or of another shape, with False warn. What fits is written.

    Raises:
        PatchedWeightsError: tensors are missing, left over or of another shape.
        InvalidPatcherError: the model can't be written to in place: it is quantized, or partly on the disk.
    """
    _write(_Checkpoint(model, "left out"), weights.items() if isinstance(weights, Mapping) else weights, strict)


class _Checkpoint:
    """What a model is saved as.

    Attributes:
        model: the one of transformers.
        merging: name of a tensor of the model -> what makes its module with an adapter merged, and its name there.
        own: the tensors of the state dict, without adapters, each under the name that is saved.
        tied: name that isn't saved -> the one under which its tensor is.
        parts: plans for parts of the model, in the order of a save, each with the names of its tensors.
    """

    def __init__(self, model: nn.Module, adapters: Adapters | None) -> None:
        self.model = _model_of_transformers(model)
        if any(isinstance(part, FullyShardedDataParallel) for _, part in named_modules(model)):
            raise InvalidPatcherError(
                f"{type(self.model).__name__} is split by FullyShardedDataParallel, whose parameters are pieces of no "
                "shape. Split it by fully_shard (FSDP2) instead."
            )
        quantizer: Any = getattr(self.model, "hf_quantizer", None)
        if quantizer is not None and not quantizer.is_serializable():
            raise PatchedWeightsError(
                f"The weights of {type(self.model).__name__} are quantized by {type(quantizer).__name__}, which can't "
                "save them, so they have no checkpoint. Stream those of the model that isn't quantized."
            )
        reshard_modules(self.model)
        self.merging: dict[str, tuple[Callable[[], nn.Module], str]] = {}
        state = self._without_adapters(state_to_save(self.model), adapters, model)
        objects = {**state, **(held := state_tensors(self.model))}
        self.own = {name: state[name] for name in without_tied(self.model, state, held)}
        saved = {id(objects[name]): name for name in self.own}
        self.tied = {name: saved.get(id(objects[name]), "") for name in state if name not in self.own}
        tied = {id(objects[name]) for name in self.tied}
        self.parts = replace(plan_original_format(self.model), one_by_one=True).parts(self.own)
        for plan, names in self.parts[:1]:  # what can't be known is often seen in the first
            self.shown(plan, names)
        for name in sorted(self.merging):
            is_plain = type(local_tensor(state[name])) in (torch.Tensor, nn.Parameter)
            if not is_plain or id(state[name]) in tied:
                what = "tied to another that has no adapter" if is_plain else "quantized, and would be rounded"
                raise InvalidPatcherError(
                    f'An adapter can\'t be merged into {name}: it is {what}. Write adapters="left out", and give the '
                    "engine the adapter."
                )

    def _without_adapters(self, state: dict[str, Any], adapters: Adapters | None, around: nn.Module) -> dict[str, Any]:
        """The state dict with the modules that adapters are around in the place of both."""
        given = (each.adapted(self.model, adapters == "merged", around) for each in integrations())
        adapted = {path: found for each in given for path, found in each.items()}
        if adapted and adapters not in get_args(Adapters):
            raise InvalidPatcherError(
                f"{next(iter(adapted))} has an adapter, and adapters={adapters!r} doesn't say what becomes of it. "
                'Write adapters="merged" for weights that compute what the model does, or adapters="left out".'
            )
        result: dict[str, Any] = {}
        for name, value in state.items():
            heads = accumulate(name.split("."), "{}.{}".format) if adapted else ()
            if (path := next((path for path in heads if path in adapted), None)) is None:
                result[name] = value
                continue
            module, merge = adapted[path]
            for each, tensor in state_tensors(module).items():
                result[f"{path}.{each}"] = tensor
                if merge is not None:
                    self.merging[f"{path}.{each}"] = merge, each
        return result

    def shown(self, plan: SavePlan, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What a part is saved as, on the meta device."""
        return plan.shown({name: self.own[name] for name in names})

    @torch.no_grad()
    def made(self, plan: SavePlan, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What a part is saved as."""
        self.shown(plan, names)  # raises for what would change the model
        return _uncopied(plan, {name: self._read(name) for name in names})

    def values(self, only_on: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, in the order in which a save has them."""
        rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        if only_on is not None and only_on not in range(size):
            raise InvalidPatcherError(
                f"only_on={only_on!r} isn't one of the {size} processes, so no process would get the weights. Write "
                "the rank of one, only_on=0, or leave it out."
            )
        is_given = only_on in (None, rank)
        if not is_given and not any(isinstance(value, DTensor) for value in self.own.values()):
            return  # there is nothing to take part in
        for part in self.parts:
            made = self.made(*part)
            for name in list(made):
                tensor = made.pop(name)
                if is_given:
                    yield name, tensor.contiguous() if type(tensor) is torch.Tensor else tensor
                del tensor  # before the next one is made

    def _read(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.own[name]
        if name in self.merging:
            merge, own = self.merging[name]
            value = merge().state_dict()[own]
        if type(local_tensor(value)) not in (torch.Tensor, nn.Parameter):
            return value  # of a quantizer
        if isinstance(value, DTensor):
            gathered: torch.Tensor = whole(value.detach())
            return gathered.contiguous()
        return load_if_offloaded(self.model, name, value.detach())


class _Uncopied(TorchFunctionMode):
    """Has operations cut tensors without putting the pieces into memory of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _uncopied(plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a state dict is saved as: views of its tensors where they do."""
    with suppress(Exception), _Uncopied():  # an operation may need what lies in one piece
        return plan.saved_state_dict(state_dict)
    return plan.saved_state_dict(state_dict)


def _model_of_transformers(model: nn.Module) -> PreTrainedModel:
    """The one model of transformers that a module is, or is around."""
    found: dict[str, PreTrainedModel] = {}
    for path, part in named_modules(model):
        if isinstance(part, PreTrainedModel) and not any(path.startswith(inside(around)) for around in found):
            found[path] = part
    if len(found) != 1:
        raise InvalidPatcherError(
            f"The weights of one model of transformers are meant, and {type(model).__qualname__} has "
            f"{', '.join(found) or 'none'}. Give the model itself."
        )
    return next(iter(found.values()))


class _Part:
    """A part of a model that is written to."""

    def __init__(self, checkpoint: _Checkpoint, plan: SavePlan, names: list[str]) -> None:
        self.model, self.plan = checkpoint.model, plan
        self.own = {name: checkpoint.own[name] for name in names}
        self.shown = checkpoint.shown(plan, names)
        self.left = set(self.shown)  # what has not come
        #: tensors that have come, and aren't views of what the model has
        self.waiting: dict[str, torch.Tensor] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._starts: list[tuple[int, int]] = []

    def current(self, name: str) -> torch.Tensor:
        """The values of one tensor, as the model has them; gathered, if it is split."""
        if not self._views:
            self._held = {name: whole(value.detach()) for name, value in self.own.items()}
            self._views = _uncopied(self.plan, self._held)
            storages = [each.untyped_storage() for each in self._held.values()]
            self._starts = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages)
        return self.waiting.get(name, self._views[name])

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write values where a view says that they are, or keep them until all of the part have come."""
        target = self.current(name)
        start, end = self._starts[max(0, bisect_right(self._starts, (target.data_ptr(), sys.maxsize)) - 1)]
        if start <= target.data_ptr() < end and target.device.type != "meta":
            target.copy_(tensor)
        else:
            self.waiting[name] = tensor.clone()

    def close(self) -> None:
        """Put back what was gathered, and convert what has waited."""
        for name, value in self._held.items():
            if isinstance(own := self.own[name], DTensor):
                own.copy_(distribute_like(value, own))
        if self.waiting:
            found = load_original_state_dict(self.model, self.waiting, strict=False)
            if found.unexpected_keys:
                raise _not_written(found.unexpected_keys[0], self.model, "is made by a conversion without a way back")
        self.waiting, self._held, self._views = {}, {}, {}


@torch.no_grad()
def _write(checkpoint: _Checkpoint, weights: Iterable[tuple[str, torch.Tensor]], strict: bool) -> None:
    """Write a stream into a model, and judge it at the end."""
    parts, tied = [_Part(checkpoint, *part) for part in checkpoint.parts], checkpoint.tied
    part_of = {name: part for part in parts for name in part.shown}
    _check_writable(checkpoint.model, checkpoint.own)
    problems: dict[str, list[str]] = {"missing": [], "left over": [], "of another shape": [], "not as tied": []}
    came: dict[str, str] = {}  # the name of what is tied -> the first of its names that has come
    for name, tensor in weights:
        saved = tied.get(name, name)
        part = part_of.get(saved)
        if part is None or (name not in part.left and name not in tied):
            problems["left over"] += [name] * (name not in tied)
            continue
        part.left.discard(name)
        shape, first = tuple(part.shown[saved].shape), came.setdefault(saved, name)
        if tensor.shape != shape:
            problems["of another shape"].append(f"{name}: found {tuple(tensor.shape)}, expected {shape}")
        elif first == name:
            part.write(saved, whole(tensor))
        elif not torch.equal(held := part.current(saved), whole(tensor).to(held)):
            problems["not as tied"].append(f"{name}: it is one with {first}, of which other values have come")
        if not part.left:
            part.close()
    for part in parts:
        part.close()
    problems["missing"] = sorted((name for part in parts for name in part.left), key=dot_natural_key)
    lines = [f"  {kind}: {each}\n" for kind, names in problems.items() for each in compress(names)]
    if not lines:
        return
    text = (
        "These weights aren't those of the model's checkpoint. patcher.checkpoint_metadata(model) lists them.\n"
        + "".join(lines)
        + "What fits has been written, so the model is neither what it was nor what was meant. Give it all tensors of "
        "one checkpoint, or write strict=False if it is to keep the rest."
    )
    if strict:
        raise PatchedWeightsError(text)
    warn(text)


def _check_writable(model: PreTrainedModel, own: Mapping[str, Any]) -> None:
    """Raise for a model that can't be written to in place."""
    held = [local_tensor(value) for value in state_tensors(model).values() if not is_quantized(value)]
    storages = {local.untyped_storage().data_ptr() for local in held}
    for name, value in own.items():
        if not isinstance(value, torch.Tensor) or is_quantized(value):
            raise _not_written(name, model, "is quantized")
        if (local := local_tensor(value)).is_meta:
            raise _not_written(name, model, "is on the disk, or nowhere yet")
        if local.untyped_storage().data_ptr() not in storages:
            raise _not_written(name, model, "is made by its state_dict(), and no module holds it")


def _not_written(name: str, model: PreTrainedModel, reason: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"{name} of {type(model).__name__} {reason}, so nothing can be written into it in place. Load the weights "
        "anew with from_pretrained, in full precision and in memory."
    )
