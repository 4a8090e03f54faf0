"""Patched models on a GPU: loaded, run, captured, trained and saved as stock is there."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

import patcher
from patcher import Patcher, checkpoint_weights, load_checkpoint_weights, presets, report
from patcher.fusions import SequentialExperts
from tests.support import shared
from tests.support.checkpoints import assert_saved_alike
from tests.support.comparing import logits
from tests.support.quantizers import torchao_int8
from tests.support.replacements import JOINED
from tests.support.tiny import (
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen3_config,
)

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
#: torch.compile advises TensorFloat32, and tells of empty graphs and of what it doesn't optimize.
compiles = pytest.mark.filterwarnings("ignore::UserWarning")

CUDA = torch.device("cuda", 0)
FUSED = Patcher(fusions=["qkv", "gate_up"])
EXPERTS = Patcher(fusions=[SequentialExperts(all_tokens=True)])
TINY = {"atol": 1e-5, "rtol": 1e-4}  # of sums in another order

CASES: dict[str, tuple[Callable[[], PretrainedConfig], Patcher]] = {
    "Llama": (tiny_llama_config, FUSED),
    "Llama, a conversion": (tiny_llama_config, JOINED),
    "Llama, siblings": (tiny_llama_config, Patcher(fusions=["siblings"])),
    "Qwen3": (tiny_qwen3_config, FUSED),
    "BERT": (tiny_bert_config, Patcher(fusions=["qkv"])),
    "GPT-2": (tiny_gpt2_config, Patcher(fusions=["split"])),
    "LLaVA": (tiny_llava_config, FUSED | Patcher(fusions=["patch_embeddings"])),
    "Mixtral": (tiny_mixtral_config, Patcher(fusions=["qkv"]) | EXPERTS),
    "Qwen2-MoE": (tiny_qwen2_moe_config, FUSED | Patcher(fusions=["sequential_experts"])),
}
every_case = pytest.mark.parametrize(("make", "patcher_"), CASES.values(), ids=CASES)


def load(config: PretrainedConfig, patcher_: Patcher | None, **options: Any) -> Any:
    folder = shared.checkpoint(config)
    (name,) = AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder, patcher=patcher_, **{"device_map": CUDA} | options)


def inputs_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    found = {name: each.to(CUDA) for name, each in tiny_inputs(config).items()}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in found.items()}


@every_case
def test_a_load_computes_and_saves_as_stock(
    make: Callable[[], PretrainedConfig], patcher_: Patcher, tmp_path: Path
) -> None:
    config = make()
    stock, model = load(config, None), load(config, patcher_)
    assert {parameter.device for parameter in model.parameters()} == {CUDA}
    assert report(model).replaced or report(model).fused
    inputs = inputs_of(config)
    torch.testing.assert_close(logits(model, inputs), logits(stock, inputs), **TINY)
    assert_saved_alike(model, stock, tmp_path)
    expected = stock.state_dict()
    found = patcher.original_state_dict(model)
    assert found.keys() == expected.keys()
    assert all(found[name].device == CUDA and torch.equal(found[name], expected[name]) for name in expected)


@every_case
def test_half_precision_is_as_exact_as_stock(make: Callable[[], PretrainedConfig], patcher_: Patcher) -> None:
    config = make()
    exact = logits(load(config, None), inputs_of(config))
    inputs = inputs_of(config, torch.bfloat16)
    stock, model = (load(config, each, dtype=torch.bfloat16) for each in (None, patcher_))
    errors = [(logits(each, inputs).float() - exact).abs().mean().item() for each in (stock, model)]
    assert errors[1] <= 1.5 * errors[0]


@every_case
def test_gradients_are_those_of_stock(make: Callable[[], PretrainedConfig], patcher_: Patcher) -> None:
    config = make()
    stock, model = load(config, None), load(config, patcher_)
    before = {name: parameter.clone() for name, parameter in stock.named_parameters()}
    for each in (stock, model):
        output = each(**inputs_of(config))
        (output.logits if "logits" in output else output[0]).square().mean().backward()
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    found = patcher.original_state_dict(model)
    steps = {
        name: (found[name] - value, parameter - value)
        for (name, parameter), value in zip(stock.named_parameters(), before.values(), strict=True)
    }
    assert sum(expected.any().item() for _, expected in steps.values()) > 10
    for step, expected in steps.values():
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.*checkpoint")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_with_gradient_checkpointing(checkpointing: bool) -> None:
    config = tiny_llama_config()
    found = []
    for each in (load(config, None), load(config, FUSED)):
        if checkpointing:
            each.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cuda", torch.bfloat16):
            loss = each.train()(**inputs_of(config), labels=inputs_of(config)["input_ids"]).loss
        loss.backward()
        weight = each.model.layers[0].self_attn.k_proj.weight
        found.append((loss.detach(), weight.grad))
    (loss, gradient), (mine, of_the_part) = found
    torch.testing.assert_close(mine, loss, atol=1e-2, rtol=1e-2)
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), of_the_part.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_kernels_take_rows_of_a_joined_output(name: str) -> None:
    """They lie apart in memory, by the width of the joined layer."""
    config = tiny_llama_config(num_key_value_heads=4)  # the memory-efficient one takes as many keys as queries
    stock, model = (load(config, each, dtype=torch.bfloat16) for each in (None, FUSED))
    tokens = inputs_of(config)["input_ids"]
    with sdpa_kernel(getattr(SDPBackend, name)), torch.no_grad():
        expected, found = (each(tokens).logits for each in (stock, model))
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


@compiles
def test_generated_tokens_are_those_of_stock() -> None:
    config = tiny_llama_config()
    tokens = inputs_of(config)["input_ids"]
    found = [
        load(config, each).generate(tokens, max_new_tokens=16, do_sample=False, **options)
        for each in (None, FUSED)
        for options in ({}, {"cache_implementation": "static"})
    ]
    assert found[0].shape[1] > tokens.shape[1]
    assert all(torch.equal(each, found[0]) for each in found)


@compiles
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_compiled_with_cuda_graphs(name: str) -> None:
    make, patcher_ = CASES[name]
    config = make()
    model = load(config, patcher_)
    tokens = inputs_of(config)["input_ids"]
    expected = logits(load(config, None), {"input_ids": tokens})
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            found = compiled(tokens, use_cache=False).logits.clone()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_a_forward_waits_for_the_gpu_no_more_often_than_stock() -> None:
    make, patcher_ = CASES["Mixtral"]
    tokens = inputs_of(make())["input_ids"]
    counts = []
    for each in (None, patcher_):
        model = load(make(), each)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(tokens, use_cache=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("called a synchronizing CUDA operation" in str(each.message) for each in caught))
    assert counts[1] <= counts[0]


class Captured:
    """A forward captured as a CUDA graph."""

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor) -> None:
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    model(tokens, use_cache=False)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph):
                self.logits = model(tokens, use_cache=False).logits

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits.clone()


GRAPHS: dict[str, tuple[Callable[[], PretrainedConfig], Patcher]] = {
    name: CASES[name] for name in ("Llama", "Llama, a conversion", "Qwen3", "Mixtral")
}


@pytest.mark.parametrize("target", ["stock", "patched"])
@pytest.mark.parametrize(("make", "patcher_"), GRAPHS.values(), ids=GRAPHS)
def test_new_weights_stream_under_a_captured_graph(
    make: Callable[[], PretrainedConfig], patcher_: Patcher, target: str
) -> None:
    """An engine that captured its forward takes the weights of each step of training."""
    config = make()
    # Stock's grouped matmul of float32 can't be captured.
    engine = load(config, patcher_ if target == "patched" else None, experts_implementation="batched_mm")
    tokens = inputs_of(config)["input_ids"]
    captured = Captured(engine, tokens)
    before = {name: parameter.data_ptr() for name, parameter in engine.named_parameters()}
    trained = load(config, patcher_)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    expected = logits(trained, {"input_ids": tokens})
    assert not torch.allclose(captured.replay(), expected, atol=1e-2)
    load_checkpoint_weights(engine, checkpoint_weights(trained))
    torch.testing.assert_close(captured.replay(), expected, **TINY)
    assert {name: parameter.data_ptr() for name, parameter in engine.named_parameters()} == before


def test_writing_to_a_part_takes_effect_under_a_captured_graph() -> None:
    config = tiny_llama_config()
    stock, model = load(config, None), load(config, FUSED)
    tokens = inputs_of(config)["input_ids"]
    captured = Captured(model, tokens)
    with torch.no_grad():
        for each in (stock, model):
            each.model.layers[1].self_attn.v_proj.weight.mul_(2)
    torch.testing.assert_close(captured.replay(), logits(stock, {"input_ids": tokens}), **TINY)


OFFLOADED = {
    "layers in memory and on the disk": {
        "model.embed_tokens": 0,
        "model.layers.0": "cpu",
        "model.layers.1.self_attn": "disk",
        "model.layers.1.mlp": 0,
        "model.layers.1.input_layernorm": 0,
        "model.layers.1.post_attention_layernorm": "cpu",
        "model.norm": 0,
        "model.rotary_emb": 0,
        "lm_head": "disk",
    },
    "auto": "auto",
}


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("patcher_", [FUSED, JOINED], ids=["fused", "a conversion"])
def test_what_does_not_fit_is_offloaded(patcher_: Patcher, name: str, tmp_path: Path) -> None:
    config = tiny_llama_config()
    options: dict[str, Any] = {"device_map": OFFLOADED[name], "offload_folder": tmp_path / "offload"}
    if name == "auto":
        options["max_memory"] = {0: 200_000, "cpu": 100_000}
    stock, model = load(config, None), load(config, patcher_, **options)
    assert len({str(parameter.device) for parameter in model.parameters()}) > 1
    inputs = inputs_of(config)
    torch.testing.assert_close(logits(model, inputs).to(CUDA), logits(stock, inputs), **TINY)
    assert_saved_alike(model, stock, tmp_path)


def test_what_is_moved_stays_one_layer(tmp_path: Path) -> None:
    """Parts are views of the joined weight, after every way of moving it."""
    config = tiny_llama_config()
    model = load(config, FUSED, device_map="cpu")
    for move in (nn.Module.cuda, nn.Module.bfloat16, nn.Module.cpu, nn.Module.cuda, nn.Module.float):
        move(model)
        attention = model.model.layers[0].self_attn
        joined = attention.qkv_proj.weight
        assert attention.k_proj.weight.device == joined.device
        with torch.no_grad():
            attention.k_proj.weight.zero_()
        assert joined[64:96].eq(0).all()
        assert joined[:64].ne(0).any()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    inputs = inputs_of(config)
    torch.testing.assert_close(logits(copied, inputs), logits(model, inputs), atol=0, rtol=0)


def test_apply_shares_memory_on_the_gpu() -> None:
    config = tiny_llama_config()
    stock = load(config, None)
    before = torch.cuda.memory_allocated()
    model = FUSED.apply(stock)
    added = torch.cuda.memory_allocated() - before
    joined = sum(
        parameter.nbytes for name, parameter in model.named_parameters() if "qkv_proj" in name or "gate_up" in name
    )
    assert joined <= added <= 1.1 * joined
    back = Patcher().apply(model)
    expected, found = stock.state_dict(), back.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_load_holds_no_more_memory_than_stock() -> None:
    """At most one joined weight beside the model."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = tiny_llama_config(**sizes)
    peaks, held = [], []
    for each in (None, FUSED):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = load(config, each)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        held.append(torch.cuda.memory_allocated() - before)
        del model
    assert held[1] <= 1.01 * held[0]
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_kernels(dtype: torch.dtype) -> None:
    config = tiny_llama_config()
    stock, model = (load(config, each, dtype=dtype) for each in (None, presets.LIGER))
    assert {original for _, original, *_ in report(model).replaced} == {"LlamaRMSNorm", "LlamaMLP"}
    inputs = inputs_of(config)
    found = []
    for each in (stock, model):
        loss = each.train()(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        found.append((loss.detach(), each.model.layers[0].mlp.down_proj.weight.grad))
    bound = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found[1], found[0], atol=bound, rtol=bound)


def test_liger_beside_fusions(tmp_path: Path) -> None:
    found = patcher.verify(
        shared.checkpoint(tiny_llama_config()),
        presets.LIGER | Patcher(fusions=["qkv"]),
        device_map=CUDA,
        progress=False,
    )
    assert found.passed, str(found)


def test_verify_passes_what_is_right_and_fails_what_is_wrong() -> None:
    class Louder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(96, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)) * 1.01

    folder = shared.checkpoint(tiny_llama_config())
    right = patcher.verify(folder, FUSED, device_map=CUDA, progress=False)
    assert right.passed, str(right)
    wrong = patcher.verify(folder, Patcher({"LlamaMLP": Louder}), device_map=CUDA, quick=True, progress=False)
    assert not wrong.passed
    assert "LlamaMLP" in str(wrong.guilty)


def test_benchmark_measures_by_events() -> None:
    found = patcher.benchmark(shared.checkpoint(tiny_llama_config()), FUSED, seconds=15, progress=False)
    assert torch.cuda.get_device_name(CUDA) in str(found)
    assert any(each.patcher == FUSED for each in found.measured)


def test_a_quantizer_takes_joined_layers() -> None:
    config = tiny_llama_config()
    options = {"dtype": torch.bfloat16, "quantization_config": torchao_int8()}
    stock, model = load(config, None, **options), load(config, FUSED, **options)
    tokens = inputs_of(config)["input_ids"]
    torch.testing.assert_close(
        logits(model, {"input_ids": tokens}), logits(stock, {"input_ids": tokens}), atol=0.1, rtol=0.05
    )
