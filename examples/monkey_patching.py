"""Process-wide class replacements: the registry, with the names and the contract of transformers' own.

    python examples/monkey_patching.py

Prefer `patcher=`: it is scoped to one load, strict, and converts weights. The registry is for code that is written for
that of transformers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, logging
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from patcher import Patcher
from patcher.monkey_patching import (
    apply_patches,
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)

sys.path.insert(0, str(Path(__file__).parent))
import moe_layouts


class CountingAttention(GPT2Attention):
    """Attention that counts how often it runs."""

    calls = 0

    def forward(self, *args, **kwargs):
        type(self).calls += 1
        return super().forward(*args, **kwargs)


class MarkedSelfAttention(BertSelfAttention):
    pass


def quick_start() -> int:
    """Register classes: every load and every `from_config` is patched until the registry is cleared."""
    register_patch_mapping({"GPT2Attention": CountingAttention})
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64))
    assert type(model.transformer.h[0].attn) is CountingAttention
    model(torch.arange(8)[None])
    clear_patch_mapping()
    return CountingAttention.calls


def patterns() -> list[str]:
    """A key may be a regular expression, which may match more than intended; exact names take precedence."""
    register_patch_mapping({"^Bert.*SelfAttention$": MarkedSelfAttention})
    register_patch_mapping({"GPT2Attention": CountingAttention})
    register_patch_mapping({"GPT2Attention": GPT2Attention}, overwrite=True)
    unregister_patch_mapping(["GPT2Attention"])
    return list(get_patch_mapping())


def manual_construction() -> tuple[type, type]:
    """`Model(config)` is patched inside `apply_patches()` only."""
    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    with apply_patches():
        inside = BertModel(config)
    outside = BertModel(config)
    clear_patch_mapping()
    return type(inside.encoder.layer[0].attention.self), type(outside.encoder.layer[0].attention.self)


def complete_example(checkpoint: Path) -> tuple[float, bool, bool]:
    """Classes from the registry, conversions from a patcher: the registry only replaces classes."""
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    register_patch_mapping(dict(moe_layouts.BOTH.class_mapping))
    try:
        conversions = Patcher(
            filtered_weight_conversion_patterns=moe_layouts.BOTH.filtered_weight_conversion_patterns,
            extra_weight_conversions=moe_layouts.BOTH.extra_weight_conversions,
        )
        model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=conversions)
    finally:
        clear_patch_mapping()  # otherwise every later load of the process is patched
    return *moe_layouts.compare(model, stock), moe_layouts.saves_the_original(model, checkpoint)


def main() -> None:
    logging.disable_progress_bar()
    print(f"quick start: the replacement ran {quick_start()} times")
    print(f"patterns: registered: {patterns()}")
    inside, outside = manual_construction()
    print(f"manual construction: {inside.__name__} inside the block, {outside.__name__} outside")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = moe_layouts.tiny_checkpoint(Path(folder, "qwen2-moe"))
        difference, same_tokens, same_bytes = complete_example(checkpoint)
    print(
        f"complete example: logits differ by at most {difference:.1e}, same greedy tokens: {same_tokens}, "
        f"saves the original checkpoint: {same_bytes}"
    )


if __name__ == "__main__":
    main()
