"""How fast a patch projection is as a linear layer (budget: 3 times as fast as Conv3d, twice as fast as Conv2d).

    python -m tests.benchmarks.bench_patch_embeddings [REPETITIONS [SHARE]]

First the modules alone, with the bare matrix product of the same size beside them: nothing in float32 is faster than
that. A convolution over whole images is already about as fast as the product, so there the budget is not reached.
Then Qwen3-VL's patch embedding: stock, transformers' own `fusion_config`, and ours. With SHARE the modules have that
share of their features only: quick, and no measurement.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.benchmarks.measuring import line, median, ratio, taking_turns

THREADS = 2
#: name, (channels, features, kernel), shape of the input, budget
MODULES: list[tuple[str, tuple[int, int, tuple[int, ...]], tuple[int, ...], float | None]] = [
    ("Conv3d, Qwen2-VL, 1024 patches", (3, 1280, (2, 14, 14)), (1024, 3, 2, 14, 14), 3.0),
    ("Conv3d, Qwen3-VL, 1024 patches", (3, 1152, (2, 16, 16)), (1024, 3, 2, 16, 16), 3.0),
    ("Conv3d, Qwen2-VL, 16 patches", (3, 1280, (2, 14, 14)), (16, 3, 2, 14, 14), 3.0),
    ("Conv2d, 1024 patches of 14 x 14", (3, 1280, (14, 14)), (1024, 3, 14, 14), 2.0),
    ("Conv3d, a video of 16 x 224 x 224", (3, 768, (2, 16, 16)), (1, 3, 16, 224, 224), 3.0),
    ("Conv2d, ViT-B/16, 8 images", (3, 768, (16, 16)), (8, 3, 224, 224), 2.0),
    ("Conv2d, CLIP-L/14, 4 images", (3, 1024, (14, 14)), (4, 3, 224, 224), 2.0),
    ("Conv2d, SigLIP so400m, 1 image", (3, 1152, (14, 14)), (1, 3, 378, 378), 2.0),
]


def modules(repetitions: int, share: int) -> None:
    from patcher.fusions import PatchEmbeddings
    from patcher.fusions.fused_module import fuse
    from patcher.fusions.patch_embeddings import LinearPatchEmbedding

    for name, (channels, features, kernel), shape, budget in MODULES:
        kind = {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
        convolution = kind(channels, features // share, kernel, kernel)
        linear: Any = fuse(PatchEmbeddings(), convolution, LinearPatchEmbedding)
        image = torch.randn(shape)
        rows = torch.randn(image.numel() // linear.linear.in_features, linear.linear.in_features)
        with torch.no_grad():
            assert torch.allclose(linear(image), convolution(image), atol=1e-4)
            forward = {"stock": partial(convolution, image), "linear": partial(linear, image)}
            times = taking_turns(forward | {"product": partial(linear.linear, rows)}, repetitions)
        trained = {"stock": partial(train, convolution, image), "linear": partial(train, linear, image)}
        faster = ratio(times, "stock", "linear")
        kept = None if budget is None else faster >= budget
        line(f"{name}: stock / linear", f"{faster:.1f} x", f">= {budget:.0f} x" if budget else "", kept)
        line("  the bare product / linear", f"{ratio(times, 'product', 'linear'):.2f}")
        line("  forward and backward", f"{ratio(taking_turns(trained, repetitions), 'stock', 'linear'):.1f} x")


def train(module: nn.Module, image: torch.Tensor) -> None:
    module.zero_grad()
    module(image).sum().backward()


def beside_fusion_config(repetitions: int) -> None:
    """The same weights, loaded three ways."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from patcher import Patcher

    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=120, video_token_id=121)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
        load = Qwen3VLForConditionalGeneration.from_pretrained
        candidates = {
            "stock": load(folder).model.visual.patch_embed,
            "ours": load(folder, patcher=Patcher(fusions="patch_embeddings")).model.visual.patch_embed,
            # Last: after it every later load of this class in this process is fused as well.
            "theirs": load(folder, fusion_config={"patch_embeddings": True}).model.visual.patch_embed,
        }
        patches = torch.randn(1024, 3 * 2 * 16 * 16)
        with torch.no_grad():
            for module in candidates.values():
                assert torch.allclose(module(patches), candidates["stock"](patches), atol=1e-4)
            times = taking_turns({key: partial(module, patches) for key, module in candidates.items()}, repetitions)
    line("Qwen3-VL's patch embedding, 1024 patches, stock", f"{median(times, 'stock'):.1f} ms")
    line("  stock / transformers' own fusion_config", f"{ratio(times, 'stock', 'theirs'):.1f} x")
    line("  stock / patch_embeddings", f"{ratio(times, 'stock', 'ours'):.1f} x")


def main(repetitions: int = 9, share: int = 1) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import logging

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    torch.manual_seed(0)
    try:
        modules(repetitions, share)
        beside_fusion_config(repetitions)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
