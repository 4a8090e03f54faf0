"""RMSNorm and gated activations in Triton, for training on GPUs, in every model whose classes match a verified one.

The kernels save fewer activations and read memory once. Only the forward of the modules changes, so no weight is
converted; an activation that Liger lacks is computed by the module itself. Outputs equal stock's within the rounding
of the dtype; verify on your GPU with `patcher verify MODEL --preset LIGER`. They need the package `liger-kernel` and a
GPU. `tests/coverage/coverage_liger.md` lists the classes that are replaced, by architecture.

Measured on an H200: a 1B Llama in bfloat16 computes prompts of 8 x 512 tokens in 0.82 of stock's time. A step of
decoding takes 1.27 of it, since a kernel of Triton costs more to launch.

Rotary embeddings are left out: Liger's kernel assumes that both halves of cos and sin are equal, and overwrites its
queries and keys. A function that computes the same as Llama's needn't allow either.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patcher import errors, forward_of, like

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LigerRMSNorm(nn.Module):
    """Llama's RMSNorm: the product with the weight is in the promoted dtype of both."""

    def forward(self: Any, hidden_states: Any) -> Any:
        normed = _normed(hidden_states, self.weight, self.variance_epsilon, casting="llama")
        return normed.to(torch.promote_types(self.weight.dtype, hidden_states.dtype))


class LigerRMSNormInFloat32(nn.Module):
    """OLMo 2's RMSNorm: the product with the weight is in float32."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return _normed(hidden_states, self.weight, self.variance_epsilon)


class LigerRMSNormFromOne(nn.Module):
    """Gemma's RMSNorm: the factor is one plus the weight."""

    def forward(self: Any, x: Any) -> Any:
        return _normed(x, self.weight, self.eps, offset=1.0)


class LigerRMSNormWithScale(nn.Module):
    """Gemma 3n's and Gemma 4's RMSNorm: there may be no weight."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return _normed(hidden_states, getattr(self, "weight", None), self.eps)


class LigerGatedMLP(nn.Module):
    """The gated MLP of most models, with a layer for the gate and another for the values."""

    def forward(self: Any, x: Any) -> Any:
        return self.down_proj(_gated(self.act_fn, self.gate_proj(x), self.up_proj(x)))


class LigerGateUpMLP(nn.Module):
    """Phi-3's gated MLP, with one layer for both."""

    def forward(self: Any, hidden_states: Any) -> Any:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(_gated(self.activation_fn, gate, up))


#: Class of an activation -> its function in Liger. Subclasses don't count, they may compute something else.
_FUNCTIONS = {
    "transformers.activations.SiLUActivation": "LigerSiLUMulFunction",
    "torch.nn.modules.activation.SiLU": "LigerSiLUMulFunction",
    "transformers.activations.GELUTanh": "LigerGELUMulFunction",
}


def _normed(states: Any, weight: Any, eps: float, offset: float = 0.0, casting: str = "gemma") -> Any:
    from liger_kernel import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]

    # Not in place, which is the default of Liger's layers: a residual connection may use the same gradient.
    return ops.LigerRMSNormFunction.apply(states, weight, eps, offset, casting, False)


def _gated(activation: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `activation(gate) * up`, by Liger's kernel if it has the activation."""
    from liger_kernel import ops

    name = _FUNCTIONS.get(f"{type(activation).__module__}.{type(activation).__qualname__}")
    if name is None:
        return activation(gate) * up  # type: ignore[no-any-return]
    product: torch.Tensor = getattr(ops, name).apply(gate, up)
    if product.requires_grad and not torch.compiler.is_compiling():
        passes: list[None] = []
        product.register_hook(lambda gradient: _count_pass(passes))  # type: ignore[no-untyped-call]
    return product


def _count_pass(passes: list[None]) -> None:
    """Refuse a second backward pass: in the first, Liger overwrites the saved tensors of the forward."""
    if passes:
        raise RuntimeError(
            "Liger's gated activations support one backward pass, and this is the second one (retain_graph=True). "
            "Run the forward again for each, or load without the preset LIGER."
        )
    passes.append(None)


_MODELS = "transformers.models."
#: layer -> examples of the classes that it replaces, with the fingerprints of the verified code
_RULES: dict[type[nn.Module], dict[str, Any]] = {
    LigerRMSNorm: {
        "llama.modeling_llama:LlamaRMSNorm": "d343b51fc4f03ebb",
        "olmoe.modeling_olmoe:OlmoeRMSNorm": "64235d790fce97ef",
    },
    LigerRMSNormInFloat32: {
        "olmo2.modeling_olmo2:Olmo2RMSNorm": "09b65d6d78d9f6fa",
        "helium.modeling_helium:HeliumRMSNorm": "b05e749ae969ce14",
    },
    LigerRMSNormFromOne: {"gemma.modeling_gemma:GemmaRMSNorm": "951e0277ced85072"},
    LigerRMSNormWithScale: {"gemma3n.modeling_gemma3n:Gemma3nRMSNorm": "80dbd2427773ca83"},
    LigerGatedMLP: {
        "llama.modeling_llama:LlamaMLP": "eafbe94b23d9df2e",
        "mistral.modeling_mistral:MistralMLP": "c73b8ed157b7f657",
        "deepseek_v3.modeling_deepseek_v3:DeepseekV3MLP": "b5373f23af148073",
        "qwen3_5.modeling_qwen3_5:Qwen3_5MLP": "8ed1f613e7024934",
        "gemma2.modeling_gemma2:Gemma2MLP": "f5d4c358d68355a9",
        "gemma4.modeling_gemma4:Gemma4TextMLP": ["89029c06ba2a97c1", "4ecb027316ca5933"],
        "deepseek_v2.modeling_deepseek_v2:DeepseekV2MLP": "6ba030e697050685",
        "ernie4_5.modeling_ernie4_5:Ernie4_5MLP": "d976babbddb1cd67",
        "ernie4_5_moe.modeling_ernie4_5_moe:Ernie4_5_MoeMLP": "dfaa41bd45bc4c40",
        "hunyuan_v1_dense.modeling_hunyuan_v1_dense:HunYuanDenseV1MLP": "fa88709a7fa33113",
    },
    LigerGateUpMLP: {"phi3.modeling_phi3:Phi3MLP": ["c942b52642b72c0d", "0efa846a86067cac"]},
}


def rules() -> dict[Any, type[nn.Module]]:
    """Return the mapping from classes to the layers whose forwards they get. It needs neither Liger nor a GPU."""
    return {like(_MODELS + example): layer for layer, examples in _RULES.items() for example in examples}


def fits(config: PretrainedConfig) -> bool:
    """Whether the modeling file of a config, or of one of its sub-configs, has a class that is replaced."""
    classes: list[Any] = []
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        with suppress(ImportError):
            home = importlib.import_module(type(part).__module__.replace(".configuration_", ".modeling_"))
            classes += [value for value in vars(home).values() if getattr(value, "__module__", "") == home.__name__]
    return any(key.matches(cls) for key in rules() for cls in classes if isinstance(cls, type))


def arguments() -> dict[str, Any]:
    """Return the arguments of the preset's `Patcher`, or raise if the package or a GPU is missing."""
    try:
        importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise errors.NoSuchNameError(
            f"The preset LIGER needs Liger's kernels, which can't be imported ({error}). "
            "Install them: pip install liger-kernel"
        ) from error
    if not torch.accelerator.is_available():
        raise errors.NoSuchNameError(
            f"The preset LIGER needs a GPU: Liger's kernels are written in Triton, and torch {torch.__version__} "
            "sees no GPU here. Use it where there is one, or load without it."
        )
    classes = {key: forward_of(layer) for key, layer in rules().items()}
    pins = {name.rpartition(":")[2]: pin for examples in _RULES.values() for name, pin in examples.items()}
    return {"class_mapping": classes, "alternatives": [[*classes]], "fingerprints": pins}
