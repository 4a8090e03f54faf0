"""The examples: each is regenerated and compared, and computes what the original computes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

from patcher import Patcher
from patcher.codegen import check, verify
from patcher.codegen.files.projects import discover, load_configs, read_settings

GALLERY = Path(__file__).parents[2] / "examples" / "codegen"
CONFIGS = [path for path in discover(read_settings(GALLERY)) if path.is_relative_to(GALLERY)]


def made_for() -> str:
    """The transformers that the generated files of the gallery were made of."""
    for line in (GALLERY / "qwen3" / "generated" / "patched_modeling_qwen3.py").read_text("utf-8").splitlines():
        if line.startswith("# Source:"):
            return line.rstrip(")").rpartition(" ")[2]
    raise AssertionError("the header names no version")


pytestmark = pytest.mark.skipif(
    transformers.__version__ != made_for(), reason="the gallery is generated from another transformers"
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.parent.name)
def test_regenerated(config: Path) -> None:
    results = check([config])
    assert results
    for result in results:
        assert result.ok, str(result)
        assert result.path is not None
        assert result.path.with_suffix(".diff").is_file()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.parent.name)
def test_small_models_of_it_are_right(config: Path) -> None:
    """None of the examples is to compute anything else than stock: within rounding, in the gradients too."""
    for each in load_configs(str(config)):
        verify(each, tolerance=1e-5).raise_on_failure()


@contextmanager
def imported(folder: str, name: str) -> Iterator[ModuleType]:
    """A generated file of the gallery, imported."""
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / folder / "generated" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its decorators ask for the file of its classes
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def patched() -> Iterator[ModuleType]:
    """The generated Qwen3."""
    with imported("qwen3", "patched_modeling_qwen3") as module:
        yield module


def tiny(**changes: object) -> transformers.Qwen3Config:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return transformers.Qwen3Config(**{**sizes, **changes})


def pair(patched: ModuleType, dtype: torch.dtype = torch.float32, **changes: object) -> list[torch.nn.Module]:
    """The original and the patched model, with the same weights."""
    torch.manual_seed(0)
    stock = modeling_qwen3.Qwen3ForCausalLM(tiny(**changes)).to(dtype).eval()
    model = patched.Qwen3ForCausalLM(tiny(**changes)).to(dtype).eval()
    model.load_state_dict(stock.state_dict())  # strict: the same names and shapes
    return [stock, model]


IDS = torch.randint(0, 99, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
def test_qwen3_gives_the_logits_of_the_original(patched: ModuleType, dtype: torch.dtype, tolerance: float) -> None:
    stock, model = pair(patched, dtype)
    with torch.no_grad():
        expected, found = stock(IDS).logits, model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_qwen3_with_another_activation(patched: ModuleType) -> None:
    stock, model = pair(patched, hidden_act="gelu")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)


def test_qwen3_gives_the_gradients_of_the_original(patched: ModuleType) -> None:
    models = pair(patched)
    for model in models:
        model(IDS, labels=IDS).loss.backward()
    expected = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )


def test_the_helper_passes_gradcheck(patched: ModuleType) -> None:
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(patched.SwiGLU.apply, inputs)


def test_the_helper_keeps_one_tensor_less(patched: ModuleType) -> None:
    """What its description promises, counted."""
    kept = []
    for module in (modeling_qwen3, patched):
        mlp = module.Qwen3MLP(tiny())
        sizes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(tuple(t.shape)), lambda _: None):
            mlp(torch.randn(2, 11, 64))
        kept.append(sum(size == (2, 11, 96) or size == (22, 96) for size in sizes))
    assert kept[0] - kept[1] == 1, kept


def test_qwen3_generates_saves_and_loads(patched: ModuleType, tmp_path: Path) -> None:
    stock, model = pair(patched)
    arguments = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(IDS, **arguments)
    assert torch.equal(model.generate(IDS, **arguments), expected)
    model.save_pretrained(tmp_path)
    again = modeling_qwen3.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(IDS, **arguments), expected)


# --- files of a runtime Patcher ------------------------------------------------------------------------------------

#: folder and file, and the Patcher whose file it is
JOINED = ("llama", "patched_modeling_llama", Patcher(fusions=["qkv"]))


@pytest.fixture(scope="module")
def joined() -> Iterator[ModuleType]:
    """The generated Llama."""
    with imported(*JOINED[:2]) as module:
        yield module


def saved(model: transformers.PreTrainedModel, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_llama_with_qkv_computes_and_saves_what_the_patcher_does(
    joined: ModuleType, smollm2_small: Path, tmp_path: Path
) -> None:
    """On real weights, with three queries to a key."""
    stock = transformers.LlamaForCausalLM.from_pretrained(smollm2_small)
    patched = transformers.LlamaForCausalLM.from_pretrained(smollm2_small, patcher=JOINED[2])
    model = joined.LlamaForCausalLM.from_pretrained(smollm2_small)
    assert type(model) is joined.LlamaForCausalLM
    with torch.no_grad():
        found = model(IDS).logits
        assert torch.equal(found, patched(IDS).logits)
        torch.testing.assert_close(found, stock(IDS).logits, rtol=1e-4, atol=1e-4)
    expected = saved(stock, tmp_path / "stock")
    assert saved(model, tmp_path / "model") == expected
    assert saved(patched, tmp_path / "patched") == expected


def test_llama_with_qkv_generates_and_trains(joined: ModuleType, smollm2_small: Path) -> None:
    stock = transformers.LlamaForCausalLM.from_pretrained(smollm2_small)
    model = joined.LlamaForCausalLM.from_pretrained(smollm2_small)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **arguments), stock.generate(IDS, **arguments))
    for each in (stock, model):
        each(IDS, labels=IDS).loss.backward()
    attention, original = model.model.layers[0].self_attn, stock.model.layers[0].self_attn
    gradients = [getattr(original, name).weight.grad for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(attention.qkv_proj.weight.grad, torch.cat(gradients), rtol=1e-3, atol=1e-5)


EXPERTS = ("mixtral", "patched_modeling_mixtral", Patcher(fusions=["sequential_experts"]))


def test_mixtral_with_experts_as_layers_computes_and_saves_what_the_patcher_does(
    smollm2_moe: Path, tmp_path: Path
) -> None:
    """On real weights: four experts, apart on disk, which transformers stacks and the file doesn't."""
    stock = transformers.MixtralForCausalLM.from_pretrained(smollm2_moe)
    patched = transformers.MixtralForCausalLM.from_pretrained(smollm2_moe, patcher=EXPERTS[2])
    expected = saved(stock, tmp_path / "stock")
    with imported(*EXPERTS[:2]) as module, torch.no_grad():
        model = module.MixtralForCausalLM.from_pretrained(smollm2_moe)
        experts = model.model.layers[0].mlp.experts
        assert [type(expert.gate_proj) for expert in experts] == [torch.nn.Linear] * 4
        found = model(IDS).logits
        assert torch.equal(found, patched(IDS).logits)
        torch.testing.assert_close(found, stock(IDS).logits, rtol=1e-3, atol=1e-3)
        assert saved(model, tmp_path / "model") == expected


def test_deepseek_v3_needs_nothing_but_transformers() -> None:
    text = (GALLERY / "deepseek_v3" / "generated" / "patched_modeling_deepseek_v3.py").read_text("utf-8")
    assert "import patcher" not in text
    assert "from patcher" not in text
