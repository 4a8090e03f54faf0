"""A config, and its source in two releases of transformers between which the code under its patches changed."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
import torch
from torch import nn

from patcher.codegen import PatchConfig, create_patch_from_external

config = PatchConfig("drifting.models.modeling_mixtral", "patched_modeling_mixtral.py")


@config.override_method("MixtralExperts.forward", description="one activation, known in advance")
def silu_forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()

    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
        current_hidden_states = nn.functional.silu(gate) * up  # the one activation
        current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))

    return final_hidden_states


@config.override_method("MixtralRotaryEmbedding.forward", description="in double precision")
@torch.no_grad()
def double_forward(self, x, position_ids):
    inv_freq_expanded = (
        self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).to(dtype=torch.double, device=x.device)
    )
    position_ids_expanded = position_ids[:, None, :].double()

    device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
    # Disable any outside autocast context if any, to really force fp32
    with maybe_autocast(device_type=device_type, enabled=False):
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling

    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


config.patches.append(create_patch_from_external("load_balancing_loss_func", "math", "fsum"))
config.drop_decorators("MixtralExperts", "use_experts_implementation")
"""
OLD, NEW = "5.17.0", "5.23.0"


def excerpt(release: str) -> str:
    """What the config patches, as that release of transformers ships it."""
    return (Path(__file__).parent / "drift" / f"modeling_mixtral_{release}.txt").read_text()
