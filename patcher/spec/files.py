"""A patcher as a file: `Patcher.save`, `Patcher.load`, `Patcher.push_to_hub`. The file is the JSON of `to_dict`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from patcher.errors import InvalidPatcherError

FILE_NAME = "patcher.json"
#: A patcher has names and numbers. What is larger isn't one.
_MOST_BYTES = 10_000_000


def write(data: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write the data of a patcher into a folder, which is made if there is none."""
    path = Path(folder, FILE_NAME)
    if path.parent.exists() and not path.parent.is_dir():
        raise InvalidPatcherError(f"{path.parent} is a file; a patcher is saved in a folder, as {FILE_NAME}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    beside = path.with_suffix(f".{os.getpid()}.part")  # whoever reads meanwhile finds a whole file
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read(folder_or_repo: str | os.PathLike[str], places: Mapping[str, Any]) -> Any:
    """The data in the file of a folder, or of a repo on the hub.

    Args:
        places: where in the repo: what `hf_hub_download` takes.

    Raises:
        InvalidPatcherError: there is no such file, or it isn't JSON.
    """
    path = Path(folder_or_repo, FILE_NAME)
    if not Path(folder_or_repo).is_dir():
        try:
            path = Path(hf_hub_download(os.fspath(folder_or_repo), FILE_NAME, **places))
        except (OSError, ValueError, RuntimeError) as error:  # of the hub: not found, no access, no network, no name
            raise InvalidPatcherError(
                f"{os.fspath(folder_or_repo)!r} is not a folder, and no {FILE_NAME} of such a repo on the hub can be "
                f"fetched ({type(error).__name__}: {' '.join(str(error).split())[:300]}). Write the path of a folder "
                "in which Patcher.save has put one."
            ) from error
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidPatcherError(
            f"{path} is not the file of a patcher ({type(error).__name__}: {str(error)[:300]}). Write it with "
            "Patcher.save."
        ) from error


def push(path: Path, repo_id: str, **options: Any) -> str:
    """Put the file of a patcher into a repo on the hub, which is made if there is none.

    Args:
        options: `token`, `private`, `revision`, `commit_message`.

    Returns:
        The address of the commit.
    """
    api = HfApi(token=options.pop("token", None))
    private, message = options.pop("private", None), options.pop("commit_message", f"Upload {FILE_NAME}")
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    return str(
        api.upload_file(path_or_fileobj=path, path_in_repo=FILE_NAME, repo_id=repo, commit_message=message, **options)
    )
