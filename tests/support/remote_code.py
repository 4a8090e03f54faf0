"""A tiny model whose code lies beside its weights, as ``trust_remote_code=True`` loads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_CONFIGURATION = """\
from transformers import PretrainedConfig


class TinyRemoteConfig(PretrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
"""

_MODELING = '''\
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .configuration_tiny_remote import TinyRemoteConfig


class TinyRemoteMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyRemoteMixer(nn.Module):
    """The mean of the tokens so far, projected: enough of an attention for a test."""

    def __init__(self, config):
        super().__init__()
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return self.o_proj(self.v_proj(x).cumsum(1) / count[:, None])


class TinyRemoteLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mixer = TinyRemoteMixer(config)
        self.mlp = TinyRemoteMLP(config)
        self.mixer_norm = nn.LayerNorm(config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x):
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TinyRemotePreTrainedModel(PreTrainedModel):
    config_class = TinyRemoteConfig
    base_model_prefix = "model"
    _no_split_modules = ["TinyRemoteLayer"]


class TinyRemoteModel(TinyRemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyRemoteLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class TinyRemoteForCausalLM(TinyRemotePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyRemoteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))
'''


def remote_code_model(folder: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Write a model with code of its own into ``folder`` and return it; nothing of that code is imported here.

    Its classes are ``TinyRemoteForCausalLM``, ``TinyRemoteModel``, ``TinyRemoteLayer``, ``TinyRemoteMixer`` and
    ``TinyRemoteMLP``. transformers copies the code to ``HF_MODULES_CACHE``, under the folder's name and a hash of it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration_tiny_remote.py").write_text(_CONFIGURATION)
    (folder / "modeling_tiny_remote.py").write_text(_MODELING)
    config = {
        "architectures": ["TinyRemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_tiny_remote.TinyRemoteConfig",
            "AutoModel": "modeling_tiny_remote.TinyRemoteModel",
            "AutoModelForCausalLM": "modeling_tiny_remote.TinyRemoteForCausalLM",
        },
        "model_type": "tiny_remote",
        "num_hidden_layers": layers,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(layers, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64)}
    norms = ["model.norm"]
    for layer in (f"model.layers.{index}" for index in range(layers)):
        norms += [f"{layer}.mixer_norm", f"{layer}.mlp_norm"]
        shapes |= {f"{layer}.mlp.gate_proj.weight": (96, 64), f"{layer}.mlp.up_proj.weight": (96, 64)}
        shapes |= {f"{layer}.mlp.down_proj.weight": (64, 96)}
        for projection in ("v_proj", "o_proj"):
            shapes |= {f"{layer}.mixer.{projection}.weight": (64, 64), f"{layer}.mixer.{projection}.bias": (64,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (64,), f"{norm}.bias": (64,)}
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for key, shape in shapes.items()}
