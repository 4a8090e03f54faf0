"""Projections of one input as one matrix product.

One large product has less overhead than two or three small ones, and it is one layer to quantize, shard or calibrate:
for whoever decodes on one device, or quantizes and calibrates by layer. What it gains on two CPU cores is small: a
step of decoding SmolLM2-135M in bfloat16 takes 0.95 of stock's time, and one of a Llama of 1 B as long as stock's.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte, grouped heads included.
`python -m tests.benchmarks.bench_projections` measures it on your machine.
"""

from __future__ import annotations

from typing import Any

#: model -> its name, the attention and the MLP that the preset is pinned to, what else there is to say
_MODELS: dict[str, tuple[str, dict[str, str | list[str]], str]] = {
    "BERT": (
        "BERT",
        {"BertSelfAttention": ["762e60062dbe1a75", "3e1e0b510c75801a", "44c62aebeb3aa4b6"]},
        "Cross attention, where keys and values have another input, is left alone.",
    ),
    "GEMMA3": (
        "Gemma 3",
        {
            "Gemma3Attention": ["b58db9078fb3f8ed", "725f12610f12fdd0"],
            "Gemma3MLP": "923411af8433b1dd",
            "SiglipAttention": "1cc0a052bef4f401",
        },
        "In the vision-language model the attention of the vision tower is fused as well.",
    ),
    "LLAMA": (
        "Llama",
        {"LlamaAttention": ["bb79e6fd486f0b0d", "25072e8c8a0135c8"], "LlamaMLP": "eafbe94b23d9df2e"},
        "Measured on SmolLM2: a step of decoding in bfloat16 on two CPU cores takes 0.95 of stock's time.",
    ),
    "MISTRAL": (
        "Mistral",
        {"MistralAttention": ["89fa5ad4e8a016a9", "9b49914a053e4460"], "MistralMLP": "c73b8ed157b7f657"},
        "",
    ),
    "PHI": ("Phi", {"PhiAttention": ["30bf7c02afa71944", "1d8efac07675dd47"]}, "Its MLP has no gate."),
    "QWEN2": (
        "Qwen2",
        {"Qwen2Attention": ["c9fc901edd3b17aa", "830814518469bc67"], "Qwen2MLP": "62984afaf175f993"},
        "Queries, keys and values have biases, which are joined as well.",
    ),
    "QWEN3": (
        "Qwen3",
        {"Qwen3Attention": ["c3ab2496711571bb", "6545b649362f857e"], "Qwen3MLP": "b5887e774e35e3ce"},
        "The norms of queries and keys come after the split.",
    ),
}
_WITHOUT_GATE = {"BERT", "PHI"}


def arguments(model: str) -> dict[str, Any]:
    """Those of the preset's `Patcher`."""
    return {"fusions": ["qkv"] if model in _WITHOUT_GATE else ["qkv", "gate_up"], "fingerprints": _MODELS[model][1]}


def describe(model: str) -> str:
    name, _, more = _MODELS[model]
    gate = "" if model in _WITHOUT_GATE else ", gate and up as another"
    return f"{name} with queries, keys and values as one projection{gate}.\n\n{more}".rstrip()
