"""What a checkpoint holds, by name, shape and dtype, without reading a weight.

Of a safetensors file the header is read, of a sharded checkpoint the index and the headers of the shards that are
there, of a `.bin` file the structure. Of a repo on the hub nothing else is fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patcher.checkpoints.weight_files import whole_names
from patcher.compat.models import str_to_torch_dtype
from patcher.errors import InvalidPatcherError


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint, on the meta device.

    Attributes:
        where: the file or repo that was asked.
        tensors: key -> a tensor without storage.
        unknown: the keys whose shapes nobody said: those of an index whose shards aren't there.
    """

    where: str
    tensors: dict[str, torch.Tensor]
    unknown: frozenset[str] = frozenset()


def headers_of(
    source: str | os.PathLike[str], *, subfolder: str = "", variant: str | None = None, **hub: Any
) -> Headers:
    """The headers of a folder, a file, an index or a repo.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"norm.weight": torch.ones(64)}, Path(folder, "model.safetensors"))
    ...     headers_of(folder).tensors
    {'norm.weight': tensor(..., device='meta', size=(64,))}

    Args:
        source: a folder, a file, an index or a repo id.
        subfolder: where in the folder or repo the checkpoint is.
        variant: of the file names, as `from_pretrained` takes it.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` of a repo.

    Raises:
        InvalidPatcherError: there is no checkpoint, or none that can be read by name and shape.
    """
    path = Path(source)
    if path.is_file():
        return _headers_of_file(path)
    names = whole_names(variant)
    if not path.is_dir():
        return _headers_of_repo(str(source), subfolder, names, hub)
    for name in names:
        if (path / subfolder / name).is_file():
            return _headers_of_file(path / subfolder / name)
    raise InvalidPatcherError(
        f"{path / subfolder} has no checkpoint: none of {', '.join(names)}. "
        "Pass checkpoint=, a folder, an index or a mapping of keys to shapes, or a config in place of the folder."
    )


def headers_of_mapping(tensors: Mapping[str, Any]) -> Headers:
    """Headers from key -> shape, or -> anything that has a shape; None stands for one that isn't known.

    >>> headers_of_mapping({"norm.weight": (64,), "bias": None}).unknown
    frozenset({'bias'})

    Raises:
        InvalidPatcherError: a value is no shape.
    """
    shapes = {key: getattr(value, "shape", value) for key, value in tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        dtype = getattr(value, "dtype", torch.float32)
        try:
            found[key] = torch.empty(tuple(shapes[key] or ()), dtype=dtype, device="meta")
        except (TypeError, RuntimeError) as error:
            raise InvalidPatcherError(
                f"checkpoint= maps keys to shapes, found {value!r} for {key!r}; write {{{key!r}: (64, 64)}}."
            ) from error
    return Headers("the given shapes", found, frozenset(key for key, shape in shapes.items() if shape is None))


def _headers_of_file(path: Path) -> Headers:
    if not path.name.endswith(".index.json"):
        return Headers(str(path), _tensors_of_file(path))
    tensors: dict[str, torch.Tensor] = {}
    unknown: set[str] = set()
    for name, keys in _shards(path).items():
        if (path.parent / name).is_file():
            tensors.update(_tensors_of_file(path.parent / name))
        else:
            tensors.update((key, torch.empty((), device="meta")) for key in keys)
            unknown.update(keys)
    return Headers(str(path), tensors, frozenset(unknown))


def _shards(index: Path) -> dict[str, list[str]]:
    """shard -> its keys."""
    shards: dict[str, list[str]] = {}
    try:
        for key, name in json.loads(index.read_text())["weight_map"].items():
            shards.setdefault(name, []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidPatcherError(f"{index} is no index of a checkpoint: {error!r}. Fetch it again.") from error
    return shards


def _tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from huggingface_hub import parse_local_safetensors_file_metadata
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            return _tensors(parse_local_safetensors_file_metadata(path))
        except (SafetensorsParsingError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidPatcherError(
                f"{path} has no header of a safetensors file: {error}. Fetch it again."
            ) from error
    if path.suffix not in (".bin", ".pt", ".pth"):
        raise InvalidPatcherError(
            f"{path} is no checkpoint that can be read by name and shape; "
            "pass a .safetensors or .bin file, or an index."
        )
    try:
        held = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except RuntimeError:  # written before torch 1.6, as no archive that can be mapped
        held = torch.load(path, map_location="meta", weights_only=True)
    return {key: value.to("meta") for key, value in held.items() if isinstance(value, torch.Tensor)}


def _tensors(metadata: Any) -> dict[str, torch.Tensor]:
    """What the header of one safetensors file names. What torch has no type for counts as bytes."""
    return {
        key: torch.empty(tuple(info.shape), dtype=str_to_torch_dtype.get(info.dtype, torch.uint8), device="meta")
        for key, info in metadata.tensors.items()
    }


def _headers_of_repo(repo: str, subfolder: str, names: list[str], hub: Mapping[str, Any]) -> Headers:
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    def below(name: str) -> str:
        return f"{subfolder}/{name}" if subfolder else name

    places: dict[str, Any] = {"revision": hub.get("revision"), "cache_dir": hub.get("cache_dir")}
    if hub.get("local_files_only") or constants.HF_HUB_OFFLINE:  # what was downloaded before
        for name in names:
            found = try_to_load_from_cache(repo, below(name), **places)
            if isinstance(found, str):
                return _headers_of_file(Path(found))
        raise InvalidPatcherError(
            f"{repo} is no folder, its checkpoint isn't in the cache, and nothing may be fetched (offline). "
            "Pass a folder, or a config."
        )
    token, api = hub.get("token"), HfApi()

    def parsed(name: str) -> dict[str, torch.Tensor]:
        revision = hub.get("revision")
        return _tensors(api.parse_safetensors_file_metadata(repo, below(name), revision=revision, token=token))

    whole, index = names[:2]
    try:
        return Headers(f"{repo} ({whole})", parsed(whole))
    except EntryNotFoundError:
        pass
    try:
        fetched = hf_hub_download(repo, below(index), token=token, **places)
    except EntryNotFoundError as error:
        raise InvalidPatcherError(
            f"{repo} has no {whole} and no {index}, and of files of another kind the weights can't be left out. "
            "Download the repo, and pass the folder."
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(parsed, _shards(Path(fetched))):
            tensors.update(part)
    return Headers(f"{repo} ({index})", tensors)
