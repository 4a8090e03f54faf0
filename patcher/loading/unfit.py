"""What is said of a checkpoint that doesn't fit the model that it is routed into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.transforms import describe
from patcher.patterns import compress

_LACKS = "Parameters of the patched model are made of tensors of which the checkpoint doesn't have all. It lacks:"
#: What is wrong -> what is said before the tensors are listed, and what to do.
_TEXTS = {
    "quantized": (
        "The checkpoint is quantized, and it has these quantized, of which the patcher makes others:",
        "Fuse the full-precision checkpoint, and quantize that while it loads.",
    ),
    "unquantized": (
        "The checkpoint is quantized, and it has these in full precision, of which the patcher makes layers that are "
        "quantized then:",
        "Fuse the full-precision checkpoint, and quantize that while it loads.",
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
    """The error for tensors that become others and can't: what is wrong -> keys, or lines that say it of each.

    `twice` are parameters that come from several places, and from which; the others are those of the table above.
    """
    lines = [f"The checkpoint holds {text}. Take one of them out." for text in problems.get("twice", ())[:3]]
    for problem, (what, advice) in _TEXTS.items():
        listed = list(dict.fromkeys(problems.get(problem, ())))
        if problem not in ("failed", "misfits"):
            listed = compress(sorted(listed, key=dot_natural_key))
        if listed and not (problem == "failed" and problems.get("incomplete")):  # for that reason
            lines += [what, *(f"  {line}" for line in listed[:10]), advice]
    return PatchedWeightsError("\n".join(lines)) if lines else None


def failure(transform: WeightTransform, targets: Sequence[str], reason: str) -> PatchedWeightsError:
    """The error for a conversion of a patcher that raises."""
    return PatchedWeightsError(
        f"{describe(transform)} failed for {', '.join(targets[:3])}: {reason}\n"
        "Check the patterns, the order of the sources and the operations of this conversion."
    )


def partial_match_error(
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
