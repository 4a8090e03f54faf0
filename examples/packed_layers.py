"""LoRA on queries and values only, in a model that packs queries, keys and values into one layer.

python examples/packed_layers.py

The layout of `query_key_value` is inferred from the forward: in GPT-NeoX the rows are interleaved by head. The model
computes the same, trains, and saves the packed weights.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from patcher import Patcher, report

SPLIT = Patcher(fusions="split")
HEADS, HEAD, HIDDEN = 4, 16, 64


def main():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=1000,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    ids = torch.randint(1000, (4, 32))
    with tempfile.TemporaryDirectory() as folder:
        original, merged = Path(folder, "original"), Path(folder, "merged")
        AutoModelForCausalLM.from_config(config).save_pretrained(original)
        stock = AutoModelForCausalLM.from_pretrained(original)

        model = AutoModelForCausalLM.from_pretrained(original, patcher=SPLIT)
        print(report(model))
        torch.testing.assert_close(model(ids).logits, stock(ids).logits)

        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
        for _ in range(4):
            adapted(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted.merge_and_unload().save_pretrained(merged)

        # Without patcher=: a GPT-NeoX checkpoint in which only the rows of queries and values have changed.
        loaded = AutoModelForCausalLM.from_pretrained(merged)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        name = "gpt_neox.layers.0.attention.query_key_value.weight"
        before, after = (load_file(path / "model.safetensors")[name] for path in (original, merged))
        changes = (after - before).view(HEADS, 3, HEAD, HIDDEN).abs().amax((0, 2, 3))
        print("largest change of queries, keys, values:", *(f"{change:.3f}" for change in changes))


if __name__ == "__main__":
    main()
