"""Checkpoints that nobody should have written: a plan refuses them in bounded time, and what it finds good loads."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import patcher
from patcher import InvalidPatcherError, Patcher, PatcherError
from tests.support import fresh
from tests.support.tiny import save_tiny, tiny_llama_config

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
OWN = Patcher(fusions="gate_up")
DEEP = "[" * 100_000 + "]" * 100_000
Json = Any


@pytest.fixture(scope="module", params=["whole", "sharded", "bin"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in the three kinds of files that a load reads."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("whole", "sharded", "bin")}
    save_tiny(tiny_llama_config(), folders["whole"])
    save_tiny(tiny_llama_config(), folders["sharded"], max_shard_size="100KB")
    shutil.copy(folders["whole"] / "config.json", folders["bin"])
    torch.save(load_file(folders["whole"] / WHOLE), folders["bin"] / "pytorch_model.bin")
    return folders


def verdict(folder: Path) -> bool:
    """What a plan says; any error but ours passes through."""
    try:
        return patcher.plan(folder, OWN).ok
    except PatcherError:
        return False


def held(folder: Path) -> bool:
    """What a plan says, which the load has to keep."""
    good = verdict(folder)
    if good:
        AutoModelForCausalLM.from_pretrained(folder, patcher=OWN)
    return good


# --- files, as text and bytes --------------------------------------------------------------------------------------


def split(file: Path) -> tuple[dict[str, Json], bytes]:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join(header: Json, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model*.safetensors"))


def with_header(change: Callable[[dict[str, Json]], Json]) -> Callable[[Path], object]:
    """Change the header of the first file; `change` may give another one, or its text."""

    def mutate(folder: Path) -> None:
        file = first_shard(folder)
        header, data = split(file)
        changed = change(header)
        file.write_bytes(join(header if changed is None else changed, data))

    return mutate


def with_first_tensor(**fields: Json) -> Callable[[Path], object]:
    def change(header: dict[str, Json]) -> None:
        next(value for key, value in header.items() if key != "__metadata__").update(fields)

    return with_header(change)


def with_content(name: str, content: bytes | str) -> Callable[[Path], object]:
    text = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(text)


def with_json(name: str, change: Callable[[dict[str, Json]], Json]) -> Callable[[Path], object]:
    def mutate(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        changed = change(data)
        (folder / name).write_text(json.dumps(data if changed is None else changed))

    return mutate


def all_shards_are(name: str) -> Callable[[Path], object]:
    return with_json(INDEX, lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], name)))


def overlapping(header: dict[str, Json]) -> None:
    one, other = [value for value in header.values() if "shape" in value][:2]
    other["data_offsets"] = [one["data_offsets"][0], one["data_offsets"][0] + 1]


def twice(header: dict[str, Json]) -> bytes:
    return (
        json.dumps(header).encode()[:-1]
        + b', "model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    )


def outside(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(exist_ok=True)
    shutil.copy(first_shard(folder), folder.parent / "elsewhere" / "x.safetensors")
    all_shards_are("../elsewhere/x.safetensors")(folder)


def mixed(folder: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(64)}, folder / "z.bin")
    with_json(INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "z.bin"}))(folder)


def made_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


class Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def archive(content: bytes, **options: Any) -> Callable[[Path], object]:
    def mutate(folder: Path) -> None:
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w", **options) as zipped:
            zipped.writestr("archive/data.pkl", content)
            zipped.writestr("archive/version", "3\n")

    return mutate


def saved(value: Any) -> Callable[[Path], object]:
    return lambda folder: torch.save(value, folder / "pytorch_model.bin")


MARK = "hostile code has run"
HOSTILE: dict[str, dict[str, Callable[[Path], object]]] = {
    "whole": {
        "empty": with_content(WHOLE, b""),
        "cut": lambda folder: os.truncate(folder / WHOLE, 100),
        "cut in the weights": lambda folder: os.truncate(folder / WHOLE, (folder / WHOLE).stat().st_size - 1),
        "longer than said": lambda folder: os.truncate(folder / WHOLE, (folder / WHOLE).stat().st_size + 1),
        "length of a header 2**60": with_content(WHOLE, struct.pack("<Q", 1 << 60) + b"{}"),
        "length of a header 2**64-1": with_content(WHOLE, b"\xff" * 8 + b"{}"),
        "header of nothing": with_content(WHOLE, struct.pack("<Q", 0)),
        "a list": with_header(lambda header: [header]),
        "null": with_header(lambda header: b"null"),
        "nested": with_header(lambda header: DEEP.encode()),
        "a tensor that is nested": with_first_tensor(shape=json.loads("[" * 90 + "]" * 90)),
        "a tensor that is null": with_header(lambda header: header.update({"model.norm.weight": None})),
        "no json": with_header(lambda header: b"{" * 50),
        "no utf-8": with_header(lambda header: b'{"\xff\xfe": 1}'),
        "overlapping": with_header(overlapping),
        "twice": with_header(twice),
        "unknown dtype": with_first_tensor(dtype="F128"),
        "dtype that torch lacks": with_first_tensor(dtype="F4"),
        "dtype null": with_first_tensor(dtype=None),
        "negative shape": with_first_tensor(shape=[-1, 64]),
        "absurd shape": with_first_tensor(shape=[2**62, 2**62]),
        "shape that overflows to what fits": with_first_tensor(shape=[2**62, 4, 64]),
        "shape beyond integers": with_first_tensor(shape=[10**40]),
        "shape of text": with_first_tensor(shape="12"),
        "offsets backwards": with_first_tensor(data_offsets=[8, 0]),
        "offsets beyond": with_first_tensor(data_offsets=[0, 2**62]),
        "metadata of numbers": with_header(lambda header: header.update(__metadata__={"format": 1})),
        "another framework's text": with_content(WHOLE, "version https://git-lfs.github.com/spec/v1\n"),
    },
    "sharded": {
        "index empty": with_content(INDEX, b""),
        "index null": with_content(INDEX, "null"),
        "index a list": with_content(INDEX, "[1]"),
        "index nested": with_content(INDEX, DEEP),
        "index of nothing": with_content(INDEX, "{}"),
        "no utf-8": with_content(INDEX, b'{"weight_map": "\xff"}'),
        "weight_map null": with_json(INDEX, lambda index: index.update(weight_map=None)),
        "weight_map a list": with_json(INDEX, lambda index: index.update(weight_map=["a"])),
        "weight_map empty": with_json(INDEX, lambda index: index.update(weight_map={})),
        "metadata null": with_json(INDEX, lambda index: index.update(metadata=None)),
        "no metadata": with_json(INDEX, lambda index: index.pop("metadata") and None),
        "files are numbers": with_json(INDEX, lambda index: index["weight_map"].update({"model.norm.weight": 1})),
        "files are lists": with_json(INDEX, lambda index: index["weight_map"].update({"model.norm.weight": ["a"]})),
        "file empty": all_shards_are(""),
        "file of null bytes": all_shards_are("a\0b.safetensors"),
        "file too long": all_shards_are("a" * 5000 + ".safetensors"),
        "outside": outside,
        "absolute": lambda folder: all_shards_are(str(first_shard(folder)))(folder),
        "the folder": all_shards_are("."),
        "itself": all_shards_are(INDEX),
        "no weights": all_shards_are("config.json"),
        "one shard missing": lambda folder: first_shard(folder).unlink(),
        "all shards missing": lambda folder: [file.unlink() for file in folder.glob("model-*")],
        "a shard is a folder": lambda folder: made_a_folder(first_shard(folder)),
        "a shard cut": lambda folder: os.truncate(first_shard(folder), 1000),
        "kinds mixed": mixed,
    },
    "bin": {
        "empty": with_content("pytorch_model.bin", b""),
        "text": with_content("pytorch_model.bin", "version https://git-lfs.github.com/spec/v1\n"),
        "cut": lambda folder: os.truncate(folder / "pytorch_model.bin", 2000),
        "code": with_content("pytorch_model.bin", pickle.dumps(Calls(print, MARK))),
        "code in an archive": archive(pickle.dumps(Calls(os.system, f"echo {MARK}"))),
        "a bomb": archive(b"\x80\x02" + b"0" * 200_000_000, compression=zipfile.ZIP_DEFLATED),
        "a compressed pickle": archive(pickle.dumps({}, 2), compression=zipfile.ZIP_DEFLATED),
        "endless recursion": archive(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
        "2**40 bytes": archive(pickle.dumps({"a": Calls(bytearray, 1 << 40)}, 2)),
        "a list": saved([torch.ones(2)]),
        "a tensor": saved(torch.ones(2)),
        "names that are numbers": saved({1: torch.ones(2)}),
        "values that are no tensors": saved({"model.norm.weight": {"nested": [torch.ones(2)]}}),
        "null": saved({"model.norm.weight": None}),
    },
}


CONFIGS: dict[str, Callable[[Path], object]] = {
    "null": with_content("config.json", "null"),
    "a list": with_content("config.json", "[1]"),
    "a text": with_content("config.json", '"LlamaForCausalLM"'),
    "empty": with_content("config.json", ""),
    "nested": with_content("config.json", DEEP),
    "nested inside": with_content("config.json", '{"model_type": "llama", "rope_parameters": ' + DEEP + "}"),
    "a number of 5,000 digits": with_content(
        "config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"
    ),
    "no utf-8": with_content("config.json", b'{"model_type": "\xff"}'),
    "no such type": with_json("config.json", lambda config: config.update(model_type="lama")),
    "type a list": with_json("config.json", lambda config: config.update(model_type=["llama"])),
    "architectures a number": with_json("config.json", lambda config: config.update(architectures=5)),
    "architectures of numbers": with_json("config.json", lambda config: config.update(architectures=[5])),
    "auto_map a list": with_json("config.json", lambda config: config.update(auto_map=[1], architectures=["X"])),
    "ten million layers": with_json("config.json", lambda config: config.update(num_hidden_layers=10**7)),
    "2**62 layers": with_json("config.json", lambda config: config.update(num_hidden_layers=2**62)),
    "2**62 wide": with_json("config.json", lambda config: config.update(hidden_size=2**62)),
    "-1 wide": with_json("config.json", lambda config: config.update(hidden_size=-1)),
    "no heads": with_json("config.json", lambda config: config.update(num_attention_heads=0)),
    "no dtype": with_json("config.json", lambda config: config.update(dtype="float99")),
    "dtype a number": with_json("config.json", lambda config: config.update(dtype=5)),
    "a quantizer of nothing": with_json("config.json", lambda config: config.update(quantization_config={})),
    "a quantizer that is a list": with_json("config.json", lambda config: config.update(quantization_config=[1])),
    "weights elsewhere": with_json(
        "config.json", lambda config: config.update(transformers_weights="../x.safetensors")
    ),
    "weights in a number": with_json("config.json", lambda config: config.update(transformers_weights=5)),
    "weights that aren't there": with_json(
        "config.json", lambda config: config.update(transformers_weights="x.safetensors")
    ),
    "a folder": lambda folder: made_a_folder(folder / "config.json"),
}
CASES = [(kind, name, change) for kind, cases in HOSTILE.items() for name, change in cases.items()]
CASES += [("whole", f"config: {name}", change) for name, change in CONFIGS.items()]


@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=[f"{kind}: {name}" for kind, name, _ in CASES])
def test_what_no_load_would_take_no_plan_finds_good(
    kind: str,
    name: str,
    change: Callable[[Path], object],
    original: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(original[kind], tmp_path / "model")
    change(folder)
    assert verdict(folder) is False
    assert MARK not in "".join(capfd.readouterr())


def test_good_ones_are_good(original: dict[str, Path], kind: str) -> None:
    assert held(original[kind])


#: What is harmless: a check that refuses it is too strict.
HARMLESS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "one more tensor": (
        "whole",
        with_header(lambda header: header.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
    ),
    "no metadata": ("whole", with_header(lambda header: header.pop("__metadata__") and None)),
    "shards in a folder": ("sharded", lambda folder: below(folder)),
    "links": ("sharded", lambda folder: linked(folder)),
    "another name": ("whole", lambda folder: renamed(folder)),
}


def below(folder: Path) -> None:
    (folder / "shards").mkdir()
    for file in folder.glob("model-*.safetensors"):
        file.rename(folder / "shards" / file.name)
    with_json(
        INDEX,
        lambda index: index.update(weight_map={key: f"shards/{name}" for key, name in index["weight_map"].items()}),
    )(folder)


def linked(folder: Path) -> None:
    """As the cache of the hub does it."""
    (folder.parent / "blobs").mkdir()
    for number, file in enumerate(list(folder.iterdir())):
        file.rename(folder.parent / "blobs" / str(number))
        file.symlink_to(folder.parent / "blobs" / str(number))


def renamed(folder: Path) -> None:
    (folder / WHOLE).rename(folder / "other.safetensors")
    with_json("config.json", lambda config: config.update(transformers_weights="other.safetensors"))(folder)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_is_good(name: str, original: dict[str, Path], tmp_path: Path) -> None:
    kind, change = HARMLESS[name]
    folder = shutil.copytree(original[kind], tmp_path / "model")
    change(folder)
    assert held(folder)


# --- any change of any value ---------------------------------------------------------------------------------------

VALUES = strategies.sampled_from(
    [
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**62,
        10**30,
        1.5,
        "",
        "x",
        "..",
        "/",
        "F32",
        "BF16",
        [],
        [[]],
        {},
        [0, 0],
        [1],
    ]
)


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in inner for each in places(item, (*path, key)))]


def put(value: Json, path: tuple[Any, ...], new: Json) -> Json:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("target", ["header", "index", "config"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=strategies.data())
def test_whatever_is_written_anywhere_what_a_plan_finds_good_loads(
    target: str, data: strategies.DataObject, original: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mutated") / "model"
    shutil.copytree(original["sharded" if target == "index" else "whole"], folder)
    if target == "header":
        value, weights = split(folder / WHOLE)
    else:
        value = json.loads((folder / ("config.json" if target == "config" else INDEX)).read_text())
    for _ in range(data.draw(strategies.integers(1, 2))):
        place = data.draw(strategies.sampled_from(places(value)[::-1]))
        value = put(value, place, data.draw(VALUES))
    if target == "header":
        (folder / WHOLE).write_bytes(join(value, weights))
    else:
        (folder / ("config.json" if target == "config" else INDEX)).write_text(json.dumps(value))
    held(folder)
    shutil.rmtree(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=strategies.data())
@pytest.mark.parametrize("kind", ["whole", "bin"])
def test_whatever_bytes_are_changed_what_a_plan_finds_good_loads(
    kind: str, data: strategies.DataObject, original: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(original[kind], folder)
    file = next(file for file in folder.iterdir() if file.name in (WHOLE, "pytorch_model.bin"))
    content = bytearray(file.read_bytes())
    end = min(len(content), 4000)
    for _ in range(data.draw(strategies.integers(1, 3))):
        at = data.draw(strategies.one_of(strategies.integers(0, end - 1), strategies.integers(-end, -1)))
        content[at] = data.draw(strategies.integers(0, 255))
    file.write_bytes(bytes(content[: data.draw(strategies.sampled_from([len(content), len(content) // 2]))]))
    held(folder)
    shutil.rmtree(folder)


def test_a_tensor_that_goes_beyond_its_data_is_refused(original: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original["bin"], tmp_path / "model"))
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(original["bin"] / file.name) as archive, zipfile.ZipFile(file, "w") as changed:
        for member in archive.infolist():
            content = archive.read(member)
            if member.filename.endswith("data.pkl"):
                shape = re.search(rb"K[\x01-\xfe]K[\x01-\xfe]\x86", content)  # the first tensor of two dimensions
                assert shape is not None
                content = content[: shape.start() + 1] + b"\xff" + content[shape.start() + 2 :]
            changed.writestr(member.filename, content)
    with pytest.raises(InvalidPatcherError, match="can't be read as a load would read it: RuntimeError"):
        patcher.plan(folder, OWN)


def test_an_archive_with_a_compressed_part_is_refused(original: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original["bin"], tmp_path / "model"))
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(original["bin"] / file.name) as archive, zipfile.ZipFile(file, "w") as changed:
        for member in archive.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/2" in member.filename else zipfile.ZIP_STORED
            changed.writestr(member.filename, archive.read(member), compress_type=kind)
    with pytest.raises(InvalidPatcherError, match="a part of it is compressed"):
        patcher.plan(folder, OWN)


# --- what waits for ever, or has no end: in a process that may be killed -------------------------------------------

ENDLESS = """
import os, resource, shutil, sys
from pathlib import Path
from patcher import Patcher, PatcherError, plan

asked, root = Patcher(fusions="gate_up"), Path(sys.argv[1])
plan(root / "whole", asked)  # all is imported
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
for case in sys.argv[2:]:
    for what in ("pipe", "loop", "/dev/zero", "/dev/tty", "/nowhere"):
        folder = Path(shutil.copytree(root / case.split("/")[0], root / "hostile"))
        file = folder / case.split("/")[1]
        file.unlink()
        os.mkfifo(file) if what == "pipe" else file.symlink_to(file.name if what == "loop" else what)
        for checkpoint in (None, file):
            try:
                print(case, what, plan(folder, asked, checkpoint=checkpoint).ok, flush=True)
            except PatcherError:
                print(case, what, "refused", flush=True)
        shutil.rmtree(folder)
"""


@pytest.mark.process
def test_nothing_is_opened_that_is_no_file(original: dict[str, Path], tmp_path: Path) -> None:
    for kind, folder in original.items():
        shutil.copytree(folder, tmp_path / kind)
    shard = first_shard(original["sharded"]).name
    cases = ["whole/config.json", f"whole/{WHOLE}", f"sharded/{INDEX}", f"sharded/{shard}", "bin/pytorch_model.bin"]
    done = fresh.run(ENDLESS, tmp_path, *cases, seconds=120)
    said = [line.rpartition(" ") for line in done.stdout.splitlines() if line.startswith(tuple(cases))]
    assert len(said) == 5 * 5 * 2
    assert [(case, word) for case, _, word in said if word not in ("refused", "False")] == []
