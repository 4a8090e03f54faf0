"""An attention of one's own: for one model by a function mapping, or under a name that any model may choose.

python examples/attention.py

Transformers gives the function its mask, and the keys and values of the cache. Which mask it is goes by the chosen
implementation: `eager` has a tensor of zeros and of the lowest number of the dtype, `sdpa` one of booleans. Under a
name for which no mask is registered there is none, not even a causal one, and nothing is said.
"""

import tempfile

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from patcher import Patcher, report, verify

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
    "eos_token_id": 1,
}
BLOCK = 8


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Keys in blocks, with a running maximum and sum, so that no matrix of all scores is made (arXiv:2112.05682).

    Args:
        query: [batch, heads, queries, size].
        key, value: [batch, heads of keys and values, keys, size], those of the cache included.
        attention_mask: [batch, 1, queries, keys], of either kind, or None where everything is seen.

    Returns:
        [batch, queries, heads, size], and the attention weights: None, as they are never all there.
    """
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("dropout, softcap and sinks: compute them, or load another model")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, torch.finfo(query.dtype).min
        )
    highest = query.new_full((*query.shape[:3], 1), torch.finfo(query.dtype).min)
    total, output = torch.zeros_like(highest), torch.zeros_like(query)
    for start in range(0, key.shape[2], BLOCK):
        scores = query @ key[:, :, start : start + BLOCK].transpose(2, 3) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask[..., start : start + scores.shape[-1]]
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, before = (scores - higher).exp(), (highest - higher).exp()
        total = total * before + weights.sum(-1, keepdim=True)
        output = output * before + weights @ value[:, :, start : start + BLOCK]
        highest = higher
    return (output / total).transpose(1, 2), None


# For one model: what it would call as its eager attention. The masks are those of `eager`.
PATCHER = Patcher(function_mapping={"eager_attention_forward": attention})

# Under a name, which a load chooses; a name needs masks as well, here the booleans of `sdpa`.
AttentionInterface.register("in_blocks", attention)
AttentionMaskInterface.register("in_blocks", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def main():
    tokens = torch.arange(48).reshape(2, 24) + 3
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # padded on the left
    rows = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    for architecture, window in (("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 6})):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SIZES, **window)).save_pretrained(
                folder
            )
            stock = AutoModelForCausalLM.from_pretrained(folder)
            ours = AutoModelForCausalLM.from_pretrained(folder, patcher=PATCHER, attn_implementation="eager")
            named = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="in_blocks")
            verified = verify(folder, PATCHER, quick=True, attn_implementation="eager")
        seen = mask[..., None].bool()
        for name, model in (("function mapping", ours), ("name", named)):
            with torch.no_grad():
                expected, found = (each(tokens, attention_mask=mask).logits * seen for each in (stock, model))
            same_text = torch.equal(model.generate(tokens, **rows), stock.generate(tokens, **rows))
            close = torch.allclose(found, expected, atol=1e-5)
            print(f"{architecture}, by a {name}: same outputs: {close}, same text with a cache: {same_text}")
        function, replacement, callers = report(ours).functions[0]
        print(f"  {function} -> {replacement}, called by {', '.join(callers)}; verified: {bool(verified)}")


if __name__ == "__main__":
    main()
