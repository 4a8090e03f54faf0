"""GPTQ of a mixture of experts: hooks on the layers of every expert, and an int4 checkpoint with the original names.

    python examples/calibration.py                          # two layers of SmolLM2 as a Mixtral of four experts
    python examples/calibration.py Qwen/Qwen1.5-MoE-A2.7B   # a repo id or folder; its checkpoint names single experts

transformers stacks the experts of a layer in parameters, without layers for hooks. With `SequentialExperts` experts
consist of `nn.Linear` layers, and with `all_tokens=True` every token runs through all of them: outputs for tokens that
weren't routed to an expert have weight zero, and all experts are calibrated with the same number of tokens.

Layers are quantized as in "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" by
Frantar, Ashkboos, Hoefler and Alistarh (arXiv:2210.17323), and saved in the format `pack-quantized` of
compressed-tensors, which engines read, and transformers where that package is installed.

It takes half a minute on a CPU, and prints this, the last line with compressed-tensors:

    tokens that the experts of the first layer see, of 2048:
         404  619 1307 1766  Patcher(fusions=['sequential_experts'])
        2048 2048 2048 2048  Patcher(fusions=[SequentialExperts(all_tokens=True)])
    error of int4 on other text:
        round_to_nearest   outputs of experts 11.72%, predictions 0.0348 nats
        gptq               outputs of experts 10.24%, predictions 0.0232 nats
    GPTQ is closer: True
    model.layers.0.block_sparse_moe.experts.0.*
        w1.weight float32 (1536, 576)     w1.weight_packed int32 (1536, 72)
                                          w1.weight_scale float32 (1536, 9)
                                          w1.weight_shape int64 (2,)
        ...
    the experts take 81.0 MiB, and 11.4 MiB
    each weight of an expert became three tensors: True
    all other tensors are unchanged: True
    a patched model loads it: True
    stock transformers loads it dequantized: True
    stock transformers loads it with compressed-tensors: True
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
BITS, GROUP = 4, 64  # GROUP: columns that share a scale
WORD = 32 // BITS  # integers in one int32
#: The `quantization_config` of `config.json`.
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
SUFFIXES = ("packed", "scale", "shape")
#: weight, Hessian of its inputs -> integers (rows, columns), scales (rows, groups)
Method = Callable[[torch.Tensor, "Hessian"], tuple[torch.Tensor, torch.Tensor]]


def main(name: str, folder: Path, **options: Any) -> None:
    ids = AutoTokenizer.from_pretrained(name)(" ".join(topics.values()), return_tensors="pt")["input_ids"]
    data, other_text = ids[:, :2048].split(128, dim=1), ids[:, -1024:].split(128, dim=1)

    def load(patcher: Patcher | None = ALL_TOKENS) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, patcher=patcher, **options).eval()

    print(f"tokens that the experts of the first layer see, of {sum(block.numel() for block in data)}:")
    for patcher in (Patcher(fusions="sequential_experts"), ALL_TOKENS):
        model = load(patcher)
        experts, *_ = modules_of_experts(model).values()
        inputs = hessians(model, experts, data)
        counts = [hessian.count for path, hessian in inputs.items() if path.endswith("down_proj")]
        print("   ", *(f"{count:4}" for count in counts), f" {patcher}")

    print("error of int4 on other text:")
    expected, errors = outputs(model, other_text), {}
    for method in (round_to_nearest, gptq):
        model = load()
        quantize(model, method, data if method is gptq else [])
        errors[method] = error, divergence = compare(outputs(model, other_text), expected)
        print(f"    {method.__name__:<18} outputs of experts {error:.2%}, predictions {divergence:.4f} nats")
    show("GPTQ is closer", errors[gptq] < errors[round_to_nearest])

    # Save it with the quantization config.
    model.config.quantization_config = PACKED | {"ignore": [*linear_layers(model), r"re:.*\.gate$"]}
    model.save_pretrained(folder / "int4")
    stock = load(None)
    stock.save_pretrained(folder / "original")
    original, saved = (load_file(folder / kind / "model.safetensors") for kind in ("original", "int4"))
    old, new, kept = original.keys() - saved.keys(), saved.keys() - original.keys(), saved.keys() & original.keys()
    print_expert(min(old), original, saved)
    print(f"the experts take {mebibytes(original, old):.1f} MiB, and {mebibytes(saved, new):.1f} MiB")
    show("each weight of an expert became three tensors", new == {f"{key}_{kind}" for key in old for kind in SUFFIXES})
    show("all other tensors are unchanged", all(torch.equal(saved[key], original[key]) for key in kept))

    # Load it again: into the int4 layers of a patched model; dequantized into stock; by the quantizer of transformers.
    loaded = load()
    quantize(loaded, round_to_nearest, [])
    load_original_state_dict(loaded, saved)
    show("a patched model loads it", same(loaded, model, other_text))
    plain = {key: saved[key] for key in kept}
    plain |= {key: dequantized(*(saved[f"{key}_{kind}"] for kind in SUFFIXES)) for key in old}
    stock = type(stock).from_pretrained(None, config=stock.config, state_dict=plain).eval()
    show("stock transformers loads it dequantized", same(stock, model, other_text))
    if find_spec("compressed_tensors"):
        stock = AutoModelForCausalLM.from_pretrained(folder / "int4").eval()
        show("stock transformers loads it with compressed-tensors", same(stock, model, other_text))


def print_expert(weight: str, original: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Print the weights of an expert, and the tensors that replace them."""
    layer = weight.removesuffix(".weight")
    expert = layer.removesuffix(layer.rpartition(".")[2])
    print(f"{expert}*")
    for old in sorted(key for key in original if key.startswith(expert)):
        for index, key in enumerate(sorted(key for key in saved if key.startswith(old))):
            left = "" if index else describe(old.removeprefix(expert), original[old])
            print(f"    {left:<33} {describe(key.removeprefix(expert), saved[key])}")


def describe(key: str, tensor: torch.Tensor) -> str:
    return f"{key} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def mebibytes(tensors: dict[str, torch.Tensor], keys: Iterable[str]) -> float:
    return sum(tensors[key].numel() * tensors[key].itemsize for key in keys) / 2**20


def show(claim: str, holds: bool) -> None:
    print(f"{claim}: {holds}")


# --- errors of a quantized model -----------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: Any, data: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of all modules of experts, and the logits."""
    hidden: list[torch.Tensor] = []
    modules = modules_of_experts(model).values()
    hooks = [
        module.register_forward_hook(lambda _, args, out: hidden.append(out.flatten(0, -2))) for module in modules
    ]
    logits = torch.cat([model(block, use_cache=False).logits[0] for block in data])
    for hook in hooks:
        hook.remove()
    return torch.cat(hidden).float(), logits.float()


def compare(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return the relative error of the outputs of experts, and the mean KL divergence of predictions."""
    (hidden, logits), (expected_hidden, expected_logits) = actual, expected
    log_p, log_q = expected_logits.log_softmax(-1), logits.log_softmax(-1)
    error = (hidden - expected_hidden).norm() / expected_hidden.norm()
    return float(error), float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@torch.no_grad()
def same(model: Any, other: Any, data: Iterable[torch.Tensor]) -> bool:
    """Whether two models compute the same within rounding."""
    logits, expected = (torch.cat([m(block, use_cache=False).logits for block in data]) for m in (model, other))
    return bool((logits - expected).norm() < 50 * torch.finfo(logits.dtype).eps * expected.norm())


# --- inputs of the layers ------------------------------------------------------------------------------------------


class Hessian:
    """A hook that sums up X^T X of the inputs of a layer, and counts the rows of X."""

    def __init__(self, layer: nn.Linear) -> None:
        self.sum = layer.weight.new_zeros(layer.in_features, layer.in_features, dtype=torch.float32)
        self.count = 0

    def __call__(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = args[0].flatten(0, -2).float()
        self.sum += rows.T @ rows
        self.count += len(rows)


class StopForwardError(Exception):
    """Raised to skip the rest of a forward pass."""


@torch.no_grad()
def hessians(model: Any, experts: nn.Module, data: Iterable[torch.Tensor]) -> dict[str, Hessian]:
    """Return the Hessians of the layers in a module of experts, by path."""
    layers = linear_layers(experts)
    result = {path: Hessian(layer) for path, layer in layers.items()}
    hooks = [layer.register_forward_hook(result[path]) for path, layer in layers.items()]

    def stop(*_: Any) -> None:
        raise StopForwardError

    hooks.append(experts.register_forward_hook(stop))
    for block in data:
        with suppress(StopForwardError):
            model.base_model(block, use_cache=False)
    for hook in hooks:
        hook.remove()
    return result


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def modules_of_experts(model: nn.Module) -> dict[str, Any]:
    return {path: model.get_submodule(path) for path, *_ in report(model).fused}


# --- GPTQ ----------------------------------------------------------------------------------------------------------


def rounded(columns: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    half = 2 ** (BITS - 1)
    return (columns / scale).round().clamp(-half, half - 1)


def scale_of(columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a scale for each row, (rows, 1), rounded to the dtype in which it is saved."""
    scale = columns.abs().amax(1, keepdim=True) * 2 / (2**BITS - 1)
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype).float()


def round_to_nearest(weight: torch.Tensor, hessian: Hessian) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().split(GROUP, dim=1)
    scales = [scale_of(columns, weight.dtype) for columns in groups]
    return torch.cat([rounded(*pair) for pair in zip(groups, scales, strict=True)], 1), torch.cat(scales, 1)


def gptq(weight: torch.Tensor, hessian: Hessian, damping: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of the paper, in blocks of one group.

    After column i is rounded, each following column j compensates the error for these inputs by
    -error * U[i, j] / U[i, i], with the Cholesky factor U of the inverse Hessian, U^T U = H^-1. The scales of a group
    are computed after all previous columns have changed it.
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


# --- int4 layers ---------------------------------------------------------------------------------------------------


class Int4Linear(nn.Module):
    """A linear layer without bias. An int32 packs eight integers of a row, plus 8 each, the first in the low bits."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns = numbers.shape
        shifts = torch.arange(0, 32, BITS, device=numbers.device)
        words = ((numbers.long() + 2 ** (BITS - 1)).view(rows, -1, WORD) << shifts).sum(-1)
        self.register_buffer("weight_packed", words.to(torch.int32))  # the highest bit becomes the sign
        self.register_buffer("weight_scale", scales.to(dtype))
        self.register_buffer("weight_shape", torch.tensor([rows, columns]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, dequantized(self.weight_packed, self.weight_scale, self.weight_shape))


def dequantized(packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Return the weight, (rows, columns), from int32 (rows, columns / 8), scales (rows, groups) and its shape."""
    rows, columns = shape.tolist()
    shifts = torch.arange(0, 32, BITS, device=packed.device)
    numbers = (packed[..., None] >> shifts & 2**BITS - 1) - 2 ** (BITS - 1)
    groups = numbers.view(rows, scale.shape[1], -1).to(scale.dtype)
    return (groups * scale[..., None]).view(rows, columns)


@torch.no_grad()
def quantize(model: Any, method: Method, data: Iterable[torch.Tensor]) -> None:
    """Replace the layers of experts by int4 layers, module by module, so that each sees quantized inputs."""
    for experts in modules_of_experts(model).values():
        inputs = hessians(model, experts, data)
        for path, layer in linear_layers(experts).items():
            experts.set_submodule(path, Int4Linear(*method(layer.weight, inputs[path]), layer.weight.dtype))


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
