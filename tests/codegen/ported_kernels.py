"""What `ported` takes from elsewhere."""

from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP


class ExternalMLP(Qwen3MLP):
    pass
