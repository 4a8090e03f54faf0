"""Patch embeddings as one matrix product.

A convolution whose stride is its kernel looks at each patch once: it is a linear layer over flattened patches, which
quantizers and adapters of linear layers know. Where the patches were cut before, as in the Qwen-VL family, it is
faster as well, for whoever runs many images or videos: for 1024 patches 2.6 times as fast as Conv3d on two CPU cores
in float32, and 4 to 8 times with the backward pass. Whole images are convolved as before, with the same weight.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte.
`python -m tests.benchmarks.bench_patch_embeddings` measures both forms on your machine.
"""

from __future__ import annotations

from typing import Any

_AS_FAST = "For quantizers and adapters. It is given whole images, which are convolved as by stock, so it is as fast."
#: model -> its name, the dimensions of its convolution, the code that the preset is pinned to, what was measured
_MODELS: dict[str, tuple[str, str, dict[str, str | list[str]], str]] = {
    "CLIP": ("CLIP", "two", {"CLIPVisionEmbeddings": ["0727acccea5476d9", "6fb2b3b150ac83f8"]}, _AS_FAST),
    "GLM4V": (
        "GLM-4V",
        "three",
        {
            "Glm4vVisionPatchEmbed": "e05c4572386110dd",
            "Glm4vVisionModel": [
                "675420c1cfff2c4b",
                "652d8a4c0217d5df",
                "290a3eb55f5817aa",
                "db420722cda9be13",
                "6b7ce4d8fd723bbc",
                "77338795fa4a57f7",
            ],
        },
        "Its convolution that merges patches is a linear layer too. Measured for 1024 patches of Qwen2-VL's size.",
    ),
    "QWEN2_5_VL": (
        "Qwen2.5-VL",
        "three",
        {"Qwen2_5_VisionPatchEmbed": "ee882c51f230c1f0"},
        "2.6 times as fast as stock's Conv3d, as measured on Qwen2-VL, which has the same sizes.",
    ),
    "QWEN2_VL": (
        "Qwen2-VL",
        "three",
        {"PatchEmbed": "5983a7ce69b14878"},
        "Measured on it: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.",
    ),
    "QWEN3_VL": (
        "Qwen3-VL",
        "three",
        {"Qwen3VLVisionPatchEmbed": "c87ce03372bba61c"},
        "Measured: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.",
    ),
    "SIGLIP": ("SigLIP", "two", {"SiglipVisionEmbeddings": ["e70867dfafb55777", "3412ef7824297308"]}, _AS_FAST),
    "VIT": ("ViT", "two", {"ViTPatchEmbeddings": "391cf0cf4fe29cd2"}, _AS_FAST),
}


def arguments(model: str) -> dict[str, Any]:
    """Those of the preset's `Patcher`."""
    return {"fusions": "patch_embeddings", "fingerprints": _MODELS[model][2]}


def describe(model: str) -> str:
    name, count, _, measured = _MODELS[model]
    return f"{name} with the {count}-dimensional convolution of its patches as a linear layer.\n\n{measured}"
