"""Three rules for every architecture: a custom norm, gated MLP and rotary embedding, without naming models.

python examples/every_architecture.py

`like("LlamaRMSNorm")` matches every class whose code computes the same as LlamaRMSNorm, whatever its name. Others,
such as Gemma's norm with its `1 + weight`, stay unchanged.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from patcher import Patcher, forward_of, like, verify

ARCHITECTURES = ["diffllama", "exaone4", "hunyuan_v1_moe", "ministral", "ministral3", "mistral", "qwen2", "qwen3"]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class Norm(nn.Module):
    """RMSNorm by torch's function, with the weight and the epsilon of the original."""

    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """A gated MLP that computes both projections in one product."""

    def forward(self, x):
        both = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        gate, up = nn.functional.linear(x, both).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Apply rotary position embeddings (RoFormer, arXiv:2104.09864) to queries and keys at once."""
    both = torch.cat([q, k], dim=1)
    half = both.shape[-1] // 2
    rotated = torch.cat([-both[..., half:], both[..., :half]], dim=-1)
    both = both * cos.unsqueeze(unsqueeze_dim) + rotated * sin.unsqueeze(unsqueeze_dim)
    return both.split([q.shape[1], k.shape[1]], dim=1)


PATCHER = Patcher(
    {like("LlamaRMSNorm"): forward_of(Norm), like("MistralMLP"): forward_of(GatedMLP)},
    function_mapping={like("transformers.models.llama.modeling_llama:apply_rotary_pos_emb"): rotary},
)


def main():
    tokens = torch.arange(24)[None] + 3
    for architecture in ARCHITECTURES:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            config = AutoConfig.for_model(architecture, **SIZES)
            AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/stock")
            stock = AutoModelForCausalLM.from_pretrained(f"{folder}/stock")
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/stock", patcher=PATCHER)
            with torch.no_grad():
                close = torch.allclose(model(tokens).logits, stock(tokens).logits, atol=1e-4)
            verified = verify(f"{folder}/stock", PATCHER, quick=True)
            model.save_pretrained(f"{folder}/again")
            same = all(
                (Path(folder) / "again" / path.name).read_bytes() == path.read_bytes()
                for path in (Path(folder) / "stock").glob("*.safetensors")
            )
        print(f"{type(model).__name__}: same outputs: {close}, verified: {bool(verified)}, same bytes saved: {same}")


if __name__ == "__main__":
    main()
