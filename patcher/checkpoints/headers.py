"""What a checkpoint holds, by name, shape and dtype, without reading a weight.

Of a safetensors file the header is read, of a sharded checkpoint the index and the headers of the shards, of a `.bin`
file the structure. Of a repo on the hub nothing else is fetched. Files may come from anyone: they are opened by what a
load opens them with, so that what it wouldn't read isn't taken here, and nothing is opened that isn't a file.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import safe_open

from patcher.checkpoints.weight_files import whole_names
from patcher.compat.files import shards_of_index
from patcher.compat.models import str_to_torch_dtype
from patcher.errors import InvalidPatcherError

#: No index, no header and no pickle beside the weights is larger: safetensors has the same limit.
_LARGEST = 100_000_000
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint, on the meta device.

    Attributes:
        where: the file or repo.
        tensors: key -> a tensor without storage.
        unknown: the keys without known shapes: those of an index whose shards aren't there.
        files: those that were opened.
    """

    where: str
    tensors: dict[str, torch.Tensor]
    unknown: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()


def headers_of(
    source: str | os.PathLike[str],
    *,
    subfolder: str = "",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    named: Any = None,
    **hub: Any,
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
        use_safetensors: which kinds of files are looked for, as `from_pretrained` takes it.
        named: the file in the folder that its config names, if it does.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` of a repo.

    Raises:
        InvalidPatcherError: there is no checkpoint, or none that can be read by name and shape.
    """
    path = Path(source)
    if path.is_file():
        return _headers_of_file(path, by_name=True)
    if named is not None and not (path.is_dir() and _is_below(named) and named.endswith((".safetensors", _INDEX))):
        raise InvalidPatcherError(
            f"the config of {source} names {named!r} as transformers_weights; it must be a safetensors file, or the "
            "index of some, in the folder. Of a repo on the hub download the folder, and pass it."
        )
    names = whole_names(variant, use_safetensors)
    if not path.is_dir():
        if path.exists() or path.is_symlink():
            raise _no_file(path)
        return _headers_of_repo(str(source), subfolder, names, hub)
    for name in [named] if named is not None else names:
        if (path / subfolder / name).is_file():
            return _headers_of_file(path / subfolder / name)
    raise InvalidPatcherError(
        f"{path / subfolder} has no checkpoint: none of {', '.join([named] if named is not None else names)}. "
        "Pass checkpoint=, a folder, an index or a mapping of keys to shapes, or a config in place of the folder."
    )


def headers_of_mapping(tensors: Mapping[str, Any]) -> Headers:
    """Headers from key -> shape, or -> anything that has a shape; None for one that isn't known.

    >>> headers_of_mapping({"norm.weight": (64,), "bias": None}).unknown
    frozenset({'bias'})

    Raises:
        InvalidPatcherError: a value isn't a shape.
    """
    shapes = {key: getattr(value, "shape", value) for key, value in tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        try:
            if not isinstance(key, str):
                raise TypeError(f"a key is a name, found {key!r}")
            found[key] = _on_meta(() if shapes[key] is None else shapes[key], getattr(value, "dtype", torch.float32))
        except Exception as error:
            raise InvalidPatcherError(
                f"checkpoint= maps keys to shapes, found {value!r} for {key!r} ({_reason(error)}); "
                f"write {{{key!r}: (64, 64)}}."
            ) from error
    return Headers("the given shapes", found, frozenset(key for key, shape in shapes.items() if shape is None))


def _on_meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _headers_of_file(path: Path, *, by_name: bool = False) -> Headers:
    """The headers of a file or an index.

    Args:
        by_name: whether shards may be missing: whoever names an index means it. A load of a folder needs them all.
    """
    if not path.name.endswith(".index.json"):
        return Headers(str(path), _tensors_of_file(path), files=(str(path),))
    tensors: dict[str, torch.Tensor] = {}
    unknown: set[str] = set()
    files: list[str] = []
    shards = _shards(path)
    for name, keys in shards.items():
        file = path.parent / name
        if by_name and not file.exists() and not file.is_symlink():
            tensors.update((key, torch.empty((), device="meta")) for key in keys)
            unknown.update(keys)
        elif PurePath(name).suffix != PurePath(next(iter(shards))).suffix:  # a load goes by the first one
            raise InvalidPatcherError(f"{path} names files of several kinds: {', '.join(shards)}. Fetch it again.")
        else:
            tensors.update(_tensors_of_file(file, f"; to plan by names alone pass checkpoint={str(path)!r}"))
            files.append(str(file))
    return Headers(str(path), tensors, frozenset(unknown), tuple(files))


def _shards(index: Path) -> dict[str, list[str]]:
    """shard -> its keys, in the order in which a load reads them."""
    _check_file(index)
    try:
        shards = shards_of_index(index)
        if not shards:
            raise ValueError("it names no file")
        outside = [name for name in shards if not _is_below(name)]
    except Exception as error:
        raise InvalidPatcherError(
            f"{index} isn't an index of a checkpoint: {_reason(error)}. Fetch it again."
        ) from error
    if outside:
        raise InvalidPatcherError(
            f"{index} isn't an index of a checkpoint: it names files outside of its folder, {', '.join(outside[:3])}. "
            "Fetch it again, from a source that you trust."
        )
    return shards


def _is_below(name: Any) -> bool:
    """Whether a name leads to where it is below the folder that it is in."""
    return isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


def _tensors_of_file(path: Path, hint: str = "") -> dict[str, torch.Tensor]:
    if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
        raise InvalidPatcherError(
            f"{path} isn't a checkpoint that can be read by name and shape; "
            "pass a .safetensors or .bin file, or an index."
        )
    if not path.exists():
        raise InvalidPatcherError(f"{path} is missing, and a load needs it: fetch it{hint}.")
    if path.suffix == ".safetensors":
        _check_file(path, largest=None)
        try:
            with safe_open(path, framework="np") as file:  # as "pt", but it maps a file larger than the memory too
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                return {
                    key: _on_meta(part.get_shape(), str_to_torch_dtype[part.get_dtype()])
                    for key, part in slices.items()
                }
        except Exception as error:
            raise InvalidPatcherError(
                f"{path} has no header of a safetensors file that a load could read: {_reason(error)}. Fetch it again."
            ) from error
    _check_file(path, largest=None)
    try:
        if zipped := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                if any(item.compress_type for item in members):
                    raise ValueError("a part of it is compressed, as torch writes none")
                if any(item.file_size > _LARGEST for item in members if item.filename.endswith(".pkl")):
                    raise ValueError("its pickle is larger than any model needs")
        # What torch < 1.6 has written isn't an archive, and can't be mapped. What can is mapped: on the meta device
        # a tensor that goes beyond the data which the file has for it would pass.
        held = torch.load(path, map_location="cpu" if zipped else "meta", mmap=zipped, weights_only=True)
        if others := [key for key, value in held.items() if not isinstance(key, str) or not torch.is_tensor(value)]:
            raise TypeError(f"a state dict maps names to tensors, and {_reason(others[0])} isn't so")
        return {key: value.to("meta") for key, value in held.items()}
    except Exception as error:
        raise InvalidPatcherError(
            f"{path} isn't a state dict that a load could read: {_reason(error)}. Fetch it again, from a source that "
            "you trust."
        ) from error


def _check_file(path: Path, largest: int | None = _LARGEST) -> None:
    """Raise for what isn't a regular file: whoever opens a pipe waits, and a device has no end."""
    if not path.is_file():
        raise _no_file(path)
    if largest is not None and path.stat().st_size > largest:
        raise InvalidPatcherError(f"{path} has more than {largest:,} bytes, which no file of its kind has.")


def _no_file(path: Path) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"{path} isn't a regular file, but a folder, a pipe, a device or a link that leads nowhere. Fetch it again."
    )


def _reason(error: object) -> str:
    text = " ".join(str(error).split()) if isinstance(error, BaseException) else repr(error)
    return f"{type(error).__name__}: {text[:300]}"


def _tensors(metadata: Any) -> dict[str, torch.Tensor]:
    """What a header names that the hub gave, which no library has checked against its file.

    Raises:
        InvalidPatcherError: a load would not read it.
    """
    tensors, end = {}, 0
    try:
        for key, info in sorted(metadata.tensors.items(), key=lambda item: tuple(item[1].data_offsets)):
            tensor = tensors[key] = _on_meta(info.shape, str_to_torch_dtype[info.dtype])
            begin, end = end, end + tensor.numel() * tensor.element_size()
            if tuple(info.data_offsets) != (begin, end):
                raise ValueError(f"{key} lies at {info.data_offsets}, and not where the tensor before it ends")
    except Exception as error:
        raise InvalidPatcherError(
            f"the file on the hub has no header that a load could read: {_reason(error)}. Pass another revision=."
        ) from error
    return tensors


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
            f"{repo} isn't a folder, its checkpoint isn't in the cache, and nothing may be fetched (offline). "
            "Pass a folder, or a config."
        )
    token, api = hub.get("token"), HfApi()

    def parsed(name: str) -> dict[str, torch.Tensor]:
        revision = hub.get("revision")
        return _tensors(api.parse_safetensors_file_metadata(repo, below(name), revision=revision, token=token))

    whole, index = names[:2]
    if not whole.endswith(".safetensors"):
        raise _of_another_kind(repo, names)
    try:
        return Headers(f"{repo} ({whole})", parsed(whole))
    except EntryNotFoundError:
        pass
    try:
        fetched = hf_hub_download(repo, below(index), token=token, **places)
    except EntryNotFoundError as error:
        raise _of_another_kind(repo, names) from error
    tensors: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(parsed, _shards(Path(fetched))):
            tensors.update(part)
    return Headers(f"{repo} ({index})", tensors)


def _of_another_kind(repo: str, names: list[str]) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"{repo} has no {names[0]} and no {names[1]}, and of files of another kind the weights can't be left out. "
        "Download the repo, and pass the folder."
    )
