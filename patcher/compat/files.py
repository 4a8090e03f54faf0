"""The files of a checkpoint, as transformers finds and writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import get_checkpoint_shard_files, has_file as _has_file

_WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "token")


def has_file(path: str | os.PathLike[str], name: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder, or a repo on the hub, has a file; of the hub nothing else is requested.

    Args:
        options: the keyword arguments of `from_pretrained`, some of which say where the file is.
    """
    below = f"{options['subfolder']}/{name}" if options.get("subfolder") else name
    return bool(_has_file(path, below, **{key: options[key] for key in _WHERE if options.get(key) is not None}))


def shards_of_index(index: Path) -> dict[str, list[str]]:
    """The files that an index names, in the order in which a load reads them, and the keys in each.

    Raises:
        Exception: what a load raises where it isn't an index.
    """
    _, found = get_checkpoint_shard_files(str(index.parent), str(index))  # type: ignore[no-untyped-call]
    shards: dict[str, list[str]] = {name: [] for name in sorted(set(found["weight_map"].values()))}
    for key, name in found["weight_map"].items():
        shards[name].append(key)
    return shards
