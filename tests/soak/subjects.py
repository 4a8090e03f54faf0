"""What is loaded, what with, and how it is known that the result is right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig

from patcher import Patcher
from patcher.construction.lock import construction_lock
from tests.soak.stock import CONFIGS, SHARDS, auto_class, class_names
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits
from tests.support.replacements import JOINED, OtherMLP, OwnLayer, OwnMLP, OwnNorm, With


class OwnLayerNorm(nn.LayerNorm):
    pass


class OwnLlama(LlamaForCausalLM):
    pass


BOTH = ["qkv", "gate_up"]
NEW = [r"\.mlp\.adapter\.", r"\.mlp\.scales\."]
#: name -> the model, the patcher, and the stock classes of which no module is left
PATCHES: dict[str, tuple[str, Patcher, set[str]]] = {
    "a class": ("llama", Patcher({"LlamaMLP": OwnMLP}), {"LlamaMLP"}),
    "expressions": ("tied llama", Patcher({"Llama.*MLP$": OtherMLP, "Norm$": OwnNorm}), {"LlamaMLP", "LlamaRMSNorm"}),
    "a converter": ("llama", JOINED, {"LlamaMLP"}),
    "new weights": ("llama", Patcher({"LlamaMLP": With}, new_weights=NEW), {"LlamaMLP"}),
    "the root": ("llama", Patcher({"LlamaForCausalLM": OwnLlama}), {"LlamaForCausalLM"}),
    "a class of torch": ("mobilebert", Patcher({"LayerNorm": OwnLayerNorm}), {"LayerNorm"}),
    "projections": ("llama", Patcher(fusions=BOTH), {"LlamaAttention", "LlamaMLP"}),
    "projections, tied": ("tied llama", Patcher(fusions=BOTH), {"LlamaAttention", "LlamaMLP"}),
    "projections, BERT": ("bert", Patcher(fusions="qkv"), {"BertSelfAttention"}),
    "projections, experts": ("qwen2_moe", Patcher(fusions=BOTH), {"Qwen2MoeAttention", "Qwen2MoeMLP"}),
    "experts": ("mixtral", Patcher(fusions="sequential_experts"), {"MixtralExperts"}),
    "patches": ("qwen2_vl", Patcher(fusions="patch_embeddings"), {"Conv3d"}),
    "layers and projections": (
        "llama",
        Patcher({"LlamaDecoderLayer": OwnLayer}, fusions=BOTH),
        {"LlamaDecoderLayer", "LlamaAttention", "LlamaMLP"},
    ),
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, under a patcher or as stock has it, and what is known of it."""

    name: str
    folder: Path
    config: PretrainedConfig
    patcher: Patcher | None
    logits: torch.Tensor
    classes: Mapping[str, str]
    state_dict: Mapping[str, torch.Tensor]

    @property
    def model_class(self) -> Any:
        """The stock class, as whoever builds it by hand has it."""
        return getattr(transformers, self.config.architectures[0])

    @property
    def is_fused_only(self) -> bool:
        """Whether its runtime layout can be saved."""
        return self.patcher is not None and bool(self.patcher.fusions) and not self.patcher.class_mapping

    @property
    def saves_as_stock(self) -> bool:
        return self.patcher is None or not self.patcher.new_weights

    def load(self, shards: str = "whole", **options: Any) -> Any:
        return auto_class(self.config).from_pretrained(self.folder / shards, patcher=self.patcher, **options)

    def computed(self, model: Any) -> torch.Tensor:
        """Its logits. Stock's forward of Qwen2-VL goes by torch's default type, which another load may have set."""
        depends = self.config.model_type == "qwen2_vl"
        with construction_lock.held_for("nothing") if depends else nullcontext():
            return logits(model)

    def check_built(self, model: Any) -> None:
        """Its modules are of the classes that they should be, and stand on the CPU."""
        found = class_names(model)
        different = {
            path: (found.get(path), self.classes.get(path))
            for path in found.keys() | self.classes.keys()
            if found.get(path) != self.classes.get(path)
        }
        assert not different, f"{self.name}: path -> (found, expected): {different}"
        homes = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
        assert homes == {"cpu"}, f"{self.name}: {homes}"

    def check(self, model: Any) -> None:
        """It is built as it should be, and computes what stock does."""
        self.check_built(model)
        found = self.computed(model)
        if self.patcher is not None:
            torch.testing.assert_close(found, self.logits, atol=1e-4, rtol=1e-4)
            return
        assert torch.equal(found, self.logits), f"{self.name}: off by {(found - self.logits).abs().max()}"
        state_dict = model.state_dict()
        assert state_dict.keys() == self.state_dict.keys(), self.name
        wrong = [key for key, value in self.state_dict.items() if not torch.equal(state_dict[key], value)]
        assert not wrong, f"{self.name}: {wrong}"

    def check_saved(self, folder: Path, shards: str = "whole") -> None:
        """What was saved are the files that stock saves; with new weights, at least all of stock's are in them."""
        if self.saves_as_stock:
            assert same_checkpoint(folder, self.folder / shards), f"{self.name}: the saved files differ from stock's"


class Subjects:
    """All of them: `plain` and `patched` by name."""

    def __init__(self, folder: Path) -> None:
        self.plain: dict[str, Subject] = {}
        for name, config in CONFIGS.items():
            facts = torch.load(folder / name / "facts.pt")
            config = type(config).from_pretrained(folder / name / "whole")
            self.plain[name] = Subject(name, folder / name, config, None, **facts)
        self.patched = {name: self._patched(name, *patch) for name, patch in PATCHES.items()}

    def _patched(self, name: str, of: str, patcher: Patcher, gone: set[str]) -> Subject:
        """A patched model whose classes are those of the first load of it, if that changes what it is to change."""
        stock = self.plain[of]
        model = auto_class(stock.config).from_pretrained(stock.folder / "whole", patcher=patcher)
        classes = class_names(model)
        changed = {stock.classes[path] for path in classes if classes[path] != stock.classes.get(path, classes[path])}
        assert {each.rpartition(".")[2] for each in changed} == gone, (name, changed)
        subject = Subject(name, stock.folder, stock.config, patcher, stock.logits, classes, stock.state_dict)
        subject.check(model)
        return subject

    def stock_of(self, subject: Subject) -> Subject:
        return next(each for each in self.plain.values() if each.folder == subject.folder)

    def any_plain(self, choose: random.Random) -> Subject:
        """Any but GPT-2, which the action with the registry has for itself."""
        return choose.choice([subject for name, subject in self.plain.items() if name != "gpt2"])

    def any_patched(self, choose: random.Random) -> Subject:
        return choose.choice(list(self.patched.values()))

    def any(self, choose: random.Random) -> Subject:
        return self.any_plain(choose) if choose.random() < 0.3 else self.any_patched(choose)

    def any_fused(self, choose: random.Random) -> Subject:
        return choose.choice([subject for subject in self.patched.values() if subject.is_fused_only])


def any_shards(choose: random.Random) -> str:
    return choose.choice(list(SHARDS))
