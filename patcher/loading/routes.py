"""The table of where the keys of a checkpoint go, and the errors for a checkpoint that doesn't fit the model.

    checkpoint keys            layout                      parameters
    layers.0.q_proj.weight  \\
    layers.0.k_proj.weight   }-- concatenated rows -------- layers.0.qkv_proj.weight
    layers.0.v_proj.weight  /
    layers.0.o_proj.weight  ---- unchanged ---------------- layers.0.o_proj.weight

Plans show this table, and loads are checked, read, recorded and reversed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import Added, ResolvedKey, describe
from patcher.patterns import compress


@dataclass(frozen=True, eq=False)
class Route:
    """Where tensors of a checkpoint go.

    Attributes:
        keys: the keys that are taken together, in the order in which they are joined.
        parameters: the parameters that they become.
        layout: how; None for a tensor that is read unchanged.
        added: the conversions of patchers that take part.
        stock: the names of the parts in transformers.
        is_carried: whether modules carry the layout: that of a patcher's conversion, or of one of transformers that
            joins parts of different sizes, which transformers would split into equal ones.
    """

    keys: tuple[str, ...]
    parameters: tuple[str, ...]
    layout: Layout | None = None
    added: tuple[Added, ...] = ()
    stock: tuple[str, ...] = ()
    is_carried: bool = False

    @property
    def text(self) -> str:
        """The layout in one line; "" for a tensor that is read unchanged."""
        return describe(self.added[-1].transform) if self.added else str(self.layout or "")


@dataclass(eq=False)
class Routing:
    """The routes of a load, and what doesn't fit, in the form of transformers' loading info.

    Attributes:
        rest: what transformers reads itself: key -> tensor, or lazy source of one.
        sources: parameter -> the lazy source that it is read from instead.
        mismatched_keys: (parameter, shape in the checkpoint, shape in the model).
        conversion_errors: parameter -> why the conversion that makes it raises.
        failed: conversion of a patcher that raises -> the parameters concerned, and the first reason.
        used: the conversions of transformers that took part.
        resolve: resolves another key.
        is_runtime_layout: whether the checkpoint has fused parameters.
        problem: why the checkpoint can't be read.
    """

    routes: list[Route] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    missing_keys: set[str] = field(default_factory=set)
    unexpected_keys: set[str] = field(default_factory=set)
    mismatched_keys: set[tuple[str, torch.Size, torch.Size]] = field(default_factory=set)
    conversion_errors: dict[str, str] = field(default_factory=dict)
    failed: dict[WeightTransform, tuple[list[str], str]] = field(default_factory=dict)
    used: list[WeightTransform] = field(default_factory=list)
    is_runtime_layout: bool = False
    problem: PatchedWeightsError | None = None
    resolve: Callable[[str], ResolvedKey] = ResolvedKey

    @property
    def failure(self) -> PatchedWeightsError | None:
        """The error for the first conversion of a patcher that raises."""
        first = next(iter(self.failed.items()), None)
        return None if first is None else conversion_error(first[0], *first[1])

    @property
    def absent(self) -> set[str]:
        """The parameters that get no tensor, or none of their shape."""
        return self.missing_keys | {name for name, *_ in self.mismatched_keys}

    def agrees_with(self, info: Any) -> bool:
        """Whether a load ended as expected."""
        return (
            not info.conversion_errors
            and self.missing_keys == info.missing_keys
            and self.unexpected_keys == info.unexpected_keys
            and {name for name, *_ in self.mismatched_keys} == {name for name, *_ in info.mismatched_keys}
        )


# --- errors ----------------------------------------------------------------------------------------------------------


_LACKS = "Parameters of the patched model are made of several tensors, of which the checkpoint lacks:"
#: Kind of problem -> the line before the listed tensors, and the advice after them.
_TEXTS = {
    "quantized": (
        "The checkpoint is quantized, and the patcher converts or replaces the layers of these weights, so that they "
        "wouldn't be read as what they are:",
        "Load the full-precision checkpoint with the patcher, and quantize that while it loads.",
    ),
    "failed": (
        "Conversions of this load fail for weights that a fusion takes:",
        "If the checkpoint is quantized, fuse the full-precision one, and quantize that while it loads.",
    ),
    "incomplete": (_LACKS, "Take a checkpoint that has them: transformers can't convert this one either."),
    "lacking": (
        _LACKS,
        "Take a checkpoint that has them; or load this one without the patcher, which initialises them, save that, "
        "and load it with the patcher.",
    ),
    "misfits": (
        "Tensors that are joined don't have the shapes that the model has for them:",
        "Take a checkpoint that fits the config; or load this one without the patcher, with "
        "ignore_mismatched_sizes=True, save that, and load it with the patcher.",
    ),
}


def unfit_error(problems: Mapping[str, Sequence[str]]) -> PatchedWeightsError | None:
    """Return the error for tensors that can't be converted: kind of problem -> keys, or lines about them.

    The kinds are those of the table above, and `twice` for parameters that come from several places.
    """
    lines = [f"The checkpoint holds {text}. Take one of them out." for text in problems.get("twice", ())[:3]]
    for kind, (what, advice) in _TEXTS.items():
        listed = list(dict.fromkeys(problems.get(kind, ())))
        if kind not in ("failed", "misfits"):
            listed = compress(sorted(listed, key=dot_natural_key))
        is_told = kind == "failed" and (problems.get("incomplete") or problems.get("quantized"))  # the reason
        if listed and not is_told:
            more = [f"and {len(listed) - 10} more"] if len(listed) > 10 else []
            lines += [what, *(f"  {line}" for line in [*listed[:10], *more]), advice]
    return PatchedWeightsError("\n".join(lines)) if lines else None


def conversion_error(transform: WeightTransform, targets: Sequence[str], reason: str) -> PatchedWeightsError:
    """Return the error for a conversion of a patcher that raises."""
    return PatchedWeightsError(
        f"{describe(transform)} failed for {', '.join(targets[:3])}: {reason}\n"
        "Check the patterns, the order of the sources and the operations of this conversion."
    )


def partial_match_error(
    transform: WeightTransform, inside: Sequence[str], misfits: Sequence[str]
) -> PatchedWeightsError:
    """Return the error for a conversion of a patcher with targets inside and outside of the replaced modules."""
    replaced, others = ("".join(f"  {line}\n" for line in lines[:5]) for lines in (inside, misfits))
    return PatchedWeightsError(
        f"{describe(transform)} makes parameters of modules that the patcher replaces:\n{replaced}"
        f"and of others, which the checkpoint's own tensors don't fit:\n{others}"
        "Replace those modules as well, or take a checkpoint that fits them: there a conversion runs only if nothing "
        "else can fill the parameter."
    )
