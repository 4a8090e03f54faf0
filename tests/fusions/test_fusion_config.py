"""`fusion_config` from anywhere, with anything in it: what is meant, what stock makes of it, or an error that says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import patcher
from patcher import InvalidPatcherError, Patcher, PatcherError
from patcher.fusions.config import split_fusion_config
from tests.support import shared
from tests.support.tiny import tiny_llama_config

NO_MAPPING = [["qkv"], [["qkv"]], "qkv", "patcher", 1, -1.5, True, ["patcher", "qkv"], ("qkv",), [{"qkv": True}]]
NO_NAMES = ["qkv", 1, True, None, {"qkv": True}, [1], [None], [["qkv"]], [{"qkv": True}], -1.5]
FOUND = r"fusion_config maps names .*, found .* \({}\); write \{{\"patcher\": \[\"qkv\"\]\}} for fusions of patcher"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def say(folder: Path, value: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fusion_config": value}))


def in_the_file(folder: Path, value: Any, **options: Any) -> Any:
    say(folder, value)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def in_a_config(folder: Path, value: Any, **options: Any) -> Any:
    config = tiny_llama_config()
    config.fusion_config = value
    return LlamaForCausalLM.from_pretrained(folder, config=config, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "in config.json": in_the_file,
    "in a config": in_a_config,
    "as an argument": lambda folder, value, **options: LlamaForCausalLM.from_pretrained(
        folder, fusion_config=value, **options
    ),
}


@pytest.mark.parametrize("asked", [None, Patcher(fusions="gate_up")], ids=["plain", "patched"])
@pytest.mark.parametrize("value", NO_MAPPING, ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_mapping_is_refused(
    way: str, value: Any, asked: Patcher | None, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    kind = "list" if way == "in config.json" and isinstance(value, tuple) else type(value).__name__
    with pytest.raises(InvalidPatcherError, match=FOUND.format(kind)):
        WAYS[way](copy, value, patcher=asked)
    if way == "in config.json" and asked is not None:
        with pytest.raises(InvalidPatcherError, match=FOUND.format(kind)):
            raise InvalidPatcherError(" ".join(patcher.plan(copy, asked).problems))


@pytest.mark.parametrize("value", NO_NAMES, ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_list_of_names_is_refused(way: str, value: Any, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    with pytest.raises(InvalidPatcherError, match=r"'patcher' holds a list of names of fusions, found .*; write \{"):
        WAYS[way](copy, {"patcher": value})


@pytest.mark.parametrize("value", [{}, [], "", 0, False, None], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_empty_is_none_as_it_is_to_stock(way: str, value: Any, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    assert patcher.report(WAYS[way](copy, value, patcher=Patcher(fusions="qkv"))).fused
    assert type(WAYS[way](copy, value).model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_what_stock_takes_for_itself_goes_to_stock(folder: Path) -> None:
    with pytest.raises(ValueError, match="Unknown fusion type: qkv"):
        LlamaForCausalLM.from_pretrained(folder, fusion_config={"qkv": True})
    with pytest.raises(ValueError, match="Invalid fusion config for patch_embeddings"):
        LlamaForCausalLM.from_pretrained(folder, fusion_config={"patch_embeddings": "yes"})
    assert split_fusion_config({"patch_embeddings": True, "patcher": ["qkv"]}) == (["qkv"], {"patch_embeddings": True})


def test_what_the_error_advises_works(folder: Path) -> None:
    with pytest.raises(InvalidPatcherError) as raised:
        LlamaForCausalLM.from_pretrained(folder, fusion_config=["qkv"])
    advised = re.search(r"write (\{.*?\}) for fusions", str(raised.value))
    assert advised
    model = LlamaForCausalLM.from_pretrained(folder, fusion_config=json.loads(advised[1]))
    assert patcher.report(model).fused


# --- anything ------------------------------------------------------------------------------------------------------

NAMES = strategies.sampled_from("qkv kv gate_up patcher patch_embeddings sequential_experts modules x".split())
SCALARS = strategies.one_of(
    NAMES, strategies.none(), strategies.booleans(), strategies.integers(), strategies.floats(), strategies.just("a.b")
)
ANYTHING = strategies.recursive(
    SCALARS, lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(NAMES, inner, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_a_patcher_is_made_of_it_or_an_error(value: Any) -> None:
    for make in (Patcher.from_fusion_config, lambda found: Patcher(fusions=split_fusion_config(found)[0])):
        try:
            made = make(value)
        except InvalidPatcherError:
            pass
        else:
            assert isinstance(made, Patcher)
            assert isinstance(value, Mapping) or not value
            assert hash(made) == hash(make(value))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=ANYTHING)
def test_a_load_takes_it_or_an_error_says_why(value: Any, folder: Path) -> None:
    try:
        LlamaForCausalLM.from_pretrained(folder, fusion_config=value, patcher=Patcher())
    except PatcherError:
        pass
    except ValueError as error:  # stock's, of what it takes for itself
        if not isinstance(value, dict) or not re.match("Unknown fusion type|Invalid fusion config", str(error)):
            raise
