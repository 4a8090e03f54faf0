"""Projections of one input as one matrix product.

One large product has less overhead than two or three small ones, and it is one layer to quantize, shard or calibrate:
for whoever decodes on one device, or quantizes and calibrates by layer. What it gains on two CPU cores is small: a
step of decoding SmolLM2-135M in bfloat16 takes 0.97 of stock's time.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte, grouped heads included.
`python -m tests.benchmarks.bench_projections` measures it on your machine.
"""

from __future__ import annotations

from patcher import Patcher


def _pinned(name: str, fusions: list[str], **pins: str | list[str]) -> Patcher:
    return Patcher(fusions=fusions, name=name, transformers=">=5.17,<5.24", fingerprints=pins)


LLAMA_FUSED_PROJECTIONS = _pinned(
    "LLAMA_FUSED_PROJECTIONS", ["qkv", "gate_up"], LlamaAttention="bb79e6fd486f0b0d", LlamaMLP="eafbe94b23d9df2e"
)
"""Llama with queries, keys and values as one projection, gate and up as another.

Measured on SmolLM2: a step of decoding in bfloat16 on two CPU cores takes 0.97 of stock's time.
"""

MISTRAL_FUSED_PROJECTIONS = _pinned(
    "MISTRAL_FUSED_PROJECTIONS", ["qkv", "gate_up"], MistralAttention="89fa5ad4e8a016a9", MistralMLP="c73b8ed157b7f657"
)
"""Mistral with queries, keys and values as one projection, gate and up as another."""

QWEN2_FUSED_PROJECTIONS = _pinned(
    "QWEN2_FUSED_PROJECTIONS", ["qkv", "gate_up"], Qwen2Attention="c9fc901edd3b17aa", Qwen2MLP="62984afaf175f993"
)
"""Qwen2 with queries, keys and values as one projection, gate and up as another.

Queries, keys and values have biases, which are joined as well.
"""

QWEN3_FUSED_PROJECTIONS = _pinned(
    "QWEN3_FUSED_PROJECTIONS", ["qkv", "gate_up"], Qwen3Attention="c3ab2496711571bb", Qwen3MLP="b5887e774e35e3ce"
)
"""Qwen3 with queries, keys and values as one projection, gate and up as another.

The norms of queries and keys come after the split.
"""

GEMMA3_FUSED_PROJECTIONS = _pinned(
    "GEMMA3_FUSED_PROJECTIONS",
    ["qkv", "gate_up"],
    Gemma3Attention="b58db9078fb3f8ed",
    Gemma3MLP="923411af8433b1dd",
    SiglipAttention="1cc0a052bef4f401",
)
"""Gemma 3 with queries, keys and values as one projection, gate and up as another.

In the vision-language model the attention of the vision tower is fused as well.
"""

PHI_FUSED_PROJECTIONS = _pinned("PHI_FUSED_PROJECTIONS", ["qkv"], PhiAttention="30bf7c02afa71944")
"""Phi with queries, keys and values as one projection.

Its MLP has no gate.
"""

BERT_FUSED_PROJECTIONS = _pinned(
    "BERT_FUSED_PROJECTIONS", ["qkv"], BertSelfAttention=["762e60062dbe1a75", "3e1e0b510c75801a"]
)
"""BERT with queries, keys and values as one projection.

Cross attention, where keys and values have another input, is left alone.
"""
