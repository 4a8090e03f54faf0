"""The examples run, and the worked ones are right: equal to stock, the original checkpoint saved."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import fresh
from tests.support.sampling import sampled

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What the README's first command runs; each that CI leaves out has its parts in tests of what it uses.
IN_CI = {"quickstart", "custom_fusion", "moe_layouts"}
#: How the lines of the quickstart begin, beside classes and reports.
SAID = (
    "(the models are fetched once, and kept in ",
    "--- ",
    "answer: The capital of France is Paris.",
    "same tokens as stock: True, ",
    "saved: ",
    "before: cat",
    "after: cat",
    "(stock transformers doesn't write ",
)
NEEDS = {"export_onnx": ("onnx", "onnxscript", "onnxruntime"), "sft": ("trl",)}


@pytest.mark.parametrize("path", sampled(sorted(EXAMPLES.glob("*.py")), IN_CI))
def test_example_runs(path: Path, tmp_path: Path, smollm2: Path, minilm: Path) -> None:
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library)
    if path.stem == "quickstart":  # it quiets what its imports say
        # Beside other tests a model this small computes in less time than its threads wait.
        environment = {**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(path)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        done = fresh.run_file(path, cwd=tmp_path)
    assert done.stdout.strip()
    assert ": False" not in done.stdout  # what an example claims of itself
    if path.stem == "quickstart":
        assert done.stderr == ""  # torchao is installed here, and has a lot to say
        blocks = r"^(?:(?:before|after): \w+\((?:\n  .*)+\n\)|\w+: \d+ modules replaced.*(?:\n.*\S.*)+)\n"
        lines = re.sub(blocks, "", done.stdout, flags=re.M).split("\n")
        assert [line for line in lines if line.strip() and not line.startswith(SAID)] == []
        assert {head for head in SAID if any(line.startswith(head) for line in lines)} == set(SAID)


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    return load("moe_layouts")


def load(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(layouts: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layouts.tiny_checkpoint(tmp_path_factory.mktemp("qwen2_moe"))


@pytest.mark.parametrize(
    "name",
    [
        "both",
        "linear experts",
        "fused qkv",
        "experiment",
    ],
)
def test_worked_example_equals_stock(layouts: ModuleType, checkpoint: Path, name: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=layouts.PATCHERS[name])
    changed = {type(module).__name__ for module in model.modules()} - {
        type(module).__name__ for module in stock.modules()
    }
    assert changed  # otherwise it is equal for nothing
    difference, same_tokens = layouts.compare(model, stock)
    assert difference <= 1e-5
    assert same_tokens
    assert layouts.saves_the_original(model, checkpoint)


@pytest.mark.parametrize("correlation", [0.0, 0.9], ids=["independent inputs", "inputs alike"])
def test_gptq_of_the_example_is_the_algorithm_of_the_paper(correlation: float) -> None:
    calibration = load("calibration")
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 24, bias=False)
    inputs = torch.randn(512, 128) + correlation * 3 * torch.randn(512, 1)
    hessian = calibration.Hessian(layer)
    hessian(layer, (inputs,), None)
    weight = layer.weight.detach()
    numbers, scales = calibration.gptq(weight, hessian)
    expected = column_by_column(calibration, weight, inputs)

    # Of so many one may be so near to the middle that arithmetic decides, and then the columns after it follow.
    assert (numbers == expected).float().mean() > 0.99
    rounded = calibration.round_to_nearest(weight, hessian)
    errors = [(inputs @ (each - weight).T).norm() for each in map(whole, (numbers, rounded[0]), (scales, rounded[1]))]
    assert errors[0] < (0.95 if not correlation else 0.5) * errors[1]
    layer = calibration.Int4Linear(numbers, scales, torch.float32)
    assert torch.equal(layer(torch.eye(128)).T, whole(numbers, scales))


def whole(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (numbers.view(*scales.shape, -1) * scales[..., None]).view(numbers.shape)


def column_by_column(calibration: ModuleType, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """By the formula that the paper starts from (its equation 2), with the inverse for the columns that are left."""
    rest, matrix = weight.double(), (inputs.T @ inputs).double() / len(inputs)
    matrix += 0.01 * matrix.diagonal().mean() * torch.eye(len(matrix))
    numbers = torch.empty_like(rest)
    for i in range(rest.shape[1]):
        if i % calibration.GROUP == 0:
            scale = calibration.scale_of(rest[:, i : i + calibration.GROUP], torch.float32)
        numbers[:, i : i + 1] = calibration.rounded(rest[:, i : i + 1], scale)
        inverse = matrix[i:, i:].inverse()
        error = rest[:, i : i + 1] - numbers[:, i : i + 1] * scale
        rest[:, i:] = rest[:, i:] - error / inverse[0, 0] * inverse[0]
    return numbers.float()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_fused_attention_takes_a_padding_mask(layouts: ModuleType, checkpoint: Path, implementation: str) -> None:
    options = {"attn_implementation": implementation}
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=layouts.FUSED_QKV, **options)
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        real = mask.bool()
        one, other = (each(ids, attention_mask=mask).logits[real] for each in (model, stock))
    assert (one - other).abs().max() <= 1e-5


def test_the_registry_examples(layouts: ModuleType, checkpoint: Path) -> None:
    from transformers.models.bert.modeling_bert import BertSelfAttention

    from patcher.monkey_patching import get_patch_mapping

    registry = load("monkey_patching")
    assert registry.quick_start() == 2
    assert registry.patterns() == ["^Bert.*SelfAttention$"]
    assert registry.manual_construction() == (registry.MarkedSelfAttention, BertSelfAttention)
    difference, same_tokens, same_bytes = registry.complete_example(checkpoint)
    assert difference <= 1e-5
    assert same_tokens
    assert same_bytes
    assert get_patch_mapping() == {}


def test_a_registered_conversion_that_joins_grouped_heads_is_given_back(
    layouts: ModuleType, checkpoint: Path, tmp_path: Path
) -> None:
    """The way of the reference: classes from the registry, and the conversion from transformers' own."""
    from transformers import conversion_mapping

    from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping

    before = conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")
    register_patch_mapping(dict(layouts.BOTH.class_mapping))
    try:
        conversion_mapping.register_checkpoint_conversion_mapping(
            "qwen2_moe", list(layouts.FUSED_QKV.extra_weight_conversions), overwrite=True
        )
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    finally:
        clear_patch_mapping()
        conversion_mapping.register_checkpoint_conversion_mapping("qwen2_moe", before, overwrite=True)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    difference, same_tokens = layouts.compare(model, stock)
    assert difference <= 1e-5
    assert same_tokens
    assert layouts.saves_the_original(model, checkpoint)
