"""Export an encoder with joined projections to ONNX, run it in ONNX Runtime, and compare it with the stock model.

    pip install onnx onnxscript onnxruntime
    python examples/export_onnx.py                 # MiniLM, from a package on the index: no hub needed
    python examples/export_onnx.py BAAI/bge-small-en-v1.5    # any encoder like BERT, by repo id or folder

It prints

    6 attentions with one projection for queries, keys and values
    stock: 288 nodes, 48 of them matrix products, 120 initializers, 91.0 MB
    fused: 270 nodes, 36 of them matrix products, 97 initializers, 90.9 MB
    sentences as exported, 3x9 tokens: within 1e-4 of stock in torch: True
    sentences as one text, 1x22 tokens: within 1e-4 of stock in torch: True
    1x16 tokens: 1.00 of stock's time in ONNX Runtime, medians of 15
    4x64 tokens: 1.01 of stock's time in ONNX Runtime, medians of 15

So the graph is smaller, but not faster on two CPU cores: three products have no overhead in ONNX Runtime.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, logging

from patcher import Patcher, report

logging.disable_progress_bar()
ROUNDS = 15
SENTENCES = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell sharply."]


class Encoder(nn.Module):
    """A model with tensors as inputs, and one tensor as output."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # (batch, length), twice -> (batch, length, hidden)
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def export(model: PreTrainedModel, inputs: dict[str, torch.Tensor], file: Path) -> onnx.ModelProto:
    """Write the model with dynamic batch size and length, and return it as ONNX."""
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.onnx.export(
        Encoder(model).eval(), kwargs=inputs, dynamo=True, dynamic_shapes=dict.fromkeys(inputs, sizes), verbose=False
    )
    assert program is not None
    program.save(file)
    return onnx.load(file)


def session_of(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def times(sessions: dict[str, onnxruntime.InferenceSession], feeds: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Measure the seconds of each run, with all sessions in turn in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for index in range(ROUNDS + 3):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(None, feeds)
            if index >= 3:  # the first rounds allocate
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    stock = AutoModel.from_pretrained(name).eval()
    fused = AutoModel.from_pretrained(name, patcher=Patcher(fusions="qkv")).eval()
    print(f"{len(report(fused).fused)} attentions with one projection for queries, keys and values")
    texts = {"as exported": SENTENCES, "as one text": [" ".join(SENTENCES)]}
    feeds = {title: dict(tokenizer(text, padding=True, return_tensors="pt")) for title, text in texts.items()}
    for inputs in feeds.values():
        inputs.pop("token_type_ids", None)

    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for title, model in {"stock": stock, "fused": fused}.items():
            file = Path(folder, f"{title}.onnx")
            graph = export(model, feeds["as exported"], file).graph
            size = sum(path.stat().st_size for path in Path(folder).glob(f"{title}.onnx*"))
            products = sum(node.op_type in ("MatMul", "Gemm") for node in graph.node)
            print(
                f"{title}: {len(graph.node)} nodes, {products} of them matrix products, "
                f"{len(graph.initializer)} initializers, {size / 1e6:.1f} MB"
            )
            sessions[title] = session_of(file)

        for title, inputs in feeds.items():
            arrays = {key: value.numpy() for key, value in inputs.items()}
            with torch.no_grad():
                expected = stock(**inputs).last_hidden_state.numpy()
            errors = [np.abs(session.run(None, arrays)[0] - expected).max() for session in sessions.values()]
            shape = "x".join(map(str, inputs["input_ids"].shape))
            print(f"sentences {title}, {shape} tokens: within 1e-4 of stock in torch: {max(errors) < 1e-4}")

        for batch, length in ((1, 16), (4, 64)):
            ids = torch.randint(1000, 2000, (batch, length), generator=torch.Generator().manual_seed(0)).numpy()
            seconds = times(sessions, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
            medians = {title: statistics.median(values) for title, values in seconds.items()}
            print(
                f"{batch}x{length} tokens: {medians['fused'] / medians['stock']:.2f} of stock's time in ONNX Runtime, "
                f"medians of {ROUNDS}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import minilm

        main(str(minilm()))
