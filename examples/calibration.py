"""GPTQ of a mixture of experts: hooks on every expert's layers, and a checkpoint of int4 under the original's names.

    python examples/calibration.py                          # two layers of SmolLM2 as a Mixtral of four experts
    python examples/calibration.py Qwen/Qwen1.5-MoE-A2.7B   # a repo id or folder; its checkpoint names single experts

transformers keeps the experts of a layer in stacks, which have no layers to put a hook on. With `SequentialExperts`
each expert has `nn.Linear`s, and with `all_tokens=True` every token runs through each of them: what an expert makes of
tokens that didn't choose it weighs nothing in the output, and its layers are calibrated with as many as all others.

Layers are quantized as in "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" by
Frantar, Ashkboos, Hoefler and Alistarh (arXiv:2210.17323), and saved in the format `pack-quantized` of
compressed-tensors, which engines read, and transformers where that package is installed.

OUTPUT
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from patcher import Patcher, load_original_state_dict, report
from patcher.fusions import SequentialExperts

ALL_TOKENS = Patcher(fusions=[SequentialExperts(all_tokens=True)])
BITS, GROUP = 4, 64  # columns that share a scale
WORD = 32 // BITS  # numbers in one int32
#: What says so in `config.json`.
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}
#: A weight, and what its inputs are like -> numbers (rows, columns), and scales (rows, groups).
Method = Callable[[torch.Tensor, "Hessian"], tuple[torch.Tensor, torch.Tensor]]


def main(name: str, folder: Path, **options: Any) -> None:
    ids = AutoTokenizer.from_pretrained(name)(" ".join(topics.values()), return_tensors="pt")["input_ids"]
    data, other_text = ids[:, :2048].split(128, dim=1), ids[:, -1024:].split(128, dim=1)

    def load(patcher: Patcher | None = ALL_TOKENS) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, patcher=patcher, **options).eval()

    print(f"tokens that the first experts see, of {sum(block.numel() for block in data)}:")
    for patcher in (Patcher(fusions="sequential_experts"), ALL_TOKENS):
        model = load(patcher)
        experts, *_ = modules_of_experts(model).values()
        counts = [each.count for path, each in hessians(model, experts, data).items() if path.endswith("down_proj")]
        print("   ", *(f"{count:4}" for count in counts), f" {patcher}")

    print("error of int4 on other text:")
    expected, errors = outputs(model, other_text), {}
    for method in (round_to_nearest, gptq):
        model = load()
        quantize(model, method, data if method is gptq else [])
        errors[method] = apart(outputs(model, other_text), expected)
        print(
            "    {:<18} outputs of experts {:.2%}, divergence of logits {:.4f}".format(
                method.__name__, *errors[method]
            )
        )
    show("GPTQ is nearer", errors[gptq] < errors[round_to_nearest])

    # Saved with what says how to read it. What isn't quantized is named as transformers names it.
    left_alone = [*linear_layers(model), r"re:.*\.gate$"]
    model.config.quantization_config = {**PACKED, "ignore": left_alone}
    model.save_pretrained(folder / "int4")
    stock = load(None)
    stock.save_pretrained(folder / "original")
    original, saved = (load_file(folder / each / "model.safetensors") for each in ("original", "int4"))
    print_keys(original, saved)
    weights = original.keys() - saved.keys()
    companions = {f"{weight}_{kind}" for weight in weights for kind in ("packed", "scale", "shape")}
    show(
        "beside each weight that is quantized its three, and nothing else",
        saved.keys() - original.keys() == companions,
    )
    show(
        "the rest is as it was", all(torch.equal(saved[key], original[key]) for key in saved.keys() & original.keys())
    )
    sizes = [
        sum(size(each[key]) for key in each.keys() - rest.keys())
        for each, rest in ((original, saved), (saved, original))
    ]
    print("the experts take {:.1f} MiB, and {:.1f} MiB".format(*sizes))

    # Read again: by layers of int4 in a patched model; as plain weights by stock transformers; and by its quantizer.
    again = load()
    for experts in modules_of_experts(again).values():
        for path, layer in linear_layers(experts).items():
            experts.set_submodule(path, Int4Linear.empty(layer))
    load_original_state_dict(again, saved)
    show("a patched model reads it", same(again, model, other_text))
    plain = {key: value for key, value in saved.items() if key in original}
    for weight in weights:
        plain[weight] = dequantized(*(saved[f"{weight}_{kind}"] for kind in ("packed", "scale", "shape")))
    stock = type(stock).from_pretrained(None, config=stock.config, state_dict=plain).eval()
    show("stock transformers reads what is dequantized", same(stock, model, other_text))
    if find_spec("compressed_tensors"):
        stock = AutoModelForCausalLM.from_pretrained(folder / "int4").eval()
        show("stock transformers reads it with compressed-tensors", same(stock, model, other_text))


def print_keys(original: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """The weights of the last expert, and what there is in the place of each."""
    gone = max(
        original.keys() - saved.keys(), key=lambda key: [int(part) for part in key.split(".") if part.isdigit()]
    )
    expert = gone.removesuffix(".weight").rpartition(".")[0] + "."
    print(expert)
    for weight in sorted(key for key in original if key.startswith(expert)):
        old = described(weight, original[weight])
        for key in sorted(key for key in saved if key.startswith(weight)):
            print(f"    {old:<33}{described(key, saved[key])}")
            old = ""


def described(key: str, tensor: torch.Tensor) -> str:
    return f"{'.'.join(key.split('.')[-2:])} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def size(tensor: torch.Tensor) -> float:
    return tensor.numel() * tensor.itemsize / 2**20


def show(claim: str, holds: bool) -> None:
    print(f"{claim}: {holds}")


# --- how far a quantized model is off -------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: Any, data: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What all modules of experts give, and the logits."""
    given: list[torch.Tensor] = []
    hooks = [
        experts.register_forward_hook(lambda _, args, output: given.append(output.flatten(0, -2)))
        for experts in modules_of_experts(model).values()
    ]
    logits = torch.cat([model(block, use_cache=False).logits[0] for block in data])
    for hook in hooks:
        hook.remove()
    return torch.cat(given), logits


def apart(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """The error of the outputs of experts, of their norm, and the mean Kullback-Leibler divergence of predictions."""
    error = (found[0] - expected[0]).norm() / expected[0].norm()
    one, other = (logits.float().log_softmax(-1) for logits in (expected[1], found[1]))
    return float(error), float((one.exp() * (one - other)).sum(-1).mean())


@torch.no_grad()
def same(one: Any, other: Any, data: list[torch.Tensor]) -> bool:
    return bool((one(data[0]).logits - other(data[0]).logits).abs().max() < 1e-3)


# --- what the layers are given -------------------------------------------------------------------------------------


class Hessian:
    """A hook that sums up the inputs of a layer: X^T X, and how many rows X has had."""

    def __init__(self, layer: nn.Linear) -> None:
        self.sum = torch.zeros(layer.in_features, layer.in_features)
        self.count = 0

    def __call__(self, layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = given[0].flatten(0, -2).float()
        self.sum += rows.T @ rows
        self.count += len(rows)


class EnoughError(Exception):
    """What follows in the model isn't needed."""


@torch.no_grad()
def hessians(model: Any, experts: nn.Module, data: Iterable[torch.Tensor]) -> dict[str, Hessian]:
    """Path of a layer in a module of experts -> what is found out about its inputs."""
    layers = linear_layers(experts)
    found = {path: Hessian(layer) for path, layer in layers.items()}
    hooks = [layer.register_forward_hook(found[path]) for path, layer in layers.items()]

    def stop(*_: Any) -> None:
        raise EnoughError

    hooks.append(experts.register_forward_hook(stop))
    for block in data:
        with suppress(EnoughError):
            model.base_model(block, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def modules_of_experts(model: nn.Module) -> dict[str, Any]:
    return {path: model.get_submodule(path) for path, *_ in report(model).fused}


# --- GPTQ ----------------------------------------------------------------------------------------------------------


def rounded(columns: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    half = 2 ** (BITS - 1)
    return (columns / scale).round().clamp(-half, half - 1)


def scale_of(columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One for each row, (rows, 1), with the precision in which it is saved."""
    scale = columns.abs().amax(1, keepdim=True) * 2 / (2**BITS - 1)
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype).float()


def round_to_nearest(weight: torch.Tensor, hessian: Hessian) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().split(GROUP, dim=1)
    scales = [scale_of(columns, weight.dtype) for columns in groups]
    return torch.cat([rounded(*each) for each in zip(groups, scales, strict=True)], 1), torch.cat(scales, 1)


def gptq(weight: torch.Tensor, hessian: Hessian, damping: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of the paper, in blocks of one group.

    Column i is rounded, and each column j that follows makes up for the error as well as it can for these inputs, by
    -error * U[i, j] / U[i, i] with the Cholesky factor U of the inverse Hessian, U^T U = H^-1. A group gets its scales
    when all columns before have changed it.
    """
    rest, matrix = weight.float().clone(), hessian.sum / max(hessian.count, 1)
    dead = matrix.diagonal() == 0  # inputs that are always zero
    rest[:, dead] = 0
    matrix.diagonal().add_(damping * matrix.diagonal().mean() + dead)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(matrix)), upper=True)

    numbers, scales = torch.empty_like(rest), []
    for start in range(0, rest.shape[1], GROUP):
        end = start + GROUP
        block, factors = rest[:, start:end], upper[start:end]
        scale, errors = scale_of(block, weight.dtype), torch.empty_like(block)
        for i in range(GROUP):
            number = rounded(block[:, i : i + 1], scale)
            error = (block[:, i : i + 1] - number * scale) / factors[i, start + i]
            block[:, i:] -= error * factors[i, start + i : end]
            numbers[:, start + i : start + i + 1], errors[:, i : i + 1] = number, error
        rest[:, end:] -= errors @ factors[:, end:]
        scales.append(scale)
    return numbers, torch.cat(scales, 1)


# --- layers of int4 ------------------------------------------------------------------------------------------------


class Int4Linear(nn.Module):
    """A linear layer without bias: eight numbers of a row, each plus 8, in one int32, the first in the lowest bits."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns = numbers.shape
        shifts = torch.arange(0, 32, BITS, device=numbers.device)
        words = ((numbers.long() + 2 ** (BITS - 1)).view(rows, -1, WORD) << shifts).sum(-1)
        self.register_buffer("weight_packed", words.to(torch.int32))  # the highest bit becomes the sign
        self.register_buffer("weight_scale", scales.to(dtype))
        self.register_buffer("weight_shape", torch.tensor([rows, columns]))

    @classmethod
    def empty(cls, layer: nn.Linear) -> Int4Linear:
        groups = layer.weight.new_zeros(layer.out_features, layer.in_features // GROUP)
        return cls(torch.zeros_like(layer.weight), groups, layer.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, dequantized(self.weight_packed, self.weight_scale, self.weight_shape))


def dequantized(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """The weight, (rows, columns), of int32 (rows, columns / 8), scales (rows, groups), and these numbers."""
    rows, columns = shape.tolist()
    shifts = torch.arange(0, 32, BITS, device=packed.device)
    numbers = (packed[..., None] >> shifts & 2**BITS - 1) - 2 ** (BITS - 1)
    groups = numbers.view(rows, scale.shape[1], -1).to(scale.dtype)
    return (groups * scale[..., None]).view(rows, columns)


@torch.no_grad()
def quantize(model: Any, method: Method, data: Iterable[torch.Tensor]) -> None:
    """Put layers of int4 in the place of those of experts: module by module, as each sees what is quantized before."""
    for experts in modules_of_experts(model).values():
        found = hessians(model, experts, data)
        for path, layer in linear_layers(experts).items():
            experts.set_submodule(path, Int4Linear(*method(layer.weight, found[path]), layer.weight.dtype))


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        if len(sys.argv) > 1:
            main(sys.argv[1], Path(temporary))
        else:
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from tests.real_models import smollm2_moe

            main(str(smollm2_moe()), Path(temporary), num_hidden_layers=2)
