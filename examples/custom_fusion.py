"""A fusion of your own: the down projection of every Llama-like MLP held transposed, and the checkpoint unchanged.

python examples/custom_fusion.py

A fusion is a class with three answers: which modules (`is_fusable`), what becomes of them (`make_fused_class`), and
how the weights follow (`make_transforms`). It is passed as an object; nothing has to be registered. The operations of
a conversion must have a `reverse_op`, so that saving gives the original checkpoint back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, WeightConverter
from transformers.core_model_loading import Transpose

from patcher import Patcher, report
from patcher.fusions import Fusion


class TransposedLinear(nn.Module):
    """`nn.Linear` without bias whose weight lies the other way round: (in, out), read along its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.columns = nn.Parameter(linear.weight.detach().T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.columns


class DownTransposed(Fusion):
    """The family. Its name in the messages is its `repr`."""

    target_modules_patterns = (r"\.mlp$",)

    def is_fusable(self, module):
        return type(getattr(module, "down_proj", None)) is nn.Linear and module.down_proj.bias is None

    def make_fused_class(self, original_cls):
        class Fused(original_cls):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.down_proj = TransposedLinear(self.down_proj)

        Fused.__qualname__ = f"DownTransposed{original_cls.__qualname__}"
        return Fused

    def make_transforms(self, config, matches):
        source, target = r"\.mlp\.down_proj\.weight$", ".mlp.down_proj.columns"
        return [WeightConverter(source, target, operations=[Transpose(0, 1)])]


def main() -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    with tempfile.TemporaryDirectory() as folder:
        original, saved = Path(folder, "original"), Path(folder, "saved")
        AutoModelForCausalLM.from_config(config).save_pretrained(original)

        # It stands beside the families that have a name, and beside a class mapping.
        patcher = Patcher(fusions=[DownTransposed(), "qkv"])
        model = AutoModelForCausalLM.from_pretrained(original, patcher=patcher)
        print(report(model))

        stock = AutoModelForCausalLM.from_pretrained(original)
        ids = torch.arange(20)[None]
        with torch.no_grad():
            difference = (model(ids).logits - stock(ids).logits).abs().max().item()
        print(f"largest difference of a logit: {difference:.1e}")
        assert difference < 1e-5

        model.save_pretrained(saved)
        assert (saved / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
        print("saved byte for byte as it was")


if __name__ == "__main__":
    main()
