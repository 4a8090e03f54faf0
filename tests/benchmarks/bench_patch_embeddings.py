"""How fast a patch projection is as a linear layer, beside the convolution that it stands for.

    python -m tests.benchmarks.bench_patch_embeddings [REPETITIONS [SHARE]]

First the modules alone, forward and in training, in float32 and bfloat16. Patches that were cut before, as the Qwen-VL
family has them (budget, forward in float32: 3 times as fast as Conv3d, twice as fast as Conv2d), and whole images
(budget: never slower). Beside them the bare matrix product of the same size, which nothing is faster than.
Then Qwen3-VL's patch embedding: stock, transformers' own `fusion_config`, and ours. With SHARE all sizes are smaller:
quick, and no measurement.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.benchmarks.measuring import line, median, ratio, taking_turns

THREADS = 2
#: in bfloat16 some CPUs take minutes for a convolution: a measurement is over after that many seconds
SECONDS = 6.0
DTYPES = (torch.float32, torch.bfloat16)
#: what is measured -> features, kernel, shape of the input
Cases = dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]
CUT: Cases = {
    "Qwen2-VL, 1024 patches of 2 x 14 x 14": (1280, (2, 14, 14), (1024, 3, 2, 14, 14)),
    "Qwen3-VL, 1024 patches of 2 x 16 x 16": (1152, (2, 16, 16), (1024, 3, 2, 16, 16)),
    "Qwen2-VL, 16 patches of 2 x 14 x 14": (1280, (2, 14, 14), (16, 3, 2, 14, 14)),
    "1024 patches of 14 x 14": (1280, (14, 14), (1024, 3, 14, 14)),
}
WHOLE: Cases = {
    "ViT-B/16, an image of 224": (768, (16, 16), (1, 3, 224, 224)),
    "ViT-B/16, 8 images of 224": (768, (16, 16), (8, 3, 224, 224)),
    "CLIP L/14, an image of 224": (1024, (14, 14), (1, 3, 224, 224)),
    "CLIP L/14, 8 images of 336": (1024, (14, 14), (8, 3, 336, 336)),
    "SigLIP so400m/14, an image of 384": (1152, (14, 14), (1, 3, 384, 384)),
    "SigLIP so400m/14, 4 images of 384": (1152, (14, 14), (4, 3, 384, 384)),
    "DINOv2 L/14, an image of 518": (1024, (14, 14), (1, 3, 518, 518)),
    "SAM H/16, an image of 1024": (1280, (16, 16), (1, 3, 1024, 1024)),
    "VideoMAE B/16, a video of 16 x 224 x 224": (768, (2, 16, 16), (1, 3, 16, 224, 224)),
}


def budget(name: str, dtype: torch.dtype) -> float | None:
    """How many times as fast as the convolution a forward is to be."""
    if name in WHOLE:
        return 0.95  # never slower; two convolutions of one size differ by that much
    return {2: 2.0, 3: 3.0}[len(CUT[name][1])] if dtype == torch.float32 and "16 patches of 2" not in name else None


def modules(repetitions: int, share: int) -> None:
    for name, (features, kernel, shape) in (CUT | WHOLE).items():
        for dtype in DTYPES:
            stock = convolution(features // share, kernel).to(dtype)
            measure(name, stock, torch.randn(smaller(shape, share), dtype=dtype), repetitions)


def smaller(shape: tuple[int, ...], share: int) -> tuple[int, ...]:
    return tuple(min(size, 1024 // share) for size in shape)


def convolution(features: int, kernel: tuple[int, ...]) -> nn.Conv2d | nn.Conv3d:
    return {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)](3, features, kernel, kernel)


def linear_form(stock: nn.Conv2d | nn.Conv3d) -> Any:
    """As `patch_embeddings` puts it into a model, with the same weights."""
    from patcher.fusions import PatchEmbeddings
    from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
    from tests.support.fusing import fuse

    return fuse(PatchEmbeddings(), stock, LinearPatchEmbedding)


def measure(name: str, stock: nn.Conv2d | nn.Conv3d, image: torch.Tensor, repetitions: int) -> None:
    what = f"{name}, {str(image.dtype).removeprefix('torch.')}: stock / linear"
    linear = linear_form(stock)
    found = {"stock": stock, "linear": linear}
    with torch.no_grad():
        started = time.perf_counter()
        output = stock(image)
        if (seconds := time.perf_counter() - started) > SECONDS:
            line(what, f"left out: once takes {seconds:.0f} s")
            return
        torch.testing.assert_close(linear(image), output, atol=1e-4 if image.dtype == torch.float32 else 0.1, rtol=0)
        rows = torch.randn(output[:, 0].numel(), linear.linear.in_features, dtype=image.dtype)
        forward = {key: partial(module, image) for key, module in found.items()}
        forward["product"] = partial(linear.linear, rows)
        times = taking_turns(forward, repetitions, warm_up=1, limit=SECONDS)
    training = {key: partial(train, module, image) for key, module in found.items()}
    trained = taking_turns(training, repetitions, warm_up=1, limit=SECONDS)
    wanted, faster = budget(name, image.dtype), ratio(times, "stock", "linear")
    line(what, f"{faster:.2f} x", *([] if wanted is None else [f">= {wanted:.0f} x", faster >= wanted]))
    faster = ratio(trained, "stock", "linear")
    whole = [">= 1 x", faster >= 1] if name in WHOLE else []
    line("  forward and backward", f"{faster:.2f} x", *whole)
    line("  stock; the bare product", f"{median(times, 'stock'):.2f}; {median(times, 'product'):.2f} ms")


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
