"""`fusion_config` of a `config.json`: which of our fusions a checkpoint was saved with, by name.

```json
"fusion_config": {"patcher": ["qkv", "gate_up"]}
```

transformers knows no fusion called "patcher", so without this package such a checkpoint is refused instead of being
loaded with random weights. Names are all that is ever read from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion, fusions_configured

__all__ = ["split_fusion_config", "with_fusion_names"]

KEY = "patcher"


def split_fusion_config(config: Any) -> tuple[list[str], Any]:
    """Our names in a `fusion_config`, and the rest of it, which is transformers' own.

    Raises:
        InvalidPatcherError: something under our key that is no list of names that are known.
    """
    if not isinstance(config, Mapping) or KEY not in config:
        return [], config
    names = config[KEY]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidPatcherError(f"fusion_config: {KEY!r} holds a list of names of fusions, found {names!r}.")
    for name in names:
        fusions_configured(name, True)
    return list(names), {key: value for key, value in config.items() if key != KEY}


def with_fusion_names(config: Any, fusions: Iterable[str | Fusion]) -> dict[str, Any]:
    """A `fusion_config` that names our fusions besides what it says already."""
    return {**(config or {}), KEY: [fusion for fusion in fusions if isinstance(fusion, str)]}
