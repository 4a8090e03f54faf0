"""A checkpoint that lacks what a conversion joins with other tensors: completed as transformers would initialise it.

What transformers misses as well is no fault of a patcher, so the parts that it has are read, and the others begin as
they do there, each by itself: with `ignore_mismatched_sizes=True` those of another shape too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key, stock_conversions_from_scratch, stock_revert
from patcher.compat.models import initial_values, named_parameters, tied_keys
from patcher.construction.lock import construction_lock
from patcher.errors import PatchedWeightsError
from patcher.layouts.carried import fused_modules
from patcher.layouts.sources import shape_of
from patcher.layouts.transforms import is_concatenation
from patcher.loading.routes import Routing
from patcher.patterns import compress, inside


@dataclass(frozen=True, eq=False)
class Completion:
    """A checkpoint with initial values for what it lacks.

    Attributes:
        checkpoint: it, as it is to be read.
        lacking: the keys that it should have, of what is joined with others that it has.
        initialized: the keys that were put in.
        misfits: what has another shape, and is joined all the same: `key: found ..., expected ...`.
    """

    checkpoint: Mapping[str, Any]
    lacking: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    @property
    def error(self) -> PatchedWeightsError | None:
        """What is wrong with the checkpoint."""
        if self.misfits:
            return PatchedWeightsError(
                "Tensors that are joined don't have the shapes that transformers has for them:\n"
                + "".join(f"  {line}\n" for line in self.misfits[:5])
                + "Take a checkpoint that fits the config. With ignore_mismatched_sizes=True these are initialised as "
                "transformers initialises them, and the others are read."
            )
        if not self.lacking:
            return None
        keys = "".join(f"  {key}\n" for key in compress(self.lacking))
        return PatchedWeightsError(
            "Parameters of the patched model are made of several tensors, of which the checkpoint has only some. It "
            f"lacks:\n{keys}"
            "With strict=False these are initialised as transformers initialises them, and the others are read."
        )


def complete(
    model: PreTrainedModel,
    stock: PreTrainedModel,
    outcome: Routing,
    checkpoint: Mapping[str, Any],
    routing: Routing,
    *,
    dtype: torch.dtype | None,
    ignores_shapes: bool,
    is_read: bool,
) -> Completion:
    """Put in what conversions and fusions join with what the checkpoint has, and what they would make alone.

    A fused parameter of which all is missing transformers initialises by itself.

    Args:
        model: the patched model.
        stock: the model as transformers has it, on meta.
        outcome: what the unpatched load would do with the checkpoint.
        conversions: those of the patched load, which may be used up.
        amiss: the parameters of the patched model that would not be read as they should.
        dtype: that of the load.
        ignores_shapes: whether tensors of other shapes count as missing.
        is_read: whether values are wanted, or shapes only.
    """
    if outcome.errors:
        return Completion(checkpoint)  # the unpatched load fails as well
    tied = tied_keys(stock)
    parameters = {name: parameter for name, parameter in named_parameters(stock) if name not in tied}
    unfit = _keys_of_misfits(outcome)
    misfits = unfit if ignores_shapes else {}
    absent = [name for name in parameters if name in outcome.missing or name in misfits]
    gone = set(absent)
    reverted = stock_conversions_from_scratch(stock)
    amiss = routing.missing | routing.mismatched.keys() | routing.errors.keys()

    def joined_as(key: str) -> str | None:
        found = routing.follow(key)
        return found.name if found.taker is not None and found.by else None

    if not ignores_shapes:
        lines = [
            f"{key}: found {tuple(shape_of(checkpoint[key]))}, expected {tuple(parameters[name].shape)}"
            for name, keys in unfit.items()
            for key in keys
            if name in parameters and len(keys) == 1 and joined_as(key) and is_concatenation(routing.follow(key).taker)
        ]
        if lines:
            return Completion(checkpoint, misfits=tuple(lines))

    # Joined with what isn't there, a tensor of another shape has to go as well; others transformers sees by itself.
    fused = _fused_with(model)
    dropped = {key for name, keys in misfits.items() for key in keys if name in fused or joined_as(key)}
    kept = {key: value for key, value in checkpoint.items() if key not in dropped}
    present = {joined_as(key) for key in kept}
    lacking, wanted = [], []
    for name in absent:
        parts = fused.get(name)
        if parts is not None:
            is_partial = not gone.issuperset(parts)
            is_joined = is_partial or not misfits.keys().isdisjoint(parts)
        else:
            groups = {joined_as(key) for key in stock_revert(stock, {name: parameters[name].data}, reverted)} - {None}
            is_partial, is_joined = not groups.isdisjoint(present), not groups.isdisjoint(amiss)
        if is_joined:
            wanted.append(name)
        if is_partial and name not in misfits:
            lacking.append(name)
    if not wanted:
        return Completion(checkpoint)
    if is_read:
        with construction_lock.held_for(type(stock).__name__):
            values = initial_values(stock, wanted, dtype)
    else:
        values = {name: parameters[name].data for name in wanted}
    put_in = _as_in(checkpoint, stock, stock_revert(stock, values, reverted))
    keys = _as_in(checkpoint, stock, stock_revert(stock, {name: parameters[name].data for name in lacking}, reverted))
    return Completion({**kept, **put_in}, tuple(sorted(keys, key=dot_natural_key)), tuple(put_in))


def _keys_of_misfits(outcome: Routing) -> dict[str, tuple[str, ...]]:
    """Parameter -> its keys, of those that have another shape: not where a conversion makes several of these keys."""
    alone = {route.parameters[0]: route.keys for route in outcome.routes if len(route.parameters) == 1}
    return {name: alone[name] for name in outcome.mismatched if name in alone}


def _fused_with(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """A parameter as transformers has it -> all that are fused with it."""
    found: dict[str, tuple[str, ...]] = {}
    for path, _, carried in fused_modules(model):
        for layout in carried.layouts:
            names = tuple(f"{inside(path)}{name}" for name in layout.stock)
            found |= dict.fromkeys(names, names)
    return found


def _as_in(checkpoint: Iterable[str], stock: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the names that this checkpoint has: some are saved without the prefix of the base model."""
    prefix = f"{stock.base_model_prefix}."
    has_prefix = any(key.startswith(prefix) for key in checkpoint)
    if len(prefix) == 1 or has_prefix == any(key.startswith(prefix) for key in tensors):
        return dict(tensors)
    if has_prefix:
        return {prefix + key: value for key, value in tensors.items()}
    return {key.removeprefix(prefix): value for key, value in tensors.items()}
