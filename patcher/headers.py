"""What a checkpoint holds, by name, shape and dtype, without reading a weight.

Of a safetensors file the header is read, of a sharded checkpoint the index and the headers of the shards that are
there, of a `.bin` file the structure. Of a repo on the hub nothing else is fetched.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patcher.errors import InvalidPatcherError

__all__ = ["Headers", "headers_of", "headers_of_mapping"]

# https://huggingface.co/docs/safetensors: the names of the format. What torch has no name for counts as bytes.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# A header is 100 MB at most: the format's own limit.
_LONGEST = 100_000_000


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

    ```python
    headers_of("HuggingFaceTB/SmolLM2-135M").tensors["model.norm.weight"].shape
    ```

    Raises:
        InvalidPatcherError: there is no checkpoint, or none that can be read by name and shape.
    """
    path = Path(source)
    if path.is_file():
        return _headers_of_file(path)
    if path.is_dir():
        return _headers_of_folder(path / subfolder, variant)
    cached = _cached_folder(str(source), subfolder, variant, hub)
    if cached is not None:
        return _headers_of_folder(cached, variant)
    return _headers_of_repo(str(source), subfolder, variant, hub)


def headers_of_mapping(tensors: Mapping[str, Any]) -> Headers:
    """Headers from key -> shape, or -> anything that has a shape; None stands for one that isn't known."""
    found: dict[str, torch.Tensor] = {}
    unknown = set()
    for key, value in tensors.items():
        shape = getattr(value, "shape", value)
        if shape is None:
            unknown.add(key)
        try:
            found[key] = _tensor(tuple(shape or ()), getattr(value, "dtype", torch.float32))
        except (TypeError, RuntimeError) as error:
            raise InvalidPatcherError(
                f"checkpoint= maps keys to shapes, found {value!r} for {key!r}; write {{{key!r}: (64, 64)}}."
            ) from error
    return Headers("the given shapes", found, frozenset(unknown))


def _tensor(shape: Iterable[int], dtype: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype if isinstance(dtype, torch.dtype) else torch.uint8, device="meta")


# --- files ---------------------------------------------------------------------------------------------------------


def _headers_of_folder(folder: Path, variant: str | None) -> Headers:
    for name in _NAMES:
        if (folder / _varied(name, variant)).is_file():
            return _headers_of_file(folder / _varied(name, variant))
    raise InvalidPatcherError(
        f"{folder} has no checkpoint: none of {', '.join(_varied(name, variant) for name in _NAMES)}. "
        "Pass checkpoint=, a folder, an index or a mapping of keys to shapes, or a config in place of the folder."
    )


def _varied(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _headers_of_file(path: Path) -> Headers:
    if path.name.endswith(".index.json"):
        return _headers_of_index(path)
    return Headers(str(path), _tensors_of_file(path))


def _tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST + 1
            text = file.read(length) if length <= _LONGEST else b""
        return _tensors_of_header(text, str(path))
    if path.suffix in (".bin", ".pt", ".pth"):
        return _tensors_of_pickle(path)
    raise InvalidPatcherError(
        f"{path} is no checkpoint that can be read by name and shape; pass a .safetensors or .bin file, or an index."
    )


def _tensors_of_header(text: bytes, where: str) -> dict[str, torch.Tensor]:
    try:
        entries = json.loads(text)
        return {
            key: _tensor(entry["shape"], _DTYPES.get(entry["dtype"]))
            for key, entry in entries.items()
            if key != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidPatcherError(f"{where} has no header of a safetensors file: {error}. Fetch it again.") from error


def _tensors_of_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        held = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except RuntimeError:  # written before torch 1.6, as no archive that can be mapped
        held = torch.load(path, map_location="meta", weights_only=True)
    return {key: value.to("meta") for key, value in held.items() if isinstance(value, torch.Tensor)}


def _headers_of_index(path: Path) -> Headers:
    shards = _shards(path.read_text(), str(path))
    tensors: dict[str, torch.Tensor] = {}
    unknown: set[str] = set()
    for name, keys in shards.items():
        if (path.parent / name).is_file():
            held = _tensors_of_file(path.parent / name)
            tensors.update((key, held[key]) for key in held)
        else:
            tensors.update((key, _tensor((), torch.float32)) for key in keys)
            unknown.update(keys)
    return Headers(str(path), tensors, frozenset(unknown))


def _shards(text: str, where: str) -> dict[str, list[str]]:
    """shard -> its keys."""
    shards: dict[str, list[str]] = {}
    try:
        for key, name in json.loads(text)["weight_map"].items():
            shards.setdefault(name, []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidPatcherError(f"{where} is no index of a checkpoint: {error!r}. Fetch it again.") from error
    return shards


# --- the hub -------------------------------------------------------------------------------------------------------


def _cached_folder(repo: str, subfolder: str, variant: str | None, hub: Mapping[str, Any]) -> Path | None:
    """The folder of a repo that was downloaded before, where nothing may be fetched."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not (hub.get("local_files_only") or constants.HF_HUB_OFFLINE):
        return None
    for name in _NAMES:
        file = "/".join(part for part in (subfolder, _varied(name, variant)) if part)
        found = try_to_load_from_cache(repo, file, cache_dir=hub.get("cache_dir"), revision=hub.get("revision"))
        if isinstance(found, str):
            return Path(found).parent
    raise InvalidPatcherError(
        f"{repo} is no folder, its checkpoint isn't in the cache, and nothing may be fetched (offline). "
        "Pass a folder, or a config."
    )


def _headers_of_repo(repo: str, subfolder: str, variant: str | None, hub: Mapping[str, Any]) -> Headers:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    options: dict[str, Any] = {"revision": hub.get("revision"), "token": hub.get("token")}
    api = HfApi()

    def parsed(name: str) -> dict[str, torch.Tensor]:
        metadata = api.parse_safetensors_file_metadata(repo, _below(subfolder, name), **options)
        return {key: _tensor(info.shape, _DTYPES.get(info.dtype)) for key, info in metadata.tensors.items()}

    whole, index = (_varied(name, variant) for name in _NAMES[:2])
    try:
        return Headers(f"{repo} ({whole})", parsed(whole))
    except EntryNotFoundError:
        pass
    try:
        fetched = hf_hub_download(repo, _below(subfolder, index), cache_dir=hub.get("cache_dir"), **options)
    except EntryNotFoundError as error:
        raise InvalidPatcherError(
            f"{repo} has no {whole} and no {index}, and of files of another kind the weights can't be left out. "
            "Download the repo, and pass the folder."
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(parsed, _shards(Path(fetched).read_text(), f"{repo}/{index}")):
            tensors.update(part)
    return Headers(f"{repo} ({index})", tensors)


def _below(subfolder: str, name: str) -> str:
    return f"{subfolder}/{name}" if subfolder else name
