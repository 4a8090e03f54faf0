"""Experts as plain linear layers, for quantizers.

Mixtures of experts keep the weights of all experts of a layer in one three-dimensional parameter, which quantizers of
linear layers pass by: most of the model stays as large as it was. With these presets experts are made of `nn.Linear`:
for int8 or int4 of the experts, calibration by layer, or adapters on single experts. Experts run one after the other,
so without a quantizer this is slower than grouped kernels.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte. `examples/quantize_experts.py`
measures what it gains: int8 of bitsandbytes makes a Mixtral of two experts, made of SmolLM2's weights, 1.07 times
smaller without the preset and 1.77 times with it; perplexity goes from 18.8 to 19.3 and to 19.5.
"""

from __future__ import annotations

from patcher import Patcher


def _pinned(name: str, **pins: str | list[str]) -> Patcher:
    return Patcher(fusions="sequential_experts", name=name, transformers=">=5.17,<5.24", fingerprints=pins)


QWEN2_MOE_LINEAR_EXPERTS = _pinned(
    "QWEN2_MOE_LINEAR_EXPERTS", Qwen2MoeExperts=["c59434e7fc3acde9", "b3286878e120a935"]
)
"""Qwen2-MoE with each expert as plain linear layers, which quantizers find.

The shared expert is made of linear layers already. Of the 14 billion weights of Qwen1.5-MoE-A2.7B, linear layers hold
11 % without and 98 % with it.
"""

QWEN3_MOE_LINEAR_EXPERTS = _pinned(
    "QWEN3_MOE_LINEAR_EXPERTS", Qwen3MoeExperts=["de75d84ccec673c9", "24fef0dc114a8b37"]
)
"""Qwen3-MoE with each expert as plain linear layers, which quantizers find.

Of the 15 billion weights of its default config, linear layers hold 4 % without and 98 % with it.
"""

MIXTRAL_LINEAR_EXPERTS = _pinned("MIXTRAL_LINEAR_EXPERTS", MixtralExperts=["bc1c5a59d0a70a3b", "f02b0b2e142bb6ff"])
"""Mixtral with each expert as plain linear layers, which quantizers find.

Of the 47 billion weights of Mixtral-8x7B, linear layers hold 3 % without and 99.7 % with it.
"""

DEEPSEEK_V3_LINEAR_EXPERTS = _pinned(
    "DEEPSEEK_V3_LINEAR_EXPERTS", DeepseekV3Experts=["6be7ec0ddb2ab2e7", "b5463e8c890cc6f2"]
)
"""DeepSeek-V3 with each expert as plain linear layers, which quantizers find.

Dense layers and shared experts stay as they are. Of the 671 billion weights of DeepSeek-V3, linear layers hold 2 %
without and 99.8 % with it.
"""

GPT_OSS_LINEAR_EXPERTS = _pinned("GPT_OSS_LINEAR_EXPERTS", GptOssExperts=["59b6ef84e59935f7", "91960f3493cf9e5e"])
"""gpt-oss with each expert as plain linear layers, which quantizers find.

Its stacks are transposed, interleaved and have biases; the layers have biases too. Of the 117 billion weights of
gpt-oss-120b, linear layers hold 1 % without and 99.5 % with it.
"""

OLMOE_LINEAR_EXPERTS = _pinned("OLMOE_LINEAR_EXPERTS", OlmoeExperts=["6be321e14eb8eab5", "fb37391264dd83d8"])
"""OLMoE with each expert as plain linear layers, which quantizers find.

Of the 13 billion weights of its default config, linear layers hold 3 % without and 99 % with it.
"""
