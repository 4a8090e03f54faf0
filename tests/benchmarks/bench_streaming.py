"""What weights that stream cost: the time to the first one, memory beside the model, and a hundred syncs.

python -m tests.benchmarks.bench_streaming [REPETITIONS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.measuring import in_a_process, line

# A process that loads a model and measures one thing: how long, or how many MiB more than before.
MEASURE = """
import gc, json, sys, time
import torch
from tests.support.memory import peak
from patcher import Patcher, checkpoint_weights, load_checkpoint_weights
from transformers import AutoModelForCausalLM, logging
logging.disable_progress_bar()
what, folder, *fusions = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=fusions))
engine = AutoModelForCausalLM.from_pretrained(folder)
for parameter in (*model.parameters(), *engine.parameters()):
    parameter.data = parameter.data.clone()  # from the file into memory
next(checkpoint_weights(model))  # what is imported
load_checkpoint_weights(engine, checkpoint_weights(model))
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak is that from here on
before, started = peak(), time.perf_counter()
if what == "first":
    next(checkpoint_weights(model))
    found = time.perf_counter() - started
elif what == "all":
    load_checkpoint_weights(engine, checkpoint_weights(model))
    found = time.perf_counter() - started
elif what == "copy":  # of as many bytes, for comparison
    others = [parameter.data.clone() for parameter in engine.parameters()]
    started = time.perf_counter()
    for parameter, other in zip(engine.parameters(), others):
        parameter.data.copy_(other)
    found = time.perf_counter() - started
elif what == "stream":
    for name, tensor in checkpoint_weights(model):
        del tensor
    found = (peak() - before) / 2**20
else:
    for _ in range(100):
        load_checkpoint_weights(engine, checkpoint_weights(model))
    found = (peak() - before) / 2**20
print(json.dumps(found))
"""


def subjects() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Name -> a config, and fusions."""
    from transformers import GptOssConfig, LlamaConfig, OlmoeConfig, Qwen2MoeConfig

    from tests.benchmarks.models import SMOLLM2_SIZES

    llama = LlamaConfig(**SMOLLM2_SIZES, architectures=["LlamaForCausalLM"])
    narrow = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    olmoe = OlmoeConfig(**narrow, intermediate_size=512, num_hidden_layers=16, num_experts=64, eos_token_id=1)
    olmoe.architectures = ["OlmoeForCausalLM"]
    sizes = {"num_local_experts": 32, "num_hidden_layers": 4, "intermediate_size": 512, "eos_token_id": 1}
    oss = GptOssConfig(**narrow, **sizes, architectures=["GptOssForCausalLM"])
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    tiny |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    moe = Qwen2MoeConfig(**tiny, num_hidden_layers=24, num_experts=60, bos_token_id=1, eos_token_id=1)
    moe.architectures = ["Qwen2MoeForCausalLM"]
    return {
        "SmolLM2, stock": (llama, ()),
        "SmolLM2, qkv and gate_up": (llama, ("qkv", "gate_up")),
        "OLMoE (narrow), 64 experts, stock": (olmoe, ()),
        "OLMoE (narrow), sequential_experts": (olmoe, ("qkv", "sequential_experts")),
        "GPT-OSS (narrow), sequential_experts": (oss, ("qkv", "sequential_experts")),
        "4,659 names (Qwen2-MoE, tiny)": (moe, ()),
        "4,659 names, sequential_experts": (moe, ("qkv", "sequential_experts")),
    }


def main(repetitions: int = 3) -> None:
    import torch

    from tests.benchmarks.models import write_checkpoint

    for name, (config, fusions) in subjects().items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(config, Path(folder), torch.bfloat16)
            from transformers import AutoModelForCausalLM

            stock = AutoModelForCausalLM.from_pretrained(folder)
            parts = [list(layer.children()) for layer in stock.model.layers]
            largest = max(sum(p.nbytes for p in each.parameters()) for layer in parts for each in layer) / 2**20

            def measured(what: str, folder: str = folder, fusions: tuple[str, ...] = fusions) -> float:
                found = (in_a_process(MEASURE, what, folder, *fusions) for _ in range(repetitions))
                return statistics.median(found)

            first, sync, copy = measured("first"), measured("all"), measured("copy")
            line(f"{name}: the first tensor", f"{first * 1000:.0f} ms", "<= 100 ms", first <= 0.1)
            line("  all of them, into a stock model", f"{sync * 1000:.0f} ms")
            line("  a plain copy of as much", f"{copy * 1000:.0f} ms")
            peak, flat = measured("stream"), measured("syncs")
            line("  MiB beside the model", f"{peak:.1f}", f"<= {largest:.0f}", peak <= largest)
            line("  MiB more after 100 syncs", f"{flat:.1f}", f"<= {largest:.0f}", flat <= largest)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
