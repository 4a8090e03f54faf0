"""Qwen2-VL with its patch embedding as one matrix product, from the description of a runtime Patcher.

patcher codegen examples/codegen/qwen2_vl/qwen2_vl_patch_gen_config.py --diff

The patches of an image come cut before, and the convolution over them is a product of two matrices, which a linear
layer computes in a third of the time on a CPU. The checkpoints that the file reads and writes stay those of the
original.
"""

from transformers import Qwen2VLForConditionalGeneration

from patcher import Patcher
from patcher.codegen import PatchConfig

config = PatchConfig.from_patcher(
    Patcher(fusions=["patch_embeddings"], name="Qwen2-VL with linear patch embeddings"),
    Qwen2VLForConditionalGeneration,
)
