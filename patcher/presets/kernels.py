"""RMSNorm and gated activations in Triton, for training on GPUs, in every model whose classes compute what they do.

The kernels keep fewer activations and read memory once. The modules stay those of the model, with another forward, so
nothing is converted, and an activation that Liger lacks is computed by the module's own. They compute as stock does
within the rounding of the dtype; verify on your GPU with `patcher verify MODEL --preset LIGER`. They need the package
`liger-kernel` and a GPU. Which classes are replaced, architecture by architecture, is listed in
`tests/coverage/coverage_liger.md`.

Rotary embeddings are left out: Liger's takes the second half of cos and sin to be as the first, and writes into the
queries and keys that it is given, and a function that is like Llama's says nothing of either.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patcher import InvalidPatcherError, forward_of, like

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LigerRMSNorm(nn.Module):
    """Llama's: the product with the weight is in the dtype of both."""

    def forward(self: Any, hidden_states: Any) -> Any:
        normed = _normed(hidden_states, self.weight, self.variance_epsilon, casting="llama")
        return normed.to(torch.promote_types(self.weight.dtype, hidden_states.dtype))


class LigerRMSNormInFloat32(nn.Module):
    """OLMo 2's: the product with the weight is in float32."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return _normed(hidden_states, self.weight, self.variance_epsilon)


class LigerRMSNormFromOne(nn.Module):
    """Gemma's: the weight is what is added to one."""

    def forward(self: Any, x: Any) -> Any:
        return _normed(x, self.weight, self.eps, offset=1.0)


class LigerRMSNormWithScale(nn.Module):
    """Gemma 3n's and Gemma 4's: there may be no weight."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return _normed(hidden_states, getattr(self, "weight", None), self.eps)


class LigerGatedMLP(nn.Module):
    """That of most models, with one layer for the gate and one for what it scales."""

    def forward(self: Any, x: Any) -> Any:
        return self.down_proj(_gated(self.act_fn, self.gate_proj(x), self.up_proj(x)))


class LigerGateUpMLP(nn.Module):
    """Phi-3's: both are one layer."""

    def forward(self: Any, hidden_states: Any) -> Any:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(_gated(self.activation_fn, gate, up))


#: The activations that Liger has, by the names of their classes; one that is derived from them is another.
_FUNCTIONS = {
    "transformers.activations.SiLUActivation": "LigerSiLUMulFunction",
    "torch.nn.modules.activation.SiLU": "LigerSiLUMulFunction",
    "transformers.activations.GELUTanh": "LigerGELUMulFunction",
}


def _normed(states: Any, weight: Any, eps: float, offset: float = 0.0, casting: str = "gemma") -> Any:
    from liger_kernel import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]

    # Not in place, as Liger's own layers are by default: a gradient may be that of a residual connection as well.
    return ops.LigerRMSNormFunction.apply(states, weight, eps, offset, casting, False)


def _gated(activation: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`activation(gate) * up`, which is computed so where Liger lacks the activation."""
    from liger_kernel import ops

    name = _FUNCTIONS.get(f"{type(activation).__module__}.{type(activation).__qualname__}")
    if name is None:
        return activation(gate) * up  # type: ignore[no-any-return]
    product: torch.Tensor = getattr(ops, name).apply(gate, up)
    if product.requires_grad and not torch.compiler.is_compiling():
        passes: list[None] = []
        product.register_hook(lambda gradient: _count(passes))  # type: ignore[no-untyped-call]
    return product


def _count(passes: list[None]) -> None:
    """Refuse a second backward pass: in the first Liger overwrites what the forward has saved."""
    if passes:
        raise RuntimeError(
            "Liger's gated activations can be gone back through once, and this is the second backward pass "
            "(retain_graph=True). Run the forward again for each, or load without the preset LIGER."
        )
    passes.append(None)


_MODELS = "transformers.models."
#: layer -> the classes that it is for, by examples, with the fingerprints of what was verified
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
    """What is replaced -> the layer whose forward it gets. That needs neither the package nor a GPU."""
    return {like(_MODELS + example): layer for layer, examples in _RULES.items() for example in examples}


def fits(config: PretrainedConfig) -> bool:
    """Whether the modeling file of a config, or that of the text model in it, has a class that is replaced."""
    classes: list[Any] = []
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        with suppress(ImportError):
            home = importlib.import_module(type(part).__module__.replace(".configuration_", ".modeling_"))
            classes += [each for each in vars(home).values() if getattr(each, "__module__", "") == home.__name__]
    return any(key.matches(cls) for key in rules() for cls in classes if isinstance(cls, type))


def arguments() -> dict[str, Any]:
    """Those of the preset's `Patcher`."""
    try:
        importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise InvalidPatcherError(
            f"The preset LIGER needs Liger's kernels, which can't be imported ({error}). "
            "Install them: pip install liger-kernel"
        ) from error
    if not torch.accelerator.is_available():
        raise InvalidPatcherError(
            f"The preset LIGER needs a GPU: Liger's kernels are written in Triton, and torch {torch.__version__} "
            "sees no GPU here. Use it where there is one, or load without it."
        )
    classes = {key: forward_of(layer) for key, layer in rules().items()}
    pins = {name.rpartition(":")[2]: pin for examples in _RULES.values() for name, pin in examples.items()}
    return {"class_mapping": classes, "alternatives": [[*classes]], "fingerprints": pins}
