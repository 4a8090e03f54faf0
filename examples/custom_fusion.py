"""A custom fusion: every down projection is stored transposed, and the checkpoint doesn't change.

python examples/custom_fusion.py

A family defines which modules it takes, the layouts of their parameters, and the fused class. The engine finds the
modules, reads and saves the weights, and supports pickling.
"""

import pickle
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from patcher import Patcher, report
from patcher.fusions import Fusion, Layout


class TransposedLinear(nn.Module):
    """A linear layer without bias whose weight is transposed: (in, out)."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.columns = nn.Parameter(torch.empty(in_features, out_features))

    @classmethod
    def from_module(cls, linear):
        return cls(linear.in_features, linear.out_features)

    def forward(self, x):
        return x @ self.columns


class Transposed(Layout):
    """(out, in) -> (in, out)."""

    def fuse(self, tensors):
        return [tensor.T.contiguous() for tensor in tensors]

    separate = fuse


class TransposedDown(Fusion):
    """The family: replace plain linear layers by transposed ones."""

    def is_fusable(self, module):
        return type(module) is nn.Linear and module.bias is None

    def layouts(self, module):
        return [Transposed("weight", "columns")]

    def make_fused_class(self, original_cls):
        return TransposedLinear


def main():
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    with tempfile.TemporaryDirectory() as folder:
        original, saved = Path(folder, "original"), Path(folder, "saved")
        AutoModelForCausalLM.from_config(config).save_pretrained(original)
        stock = AutoModelForCausalLM.from_pretrained(original)

        # Paths are written as reports print them; a built-in family is named.
        patcher = Patcher(fusions=[TransposedDown(modules="**.mlp.down_proj"), "qkv"])
        model = AutoModelForCausalLM.from_pretrained(original, patcher=patcher)
        print(report(model))

        ids = torch.arange(20)[None]
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)
        pickle.loads(pickle.dumps(model)).save_pretrained(saved)
        assert (saved / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
        print("saved byte for byte as it was")


if __name__ == "__main__":
    main()
