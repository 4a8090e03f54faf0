"""Every function that the modeling code of some architectures calls, replaced by one that counts and calls it.

`python -m tests.functions.architectures` does it for all of transformers.
"""

from __future__ import annotations

import pytest

from tests.functions.architectures import examine
from tests.support.sampling import sampled

#: architecture -> functions that its passes call, and those that are refused
EXPECTED = {
    "LlamaForCausalLM": ({"apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward"}, set()),
    "Qwen2MoeForCausalLM": ({"apply_rotary_pos_emb", "repeat_kv", "create_causal_mask"}, set()),
    "BertForMaskedLM": ({"eager_attention_forward", "create_bidirectional_mask"}, set()),
    "GPT2LMHeadModel": ({"eager_attention_forward", "create_causal_mask"}, set()),
    "CohereForCausalLM": ({"apply_rotary_pos_emb", "rotate_half", "repeat_kv"}, set()),
    "BartForConditionalGeneration": ({"eager_attention_forward", "create_causal_mask"}, set()),
    "ViTForImageClassification": ({"eager_attention_forward"}, set()),
    "BambaForCausalLM": ({"apply_rotary_pos_emb", "segment_sum", "apply_mask_to_padding_states"}, set()),
}


@pytest.mark.parametrize("name", sampled(EXPECTED, {"LlamaForCausalLM", "ViTForImageClassification"}))
def test_each_function_is_replaced_wherever_it_is_called(name: str) -> None:
    works, refused = EXPECTED[name]
    result = examine(name)
    assert result["status"] == "examined", result["reason"]
    rows = {key.rpartition(":")[2]: text for key, text in result["functions"].items()}
    assert {key for key, text in rows.items() if text.startswith("WRONG")} == set()
    assert {key for key, text in rows.items() if text.startswith("refused")} == refused
    assert works <= {key for key, text in rows.items() if text == "works"}
