"""Experts as plain linear layers, for quantizers.

Mixtures of experts keep the weights of all experts of a layer in one three-dimensional parameter, which quantizers of
linear layers pass by: most of the model stays as large as it was. With these presets each expert is an `nn.Linear`.
Measured with int8 of torchao on tiny models of each family: no weight of an expert is quantized without, all are with.
"""

from __future__ import annotations

from patcher import Patcher

VERIFIED = ">=5.17,<5.24"

QWEN2_MOE_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="QWEN2_MOE_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "Qwen2MoeExperts": ["c59434e7fc3acde9", "b3286878e120a935"],
    },
)
"""Qwen2-MoE with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. The shared
expert is made of linear layers already. Experts run one after the other, so without a quantizer this is slower than
grouped kernels. Measured: outputs within 1e-5 of stock in float32, checkpoints byte for byte.
"""

QWEN3_MOE_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="QWEN3_MOE_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "Qwen3MoeExperts": ["de75d84ccec673c9", "24fef0dc114a8b37"],
    },
)
"""Qwen3-MoE with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. Experts run
one after the other, so without a quantizer this is slower than grouped kernels. Measured: outputs within 1e-5 of
stock in float32, checkpoints byte for byte.
"""

MIXTRAL_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="MIXTRAL_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "MixtralExperts": ["bc1c5a59d0a70a3b", "f02b0b2e142bb6ff"],
    },
)
"""Mixtral with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. Experts run
one after the other, so without a quantizer this is slower than grouped kernels. Measured: outputs within 1e-5 of
stock in float32, checkpoints byte for byte.
"""

DEEPSEEK_V3_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="DEEPSEEK_V3_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "DeepseekV3Experts": ["6be7ec0ddb2ab2e7", "b5463e8c890cc6f2"],
    },
)
"""DeepSeek-V3 with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. Dense layers
and shared experts stay as they are. Experts run one after the other, so without a quantizer this is slower than
grouped kernels. Measured: outputs within 1e-5 of stock in float32, checkpoints byte for byte.
"""

GPT_OSS_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="GPT_OSS_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "GptOssExperts": ["59b6ef84e59935f7", "91960f3493cf9e5e"],
    },
)
"""gpt-oss with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. Its stacks
are transposed, interleaved and have biases; the layers have biases too. Experts run one after the other, so without a
quantizer this is slower than grouped kernels. Measured: outputs within 1e-5 of stock in float32, checkpoints byte for
byte.
"""

OLMOE_LINEAR_EXPERTS = Patcher(
    fusions=["sequential_experts"],
    name="OLMOE_LINEAR_EXPERTS",
    transformers=VERIFIED,
    fingerprints={
        "OlmoeExperts": ["6be321e14eb8eab5", "fb37391264dd83d8"],
    },
)
"""OLMoE with each expert as plain linear layers, which quantizers find.

For whoever quantizes: int8 or int4 of the experts, calibration by layer, or adapters on single experts. Experts run
one after the other, so without a quantizer this is slower than grouped kernels. Measured: outputs within 1e-5 of
stock in float32, checkpoints byte for byte.
"""
