"""The names, shapes and dtypes of a checkpoint's tensors, without reading a weight.

Of a repo on the hub only headers and indices are downloaded. Files are untrusted: only regular files are opened, in
the way of a load, so that what a load would reject is rejected here too.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, parse_safetensors_file_metadata, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open

from patcher.compat.models import shards_of_index, str_to_torch_dtype
from patcher.errors import InvalidPatcherError

#: The variant of weight files in a runtime layout: a load that looks for the default names doesn't find them.
VARIANT = "patcher"

_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.(?:safetensors|bin)\Z)")
#: The limit of safetensors for headers; no index is larger.
_MAX_INDEX_BYTES = 100_000_000
_INDEX = ".safetensors.index.json"


def whole_names(variant: str | None = None, use_safetensors: bool | None = None) -> list[str]:
    """Return the file names of a whole checkpoint, a file or the index of shards, in the order of precedence.

    >>> whole_names("fp16")[:2]
    ['model.fp16.safetensors', 'model.safetensors.index.fp16.json']
    """
    names = _NAMES if use_safetensors is None else _NAMES[:2] if use_safetensors else _NAMES[2:]
    return [f".{variant}.".join(name.rsplit(".", 1)) if variant else name for name in names]


def is_default(name: str) -> bool:
    """Whether transformers loads the file, or the shards it belongs to, if no variant is requested."""
    return _SHARD.sub("", name) in _NAMES


def is_layout(name: str) -> bool:
    """Whether a weight file is in a runtime layout.

    >>> is_layout("model.patcher-00001-of-00002.safetensors"), is_layout("model.safetensors")
    (True, False)
    """
    return _SHARD.sub("", name) in whole_names(VARIANT, use_safetensors=True)


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint, on the meta device.

    Attributes:
        where: the file or repo.
        tensors: key -> meta tensor.
        files: the files that were opened.
    """

    where: str
    tensors: dict[str, torch.Tensor]
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
    """Read the headers of a folder, a file, an index or a repo.

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
        variant, use_safetensors: as in `from_pretrained`.
        named: the `transformers_weights` of the config, if it has that.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` of a repo.

    Raises:
        InvalidPatcherError: if there is no checkpoint that can be read.
    """
    path, names = Path(source), [named] if named is not None else whole_names(variant, use_safetensors)
    if named is not None and not (path.is_dir() and _is_below(named) and named.endswith((".safetensors", _INDEX))):
        raise InvalidPatcherError(
            f"the config of {source} names {named!r} as transformers_weights; it must be a safetensors file, or the "
            "index of some, in the folder. Of a repo on the hub download the folder, and pass it."
        )
    if not os.path.lexists(path):
        if not (hub.get("local_files_only") or constants.HF_HUB_OFFLINE):
            return _headers_of_repo(str(source), subfolder, names, hub)
        places = {"revision": hub.get("revision"), "cache_dir": hub.get("cache_dir")}
        config = try_to_load_from_cache(str(source), Path(subfolder, "config.json").as_posix(), **places)
        if not isinstance(config, str):
            raise InvalidPatcherError(
                f"{source} isn't a folder, it isn't in the cache, and nothing may be fetched (offline). Pass a "
                "folder, or a config."
            )
        path, subfolder = Path(config).parent, ""
    if not path.is_dir():
        return _headers_of_file(path)
    for name in names:
        if (path / subfolder / name).exists():
            return _headers_of_file(path / subfolder / name)
    raise InvalidPatcherError(
        f"{path / subfolder} has no checkpoint: none of {', '.join(names)}. "
        "Pass checkpoint=, a folder, a file or an index, or a config in place of the folder."
    )


def _on_meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _headers_of_file(path: Path) -> Headers:
    """Read the headers of a file, or of the shards of an index."""
    if not (".index." in path.name and path.suffix == ".json"):  # a variant is written before the suffix
        return Headers(str(path), _tensors_of_file(path), (str(path),))
    with _reading(path):
        shards = shards_of_index(path)
        if not shards or not all(map(_is_below, shards)) or len({PurePath(name).suffix for name in shards}) > 1:
            raise ValueError(f"it must name files of one kind, in its folder, found {', '.join(list(shards)[:3])}")
    files = [path.parent / name for name in shards]
    tensors = {key: tensor for file in files for key, tensor in _tensors_of_file(file).items()}
    return Headers(str(path), tensors, tuple(map(str, files)))


def _is_below(name: Any) -> bool:
    """Whether a file name can't lead out of its folder."""
    return isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Reject what isn't a regular file, as reading a pipe or a device may never end, and explain errors of a read."""
    try:
        if not path.is_file():
            raise ValueError("it isn't a regular file, but a folder, a pipe, a device or a link that leads nowhere")
        if path.suffix == ".json" and path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes, which no file of its kind has")
        yield
    except Exception as error:
        raise InvalidPatcherError(
            f"{path} can't be read as a load would read it: {_reason(error)}. Fetch it again, from a source that you "
            "trust."
        ) from error


def _tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
        raise InvalidPatcherError(
            f"{path} isn't a checkpoint that can be read by name and shape; "
            "pass a .safetensors or .bin file, or an index."
        )
    if not os.path.lexists(path):
        raise InvalidPatcherError(f"{path} is missing, and a load needs it: fetch it.")
    with _reading(path):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:  # unlike "pt", it maps files larger than the memory
                slices = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118
                return {key: _on_meta(part.get_shape(), str_to_torch_dtype[part.get_dtype()]) for key, part in slices}
        if zipped := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(item.compress_type for item in archive.infolist()):
                    raise ValueError("a part of it is compressed, as torch writes none")
        # A file of torch < 1.6 isn't an archive and can't be mapped. Others are mapped, since on the meta device
        # a tensor larger than its data in the file would go unnoticed.
        state_dict = torch.load(path, map_location="cpu" if zipped else "meta", mmap=zipped, weights_only=True)
        for key, value in state_dict.items():
            if not isinstance(key, str) or not torch.is_tensor(value):
                raise TypeError(f"a state dict maps names to tensors, and {_reason(key)} isn't so")
        return {key: value.to("meta") for key, value in state_dict.items()}


def _reason(error: object) -> str:
    text = " ".join(str(error).split()) if isinstance(error, BaseException) else repr(error)
    return f"{type(error).__name__}: {text[:300]}"


def _headers_of_repo(repo: str, subfolder: str, names: list[str], hub: Mapping[str, Any]) -> Headers:
    """Read the headers of a repo on the hub; nothing else of it is downloaded."""
    options: dict[str, Any] = {"revision": hub.get("revision"), "token": hub.get("token")}

    def tensors_of(name: str) -> dict[str, torch.Tensor]:
        tensors = parse_safetensors_file_metadata(repo, Path(subfolder, name).as_posix(), **options).tensors
        return {key: _on_meta(info.shape, str_to_torch_dtype[info.dtype]) for key, info in tensors.items()}

    whole, index, *_ = names
    try:
        with suppress(EntryNotFoundError):
            return Headers(f"{repo} ({whole})", tensors_of(whole))
        file = hf_hub_download(repo, index, subfolder=subfolder, cache_dir=hub.get("cache_dir"), **options)
        with ThreadPoolExecutor(8) as pool:
            shards = pool.map(tensors_of, shards_of_index(Path(file)))
        return Headers(f"{repo} ({index})", {key: value for tensors in shards for key, value in tensors.items()})
    except Exception as error:
        raise InvalidPatcherError(
            f"the headers of safetensors files of {repo} can't be read on the hub: {_reason(error)}. Download the "
            "repo, and pass the folder."
        ) from error
