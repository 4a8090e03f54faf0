"""Each line of the README's table of recipes runs, and does what the table says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, Concatenate, WeightConverter
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward
from typer.testing import CliRunner

from patcher import Patcher, like, monkey_patching, plan, presets, report
from patcher.cli import app
from patcher.fusions import SequentialExperts
from tests.support import shared
from tests.support.replacements import JoinedMLP
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config

ROOT = Path(__file__).parents[2]
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"


def recipes() -> dict[str, str]:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| I want to ... |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.split("\n")[2:]]
    return {what: write.replace("\\|", "|") for what, write in cells}


RECIPES = recipes()
#: An argument of `from_pretrained` that a recipe says beside the patcher.
OPTION = re.compile(r"\w+=[^=]")


class FusedMLP(JoinedMLP):
    """That of the README's first program."""

    conversion_mapping = (
        WeightConverter(["gate_proj.weight", "up_proj.weight"], ["gate_up_proj.weight"], [Concatenate(dim=0)]),
    )


class MyHead(nn.Linear):
    pass


class MyNorm(LlamaRMSNorm):  # type: ignore[misc]
    pass


def my_rotary(*args: Any, **kwargs: Any) -> Any:
    return apply_rotary_pos_emb(*args, **kwargs)


def my_attention(*args: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(*args, **kwargs)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config(num_hidden_layers=4))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


@pytest.fixture
def names(repo: Path) -> Iterator[dict[str, Any]]:
    """What the lines may use: classes of the reader's own, and what the README's programs have."""
    given = {
        "FusedMLP": FusedMLP,
        "MyHead": MyHead,
        "MyNorm": MyNorm,
        "my_attention": my_attention,
        "my_rotary": my_rotary,
        "like": like,
        "repo": str(repo),
    }
    given |= {"Patcher": Patcher, "SequentialExperts": SequentialExperts, "AutoModelForCausalLM": AutoModelForCausalLM}
    given |= {"presets": presets, "monkey_patching": monkey_patching, "patcher": Patcher({"LlamaMLP": FusedMLP})}
    try:
        yield given | {"model": AutoModelForCausalLM.from_pretrained(repo)}
    finally:
        monkey_patching.clear_patch_mapping()


def test_there_are_twelve() -> None:
    assert len(RECIPES) == 12


@pytest.mark.parametrize("what", RECIPES)
def test_a_recipe_runs(
    what: str, names: dict[str, Any], repo: Path, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.findall("`([^`]+)`(?!])", RECIPES[what])  # those in brackets are names of links
    assert lines or re.search(r"\]\(examples/\w+\.py\)", RECIPES[what])  # the examples run, and links are followed
    monkeypatch.chdir(ROOT)
    for line in lines:
        if OPTION.match(line):
            continue
        if line.startswith("patcher "):
            where = ["--output-dir", str(tmp_path)] if "codegen" in line else []
            done = CliRunner().invoke(app, [*shlex.split(line.replace(REPO, str(repo)))[1:], *where])
            assert done.exit_code == 0, done.output
        elif re.match(r"\w+ = ", line):
            exec(line, names)
            assert report(names["patched"]).replaced
        elif isinstance(made := eval(line, names), Patcher):
            options = {name: eval(value) for name, value in (each.split("=") for each in lines if OPTION.match(each))}
            assert plan(experts if "Experts" in line else repo, made, **options).ok
        elif "presets" in line:
            assert report(made).fused
        elif "register" in line:
            assert report(AutoModelForCausalLM.from_pretrained(repo)).replaced
        else:
            assert made.state_dict().keys() == names["model"].state_dict().keys()
