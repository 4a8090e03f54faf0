"""What of a checkpoint doesn't fit the model that it is routed into, and the text of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.transforms import describe
from patcher.patterns import compress


@dataclass(eq=False)
class Unfit:
    """What doesn't fit of the tensors that are joined.

    Attributes:
        twice: parameters that come from several places, and from which.
        companions: keys of what a quantizer has put beside weights.
        failed: why conversions of transformers raise.
        lacking: what the checkpoint has only other parts of.
        stock_lacks: the same, where transformers can't read the parts either.
        misfits: parts of other shapes.
    """

    twice: list[str] = field(default_factory=list)
    companions: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    stock_lacks: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def error(self) -> PatchedWeightsError | None:
        """The error for all of it."""
        lines = [f"The checkpoint holds {text}. Take one of them out." for text in self.twice[:3]]
        if self.companions:
            lines.append("The checkpoint is quantized: it has more than the weights that a fusion takes:")
            lines += [f"  {key}" for key in compress(self.companions)[:5]]
            lines.append("Fuse the full-precision checkpoint, and quantize that while it loads.")
        if self.failed:
            lines.append("Conversions of this load fail for weights that a fusion takes:")
            lines += [f"  {reason}" for reason in dict.fromkeys(self.failed)][:5]
            lines.append(
                "If the checkpoint is quantized, fuse the full-precision one, and quantize that while it loads."
            )
        if lacking := dict.fromkeys([*self.lacking, *self.stock_lacks]):
            lines.append(
                "Parameters of the patched model are made of tensors of which the checkpoint doesn't have all. It "
                "lacks:"
            )
            lines += [f"  {key}" for key in compress(sorted(lacking, key=dot_natural_key))]
            lines.append(
                "Take a checkpoint that has them: transformers can't convert this one either."
                if self.stock_lacks
                else "Take a checkpoint that has them; or load this one without the patcher, which initialises them, "
                "save that, and load it with the patcher."
            )
        if self.misfits and not self.stock_lacks:
            lines.append("Tensors that are joined don't have the shapes that the model has for them:")
            lines += [f"  {line}" for line in self.misfits[:5]]
            lines.append(
                "Take a checkpoint that fits the config; or load this one without the patcher, with "
                "ignore_mismatched_sizes=True, save that, and load it with the patcher."
            )
        return PatchedWeightsError("\n".join(lines)) if lines else None


def failure(transform: WeightTransform, targets: Sequence[str], reason: str) -> PatchedWeightsError:
    """The error for a conversion of a patcher that raises."""
    return PatchedWeightsError(
        f"{describe(transform)} failed for {', '.join(targets[:3])}: {reason}\n"
        "Check the patterns, the order of the sources and the operations of this conversion."
    )


def inside_and_outside(
    transform: WeightTransform, within: Sequence[str], misfits: Sequence[str]
) -> PatchedWeightsError:
    """The error for a conversion of a patcher whose targets are in what it replaces, and where it can't stay out."""
    replaced, others = ("".join(f"  {line}\n" for line in lines[:5]) for lines in (within, misfits))
    return PatchedWeightsError(
        f"{describe(transform)} makes parameters of modules that the patcher replaces:\n{replaced}"
        f"and of others, which the checkpoint's own tensors don't fit:\n{others}"
        "Replace those modules as well, or take a checkpoint that fits them: there a conversion runs only if nothing "
        "else can fill the parameter."
    )
