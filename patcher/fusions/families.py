"""The families that have a name, and what a fusion config or a Patcher means by it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion
from patcher.patterns import nearest

#: Families that a Patcher finds by name, and where they live: imported when they are asked for.
FAMILIES: dict[str, str] = {
    "gate_up": "patcher.fusions.gate_up:GateUp",
    "kv": "patcher.fusions.kv:KV",
    "patch_embeddings": "patcher.fusions.patch_embeddings:PatchEmbeddings",
    "qkv": "patcher.fusions.qkv:QKV",
    "sequential_experts": "patcher.fusions.sequential_experts:SequentialExperts",
}


def fusion_named(name: Any) -> Fusion:
    """The fusion called `name`, or the fusion itself.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    return name if isinstance(name, Fusion) else _family(name)()


def shortest(fusion: Any) -> str | Fusion:
    """The name of a fusion, where that says all there is to say of it; otherwise the object.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    found = fusion_named(fusion)
    known = found.name in FAMILIES and found == fusion_named(found.name)
    return found.name if known else found


def fusions_configured(name: Any, value: Any) -> list[str | Fusion]:
    """What one entry of a fusion config asks for.

    Raises:
        InvalidPatcherError: there is no such family, or it has no such option.
    """
    family = _family(name)
    if value is False:
        return []
    if value is True or (isinstance(value, Mapping) and not value):
        return [name]
    if not isinstance(value, Mapping):
        raise InvalidPatcherError(f"fusions: {name!r} takes True, False or a mapping of options, found {value!r}.")
    try:
        return [family(**value)]
    except TypeError as error:
        raise InvalidPatcherError(f"fusions: {name!r} doesn't take the options {dict(value)!r}: {error}.") from error


def _family(name: Any) -> type[Fusion]:
    if isinstance(name, str) and name in FAMILIES:
        home, _, cls = FAMILIES[name].partition(":")
        family: type[Fusion] = getattr(importlib.import_module(home), cls)
        return family
    known = ", ".join(repr(known) for known in FAMILIES)
    if not isinstance(name, str):
        hint = f"write a name ({known}) or an object of a Fusion subclass"
    elif len(names := re.split(r"[\s,|+]+", name.strip())) > 1:
        hint = f"write fusions={names!r}"
    elif close := nearest(name, FAMILIES):
        hint = f"did you mean {close[0]!r}? Known names: {known}"
    else:
        hint = f"known names: {known}; a family of your own is passed as an object of a Fusion subclass"
    raise InvalidPatcherError(f"fusions: {name!r} is no fusion; {hint}.")
