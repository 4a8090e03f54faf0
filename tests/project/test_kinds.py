"""Tests are of the kinds that they say, and what they share stays as it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fresh, shared
from tests.support.kinds import FOLDERS, KINDS, ROOT, kind_of, wants
from tests.support.tiny import tiny_llama_config

README = "not (process or libraries or project or real or gpu or nightly)"


def test_every_kind_is_a_marker_and_every_folder_there(pytestconfig: pytest.Config) -> None:
    assert {*KINDS} < {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {*FOLDERS.values()} < {*KINDS}
    assert [each for each in FOLDERS if not (ROOT / each).exists()] == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [("project/advice/values.py", "project"), ("libraries", "libraries"), ("loading/test_loading.py", ""), ("..", "")],
)
def test_a_file_is_of_the_kind_of_its_folder(path: str, kind: str) -> None:
    assert kind_of((ROOT / path).resolve()) == kind


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        (README, []),
        ("", KINDS),
        ("process", KINDS),  # what is of another kind may be of this one as well
        ("process and not (libraries or project or real)", ["process", "gpu", "nightly"]),
        ("not (gpu or nightly)", [each for each in KINDS if each not in ("gpu", "nightly")]),
    ],
)
def test_a_run_collects_what_it_may_run(expression: str, wanted: list[str]) -> None:
    assert [kind for kind in KINDS if wants(expression, kind)] == [*wanted]


STARTING = """
import os, subprocess, sys
from types import SimpleNamespace
from tests.support import kinds
running = SimpleNamespace(nodeid="it", iter_markers=lambda: [SimpleNamespace(name=mark) for mark in sys.argv[1:]])
kinds.starts_no_process(lambda: running)
subprocess.run(["git", "--version"], check=True, stdout=subprocess.DEVNULL)
for start in (lambda: subprocess.run([sys.executable, "-c", ""], check=True), lambda: os.fork() or os._exit(0)):
    try:
        start()
    except AssertionError as error:
        print(error)
"""


def test_what_starts_a_process_and_is_not_marked_so_fails() -> None:
    line = "it starts a process, and is not marked so: @pytest.mark.process\n"
    assert fresh.run(STARTING, "nightly").stdout == 2 * line
    assert fresh.run(STARTING, "process").stdout == ""


def write_a_tensor(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight": write_a_tensor,
    "behind autograd's back": lambda model: model.lm_head.weight.data.zero_(),
    "a gradient": lambda model: model(torch.arange(3)[None]).logits.sum().backward(),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda *given: None),
    "an attribute": lambda model: setattr(model.model, "mine", 1),
    "training": lambda model: model.train(),
    "requires_grad": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stock_model_that_a_test_has_changed_is_noticed_and_not_given_again(change: str) -> None:
    config = tiny_llama_config(hidden_size=32, intermediate_size=48)
    model = shared.stock(config)
    assert shared.changed() == []
    assert shared.stock(config) is model
    CHANGES[change](model)
    assert shared.changed() == ["LlamaForCausalLM"]
    assert shared.stock(config) is not model


@pytest.mark.parametrize("what", ["a new file", "another content", "a file that is gone"])
def test_a_checkpoint_that_a_test_has_changed_is_noticed_and_not_given_again(what: str) -> None:
    config = tiny_llama_config(hidden_size=32, intermediate_size=48)
    folder: Path = shared.checkpoint(config)
    assert shared.checkpoint(config) == folder
    if what == "a new file":
        (folder / "more.json").touch()
    elif what == "another content":
        (folder / "config.json").write_text((folder / "config.json").read_text())
    else:
        (folder / "model.safetensors").unlink()
    assert shared.changed() == [str(folder)]
    assert shared.checkpoint(config) != folder


def test_other_options_are_another_checkpoint() -> None:
    config = tiny_llama_config()
    found = {
        shared.checkpoint(config),
        shared.checkpoint(config, dtype=torch.bfloat16),
        shared.checkpoint(config, seed=1),
    }
    assert len({*found, shared.checkpoint(tiny_llama_config(tie_word_embeddings=True))}) == 4
