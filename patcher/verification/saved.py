"""What a patched model saves, beside what stock does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from patcher.expressions import search
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.patterns import compress
from patcher.verification.comparing import Pair, Stage, UncheckedError, said


def save_stage(pair: Pair, scratch: Path) -> Stage:
    """Save both, into `stock` and `patched` of an empty folder, and compare all tensors byte for byte.

    Only weights that the patcher declares as new may be in one and not in the other.
    """
    try:
        pair.stock.save_pretrained(scratch / "stock")
    except Exception as error:
        raise UncheckedError(f"stock can't be saved: {said(error)}") from None
    pair.ours.save_pretrained(scratch / "patched")
    stage = _compared("save", pair, _saved(scratch / "stock"), _saved(scratch / "patched"))
    # But for the code that a class brings with it: `register_for_auto_class`.
    names = [
        sorted(path.name for path in (scratch / one).iterdir() if path.suffix != ".py") for one in ("stock", "patched")
    ]
    if stage.passed and len(stage.figures) == 2 and names[0] != names[1]:
        return replace(stage, passed=False, message=f"the files are {', '.join(names[1])}, not {', '.join(names[0])}")
    return stage


def weights_stage(pair: Pair) -> Stage:
    """The same of what either would save, without a file."""
    if any(parameter.is_meta for model in (pair.stock, pair.ours) for parameter in model.parameters()):
        raise UncheckedError("weights that are offloaded are compared as files only")
    return _compared(
        "weights", pair, *(saved_state_dict(model, model.state_dict()) for model in (pair.stock, pair.ours))
    )


def _compared(name: str, pair: Pair, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> Stage:
    record = record_of(pair.ours)
    declared = [text for patcher in (record.patchers if record else ()) for text in patcher.new_weights]
    new = {key for key in found.keys() - expected.keys() if any(search(text, key) for text in declared)}
    wrong = [f"{key} is missing" for key in compress(expected.keys() - found.keys())]
    wrong += [f"{key} is not in the original" for key in compress(found.keys() - expected.keys() - new)]
    differing = [key for key in expected.keys() & found.keys() if not _equal_bytes(expected[key], found[key])]
    wrong += [f"{key} differs" for key in compress(sorted(differing))]
    figures = [("tensors", float(len(expected))), ("equal byte for byte", float(len(expected) - len(differing)))]
    figures += [("new", float(len(new)))] if new else []
    return Stage(name, not wrong, tuple(figures), message="; ".join(wrong))


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
