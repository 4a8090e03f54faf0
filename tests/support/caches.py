"""What models call the cache that they take: `cache` from transformers 5.24 on, `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import LlamaModel

CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaModel.forward).parameters)


def cache_in(arguments: dict[str, Any]) -> Any:
    """The cache in the keyword arguments of a forward, None if there is none."""
    return arguments.get(CACHE)
