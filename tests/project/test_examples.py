"""The examples run, and the worked ones are right: equal to stock, the checkpoint given back."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"export_onnx": ("onnx", "onnxscript", "onnxruntime"), "sft": ("trl",)}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path, smollm2: Path, minilm: Path) -> None:
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library)
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert ": False" not in done.stdout  # what an example claims of itself


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
        pytest.param("both", marks=pytest.mark.slow),
        pytest.param("linear experts", marks=pytest.mark.slow),
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
