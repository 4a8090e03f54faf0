"""Every kind of patch in one real modeling file."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher.codegen import PatchConfig, create_patch_from_external

config = PatchConfig("transformers.models.llama.modeling_llama", "patched_llama_of_test_runtime.py")
config.patches.append(create_patch_from_external("LlamaRMSNorm", "torch.nn", "RMSNorm"))
config.exclude_from_output("LlamaForTokenClassification")


@config.replace_class("LlamaMLP", description="counts its calls")
class CountingMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.calls = 0

    def forward(self, x):
        self.calls = counted(self.calls)
        return super().forward(x)


@config.add_helper
def counted(calls):
    return calls + 1


@config.replace_function("rotate_half")
def rotated(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@config.modify_init("LlamaAttention")
def marked(original_init, self, config, layer_idx):
    original_init(self, config, layer_idx)
    self.mark = layer_idx * 10


@config.override_method("LlamaForSequenceClassification.forward")
def forward(self, *args, **kwargs):
    return super().forward(*args, **kwargs).logits
