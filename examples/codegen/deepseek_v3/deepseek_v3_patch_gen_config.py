"""DeepSeek-V3 with another function for its experts.

patcher codegen examples/codegen/deepseek_v3/deepseek_v3_patch_gen_config.py --diff

In transformers the config decides which function computes the experts: a decorator of the class puts it in the place
of `forward`. Here the decorator goes, and tokens are sorted by their experts once. The file needs nothing but
transformers, and reads and writes checkpoints with the experts apart, as the original does.
"""

import torch
from torch import nn

from patcher.codegen import PatchConfig

config = PatchConfig(
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "patched_modeling_deepseek_v3.py",
    "DeepSeek-V3 whose tokens are sorted by their experts.",
)
config.drop_decorators("DeepseekV3Experts", "use_experts_implementation")


@config.add_helper(description="which tokens go to which expert, in the order of the experts")
def sorted_by_expert(top_k_index, num_experts):
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts + 1)[:num_experts]  # the last is none: an expert elsewhere
    order = order[: counts.sum()]
    return order, order // top_k_index.shape[-1], counts.tolist()


@config.override_method("DeepseekV3Experts.forward", description="one pass over the tokens, sorted by expert")
def forward(self, hidden_states, top_k_index, top_k_weights):
    order, tokens, counts = sorted_by_expert(top_k_index, self.num_experts)
    results = []
    for expert, states in enumerate(hidden_states[tokens].split(counts)):
        gate, up = nn.functional.linear(states, self.gate_up_proj[expert]).chunk(2, dim=-1)
        results.append(nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert]))
    weighted = torch.cat(results) * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add_(0, tokens, weighted.to(hidden_states.dtype))
