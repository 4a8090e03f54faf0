"""The rows of the table: what was done to the model, each on a tiny real architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PretrainedConfig

from patcher import Patcher
from tests.support.replacements import JOINED, OWN
from tests.support.tiny import (
    build_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_vl_config,
)


@dataclass(frozen=True)
class Row:
    """A stock model, and the patcher that changes it."""

    name: str
    patcher: Patcher
    config: Callable[[], PretrainedConfig]
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory, compare=False, repr=False)

    @cached_property
    def folder(self) -> Path:
        """The checkpoint, as stock transformers saves it; made once a process."""
        build_tiny(self.config()).save_pretrained(self._folder.name)
        return Path(self._folder.name)

    def stock(self, **options: Any) -> Any:
        """The stock model, in eval mode."""
        return self.load(self.folder, **options)

    def patched(self, **options: Any) -> Any:
        """The patched model, in eval mode."""
        return self.stock(patcher=self.patcher, **options)

    def from_config(self, **options: Any) -> Any:
        """The model from its config, with weights that transformers initialises."""
        return self._auto_class.from_config(self.config(), **options)

    def load(self, folder: Path, **options: Any) -> Any:
        """A model from another folder than `folder`."""
        return self._auto_class.from_pretrained(folder, **options)

    def inputs(self) -> dict[str, Any]:
        """Arguments of `forward`."""
        return tiny_inputs(self.config())

    def training_inputs(self) -> dict[str, Any]:
        """Arguments of `forward` that make it return a loss."""
        inputs = self.inputs()
        return inputs | {"labels": copy.deepcopy(inputs["input_ids"])}

    @property
    def has_images(self) -> bool:
        return "vision_config" in self.config().sub_configs

    @property
    def has_experts(self) -> bool:
        return hasattr(self.config(), "num_experts_per_tok")

    @property
    def joins(self) -> bool:
        """Whether its sums may come in another order than stock's: which of them round alike the processor decides."""
        return bool(self.patcher.fusions or self.patcher.extra_weight_conversions)

    @property
    def _auto_class(self) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        return AutoModelForImageTextToText if self.has_images else AutoModelForCausalLM


ROWS = (
    Row("class mapping", OWN, tiny_llama_config),
    Row("class mapping with conversions", JOINED, tiny_llama_config),
    Row("`qkv`", Patcher(fusions="qkv"), tiny_llama_config),
    Row("`gate_up`", Patcher(fusions="gate_up"), tiny_llama_config),
    Row("`sequential_experts`", Patcher(fusions="sequential_experts"), tiny_mixtral_config),
    Row("`patch_embeddings`", Patcher(fusions="patch_embeddings"), tiny_qwen2_vl_config),
)
