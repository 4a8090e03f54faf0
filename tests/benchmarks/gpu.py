"""What a patched model gains on a GPU, and how exact Liger's kernels are there. Tables in Markdown.

    python -m tests.benchmarks.gpu                         # on a machine with CUDA; with liger-kernel for its rows
    python -m tests.benchmarks.gpu --device cpu --small    # the same path where there is none: no measurement

- A Llama of 1 B with random weights in bfloat16: stock, with `qkv` and `gate_up`, and with Liger's kernels. The most
  device memory that a load holds, prompts, steps of decoding after 512 tokens, and forward and backward passes.
- Patch embeddings in bfloat16, the cases of `bench_patch_embeddings`.
- Each module that the preset LIGER replaces, on the inputs that it gets in a model: how far its outputs and
  gradients are from float64, beside the original's; and what `patcher.verify` says of the preset.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen3Config, logging

from patcher import Patcher, presets, verify
from patcher.errors import PatcherError
from tests.benchmarks.bench_patch_embeddings import CUT, WHOLE, convolution, linear_form, smaller, train
from tests.benchmarks.forwards import decode_step, prefill, training_step
from tests.benchmarks.measuring import median, ratio, table, taking_turns
from tests.benchmarks.models import LLAMA_1B, write_checkpoint

STOCK = "stock"
LENGTH = 512
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
#: What the preset LIGER is measured on.
KERNELS: dict[str, type[PretrainedConfig]] = {"Llama": type(LLAMA_1B), "Mistral": MistralConfig, "Qwen3": Qwen3Config}


def synchronized(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Until the device is done, too."""

    def run() -> None:
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return run


def load_peak(load: Callable[[], object], device: torch.device) -> float:
    """The most device memory that a load holds, in GiB; a CPU has none."""
    if device.type == "cpu":
        return float("nan")
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    load()
    return (torch.accelerator.max_memory_allocated(device) - before) / 2**30


def language_model(patchers: Mapping[str, Patcher | None], device: torch.device, size: int, folder: Path) -> None:
    """Loads, prompts and decoding; `size` divides what is asked for."""
    loads = {
        name: partial(
            AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16, device_map=device, patcher=patcher
        )
        for name, patcher in patchers.items()
    }
    peaks = {name: load_peak(load, device) for name, load in loads.items()}
    others = [f"{peaks[name] / peaks[STOCK]:.3f}" for name in peaks if name != STOCK]
    found = [("peak memory of the load", f"{peaks[STOCK]:.2f} GiB", *others)]
    models = {name: load().eval() for name, load in loads.items()}
    length = LENGTH // size
    asked = [(f"a prompt of {length} tokens, batch {rows}", prefill, rows) for rows in (1, 8)]
    asked += [(f"a step of decoding after {length} tokens, batch {rows}", decode_step, rows) for rows in (1, 8, 32)]
    for what, make, count in asked:
        runs = {name: synchronized(make(model, count, length), device) for name, model in models.items()}
        found.append((what, *figures(taking_turns(runs, 50 // size, warm_up=3))))
    runs = {name: synchronized(training_step(model, 4, length), device) for name, model in models.items()}
    found.append((f"a training step of 4 x {length} tokens", *figures(taking_turns(runs, 50 // size, warm_up=3))))
    table(("Llama 1 B, bfloat16", STOCK, *(f"{name} / {STOCK}" for name in patchers if name != STOCK)), found)


def figures(times: dict[str, list[float]]) -> list[str]:
    others = [f"{ratio(times, name, STOCK):.3f}" for name in times if name != STOCK]
    return [f"{median(times, STOCK):.2f} ms", *others]


def patch_embeddings(device: torch.device, size: int) -> None:
    rows = []
    for name, (features, kernel, shape) in (CUT | WHOLE).items():
        stock = convolution(features // size, kernel).to(device, torch.bfloat16)
        modules = {STOCK: stock, "linear": linear_form(stock)}
        image = torch.randn(smaller(shape, size), device=device, dtype=torch.bfloat16)
        found = []
        for work in (infer, train):
            runs = {key: synchronized(partial(work, module, image), device) for key, module in modules.items()}
            found += figures(taking_turns(runs, 50 // size, warm_up=3))
        rows.append((name, *found))
    table(("patch embedding, bfloat16", STOCK, f"linear / {STOCK}", f"{STOCK}, training", f"linear / {STOCK}"), rows)


@torch.no_grad()
def infer(module: nn.Module, image: torch.Tensor) -> None:
    module(image)


def replaced_modules(stock: nn.Module, patched: nn.Module, length: int) -> Iterator[tuple[nn.Module, nn.Module, Any]]:
    """One module of each class that is another in the patched model, its replacement, and an input that it gets."""
    inputs: dict[str, torch.Tensor] = {}
    chosen: dict[type, str] = {}
    for path, module in stock.named_modules():
        if type(module) is not type(patched.get_submodule(path)):
            chosen[type(module)] = path
            module.register_forward_pre_hook(lambda _, found, path=path: inputs.update({path: found[0].detach()}))
    prefill(stock, 2, length)()
    for path in chosen.values():
        yield stock.get_submodule(path), patched.get_submodule(path), inputs[path]


def outcome(module: nn.Module, states: torch.Tensor) -> list[torch.Tensor]:
    """What a module gives, and the gradients of its input and its parameters, in float64."""
    module.zero_grad()
    states = states.clone().requires_grad_()
    output = module(states)
    weights = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
    (output * weights).sum().backward()
    gradients = [each.grad for each in (states, *module.parameters())]
    return [each.detach().double() for each in (output, *gradients) if each is not None]


def error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    pairs = zip(found, exact, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def numerics(name: str, patcher: Patcher, folder: Path, device: torch.device, length: int) -> Iterator[list[str]]:
    for dtype in (torch.float32, torch.bfloat16):
        load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=dtype, device_map=device)
        for stock, patched, states in replaced_modules(load(), load(patcher=patcher), length):
            exact, mine = outcome(deepcopy(stock).double(), states.double()), outcome(stock, states)
            theirs = outcome(patched, states)
            parts = [(mine[:1], theirs[:1], exact[:1]), (mine[1:], theirs[1:], exact[1:])]
            found = [f"{error(each, truth):.1e}" for *both, truth in parts for each in both]
            yield [name, type(patched).__name__, str(dtype).removeprefix("torch."), *found]


def verdict(name: str, patcher: Patcher, folder: Path, device: torch.device) -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16):
        found = verify(folder, patcher, dtype=dtype, device_map=device, progress=False)
        what = "passed" if found.passed else "; ".join(found.failures)
        yield f"- `verify` of `LIGER` on {name}, {str(dtype).removeprefix('torch.')}: {what}"


def kernel_config(name: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Two layers of a model that the preset is for, as wide as the Llama of 1 B."""
    sizes = {key: getattr(LLAMA_1B, key) for key in SMALL} | {"num_hidden_layers": 2, "vocab_size": 1024}
    architecture = KERNELS[name].__name__.replace("Config", "ForCausalLM")
    return KERNELS[name](**sizes | changes, architectures=[architecture])


def kernel_preset() -> Patcher | None:
    try:
        return presets.LIGER
    except PatcherError as reason:
        print(f"LIGER left out: {reason}\n")
        return None


def main(device: torch.device, is_small: bool, scratch: Path) -> None:
    size = 16 if is_small else 1
    changes = SMALL if is_small else {}
    liger = kernel_preset()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    print(f"{where}, torch {torch.__version__}\n")
    patchers = {STOCK: None, "`qkv` and `gate_up`": Patcher(fusions=["qkv", "gate_up"])}
    patchers |= {"`LIGER`": liger} if liger is not None else {}
    folder = write_checkpoint(type(LLAMA_1B)(**LLAMA_1B.to_dict() | changes), scratch / "1b", torch.bfloat16)
    language_model(patchers, device, size, folder)
    print()
    patch_embeddings(device, size)
    rows, verdicts = [], []
    for name in KERNELS if liger is not None else ():
        folder = write_checkpoint(kernel_config(name, changes), scratch / name, torch.float32)
        rows += numerics(name, liger, folder, device, LENGTH // size)
        verdicts += verdict(name, liger, folder, device)
    if rows:
        print()
        columns = ("outputs, stock", "outputs, patched", "gradients, stock", "gradients, patched")
        table(("error against float64", "module", "dtype", *columns), rows)
        print("\n" + "\n".join(verdicts))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda by default")
    parser.add_argument("--small", action="store_true", help="tiny models and few turns: figures that mean nothing")
    asked = parser.parse_args(given)
    if asked.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no GPU with CUDA here. Run this on a machine that has one, or try its "
            "path without: python -m tests.benchmarks.gpu --device cpu --small"
        )
    return asked


if __name__ == "__main__":
    asked = arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        main(asked.device, asked.small, Path(name))
