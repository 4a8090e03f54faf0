"""`fusion_config` of a `config.json`: the names of the fusions of patcher that a checkpoint was saved with.

```json
"fusion_config": {"patcher": ["qkv", "gate_up"]}
```

transformers doesn't know a fusion called "patcher", so without this package it refuses such a config. The file name of
the weights keeps them from being loaded with another config: see `patcher.loading.layout_on_disk`. Only names are read
from the config; a family that another package registers is prefixed with it, `"acme-fusions/stacked"`, and imported if
that package is installed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion
from patcher.fusions.families import from_config_name, to_config_name

KEY = "patcher"

#: the arguments of `from_pretrained` that locate a file on the hub
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def split_fusion_config(config: Any) -> tuple[list[str], Any]:
    """Split a `fusion_config` into the names of fusions of patcher and the part that is for transformers.

    Raises:
        InvalidPatcherError: it isn't a mapping, or its entry "patcher" isn't a list of known names.
    """
    if config and not isinstance(config, Mapping):  # transformers ignores one that is empty
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
    return [from_config_name(name) for name in names], {key: value for key, value in config.items() if key != KEY}


def names_in_file(path: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the names of fusions in the `config.json` of a checkpoint; the config in memory may have changed.

    Args:
        path: the first argument of `from_pretrained`.
        options: its keyword arguments.

    Raises:
        InvalidPatcherError: the entry "patcher" isn't a list of known names.
    """
    if path is None:
        return []
    try:
        hub_options = {key: options[key] for key in _HUB_OPTIONS if key in options}
        config, _ = PretrainedConfig.get_config_dict(path, **hub_options)
    except Exception:  # there is no readable config beside the weights
        return []
    return split_fusion_config(config.get("fusion_config"))[0]


def names_fusions(config: Any) -> bool:
    """Whether the `fusion_config` of a model's config has an entry "patcher"."""
    fusion_config = getattr(config, "fusion_config", None)
    return isinstance(fusion_config, Mapping) and KEY in fusion_config


def with_fusion_names(config: Any, fusions: Iterable[str | Fusion]) -> dict[str, Any]:
    """Return a `fusion_config` with these names of fusions, and its entries for transformers."""
    others = dict(split_fusion_config(config)[1] or {})
    names = [to_config_name(fusion) for fusion in fusions if isinstance(fusion, str)]
    return {**others, KEY: names} if names else others
