"""The files that hold the weights of a model, by name: those of transformers, and those of a runtime layout."""

from __future__ import annotations

import re

#: The variant as which weights in a runtime layout are written, so that nobody who looks for the default names, and
#: knows nothing of the layout, finds them.
VARIANT = "patcher"

_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.(?:safetensors|bin)\Z)")


def whole_names(variant: str | None = None, use_safetensors: bool | None = None) -> list[str]:
    """The names under which a whole checkpoint is looked for, a file or the index of several, the first one first.

    >>> whole_names("fp16")[:2]
    ['model.fp16.safetensors', 'model.safetensors.index.fp16.json']
    """
    names = _NAMES if use_safetensors is None else _NAMES[:2] if use_safetensors else _NAMES[2:]
    return [f".{variant}.".join(name.rsplit(".", 1)) if variant else name for name in names]


def is_default(name: str) -> bool:
    """Whether a file is one that transformers looks for, or a shard of it, where no variant is asked for."""
    return _SHARD.sub("", name) in _NAMES


def is_layout(name: str) -> bool:
    """Whether a file belongs to weights in a runtime layout.

    >>> is_layout("model.patcher-00001-of-00002.safetensors"), is_layout("model.safetensors")
    (True, False)
    """
    return _SHARD.sub("", name) in whole_names(VARIANT, use_safetensors=True)
