"""Fused forwards as code: read in a debugger, run by threads, differentiated, compiled and exported as stock's are."""

from __future__ import annotations

import copy
import inspect
import linecache
import pickle
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from patcher import Patcher, report
from patcher.fusions.experts.linear import LinearExperts
from tests.support import fresh
from tests.support.sampling import sampled
from tests.support.tiny import (
    build_tiny,
    tiny_bert_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
    tiny_qwen2_vl_config,
    tiny_qwen3_vl_moe_config,
)

T5 = T5Config(
    dropout_rate=0.0,
    vocab_size=128,
    d_model=64,
    d_kv=16,
    d_ff=96,
    num_layers=1,
    num_heads=4,
    feed_forward_proj="gated-gelu",
    decoder_start_token_id=0,
)
BART = BartConfig(
    vocab_size=128,
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
Case = tuple[PretrainedConfig, list[str], Any]
CASES: dict[str, Case] = {
    "llama": (tiny_llama_config(num_hidden_layers=1), ["qkv", "gate_up"], None),
    "bert": (tiny_bert_config(num_hidden_layers=1), ["qkv"], None),
    "t5, gated": (T5, ["qkv", "gate_up"], T5ForConditionalGeneration),
    "bart": (BART, ["qkv"], BartForConditionalGeneration),
    "llava": (tiny_llava_config(), ["patch_embeddings", "qkv", "gate_up"], None),
    "mixtral": (tiny_mixtral_config(num_hidden_layers=1), ["sequential_experts", "qkv"], None),
    "qwen3_vl_moe": (
        tiny_qwen3_vl_moe_config(),
        ["patch_embeddings", "qkv", "gate_up", "sequential_experts"],
        None,
    ),
}


def pair(name: str) -> tuple[Any, Any]:
    """The stock model, its experts eager, and the fused one."""
    config, fusions, model_class = CASES[name]
    stock: Any = build_tiny(config, model_class=model_class)
    if "sequential_experts" in fusions:
        stock.set_experts_implementation("eager")
    return stock, Patcher(fusions=fusions).apply(stock)


def inputs_of(model: Any, seed: int = 0) -> dict[str, Any]:
    config = model.config
    if "vision_config" in config.sub_configs and config.model_type != "llava":
        return tiny_inputs(tiny_qwen2_vl_config(), seed=seed)
    inputs = tiny_inputs(config, seed=seed)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(5, 11)[None].repeat(2, 1)
    return inputs


def rewritten(model: nn.Module) -> dict[type[nn.Module], str]:
    """The classes whose forward was rewritten, and where there is one."""
    found = {
        type(model.get_submodule(path)): path for path, was, _ in report(model).fused if not was.startswith("Conv")
    }
    assert found
    return found


cases = pytest.mark.parametrize("name", CASES)


# --- read ------------------------------------------------------------------------------------------------------------


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from codes_in(constant)


@cases
def test_the_source_of_a_class_is_what_runs(name: str) -> None:
    _, model = pair(name)
    for cls in rewritten(model):
        if issubclass(cls, LinearExperts):  # methods of a class that is written down
            continue
        linecache.checkcache()  # as every traceback does: what has no file of its own must stay
        whole = inspect.getsource(cls)
        # The very code: compiled anew from what is shown, it has the same instructions.
        shown = {code.co_name: code.co_code for code in codes_in(compile(whole, "shown", "exec", dont_inherit=True))}
        methods = [value for value in vars(cls).values() if inspect.isfunction(value)]
        assert methods
        assert whole.startswith(f"class {cls.__name__}(")
        for method in methods:
            assert inspect.getsource(method) in whole
            inner = inspect.unwrap(method)
            assert inner.__code__.co_code == shown[inner.__name__]


FAILING = {
    "llama": [("self_attn", "self.qkv_proj("), ("mlp", "self.gate_up_proj(")],
    "bert": [("self", "self.qkv_proj(")],
    "t5, gated": [("SelfAttention", 'shared("q", hidden_states)'), ("DenseReluDense", "self.gate_up_proj(")],
    "bart": [("self_attn", 'shared("q_proj", hidden_states)')],
}


@pytest.mark.parametrize("name", FAILING)
def test_a_traceback_shows_the_rewritten_line(name: str) -> None:
    _, model = pair(name)
    for suffix, line in FAILING[name]:
        path = next(path for path in rewritten(model).values() if path.endswith(suffix))
        module, inputs = model.get_submodule(path), [torch.randn(1, 3, 5)]

        with pytest.raises(RuntimeError) as caught:
            module(*inputs)

        frames = [frame for frame in traceback.extract_tb(caught.tb) if type(module).__module__ in frame.filename]
        assert len(frames) == 1
        assert line in (frames[0].line or "")
        assert (
            inspect.getsource(type(module))
            .splitlines()[(frames[0].lineno or 0) - inspect.getsourcelines(type(module))[1]]
            .strip()
            == frames[0].line
        )


UNPICKLED = """
import inspect, pickle, sys
for text, module in pickle.load(open(sys.argv[1], "rb")):
    assert inspect.getsource(type(module)) == text
print("read")
"""


@pytest.mark.process
def test_another_process_that_reads_a_pickle_can_read_the_source(tmp_path: Path) -> None:
    modules = []
    for name in ("llama", "mixtral"):
        _, model = pair(name)
        # Classes of sequential experts are made of methods that have their source elsewhere.
        written = {cls: path for cls, path in rewritten(model).items() if not issubclass(cls, LinearExperts)}
        modules += [(inspect.getsource(cls), model.get_submodule(path)) for cls, path in written.items()]
    (tmp_path / "modules.pickle").write_bytes(pickle.dumps(modules))

    assert fresh.run(UNPICKLED, tmp_path / "modules.pickle").stdout == "read\n"


# --- run -------------------------------------------------------------------------------------------------------------


@cases
def test_nothing_of_a_call_stays_on_a_module(name: str) -> None:
    _, model = pair(name)
    inputs = inputs_of(model)
    model(**inputs)  # transformers puts its recorders on modules in the first call

    def state() -> dict[str, Any]:
        return {
            f"{path}.{name}.{key}": (tuple(value) if isinstance(value, dict) else None, id(value))
            for path, _, _ in report(model).fused
            for name, module in model.get_submodule(path).named_modules()
            for key, value in vars(module).items()
        }

    before = state()
    model(**inputs).logits.sum().backward()

    assert state() == before
    for path, _, _ in report(model).fused:
        projections = [child for child in model.get_submodule(path).modules() if isinstance(child, nn.Linear)]
        assert projections
        assert not any(child._forward_hooks or child._forward_pre_hooks for child in projections)


@pytest.mark.parametrize("name", ["llama", "t5, gated", "mixtral"])
def test_threads_that_share_a_model_get_their_own_outputs_and_gradients(name: str) -> None:
    _, model = pair(name)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run(seed: int) -> list[torch.Tensor | None]:
        logits = model(**inputs_of(model, seed=seed)).logits
        return [logits, *torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)]

    expected = [run(seed) for seed in range(4)]
    results: dict[int, list[list[torch.Tensor | None]]] = {seed: [] for seed in range(4)}
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for _ in range(3):
            results[seed].append(run(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed, runs in results.items():
        assert len(runs) == 3
        for tensors in runs:
            for found, right in zip(tensors, expected[seed], strict=True):
                assert (found is None) == (right is None)
                if found is not None:
                    torch.testing.assert_close(found, right, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5, gated", "mixtral"])
def test_training_with_recomputed_activations_takes_the_steps_of_stock(name: str) -> None:
    stock, fused = pair(name)
    models = (stock, copy.deepcopy(fused))  # what `apply` doesn't convert is shared
    losses: list[list[float]] = []
    for model in models:
        model.train()
        model.config.use_cache = False
        # The name since transformers 5.23, and the one before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(**{next(iter(inspect.signature(enable).parameters)): {"use_reentrant": False}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for seed in range(3):
            loss = model(**inputs_of(model, seed=seed)).logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())

    assert losses[0][0] > losses[0][2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# --- compiled, exported ----------------------------------------------------------------------------------------------


@pytest.mark.libraries
@pytest.mark.parametrize("name", sampled(["llama", "t5, gated", "llava", "mixtral"], {"t5, gated"}))
def test_it_compiles_with_no_more_graph_breaks_than_stock(name: str) -> None:
    graphs = []
    for model in pair(name):
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch._dynamo.explain(model)(**inputs_of(model))
        graphs.append((found.graph_break_count, found.graph_count))
    torch._dynamo.reset()

    assert graphs[1] <= graphs[0]


@pytest.mark.libraries
@pytest.mark.parametrize("name", sampled(["llama", "t5, gated"], {"llama"}))
def test_compiled_it_gives_the_outputs_and_gradients_of_stock(name: str) -> None:
    stock, fused = pair(name)
    inputs = inputs_of(stock)
    for model in (stock, fused):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True) if model is fused else model
        compiled(**inputs).logits.square().mean().backward()
    torch._dynamo.reset()

    for path, _, _ in report(fused).fused:
        joined, parts = fused.get_submodule(path)._joined, stock.get_submodule(path)
        gradients = [getattr(parts, part).weight.grad for part in joined.projections]
        found = getattr(fused.get_submodule(path), joined.name).weight.grad
        torch.testing.assert_close(found, torch.cat(gradients), atol=1e-6, rtol=1e-4)


@pytest.mark.libraries
@pytest.mark.parametrize("name", ["llama", "t5, gated", "llava"])
def test_it_exports_and_computes_what_it_did(name: str) -> None:
    _, fused = pair(name)
    inputs = inputs_of(fused) | {"use_cache": False}

    program = torch.export.export(fused, (), inputs, strict=False)

    found = program.module()(**inputs)
    torch.testing.assert_close(found.logits, fused(**inputs).logits, atol=1e-5, rtol=0)
    # The joined projections are in the program, not their parts.
    names = [key for key, _ in program.named_parameters()]
    assert any("qkv_proj" in key for key in names)
    assert not any(key.endswith("q_proj.weight") for key in names if "cross" not in key and "encoder_attn" not in key)


@pytest.mark.libraries
def test_it_exports_with_sizes_left_open() -> None:
    _, fused = pair("llama")
    batch, length = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("length", min=4, max=64)
    shapes = {"input_ids": {0: batch, 1: length}, "use_cache": None}
    example = {"input_ids": torch.arange(20).view(2, 10), "use_cache": False}
    program = torch.export.export(fused, (), example, dynamic_shapes=shapes, strict=False)

    others = torch.arange(3, 75).view(3, 24)
    found = program.module()(input_ids=others, use_cache=False)

    torch.testing.assert_close(found.logits, fused(input_ids=others).logits, atol=1e-5, rtol=0)
