"""The benchmarks run, and print every figure of the budgets: once through, with figures that mean nothing."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from patcher import Patcher
from tests.benchmarks import bench_cross_attention, bench_peers, bench_projections, bench_streaming, gpu
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.bench_patch_embeddings import CUT, WHOLE
from tests.benchmarks.forwards import decode_step
from tests.benchmarks.measuring import ratio, taking_turns
from tests.benchmarks.models import write_checkpoint
from tests.benchmarks.peers import PLAIN
from tests.support.caches import CACHE
from tests.support.tiny import build_tiny, tiny_llama_config

ROOT = Path(__file__).parents[2]


def test_all_benchmarks_are_listed() -> None:
    assert {path.stem for path in (ROOT / "tests" / "benchmarks").glob("bench_*.py")} == set(BENCHMARKS)


def test_candidates_take_turns_and_are_compared_turn_by_turn() -> None:
    order: list[str] = []
    times = taking_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, warm_up=1)

    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [len(each) for each in times.values()] == [2, 2]
    assert ratio({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 3.0]}, "a", "b") == 2.0


def test_a_measurement_ends_when_its_time_is_over() -> None:
    times = taking_turns({name: partial(time.sleep, 0.01) for name in "ab"}, 100, warm_up=1, limit=0.0)

    assert [len(each) for each in times.values()] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_checkpoint_is_loaded_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny_llama_config(tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    write_checkpoint(config, tmp_path, dtype)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert not any(info.values())
    assert model.dtype == dtype
    assert all(parameter.float().std() > 0.01 for parameter in model.parameters())
    assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_a_step_of_decoding_can_be_repeated() -> None:
    model = build_tiny(tiny_llama_config())
    step = decode_step(model, batch=3, cached=5)
    lengths = []
    model.model.layers[-1].self_attn.register_forward_hook(
        lambda module, given, keywords, output: lengths.append(keywords[CACHE].get_seq_length()),
        with_kwargs=True,
    )
    step()
    step()

    assert lengths == [6, 6]


def rounded(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
        return cls.forward(self, states.bfloat16().to(states.dtype))

    return type(f"Rounded{cls.__name__}", (cls,), {"forward": forward})


@pytest.mark.parametrize("name", gpu.KERNELS)
def test_errors_of_kernels_are_those_against_float64(name: str, tmp_path: Path) -> None:
    """With the classes that the preset replaces, and inexact ones in the place of Liger's."""
    config = gpu.kernel_config(name, gpu.SMALL)
    write_checkpoint(config, tmp_path, torch.float32)
    family = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    replaced = f"{name}RMSNorm", f"{name}MLP"
    patcher = Patcher(class_mapping={each: rounded(getattr(family, each)) for each in replaced})
    rows = [*gpu.numerics(name, patcher, tmp_path, torch.device("cpu"), length=8)]

    assert {module for _, module, *_ in rows} == {f"Rounded{each}" for each in replaced}
    for _, _, dtype, *errors in rows:
        stock, patched, gradient, patched_gradient = map(float, errors)
        if dtype == "float32":
            assert 0 < stock < 1e-6 < 1e-3 < patched < 3e-2
            assert 0 < gradient < 1e-5 < patched_gradient < 3e-2
        else:  # rounded twice is rounded once
            assert 1e-4 < stock == patched < 3e-2
            assert gradient == patched_gradient


def test_without_a_gpu_the_way_to_try_it_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.arguments([])
    message = capsys.readouterr().err

    assert "sees no GPU with CUDA here" in message
    advised = message.split("python -m tests.benchmarks.gpu ")[1].split()
    assert gpu.arguments(advised).device == torch.device("cpu")


@pytest.mark.nightly
def test_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(torch.device("cpu"), True, tmp_path)

    shown = capsys.readouterr().out
    for what in ("peak memory of the load", "a prompt of", "a step of decoding", *CUT, *WHOLE):
        assert f"| {what}" in shown
    assert "LIGER left out: The preset LIGER needs" in shown


@pytest.mark.nightly
def test_peers(capsys: pytest.CaptureFixture[str]) -> None:
    bench_peers.main(1, True)

    shown = capsys.readouterr().out
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in shown.splitlines() if row.startswith("|")]
    rows = {(effect, by): found for effect, by, *found in cells[2:]}
    for (_, by), (_, _, rebound, *outcomes) in rows.items():
        if by in (PLAIN, "patcher"):
            assert rebound.endswith("; 0")
            assert outcomes == ["yes", "yes", "yes"]
    # What others leave is seen: a measurement that sees nothing would say the same of all.
    assert rows["norms and MLPs of other classes, Llama", "transformers' registry"][3:5] == ["no", "no"]
    assert rows["linear patch embeddings, Qwen3-VL", "transformers' fusion_config"][3:5] == ["no", "no"]
    for package in ("defuser", "liger_kernel"):
        assert (find_spec(package) is None) == (f"{package}: not installed" in shown)


@pytest.mark.nightly
def test_patch_embeddings() -> None:
    # In a process of its own: transformers' `fusion_config` stays in force for the process.
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bench_patch_embeddings", "1", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for name in CUT | WHOLE:
        found = [line for line in done.stdout.splitlines() if line.startswith(f"{name}, ")]
        assert len(found) == 2, name  # a dtype each
        assert ">=" in found[0] or "16 patches of 2" in name
    assert "transformers' own fusion_config" in done.stdout


@pytest.mark.nightly
def test_cross_attention(capsys: pytest.CaptureFixture[str]) -> None:
    bench_cross_attention.main(1, "Whisper")

    shown = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        for what in ("first step of the decoder", "projections"):
            assert f"Whisper tiny, {dtype}, {what}, with kv / stock" in shown


@pytest.mark.nightly
def test_projections(smollm2_small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_projections, "SECONDS", 1.0)
    small = bench_projections.Subject("small", smollm2_small, torch.float32, 2, (1, 2), (1,))
    bench_projections.main(1, (small,))

    shown = capsys.readouterr().out
    allowed = dict(re.findall(r"first forward, (\w+), with qkv and gate_up / without +\S+ +<= (\S+)", shown))
    assert (allowed.keys(), allowed["bfloat16"]) == ({"float32", "bfloat16"}, "1.15")
    assert shown.count("a plain copy of the joined weights") == 1  # comes on top in float32, which is mapped
    for what in ("a step of decoding, batch 2", "a prompt of 128 tokens, batch 1"):
        assert f"small, bfloat16, {what}, stock" in shown
    assert shown.count("  with qkv and gate_up / stock") == 3


@pytest.mark.nightly
def test_streaming(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_llama_config(architectures=["LlamaForCausalLM"])
    monkeypatch.setattr(bench_streaming, "subjects", lambda: {"small": (small, ("qkv",))})
    bench_streaming.main(1)

    shown = capsys.readouterr().out
    for what in ("small: the first tensor", "  all of them", "  MiB beside the model", "  MiB more after 100 syncs"):
        assert what in shown
