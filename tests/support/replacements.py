"""Replacements in place of the classes of Llama and Qwen3: some are subclasses, some only look alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from patcher import Patcher
from tests.support.tiny import tiny_inputs, tiny_llama_config


class OwnMLP(nn.Module):
    """Computes what `LlamaMLP` does, and is none."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class OtherMLP(OwnMLP):
    pass


class ThirdMLP(OwnMLP):
    pass


class OfOlderReleases(LlamaMLP):
    """Has a parameter under a name that transformers could have given up."""

    def forward(self, states: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(states)


class OwnNorm(LlamaRMSNorm):
    pass


class OtherNorm(LlamaRMSNorm):
    pass


class OwnLayer(LlamaDecoderLayer):
    pass


class JoinedMLP(nn.Module):
    """Gate and up projection in one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class JoinedAttention(nn.Module):
    """Queries, keys and values of one projection: of unequal sizes where heads are grouped."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.head_dim
        self.sizes = [config.num_attention_heads * width, *[config.num_key_value_heads * width] * 2]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.qkv_proj(hidden_states)[..., : self.sizes[0]]), None


class Without(OwnMLP):
    """Leaves a weight of the checkpoint alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)))


class With(OwnMLP):
    """Has a weight that the checkpoint hasn't."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.adapter = nn.Linear(4, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])
        nn.init.constant_(self.adapter.weight, 2)


class Both(Without):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.upper = nn.Linear(2, 2, bias=False)


def joining(*sources: str, target: str = "mlp.gate_up_proj.weight") -> WeightConverter:
    return WeightConverter(list(sources), [target], operations=[Concatenate(dim=0)])


JOIN = joining("mlp.gate_proj.weight", "mlp.up_proj.weight")
JOINED = Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=JOIN)
OWN = Patcher({"LlamaMLP": OwnMLP})


def classes(model: nn.Module) -> dict[str, int]:
    """The names of the MLP and norm classes in a model, and how many objects there are of each."""
    found: dict[str, int] = {}
    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("MLP", "Norm")):
            found[name] = found.get(name, 0) + 1
    return found


@torch.no_grad()
def same_output(model: Any, stock: Any) -> bool:
    """Whether two models compute the same."""
    inputs = tiny_inputs(stock.config)
    return torch.allclose(model.eval()(**inputs)[0], stock.eval()(**inputs)[0], atol=1e-5)


def in_block(patcher: Patcher) -> Any:
    """A model that is built by hand while a patcher is applied."""
    with patcher.applied():
        return LlamaForCausalLM(tiny_llama_config())


class ScaledNorm(Qwen3RMSNorm):
    """A norm that has its weight under another name."""

    weight = property(lambda self: self.scale)  # type: ignore[assignment]

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.scale = self._parameters.pop("weight")


class AttentionOfOthersNames(Qwen3Attention):
    """Attention that has the norm of its queries under another name."""

    q_norm = property(lambda self: self.norm_of_queries)  # type: ignore[assignment]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.norm_of_queries = self._modules.pop("q_norm")


SCALED_NORMS = Patcher(
    {"Qwen3RMSNorm": ScaledNorm}, extra_weight_conversions=WeightRenaming(r"norm\.weight", "norm.scale")
)
OTHERS_NAMES = Patcher(
    {"Qwen3Attention": AttentionOfOthersNames},
    extra_weight_conversions=WeightRenaming(r"q_norm\.weight", "norm_of_queries.weight"),
)


class Turned(nn.Module):
    """A linear layer that holds its weight transposed: if it is square, with the same name and shape as before."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight
