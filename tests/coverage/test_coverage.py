"""A representative part of `python -m tests.coverage`: all kinds and families, each way to write a forward."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

import patcher
from patcher.layouts.layouts import Rows
from patcher.layouts.sources import JoinedRows
from tests.coverage.__main__ import read_results, versions
from tests.coverage.checks import FAMILIES, FUSIONS, examine
from tests.coverage.models import architectures
from tests.coverage.table import summary
from tests.support.sampling import sampled

PAGE, SPLIT = (Path(__file__).with_name(f"coverage_{name}.md") for name in ("fusions", "split"))

#: architecture -> the families that apply, and what is particular about it
REPRESENTATIVES: dict[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("qkv", "gate_up", "siblings"),  # norms of queries and keys
    "Exaone4ForCausalLM": ("qkv", "gate_up", "siblings"),  # layers of different kinds
    "MixtralForCausalLM": ("qkv", "sequential_experts", "siblings"),  # experts that lie apart on disk
    "GptOssForCausalLM": ("qkv", "sequential_experts", "siblings"),  # transposed, interleaved, with biases
    "DeepseekV3ForCausalLM": ("gate_up", "sequential_experts", "siblings"),  # latent attention; a shared expert
    "BertForMaskedLM": ("qkv", "siblings"),
    "DistilBertForMaskedLM": ("qkv", "siblings"),  # q_lin, k_lin, v_lin
    "BartForConditionalGeneration": ("qkv", "kv", "siblings"),  # one class for self and cross attention
    "MT5ForConditionalGeneration": ("qkv", "kv", "gate_up", "siblings"),  # wi_0 and wi_1
    "WhisperForConditionalGeneration": ("qkv", "kv", "siblings"),  # keys without a bias
    "LlavaForConditionalGeneration": ("qkv", "gate_up", "patch_embeddings", "siblings"),  # two towers
    "Qwen2VLForConditionalGeneration": (
        "qkv",
        "gate_up",
        "patch_embeddings",
        "siblings",
        "split",
    ),  # Conv3d, row 5 of the design
    "Glm4vForConditionalGeneration": ("qkv", "gate_up", "patch_embeddings", "siblings", "split"),
    "Molmo2ForConditionalGeneration": (
        "qkv",
        "gate_up",
        "siblings",
    ),  # joined on disk; stock cuts by the sizes of parameters
    "ViTForImageClassification": ("qkv", "patch_embeddings", "siblings"),  # stock renames query, key and value
    "ConvNextForImageClassification": ("patch_embeddings",),  # several in one model
    "CodeGenForCausalLM": ("split",),  # values before keys, in four blocks
    "GPT2LMHeadModel": ("split",),  # transposed
    "Phi4MultimodalForCausalLM": (  # the gate behind what is gated
        "qkv",
        "patch_embeddings",
        "siblings",
        "split",
    ),
}


#: what the oldest supported release of transformers doesn't have yet
LATER = {"Molmo2ForConditionalGeneration"}
KNOWN = architectures()
HERE = [name for name in REPRESENTATIVES if name in KNOWN or name not in LATER]


@pytest.mark.filterwarnings("ignore")  # whatever an architecture of transformers has to say
@pytest.mark.parametrize("name", sampled(HERE, HERE[::2]))
def test_an_architecture_is_fused_and_stays_what_it_is(name: str) -> None:
    result = examine(name)

    assert result["status"] == "examined", result
    nothing = ("left alone", "not reached")  # what no input that is tried reaches
    rows = {family: row for family, row in result["families"].items() if row["status"] not in nothing}
    found = {family: (row["status"], row["reason"]) for family, row in rows.items()}
    assert found == dict.fromkeys(REPRESENTATIVES[name], ("passed", ""))
    assert all(row["fused"] >= row["fusable"] > 0 for row in rows.values())


def test_the_representatives_are_of_every_kind_and_every_family() -> None:
    kinds = {KNOWN[name].kind for name in HERE}

    assert kinds == {"causal-lm", "masked-lm", "encoder-decoder", "vision-language", "vision"}
    assert {family for families in REPRESENTATIVES.values() for family in families} == set(FAMILIES)


# --- the checks see what is wrong ----------------------------------------------------------------------------------


def rows_swapped(original: Any) -> Any:
    def swapped(self: Any, given: Any) -> Any:
        result = original(self, given)
        return result.flip(0) if isinstance(result, torch.Tensor) else [tensor.flip(0) for tensor in result]

    return swapped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("broken", "gradients", "reason"),
    [
        ((JoinedRows, "__getitem__"), True, r"outputs differ by [1-9]"),
        ((Rows, "separate"), True, r"outputs differ by 0.0e\+00, gradients by [1-9]"),
        ((Rows, "separate"), False, "saves other files: model.safetensors"),
    ],
    ids=["loading", "gradients", "saving"],
)
def test_a_fusion_that_is_wrong_is_told(
    broken: tuple[type, str], gradients: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken, rows_swapped(getattr(*broken)))
    if not gradients:
        monkeypatch.setattr("tests.coverage.checks.gradients_of", lambda *_: None)

    row = examine("LlamaForCausalLM", ("gate_up",))["families"]["gate_up"]

    assert row["status"] == "FAILED"
    assert re.match(reason, row["reason"])


@pytest.mark.filterwarnings("ignore")
def test_what_is_fused_without_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patcher.fusions.fused_module._classes", WeakKeyDictionary())  # of whoever came before
    # A forward that calls each projection by itself: right, but three times the work.
    monkeypatch.setattr("patcher.fusions.projections.rewritten", lambda method, *_: method.source)

    row = examine("Qwen3ForCausalLM", ("qkv",))["families"]["qkv"]

    assert row["status"] == "FAILED"
    assert "stock calls each projection 1 times, the joined one is called 3 times" in row["reason"]


# --- the command and its page --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_command_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.coverage", "--results", str(results), "--page", str(page)]
    command += ["--kind", "masked-lm", "--family", "qkv"]

    def run(*options: str) -> str:
        root = Path(__file__).parents[2]
        return subprocess.run(
            [*command, *options], cwd=root, check=True, capture_output=True, text=True, timeout=120
        ).stdout

    first = run("--only", "BertForMaskedLM", "--only", "ErnieForMaskedLM")
    again = run("--only", "BertForMaskedLM")

    assert "2/2" in first
    assert "1/" not in again
    assert len(results.read_text().splitlines()) == 2
    assert {json.loads(line)["name"] for line in results.read_text().splitlines()} == {
        "BertForMaskedLM",
        "ErnieForMaskedLM",
    }
    assert "| BertForMaskedLM | masked-lm | qkv | 2 of 2 | BertSelfAttention |" in page.read_text()


def test_what_was_found_with_other_code_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "A", **versions()}, {"name": "B", **versions(), "code": "other"}, {"name": "C"} | versions()]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    assert [*read_results(results)] == ["A", "C"]
    (tmp_path / "patcher" / "fusions").mkdir(parents=True)
    monkeypatch.setattr(patcher, "__file__", str(tmp_path / "patcher" / "__init__.py"))
    assert [*read_results(results)] == []


def test_the_page_that_ships_shows_the_share_that_is_required() -> None:
    pages = PAGE.read_text() + SPLIT.read_text()
    lines = re.findall(r"- `(\w+)`: (\d+) of (\d+) .* (\d+) come out wrong", pages)

    assert [family for family, *_ in lines] == list(FAMILIES)
    for family, passed, fusable, wrong in lines:
        # What layers that have nothing else in common are given is often an expression: every refusal has a line.
        share = 0.85 if family == "siblings" else 0.95
        assert int(passed) >= share * int(fusable) > 0
        assert int(wrong) == 0
    assert "doesn't see it" not in pages


def test_the_summary_counts_what_passes() -> None:
    def result(name: str, status: str, fusable: int = 1) -> dict[str, Any]:
        row = {"status": status, "fusable": fusable, "fused": 1}
        return {"name": name, "kind": "causal-lm", "status": "examined", "reason": "", "families": {"qkv": row}}

    results = [result("A", "passed"), result("B", "FAILED"), result("C", "refused"), result("D", "not reached", 0)]
    results.append({"name": "E", "kind": "causal-lm", "status": "not examined", "reason": "too large", "families": {}})

    lines = summary(results, FUSIONS)

    assert lines[0].startswith("`qkv`: 1 of 3 architectures with fusable modules pass (33.3 %), 1 modules; 1 come out")
    assert lines[-1] == "5 architectures: 4 examined, 1 not examined"
