"""A checkpoint that lacks what a conversion joins with other tensors: completed as transformers would initialise it.

What transformers misses as well isn't a fault of a patcher, so the parts that it has are read, and the others begin as
they do there, each by itself: with `ignore_mismatched_sizes=True` those of another shape too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key, stock_conversions_from_scratch, stock_revert
from patcher.compat.models import initial_values, named_parameters, tied_keys
from patcher.construction.lock import construction_lock
from patcher.errors import PatchedWeightsError
from patcher.fusions.experts.matrices import Matrices
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
        initialized: the keys that were put in, and the parameters of which all were.
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
    checkpoint: Mapping[str, Any],
    routing: Routing,
    *,
    dtype: torch.dtype | None,
    ignores_shapes: bool,
    is_read: bool,
    replaced: Iterable[str] = (),
) -> Completion:
    """Put in what conversions and fusions join with what the checkpoint has.

    Fused parameters of which it has nothing at all transformers initialises by itself. But experts it would draw layer
    by layer, and not stack by stack: where some are missing, all that is missing is drawn here, in the order of stock.

    Args:
        model: the patched model.
        stock: the model as transformers has it, on meta: what it saves is what a checkpoint should have.
        routing: where the keys of the checkpoint go.
        dtype: that of the load.
        ignores_shapes: whether tensors of other shapes count as missing.
        is_read: whether the checkpoint will be read; otherwise shapes are enough.
        replaced: the paths of modules that initialise what they have by themselves.
    """
    reverted = stock_conversions_from_scratch(stock)
    tied = tied_keys(stock)
    parameters = {name: value for name, value in named_parameters(stock) if name not in tied}
    whole = {name: value.data for name, value in parameters.items()}
    saved = stock_revert(stock, whole, reverted)
    name_of = _names_in(checkpoint, stock, saved)
    expected = {name_of(key): value for key, value in saved.items()}
    #: the parameters that are made together -> the keys that they are made of
    together: dict[tuple[str, ...], list[str]] = {}
    places = _places(model)
    is_drawn = is_read and bool(missing_experts(model, routing.missing))
    drawn = {
        name
        for name in (routing.missing if is_drawn else ())
        if not any(name.startswith(inside(path)) for path in replaced)
    }
    left_out = {place for place in places.values() if place[0] not in drawn}
    for key in expected:
        found = routing.follow(key)
        is_alone = (found.taker is None or not found.by) and found.name not in drawn
        place = places.get(found.name, None if is_alone else (found.name,))
        if place is not None:
            together.setdefault(place, []).append(key)
    misfits: list[str] = []
    lacking: list[str] = []
    wanted: list[str] = []
    initialized: list[str] = []
    # The checkpoint may have other names for them: those of an older release, or of a `key_mapping`.
    own = {routing.renamed(key): key for key in checkpoint}
    shapes = {key: shape_of(checkpoint[own[name]]) for key in expected if (name := routing.renamed(key)) in own}
    as_they_are = {found.name for key in checkpoint if (found := routing.follow(key)).taker is None}
    for place, keys in together.items():
        if place[0] in as_they_are:
            continue
        absent = [key for key in keys if key not in shapes]
        odd = [key for key in keys if key not in absent and shapes[key] != expected[key].shape]
        if not ignores_shapes:
            misfits += [
                f"{key}: found {tuple(shapes[key])}, expected {tuple(expected[key].shape)}"
                for key in odd
                if is_concatenation(routing.follow(key).taker)
            ]
            odd = []
        if len(absent) < len(keys) or place not in left_out:
            wanted += [*absent, *odd]
            initialized += place if place[0] in drawn else [*absent, *odd]
            lacking += absent if len(absent) + len(odd) < len(keys) else []
    if misfits:
        return Completion(checkpoint, misfits=tuple(misfits))
    if not wanted:
        return Completion(checkpoint)
    values: Mapping[str, torch.Tensor] = expected
    if is_read:
        with construction_lock.held_for(type(stock).__name__):
            needed = _parameters_of(wanted, name_of, stock, whole, reverted)
            made = initial_values(stock, needed, dtype)
        values = {name_of(key): value for key, value in stock_revert(stock, made, reverted).items()}
    gone = {own[routing.renamed(key)] for key in wanted if key in shapes}
    kept = {key: value for key, value in checkpoint.items() if key not in gone}
    return Completion(
        {**kept, **{key: values[key] for key in wanted}},
        tuple(sorted(lacking, key=dot_natural_key)),
        tuple(initialized),
    )


def _places(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """A parameter as transformers has it -> what it is fused into."""
    return {
        f"{inside(path)}{name}": tuple(f"{inside(path)}{fused}" for fused in layout.fused)
        for path, _, carried in fused_modules(model)
        for layout in carried.layouts
        for name in layout.stock
    }


def missing_experts(model: PreTrainedModel, missing: Container[str]) -> set[str]:
    """What a stack of experts is fused into, where the checkpoint has nothing of it."""
    return {
        name
        for path, _, carried in fused_modules(model)
        for layout in carried.layouts
        if isinstance(layout, Matrices) and (name := f"{inside(path)}{layout.fused[0]}") in missing
    }


def _parameters_of(
    keys: Iterable[str],
    name_of: Callable[[str], str],
    stock: PreTrainedModel,
    whole: Mapping[str, torch.Tensor],
    reverted: list[Any],
) -> list[str]:
    """The parameters of the stock model that are saved as some keys."""
    wanted = set(keys)
    return [
        name
        for name, value in whole.items()
        if not wanted.isdisjoint(map(name_of, stock_revert(stock, {name: value}, reverted)))
    ]


def _names_in(checkpoint: Iterable[str], stock: PreTrainedModel, keys: Iterable[str]) -> Callable[[str], str]:
    """Key of a saved model -> the one that this checkpoint has: some lack the prefix of the base model."""
    prefix = f"{stock.base_model_prefix}."
    has_prefix = any(key.startswith(prefix) for key in checkpoint)
    if len(prefix) == 1 or has_prefix == any(key.startswith(prefix) for key in keys):
        return str
    return prefix.__add__ if has_prefix else lambda key: key.removeprefix(prefix)
