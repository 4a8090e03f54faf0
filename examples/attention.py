"""A custom attention function: for one model by a function mapping, or under a name that any model can select.

python examples/attention.py

Transformers passes the mask, and the keys and values of the cache. The implementation decides the kind of mask: a
float tensor of zeros and the lowest number of the dtype for `eager`, booleans for `sdpa`. For a name without a
registered mask function there is no mask, not even a causal one, and no warning.
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
    """Attention over blocks of keys, with a running maximum and sum instead of all scores (arXiv:2112.05682).

    Args:
        query: [batch, heads, queries, size].
        key, value: [batch, heads of keys and values, keys, size], those of the cache included.
        attention_mask: [batch, 1, queries, keys], of either kind, or None if nothing is masked.

    Returns:
        [batch, queries, heads, size], and None for the attention weights, which are never materialized.
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
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - new_highest).exp(), (highest - new_highest).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        output = output * rescale + weights @ value[:, :, start : start + BLOCK]
        highest = new_highest
    return (output / total).transpose(1, 2), None


# For one model: in place of its eager attention, with the masks of `eager`.
PATCHER = Patcher(function_mapping={"eager_attention_forward": attention})

# Under a name that a load selects. A name needs a mask function as well, here that of `sdpa`.
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
            patched = AutoModelForCausalLM.from_pretrained(folder, patcher=PATCHER, attn_implementation="eager")
            named = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="in_blocks")
            verified = verify(folder, PATCHER, quick=True, attn_implementation="eager")
        unpadded = mask[..., None].bool()
        for name, model in (("function mapping", patched), ("name", named)):
            with torch.no_grad():
                expected = stock(tokens, attention_mask=mask).logits * unpadded
                logits = model(tokens, attention_mask=mask).logits * unpadded
            same_text = torch.equal(model.generate(tokens, **rows), stock.generate(tokens, **rows))
            close = torch.allclose(logits, expected, atol=1e-5)
            print(f"{architecture}, by a {name}: same outputs: {close}, same text with a cache: {same_text}")
        function, replacement, callers = report(patched).functions[0]
        print(f"  {function} -> {replacement}, called by {', '.join(callers)}; verified: {bool(verified)}")


if __name__ == "__main__":
    main()
