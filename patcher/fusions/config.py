"""`fusion_config` of a `config.json`: which of our fusions a checkpoint was saved with, by name.

```json
"fusion_config": {"patcher": ["qkv", "gate_up"]}
```

transformers knows no fusion called "patcher", so without this package such a config is refused. What keeps the weights
beside it from being loaded as others, whatever config is given, is the name of their file: see
`patcher.loading.layout_on_disk`. Names are all that is ever read from there; a family that another package registers
is named with it, `"acme-fusions/stacked"`, and imported if that is installed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion
from patcher.fusions.families import name_in_config, named_in_config

KEY = "patcher"

#: the arguments of `from_pretrained` that say where a file is
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def split_fusion_config(config: Any) -> tuple[list[str], Any]:
    """Our names in a `fusion_config`, and the rest of it, which is transformers' own.

    Raises:
        InvalidPatcherError: it isn't a mapping, or what it has under our key isn't a list of known names.
    """
    if config and not isinstance(config, Mapping):  # what is empty transformers takes for none
        raise InvalidPatcherError(
            f"fusion_config maps names of fusions to True, False or options, found {reprlib.repr(config)} "
            f'({type(config).__name__}); write {{"{KEY}": ["qkv"]}} for fusions of patcher, or '
            '{"patch_embeddings": True} for one of transformers.'
        )
    if not isinstance(config, Mapping) or KEY not in config:
        return [], config
    names = config[KEY]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidPatcherError(
            f"fusion_config: {KEY!r} holds a list of names of fusions, found {reprlib.repr(names)} "
            f'({type(names).__name__}); write {{"{KEY}": ["qkv"]}}.'
        )
    return [named_in_config(name) for name in names], {key: value for key, value in config.items() if key != KEY}


def names_in_file(path: Any, options: Mapping[str, Any]) -> list[str]:
    """Our names in the `config.json` of a checkpoint, whatever the config in memory says by now.

    Args:
        path: what `from_pretrained` loads.
        options: its keyword arguments, some of which say where on the hub the file is.

    Raises:
        InvalidPatcherError: something under our key that isn't a list of names that are known.
    """
    if path is None:
        return []
    try:
        found, _ = PretrainedConfig.get_config_dict(path, **{key: options[key] for key in _WHERE if key in options})
    except Exception:  # weights alone, or a file that says nothing, and a config from elsewhere
        return []
    return split_fusion_config(found.get("fusion_config"))[0]


def names_fusions(config: Any) -> bool:
    """Whether a model's config has something under our key."""
    found = getattr(config, "fusion_config", None)
    return isinstance(found, Mapping) and KEY in found


def with_fusion_names(config: Any, fusions: Iterable[str | Fusion]) -> dict[str, Any]:
    """A `fusion_config` that names these fusions of ours and no others, beside those of transformers."""
    rest = dict(split_fusion_config(config)[1] or {})
    names = [name_in_config(fusion) for fusion in fusions if isinstance(fusion, str)]
    return {**rest, KEY: names} if names else rest
