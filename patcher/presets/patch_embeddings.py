"""Patch embeddings as one matrix product.

A convolution whose stride is its kernel looks at each patch once: it is a linear layer over flattened patches, which
quantizers and adapters of linear layers know. Where the patches were cut before, as in the Qwen-VL family, it is
faster as well, for whoever runs many images or videos: for 1024 patches 2.6 times as fast as Conv3d on two CPU cores
in float32, and 4 to 8 times with the backward pass. Over whole images it is as fast as the convolution.

Outputs are within 1e-5 of stock in float32, checkpoints the same byte for byte.
`python -m tests.benchmarks.bench_patch_embeddings` measures both forms on your machine.
"""

from __future__ import annotations

from patcher import Patcher


def _pinned(name: str, **pins: str | list[str]) -> Patcher:
    return Patcher(fusions="patch_embeddings", name=name, transformers=">=5.17,<5.24", fingerprints=pins)


QWEN2_VL_LINEAR_PATCH_EMBEDDINGS = _pinned("QWEN2_VL_LINEAR_PATCH_EMBEDDINGS", PatchEmbed="5983a7ce69b14878")
"""Qwen2-VL with the three-dimensional convolution of its patches as a linear layer.

Measured on it: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.
"""

QWEN2_5_VL_LINEAR_PATCH_EMBEDDINGS = _pinned(
    "QWEN2_5_VL_LINEAR_PATCH_EMBEDDINGS", Qwen2_5_VisionPatchEmbed="ee882c51f230c1f0"
)
"""Qwen2.5-VL with the three-dimensional convolution of its patches as a linear layer.

2.6 times as fast as stock's Conv3d, as measured on Qwen2-VL, which has the same sizes.
"""

QWEN3_VL_LINEAR_PATCH_EMBEDDINGS = _pinned(
    "QWEN3_VL_LINEAR_PATCH_EMBEDDINGS", Qwen3VLVisionPatchEmbed="c87ce03372bba61c"
)
"""Qwen3-VL with the three-dimensional convolution of its patches as a linear layer.

Measured: 2.6 times as fast as stock's Conv3d, for 1024 patches in float32 on two CPU cores.
"""

GLM4V_LINEAR_PATCH_EMBEDDINGS = _pinned(
    "GLM4V_LINEAR_PATCH_EMBEDDINGS",
    Glm4vVisionPatchEmbed="e05c4572386110dd",
    Glm4vVisionModel=["6b7ce4d8fd723bbc", "675420c1cfff2c4b"],
)
"""GLM-4V with the three-dimensional convolution of its patches as a linear layer.

Its convolution that merges patches is a linear layer too. Measured for 1024 patches of Qwen2-VL's size.
"""

VIT_LINEAR_PATCH_EMBEDDINGS = _pinned("VIT_LINEAR_PATCH_EMBEDDINGS", ViTPatchEmbeddings="391cf0cf4fe29cd2")
"""ViT with the two-dimensional convolution of its patches as a linear layer.

For quantizers and adapters. Measured: as fast as stock, float32 on two CPU cores.
"""

CLIP_LINEAR_PATCH_EMBEDDINGS = _pinned(
    "CLIP_LINEAR_PATCH_EMBEDDINGS", CLIPVisionEmbeddings=["0727acccea5476d9", "6fb2b3b150ac83f8"]
)
"""CLIP with the two-dimensional convolution of its patches as a linear layer.

For quantizers and adapters. Measured: as fast as stock, float32 on two CPU cores.
"""

SIGLIP_LINEAR_PATCH_EMBEDDINGS = _pinned(
    "SIGLIP_LINEAR_PATCH_EMBEDDINGS", SiglipVisionEmbeddings=["e70867dfafb55777", "3412ef7824297308"]
)
"""SigLIP with the two-dimensional convolution of its patches as a linear layer.

For quantizers and adapters. Measured: as fast as stock, float32 on two CPU cores.
"""
