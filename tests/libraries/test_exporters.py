"""Patched models in exported programs: ONNX Runtime, ExecuTorch, caches, sizes left open, what exporters change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import PretrainedConfig, VideoLlama3VisionConfig, VideoLlama3VisionModel

from patcher import Patcher
from patcher.fusions import SequentialExperts
from tests.support.caches import CACHE
from tests.support.tiny import (
    build_tiny,
    randomize,
    tiny_bert_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
)
from tests.support.tiny_experts import (
    eager_and_listed,
    tiny_gpt_oss_config,
    tiny_jetmoe_config,
    tiny_llama4_config,
    tiny_nemotron_h_config,
)

FUSED = Patcher(fusions=["qkv", "gate_up"])
#: Other sizes than a program is exported with. Of two tokens, two experts of four have none.
SIZES = [(3, 7), (1, 1)]
OPEN = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}


def pair(config: PretrainedConfig, patcher: Patcher) -> tuple[Any, Any]:
    stock = build_tiny(config)
    return stock, patcher.apply(copy.deepcopy(stock))


def ids_of(size: tuple[int, int]) -> torch.Tensor:
    return torch.arange(40, 40 + size[0] * size[1]).view(size)


class Logits(nn.Module):
    """What torch.onnx exports: tensors in, and one out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids, use_cache=False).logits
        return found


def onnx_file(model: Any, file: Path) -> Any:
    """The model as torch.onnx writes it, with batch and length left open, read by onnx."""
    example = tiny_inputs(model.config)["input_ids"]
    program = torch.onnx.export(
        Logits(model).eval(), (example,), dynamo=True, dynamic_shapes={"input_ids": OPEN}, verbose=False
    )
    assert program is not None
    program.save(file)
    return pytest.importorskip("onnx").load(file)


def run(file: Path, ids: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: ids.numpy()})[0])


@pytest.mark.parametrize(
    ("config", "patcher", "rows"),
    [
        pytest.param(
            tiny_bert_config(num_hidden_layers=1),
            Patcher(fusions="qkv"),
            [3 * 64],
            id="encoder",
            marks=pytest.mark.nightly,
        ),
        pytest.param(tiny_llama_config(num_hidden_layers=1), FUSED, [64 + 2 * 32, 2 * 96], id="decoder"),
    ],
)
def test_onnx_runtime_computes_what_stock_does(
    config: PretrainedConfig, patcher: Patcher, rows: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    stock, fused = pair(config, patcher)
    files = [tmp_path / "stock.onnx", tmp_path / "fused.onnx"]
    shapes = [
        [sorted(each.dims) for each in onnx_file(model, file).graph.initializer]
        for model, file in zip((stock, fused), files, strict=True)
    ]

    for ids in [tiny_inputs(config)["input_ids"], *map(ids_of, SIZES)]:
        with torch.no_grad():
            expected = stock(ids).logits
        for file in files:
            torch.testing.assert_close(run(file, ids), expected, atol=1e-4, rtol=0)
    # A joined projection is one initializer, where stock has one for each part.
    for number in rows:
        assert shapes[1].count(sorted([64, number])) == shapes[0].count(sorted([64, number])) + 1
    matrices = [sum(len(each) == 2 for each in found) for found in shapes]
    assert matrices[1] == matrices[0] - 2 - (len(rows) - 1)


def test_prefill_and_decoding_with_a_cache_in_onnx_runtime() -> None:
    pytest.importorskip("onnxruntime")
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    from transformers.exporters.utils import decompose_for_generation

    stock, fused = pair(tiny_llama_config(num_hidden_layers=1), FUSED)
    inputs = tiny_inputs(stock.config)
    exported = OnnxExporter().export_for_generation(fused, copy.deepcopy(inputs), OnnxConfig())

    assert exported.components.keys() == {"prefill", "decode"}
    for name, (part, given) in decompose_for_generation(stock, copy.deepcopy(inputs)).items():
        found = exported.runners[name](**copy.deepcopy(given))
        with torch.no_grad():
            expected = part(**given)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)
        for one, other in zip(getattr(found, CACHE).layers, getattr(expected, CACHE).layers, strict=True):
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), atol=1e-5, rtol=0)


@pytest.mark.parametrize("all_tokens", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_experts_without_tokens_in_onnx_runtime(all_tokens: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    config = tiny_mixtral_config(num_hidden_layers=1)
    stock, listed = eager_and_listed(config, Patcher(fusions=[SequentialExperts(all_tokens=all_tokens)]))
    file = tmp_path / "model.onnx"
    onnx_file(listed, file)

    for ids in map(ids_of, SIZES):
        with torch.no_grad():
            expected = stock(ids).logits
        torch.testing.assert_close(run(file, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_mixtral_config(num_hidden_layers=1), id="Mixtral"),
        pytest.param(tiny_qwen2_moe_config(num_hidden_layers=1), id="Qwen2-MoE", marks=pytest.mark.nightly),
        pytest.param(tiny_gpt_oss_config(num_hidden_layers=1), id="gpt-oss"),
        pytest.param(tiny_llama4_config(), id="Llama 4"),
        pytest.param(tiny_nemotron_h_config(), id="Nemotron-H", marks=pytest.mark.nightly),
        pytest.param(tiny_jetmoe_config(), id="JetMoE", marks=pytest.mark.nightly),
    ],
)
def test_listed_experts_are_exported_on_their_own_tokens(config: PretrainedConfig) -> None:
    """Where stock's own loop isn't exported: it runs over the experts that have tokens, and which depends on these."""
    stock, listed = eager_and_listed(config, Patcher(fusions="sequential_experts"))
    shapes = {"input_ids": OPEN, "use_cache": None}
    with torch.no_grad():
        example = {"input_ids": ids_of((2, 5)), "use_cache": False}
        program = torch.export.export(listed, (), example, dynamic_shapes=shapes)
        for ids in map(ids_of, [(3, 7), (1, 2)]):
            found = program.module()(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, stock(ids, use_cache=False).logits, atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at it where a graph breaks
def test_experts_in_training_break_no_more_graphs_than_stock() -> None:
    models = eager_and_listed(tiny_mixtral_config(num_hidden_layers=1), Patcher(fusions="sequential_experts"))
    # Tokens for every expert: one without any runs on no rows here, a size that torch.compile compiles anew for.
    ids, graphs = torch.arange(32).view(4, 8), []
    for model in models:
        torch._dynamo.reset()
        counter = CompileCounter()
        torch.compile(model.train(), backend=counter)(ids)
        graphs.append(counter.frame_count)
    torch._dynamo.reset()

    assert 0 < graphs[1] <= graphs[0]


def test_compiled_experts_train_as_stock() -> None:
    config = tiny_mixtral_config(num_hidden_layers=1)
    stock, listed = eager_and_listed(config, Patcher(fusions=[SequentialExperts(all_tokens=True)]))
    torch._dynamo.reset()
    compiled = torch.compile(listed, backend="aot_eager", fullgraph=True)
    losses = [model(ids_of((2, 5)), labels=ids_of((2, 5))).loss for model in (stock, compiled)]
    torch._dynamo.reset()
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(losses[1], losses[0])
    with torch.no_grad():  # saved as the weights are, gradients are those of the stacks
        for parameter in listed.parameters():
            parameter.copy_(parameter.grad)
    found = Patcher().apply(listed).state_dict()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_what_exporters_put_into_a_class_is_put_into_those_made_of_it() -> None:
    """An attention over images loops over them; transformers' exporters give its class a forward without the loop."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    stock = VideoLlama3VisionModel(VideoLlama3VisionConfig(**sizes)).eval()
    randomize(stock)
    fused = Patcher(fusions="qkv").apply(copy.deepcopy(stock))
    attention = type(fused.encoder.layers[0].self_attn)
    forward = attention.forward
    inputs = {"hidden_states": torch.randn(32, 32), "cu_seqlens": torch.tensor([0, 16, 32], dtype=torch.int32)}
    inputs["position_embeddings"] = (torch.randn(32, 16), torch.randn(32, 16))

    result = DynamoExporter().export(fused.encoder, inputs, DynamoConfig())
    program = getattr(result, "program", result)

    assert attention.__name__ == "FusedVideoLlama3VisionAttention"
    assert attention.forward is forward
    with torch.no_grad():
        found, expected = program.module()(**inputs), stock.encoder(**inputs)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, atol=1e-5, rtol=0)
    # Each part is computed once, of its own rows.
    weights = [str(node.args[1]) for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(weights) == 3 + 1 + 2
    assert "layers.0.self_attn.qkv_proj.weight" in program.state_dict


def test_the_module_of_a_rewritten_class_has_the_names_of_the_original_one() -> None:
    """`sys.modules[type(layer).__module__]` is where code that is given a layer looks for functions beside it."""
    import sys

    from transformers.models.llama import modeling_llama

    _, fused = pair(tiny_llama_config(num_hidden_layers=1), FUSED)
    module = sys.modules[type(fused.model.layers[0].self_attn).__module__]

    assert module.apply_rotary_pos_emb is modeling_llama.apply_rotary_pos_emb
    assert not hasattr(module, "__path__")
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # transformers records outputs
def test_decoding_with_a_static_cache_is_exported() -> None:
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    stock, fused = pair(tiny_llama_config(num_hidden_layers=1), FUSED)
    fused.generation_config.update(
        cache_implementation="static", cache_config={"batch_size": 1, "max_cache_len": 16}, use_cache=True
    )
    wrapped = TorchExportableModuleForDecoderOnlyLM(fused, batch_size=1, max_cache_len=16, device="cpu")
    program = wrapped.export(input_ids=torch.tensor([[3]]), cache_position=torch.tensor([0])).module()
    tokens = [3, 8, 9]
    with torch.no_grad():
        for position, token in enumerate(tokens):
            found = program(input_ids=torch.tensor([[token]]), cache_position=torch.tensor([position]))
        expected = stock(torch.tensor([tokens])).logits[0, -1]

    torch.testing.assert_close(found[0, -1], expected, atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # what ExecuTorch's own code does
def test_executorch_runs_a_fused_model() -> None:
    pytest.importorskip("executorch")
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    stock, fused = pair(tiny_llama_config(num_hidden_layers=1), FUSED)
    inputs = tiny_inputs(stock.config)
    exported = ExecutorchExporter().export(fused, inputs | {"use_cache": False}, ExecutorchConfig())

    with torch.no_grad():
        torch.testing.assert_close(exported(**inputs).logits, stock(**inputs).logits, atol=1e-4, rtol=0)
