"""Experts as plain linear layers, for quantizers.

Mixtures of experts keep the weights of all experts of a layer in one three-dimensional parameter, which quantizers of
linear layers pass by: most of the model stays as large as it was. With these presets experts are made of `nn.Linear`,
`experts.3.gate_proj`, `experts.3.up_proj` and `experts.3.down_proj` in every model: for int8 or int4 of the experts,
calibration by layer, or adapters on single experts. Experts run one after the other, so without a quantizer this is
slower than grouped kernels.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte. `examples/quantize.py` measures what
it gains: int8 of bitsandbytes makes a Mixtral of two experts, made of SmolLM2's weights, 1.07 times smaller without
the fusion and 1.77 times with it; perplexity goes from 19.0 to 19.1 and to 19.4.
"""

from __future__ import annotations

from typing import Any

#: model -> its name, the experts that the preset is pinned to, what else there is to say
_MODELS = {
    "DEEPSEEK_V3": (
        "DeepSeek-V3",
        {"DeepseekV3Experts": ["6be7ec0ddb2ab2e7", "b5463e8c890cc6f2"]},
        "Dense layers and shared experts stay as they are. Of the 671 billion weights of DeepSeek-V3, linear layers "
        "hold 2 % without and 99.8 % with it.",
    ),
    "GPT_OSS": (
        "gpt-oss",
        {"GptOssExperts": ["59b6ef84e59935f7", "91960f3493cf9e5e"]},
        "Its stacks are transposed, interleaved and have biases; the layers have biases too. Of the 117 billion "
        "weights of gpt-oss-120b, linear layers hold 1 % without and 99.5 % with it.",
    ),
    "MIXTRAL": (
        "Mixtral",
        {"MixtralExperts": ["bc1c5a59d0a70a3b", "f02b0b2e142bb6ff"]},
        "Of the 47 billion weights of Mixtral-8x7B, linear layers hold 3 % without and 99.7 % with it.",
    ),
    "OLMOE": (
        "OLMoE",
        {"OlmoeExperts": ["6be321e14eb8eab5", "fb37391264dd83d8"]},
        "Of the 13 billion weights of its default config, linear layers hold 3 % without and 99 % with it.",
    ),
    "QWEN2_MOE": (
        "Qwen2-MoE",
        {"Qwen2MoeExperts": ["c59434e7fc3acde9", "b3286878e120a935"]},
        "The shared expert is made of linear layers already. Of the 14 billion weights of Qwen1.5-MoE-A2.7B, linear "
        "layers hold 11 % without and 98 % with it.",
    ),
    "QWEN3_MOE": (
        "Qwen3-MoE",
        {"Qwen3MoeExperts": ["de75d84ccec673c9", "24fef0dc114a8b37"]},
        "Of the 15 billion weights of its default config, linear layers hold 4 % without and 98 % with it.",
    ),
}


def arguments(model: str) -> dict[str, Any]:
    """Those of the preset's `Patcher`."""
    return {"fusions": "sequential_experts", "fingerprints": _MODELS[model][1]}


def describe(model: str) -> str:
    name, _, more = _MODELS[model]
    return f"{name} with each expert as plain linear layers, which quantizers find.\n\n{more}"
