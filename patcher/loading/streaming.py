"""Weights that stream: the checkpoint of a model as one tensor after the other, out of a model and into one.

    a trainer's model, fused                             an engine's, stock
    qkv_proj.weight  -->  q_proj, k_proj, v_proj  -->  q_proj.weight, k_proj.weight, v_proj.weight

Both ways go by what a save makes of the state dict (`layouts/pieces.py` notes it), so names and values are those of
its files. What is a view of one of the model's tensors is read and written there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import (
    load_offloaded_parameter,
    named_modules,
    state_tensors,
    state_to_save,
    without_tied,
)
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.layouts.carried import is_quantized
from patcher.layouts.pieces import Piece, Values
from patcher.layouts.sharded import keep_pieces, one_piece, split_like, whole
from patcher.loading.integration import integrations
from patcher.loading.saving import plan_original_format
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
    one by one where the checkpoint has them so, tied weights once. What a conversion only moves is a view of the
    model's own tensor; all else is made when its turn comes, so there is never much more in memory than the model.

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
        InvalidPatcherError: what becomes of adapters isn't said, or can't be done.
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

    For engines that ask before they receive. No value is read or gathered, so one process may ask by itself.

    Args:
        model: as in `checkpoint_weights`.
        adapters: as in `checkpoint_weights`.

    Raises:
        PatcherError: as in `checkpoint_weights`.
    """
    made = _Checkpoint(model, adapters).made().items()
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in made}


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
        InvalidPatcherError: the model can't be written to in place: it is quantized, partly on the disk, or a
            conversion has computed its weights from the checkpoint's.
    """
    _Loading(_Checkpoint(model, "left out")).run(weights.items() if isinstance(weights, Mapping) else weights, strict)


class _Checkpoint:
    """What a model is saved as.

    Attributes:
        model: the one of transformers.
        merging: what merges an adapter into a tensor of the model, by the name of that.
        own: the tensors of the state dict, without adapters, each under the name that is saved.
        tied: name that isn't saved -> the one under which its tensor is.
        blocks: name in the checkpoint -> where its values lie, or what is saved as it is; layer by layer.
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
        keep_pieces(self.model)
        self.merging: dict[str, Callable[[], torch.Tensor]] = {}
        state = self._without_adapters(state_to_save(self.model), adapters, model)
        objects = {**state, **(held := state_tensors(self.model))}
        self.own = {name: state[name] for name in without_tied(self.model, state, held)}
        saved = {id(objects[name]): name for name in self.own}
        self.tied = {name: saved.get(id(objects[name]), "") for name in state if name not in self.own}
        tied = {id(objects[name]) for name in self.tied}
        blocks = plan_original_format(self.model).pieces(self.own)
        self.blocks = chain([next(blocks, {})], blocks)  # what can't be told is often seen in the first
        for name in sorted(self.merging):
            is_plain = type(one_piece(state[name])) in (torch.Tensor, nn.Parameter)
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
        if not adapted:
            return state
        result: dict[str, Any] = {}
        for name, value in state.items():
            path = next((path for path in accumulate(name.split("."), "{}.{}".format) if path in adapted), None)
            if path is None:
                result[name] = value
                continue
            module, merge = adapted[path]
            for each, tensor in state_tensors(module).items():
                result[f"{path}.{each}"] = tensor
                if merge is not None:
                    self.merging[f"{path}.{each}"] = partial(_merged, merge, each)
        return result

    def made(self) -> dict[str, Any]:
        """All of the blocks."""
        return {name: value for block in self.blocks for name, value in block.items()}

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
        for block in self.blocks:
            values = Values((value for value in block.values() if isinstance(value, Piece)), self._read)
            for name, value in block.items():
                tensor = values.take(value).contiguous() if isinstance(value, Piece) else value
                if is_given:
                    yield name, tensor
                del tensor  # before the next one is made

    def _read(self, name: str) -> torch.Tensor:
        value = self.merging[name]() if name in self.merging else self.own[name]
        if isinstance(value, DTensor) or not value.is_meta:
            found: torch.Tensor = whole(value.detach())
            return found.contiguous() if isinstance(value, DTensor) else found
        return load_offloaded_parameter(self.model, name).contiguous()


def _merged(make: Callable[[], nn.Module], name: str) -> torch.Tensor:
    value: torch.Tensor = make().state_dict()[name]
    return value


def _model_of_transformers(model: nn.Module) -> PreTrainedModel:
    """The model of transformers that a module is, or is around.

    Raises:
        InvalidPatcherError: there is none, or there are several.
    """
    if isinstance(model, PreTrainedModel):
        return model
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


class _Loading:
    """A stream that is written into a model, under way.

    Attributes:
        left: the names that have not come.
        whole: tensors that are split, while some of their values have come.
        pending: name of a tensor that is split -> the names of the checkpoint that are still to be written to it.
    """

    def __init__(self, checkpoint: _Checkpoint) -> None:
        self.own, self.pieces, self.tied = checkpoint.own, checkpoint.made(), checkpoint.tied
        _check_writable(checkpoint.model, self.own, self.pieces)
        self.left = set(self.pieces)
        self.whole: dict[str, torch.Tensor] = {}
        self.pending: dict[str, set[str]] = defaultdict(set)
        for name, piece in self.pieces.items():
            for own in piece.own:
                if isinstance(self.own[own], DTensor):
                    self.pending[own].add(name)

    @torch.no_grad()
    def run(self, weights: Iterable[tuple[str, torch.Tensor]], strict: bool) -> None:
        """Write them, and judge them at the end."""
        problems: dict[str, list[str]] = {"missing": [], "left over": [], "of another shape": [], "not as tied": []}
        came: dict[str, str] = {}  # the name of what is tied -> the first of its names that has come
        for name, tensor in weights:
            saved = self.tied.get(name, name)
            if saved not in self.pieces or (name not in self.left and name not in self.tied):
                problems["left over"] += [name] * (name not in self.tied)
                continue
            self.left.discard(name)
            piece, first = self.pieces[saved], came.setdefault(saved, name)
            if tensor.shape != piece.shape:
                problems["of another shape"].append(f"{name}: found {tuple(tensor.shape)}, expected {piece.shape}")
            elif first == name:
                piece.write(whole(tensor), self._target)
            elif not self._holds(piece, whole(tensor)):
                problems["not as tied"].append(f"{name}: it is one with {first}, of which other values have come")
            for own in piece.own:
                self.pending[own].discard(name)
                if not self.pending[own]:
                    self._put_back(own)
        for own in list(self.whole):
            self._put_back(own)
        problems["missing"] = sorted(self.left, key=dot_natural_key)
        lines = [f"  {kind}: {each}" for kind, names in problems.items() for each in compress(names)]
        if not lines:
            return
        text = "\n".join(
            (
                "These weights aren't those of the model's checkpoint. patcher.checkpoint_metadata(model) lists them.",
                *lines,
                "What fits has been written, so the model is neither what it was nor what was meant. Give it all "
                "tensors of one checkpoint, or write strict=False if it is to keep the rest.",
            )
        )
        if strict:
            raise PatchedWeightsError(text)
        warn(text)

    def _holds(self, piece: Piece, values: torch.Tensor) -> bool:
        held = Values([piece], self._target).take(piece)
        return torch.equal(held, values.to(held))

    def _target(self, name: str) -> torch.Tensor:
        own: torch.Tensor = self.own[name]
        if not isinstance(own, DTensor):
            return own
        if name not in self.whole:
            self.whole[name] = own.full_tensor().contiguous()
        return self.whole[name]

    def _put_back(self, name: str) -> None:
        if name in self.whole:
            self.own[name].copy_(split_like(self.whole.pop(name), self.own[name]))


def _check_writable(model: PreTrainedModel, own: Mapping[str, Any], pieces: Mapping[str, Any]) -> None:
    """Raise for a model that can't be written to in place.

    Raises:
        InvalidPatcherError: with the reason, and what can be done instead.
    """
    held = [one_piece(value) for value in state_tensors(model).values() if not is_quantized(value)]
    storages = {local.untyped_storage().data_ptr() for local in held}
    for name, value in own.items():
        if not isinstance(value, torch.Tensor) or is_quantized(value):
            reason = "is quantized"
        elif (local := one_piece(value)).is_meta:
            reason = "is on the disk, or nowhere yet"
        elif local.untyped_storage().data_ptr() not in storages:
            reason = "is made by its state_dict(), and no module holds it"
        else:
            continue
        raise InvalidPatcherError(
            f"{name} of {type(model).__name__} {reason}, so nothing can be written into it in place. Load the weights "
            "anew with from_pretrained, in full precision and in memory."
        )
    for name, piece in pieces.items():
        if not piece.is_moved:
            raise InvalidPatcherError(
                f"{', '.join(sorted(piece.own))} of {type(model).__name__} is computed from {name} and others by a "
                "conversion that does more than move values, so these can't be written into it one by one. Use "
                "patcher.load_original_state_dict(model, dict(weights))."
            )
