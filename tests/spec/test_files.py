"""A patcher as a file: what is saved is read again, and what anyone may have written is read as by `from_dict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from torch import nn

from patcher import InvalidPatcherError, Patcher, forward_of, like
from tests.support.hub_uploads import Hub, taking_uploads
from tests.support.replacements import OwnMLP, OwnNorm


class Forward(nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states * self.weight


PATCHER = Patcher(
    {"LlamaMLP": OwnMLP, like("LlamaRMSNorm"): forward_of(Forward)},
    module_mapping={"model.norm": OwnNorm},
    fusions=["qkv"],
    new_weights="größe",
    name="mine",
    strict=False,
)
ALLOWED = [OwnMLP, Forward, OwnNorm]


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    assert PATCHER.save(folder) == folder / "patcher.json"
    assert Patcher.load(folder, allowed=ALLOWED) == PATCHER
    assert Patcher.load(str(folder), allowed=[f"{cls.__module__}:{cls.__qualname__}" for cls in ALLOWED]) == PATCHER
    assert "größe" in (folder / "patcher.json").read_text(encoding="utf-8")

    Patcher(fusions="kv").save(folder)
    assert Patcher.load(folder) == Patcher(fusions="kv")
    assert [path.name for path in folder.iterdir()] == ["patcher.json"]


def test_nothing_is_imported_that_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trapped_file.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patcher.json").write_text('{"schema": 1, "class_mapping": {"LlamaMLP": "trapped_file:Trap"}}')
    with pytest.raises(InvalidPatcherError, match=r"'trapped_file:Trap' is not on the list of what may be imported"):
        Patcher.load(tmp_path, allowed=ALLOWED)
    assert "trapped_file" not in sys.modules


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", r"patcher.json is not the file of a patcher \(JSONDecodeError"),
        (b"\xff\xfe", r"not the file of a patcher \(UnicodeDecodeError"),
        (b"[" * 100_000, r"not the file of a patcher \(RecursionError"),
        (b" " * 10_000_001, r"it has more than 10,000,000 bytes"),
        (b"[]", r"the data of a patcher"),
        (b'{"schema": 99}', r"this release reads schema 1, found 99"),
    ],
    ids=["empty", "no text", "deep", "long", "a list", "later"],
)
def test_a_file_that_is_none_says_so(tmp_path: Path, written: bytes, message: str) -> None:
    (tmp_path / "patcher.json").write_bytes(written)
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher.load(tmp_path)


def test_a_folder_without_one_and_a_repo_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidPatcherError, match=r"patcher.json is not the file of a patcher \(FileNotFoundError"):
        Patcher.load(tmp_path)
    with pytest.raises(InvalidPatcherError, match=r"'no/such/place' is not a folder, and no patcher.json"):
        Patcher.load("no/such/place")
    with pytest.raises(InvalidPatcherError, match=r"'me/nothing' is not a folder.*Patcher.save"):
        Patcher.load("me/nothing", local_files_only=True)


def test_what_can_not_be_data_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    Patcher(fusions="qkv").save(tmp_path)

    class Local(nn.Module):
        pass

    with pytest.raises(InvalidPatcherError, match="Local"):
        Patcher({"LlamaMLP": Local}).save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidPatcherError, match=r"file is a file; a patcher is saved in a folder, as patcher.json"):
        Patcher(fusions="qkv").save(tmp_path / "file")
    assert Patcher.load(tmp_path) == Patcher(fusions="qkv")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    with taking_uploads(tmp_path / "cache") as found:
        yield found


def test_a_patcher_goes_to_a_hub_and_comes_back(hub: type[Hub]) -> None:
    address = PATCHER.push_to_hub("me/mine", token="hf_none", private=True)
    assert address == f"{constants.ENDPOINT}/me/mine/commit/1"
    assert b"private" in hub.requests[0][1]
    assert json.loads(hub.files["patcher.json"]) == PATCHER.to_dict()
    assert Patcher.load("me/mine", allowed=ALLOWED, token="hf_none") == PATCHER


def test_what_can_not_be_data_is_not_sent(hub: type[Hub]) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(InvalidPatcherError, match="Local"):
        Patcher({"LlamaMLP": Local}).push_to_hub("me/mine")
    assert not hub.requests
