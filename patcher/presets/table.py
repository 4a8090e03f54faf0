"""The presets of fusions: a family for each fusion, with a row for each model."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """The presets of one fusion.

    Attributes:
        ending: the suffix of their names, after the model.
        fusions: the fusions that they apply.
        does: the first line of their descriptions.
        about: the purpose, the users and the accuracy.
        pins: model -> the classes that its preset is pinned to, with the fingerprints of their code in all supported
            releases of transformers.
    """

    ending: str
    fusions: tuple[str, ...]
    does: str
    about: str
    pins: dict[str, dict[str, str]]


_PROJECTIONS = """\
What it gains: one layer in place of two or three to quantize, calibrate or shard, and a little speed where products
are small: on two CPU cores, in bfloat16, a decoding step of SmolLM2-135M for one row takes 0.95 of stock's time. For 8
or 32 rows, and with a 1B Llama, it is as fast as stock.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte, grouped heads included."""
FAMILIES = (
    Family(
        "LINEAR_EXPERTS",
        ("sequential_experts",),
        "Each expert as plain linear layers, which quantizers find.",
        """\
Mixtures of experts have the weights of all experts of a layer in one three-dimensional parameter, which quantizers of
linear layers skip: most of the model keeps its size. With these presets experts consist of `nn.Linear` modules named
`experts.3.gate_proj`, `experts.3.up_proj` and `experts.3.down_proj` in every model: for int8 or int4 of the experts,
calibration by layer, or adapters on single experts. Experts run one after the other, so without a quantizer this is
slower than grouped kernels.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte. `examples/quantize.py` measures the
gain: int8 of bitsandbytes makes a Mixtral of two experts, built from SmolLM2's weights, 1.07 times smaller without
the fusion and 1.77 times with it; perplexity goes from 19.0 to 19.1 and to 19.4.""",
        {
            "DEEPSEEK_V3": {"DeepseekV3Experts": "6be7ec0ddb2ab2e7 b5463e8c890cc6f2"},
            "GPT_OSS": {"GptOssExperts": "59b6ef84e59935f7 91960f3493cf9e5e"},
            "MIXTRAL": {"MixtralExperts": "bc1c5a59d0a70a3b f02b0b2e142bb6ff"},
            "OLMOE": {"OlmoeExperts": "6be321e14eb8eab5 fb37391264dd83d8"},
            "QWEN2_MOE": {"Qwen2MoeExperts": "c59434e7fc3acde9 b3286878e120a935"},
            "QWEN3_MOE": {"Qwen3MoeExperts": "de75d84ccec673c9 24fef0dc114a8b37"},
        },
    ),
    Family(
        "LINEAR_PATCH_EMBEDDINGS",
        ("patch_embeddings",),
        "The convolution of image patches as a linear layer.",
        """\
A convolution whose stride is its kernel size reads each patch once: it is a linear layer over flattened patches, which
quantizers and adapters of linear layers support. If patches are cut beforehand, as in the Qwen-VL family, it is also
faster, for many images or videos: for 1024 patches 2.6 times as fast as Conv3d on two CPU cores in float32, and 4 to
8 times with the backward pass. Whole images are convolved as before, with the same weight.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte.""",
        {
            "CLIP": {"CLIPVisionEmbeddings": "0727acccea5476d9 6fb2b3b150ac83f8"},
            "GLM4V": {
                "Glm4vVisionPatchEmbed": "e05c4572386110dd",
                "Glm4vVisionModel": "675420c1cfff2c4b 652d8a4c0217d5df 290a3eb55f5817aa db420722cda9be13 "
                "6b7ce4d8fd723bbc 77338795fa4a57f7",
            },
            "QWEN2_5_VL": {"Qwen2_5_VisionPatchEmbed": "ee882c51f230c1f0"},
            "QWEN2_VL": {"PatchEmbed": "5983a7ce69b14878"},
            "QWEN3_VL": {"Qwen3VLVisionPatchEmbed": "c87ce03372bba61c"},
            "SIGLIP": {"SiglipVisionEmbeddings": "e70867dfafb55777 3412ef7824297308"},
            "VIT": {"ViTPatchEmbeddings": "391cf0cf4fe29cd2"},
        },
    ),
    Family(
        "FUSED_PROJECTIONS",
        ("qkv", "gate_up"),
        "Queries, keys and values as one projection, gate and up as another.",
        _PROJECTIONS,
        {
            "GEMMA3": {
                "Gemma3Attention": "b58db9078fb3f8ed 725f12610f12fdd0",
                "Gemma3MLP": "923411af8433b1dd",
                "SiglipAttention": "1cc0a052bef4f401",
            },
            "LLAMA": {"LlamaAttention": "bb79e6fd486f0b0d 25072e8c8a0135c8", "LlamaMLP": "eafbe94b23d9df2e"},
            "MISTRAL": {"MistralAttention": "89fa5ad4e8a016a9 9b49914a053e4460", "MistralMLP": "c73b8ed157b7f657"},
            "QWEN2": {"Qwen2Attention": "c9fc901edd3b17aa 830814518469bc67", "Qwen2MLP": "62984afaf175f993"},
            "QWEN3": {"Qwen3Attention": "c3ab2496711571bb 6545b649362f857e", "Qwen3MLP": "b5887e774e35e3ce"},
        },
    ),
    Family(
        "FUSED_PROJECTIONS",
        ("qkv",),
        "Queries, keys and values as one projection.",
        _PROJECTIONS,
        {
            "BERT": {"BertSelfAttention": "762e60062dbe1a75 3e1e0b510c75801a 44c62aebeb3aa4b6"},
            "PHI": {"PhiAttention": "30bf7c02afa71944 1d8efac07675dd47"},
        },
    ),
)

_BY = "(`patcher.benchmark`, with one thread of a shared AMD EPYC, in float32, torch 2.13.0)"
_AS_FAST = "For quantizers and adapters. Its inputs are whole images, which are convolved as in stock: it is as fast."
#: model -> notes on its preset, measurements included
ABOUT = {
    "DEEPSEEK_V3": "Linear layers hold 2 % of the 671 B weights of DeepSeek-V3 without it, 99.8 % with it.",
    "GPT_OSS": "Linear layers hold 1 % of the 117 B weights of gpt-oss-120b without it, 99.5 % with it.",
    "MIXTRAL": "Linear layers hold 3 % of the 47 B weights of Mixtral-8x7B without it, 99.7 % with it.\n\n"
    "Prompts and decoding together of a Mixtral of four layers and four experts, built from SmolLM2's weights, are as "
    "fast as stock, decoding eight rows takes 1.07 of its time, a load 0.51 of its time and 0.56 of its memory "
    f"{_BY}.",
    "OLMOE": "Linear layers hold 3 % of the 13 B weights of its default config without it, 99 % with it.",
    "QWEN2_MOE": "Linear layers hold 11 % of the 14 B weights of Qwen1.5-MoE-A2.7B without it, 98 % with it.",
    "QWEN3_MOE": "Linear layers hold 4 % of the 15 B weights of its default config without it, 98 % with it.",
    "CLIP": _AS_FAST,
    "GLM4V": "Its convolution that merges patches is a linear layer too. Measured for patches of Qwen2-VL's size.",
    "QWEN2_5_VL": "2.6 times as fast as stock's Conv3d, as measured on Qwen2-VL, which has the same sizes.",
    "QWEN2_VL": "Measured: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.",
    "QWEN3_VL": "Measured: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.",
    "SIGLIP": _AS_FAST,
    "VIT": _AS_FAST,
    "GEMMA3": "In the vision-language model the attention of the vision tower is fused as well.",
    "LLAMA": "In float32 prompts and decoding of SmolLM2-135M are as fast as stock, and a load takes 1.33 of its time "
    f"and 1.12 of its memory, since stock only maps the file {_BY}.",
    "QWEN2": "Queries, keys and values have biases, which are joined as well.",
    "QWEN3": "The norms of queries and keys come after the split.",
    "BERT": "Cross attention, where keys and values have another input, is left alone.\n\n"
    "Inference and training of all-MiniLM-L6-v2 together are as fast as stock, one row of 32 tokens takes 1.05 of its "
    f"time, a load 1.17 of its time and 1.15 of its memory {_BY}.",
    "PHI": "Its MLP has no gate.",
}
