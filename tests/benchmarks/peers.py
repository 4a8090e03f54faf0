"""What others offer for the effect of a patcher, each as its documentation says to write it, for one load.

    python -m tests.benchmarks.peers EFFECT CANDIDATE FOLDER loads     # once for each line that it is sent
    python -m tests.benchmarks.peers EFFECT CANDIDATE FOLDER traces    # what is left behind, as JSON

`bench_peers` starts these: a process for each candidate, since some can't be undone.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import LlamaConfig, MixtralConfig, OlmoeConfig, PretrainedConfig, Qwen3VLConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.benchmarks.models import SMOLLM2_SIZES
from tests.support.checkpoints import same_checkpoint
from tests.support.memory import peak
from tests.support.snapshot import Snapshot, changes, snapshot

__all__ = ["EFFECTS", "PLAIN", "Candidate", "Effect"]

THREADS = 2
PLAIN = "plain"
#: a load of the model; its keyword arguments are those of `from_pretrained`
Load = Callable[..., nn.Module]


@dataclass(frozen=True)
class Candidate:
    """All that one load takes, what is written before and after it included."""

    load: Callable[[Load], nn.Module]
    modules: str  # what it takes, imported beforehand

    @property
    def missing(self) -> set[str]:
        """Packages that are not installed."""
        packages = {name.split(".")[0] for name in self.modules.split()}
        return {package for package in packages if importlib.util.find_spec(package) is None}

    def prepare(self) -> None:
        for name in self.modules.split():
            importlib.import_module(name)


@dataclass(frozen=True)
class Effect:
    config: PretrainedConfig
    small: Mapping[str, Any]  # changes that make it tiny
    is_shown: Callable[[nn.Module], bool]
    candidates: Mapping[str, Candidate]

    def tiny_config(self) -> PretrainedConfig:
        found = self.config.to_dict()
        for key, value in self.small.items():
            found[key] = found[key] | value if isinstance(value, dict) else value
        return type(self.config).from_dict(found)


class OtherNorm(LlamaRMSNorm):
    pass


class OtherMLP(LlamaMLP):
    pass


OTHER_CLASSES = {"LlamaRMSNorm": OtherNorm, "LlamaMLP": OtherMLP}


def plain(load: Load) -> nn.Module:
    return load()


def patched(load: Load, **arguments: Any) -> nn.Module:
    from patcher import Patcher

    return load(patcher=Patcher(**arguments))


def preset(load: Load, name: str) -> nn.Module:
    from patcher import presets

    return load(patcher=getattr(presets, name))


def registered(load: Load, *, is_cleared: bool) -> nn.Module:
    from transformers import monkey_patching

    monkey_patching.register_patch_mapping(OTHER_CLASSES, overwrite=True)
    try:
        return load()
    finally:
        if is_cleared:
            monkey_patching.clear_patch_mapping()


def liger_classes() -> dict[str, type[nn.Module]]:
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

    return {"LlamaRMSNorm": LigerRMSNorm, "LlamaMLP": LigerSwiGLUMLP}


def liger(load: Load) -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=False, fused_linear_cross_entropy=False)  # norm and MLP, as the patcher does
    return load()


def defused_before(load: Load) -> nn.Module:
    from defuser import replace_fused_blocks

    assert replace_fused_blocks("mixtral")
    return load()


def defused_after(load: Load) -> nn.Module:
    from defuser import convert_model

    model = load()
    assert convert_model(model, cleanup_original=True)
    return model


def fused_by_config(load: Load) -> nn.Module:
    return load(fusion_config={"patch_embeddings": True})


def has(*names: str) -> Callable[[nn.Module], bool]:
    """Whether a model has modules of all these classes."""
    return lambda model: {*names} <= {type(module).__name__ for module in model.modules()}


def has_linear_experts(model: nn.Module) -> bool:
    return sum(".experts.0." in path and isinstance(m, nn.Linear) for path, m in model.named_modules()) > 0


def has_no_convolution(model: nn.Module) -> bool:
    return not any(isinstance(module, nn.Conv3d) for module in model.modules())


PATCHER, LIGER = "patcher.monkey_patching", "liger_kernel.transformers"
STOCK = Candidate(plain, "transformers")
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA = LlamaConfig(**SMOLLM2_SIZES, architectures=["LlamaForCausalLM"])
EXPERTS = SMOLLM2_SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": False}
MIXTRAL = MixtralConfig(**EXPERTS, num_local_experts=8, architectures=["MixtralForCausalLM"])
OLMOE = OlmoeConfig(
    **EXPERTS | {"intermediate_size": 512},
    num_experts=24,
    num_experts_per_tok=4,
    eos_token_id=2,
    architectures=["OlmoeForCausalLM"],
)
QWEN3_VL = Qwen3VLConfig(
    text_config=SMOLLM2_SIZES
    | {"num_hidden_layers": 4, "head_dim": 64, "tie_word_embeddings": False}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}},
    vision_config={"depth": 4, "out_hidden_size": 576, "deepstack_visual_indexes": [1]},
    architectures=["Qwen3VLForConditionalGeneration"],
)
EFFECTS: dict[str, Effect] = {
    "norms and MLPs of other classes, Llama": Effect(
        LLAMA,
        TINY,
        has("OtherNorm", "OtherMLP"),
        {
            PLAIN: STOCK,
            "patcher": Candidate(partial(patched, class_mapping=OTHER_CLASSES), PATCHER),
            "transformers' registry": Candidate(partial(registered, is_cleared=False), "transformers"),
            "the same, cleared after the load": Candidate(partial(registered, is_cleared=True), "transformers"),
        },
    ),
    "Liger's norms and MLPs, Llama": Effect(
        LLAMA,
        TINY,
        has("LigerRMSNorm", "LigerSwiGLUMLP"),
        {
            PLAIN: STOCK,
            "patcher": Candidate(lambda load: patched(load, class_mapping=liger_classes()), f"{PATCHER} {LIGER}"),
            "Liger": Candidate(liger, LIGER),
        },
    ),
    "experts as linear layers, Mixtral": Effect(
        MIXTRAL,
        TINY,
        has_linear_experts,
        {
            PLAIN: STOCK,
            "patcher": Candidate(partial(preset, name="MIXTRAL_LINEAR_EXPERTS"), PATCHER),
            "Defuser": Candidate(defused_before, "defuser"),
        },
    ),
    "experts as linear layers, OLMoE": Effect(
        OLMOE,
        TINY,
        has_linear_experts,
        {
            PLAIN: STOCK,
            "patcher": Candidate(partial(preset, name="OLMOE_LINEAR_EXPERTS"), PATCHER),
            "Defuser": Candidate(defused_after, "defuser"),
        },
    ),
    "linear patch embeddings, Qwen3-VL": Effect(
        QWEN3_VL,
        {"text_config": TINY | {"head_dim": 64}, "vision_config": {"hidden_size": 64, "intermediate_size": 96}},
        has_no_convolution,
        {
            PLAIN: STOCK,
            "patcher": Candidate(partial(patched, fusions="patch_embeddings"), PATCHER),
            "transformers' fusion_config": Candidate(fused_by_config, "transformers"),
        },
    ),
}


def classes(model: nn.Module) -> dict[str, str]:
    return {path: f"{type(module).__module__}.{type(module).__qualname__}" for path, module in model.named_modules()}


def loads(effect: Effect, candidate: Candidate, load: Load, answers: TextIO) -> None:
    """The bytes that the first load holds at its peak, and then the seconds of each."""
    load = partial(load, dtype=torch.bfloat16)  # of a file in float32: everything is read
    candidate.prepare()
    sys.stdin.readline()
    before = peak()
    assert effect.is_shown(candidate.load(load)) or candidate is STOCK
    print(max(1, peak() - before), file=answers, flush=True)  # a tiny model may fit into what was free
    for _ in sys.stdin:
        started = time.perf_counter()
        model = candidate.load(load)
        seconds = time.perf_counter() - started
        del model
        gc.collect()  # before it is the turn of others
        print(seconds, file=answers, flush=True)


def traces(candidate: Candidate, load: Load, folder: Path, scratch: Path) -> dict[str, Any]:
    """What one load with the effect leaves behind."""
    stock = classes(load())  # what any load does once has been done
    before = snapshot()
    candidate.prepare()
    imported = len(changes(before))
    before = snapshot()
    model: Any = candidate.load(load)
    rebound = len(changes(before)) + new_entries(before)
    try:
        model.save_pretrained(scratch)
        saved = same_checkpoint(folder, scratch)
    except Exception:
        saved = False
    found = {"imported": imported, "rebound": rebound, "saved": saved, "next": _is_stock(load, stock)}
    return found | {"beside": is_alone(candidate, load, stock)}


def new_entries(before: Snapshot) -> int:
    """How many entries tables of modules and classes have got: what is registered there is in force for all."""
    tables = [each for each in before.contents if issubclass(type(each.container), dict)]
    # Some tables are lazy, and have another length than what is in them.
    return sum(max(0, dict.__len__(each.container) - len(each.keys)) for each in tables)


def is_alone(candidate: Candidate, load: Load, stock: dict[str, str]) -> bool:
    """Whether a plain load in another thread, begun while the model of this one is built, is stock."""
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(_is_stock(load, stock)))
    mine = threading.current_thread()

    def begin(*args: object) -> None:
        if threading.current_thread() is mine and not other.ident:
            other.start()
            other.join(timeout=3)  # one that waits for this load to be done is no worse for it

    handle = register_module_parameter_registration_hook(begin)
    try:
        candidate.load(load)
    finally:
        handle.remove()
    other.join()
    return found == [True]


def _is_stock(load: Load, stock: dict[str, str]) -> bool:
    try:
        return classes(load()) == stock
    except Exception:
        return False


def main(effect_name: str, name: str, folder: str, task: str) -> None:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    effect = EFFECTS[effect_name]
    candidate = effect.candidates[name]
    assert effect.config.architectures
    model_class = getattr(transformers, effect.config.architectures[0])

    def load(**options: Any) -> nn.Module:  # looked up when it is called: importing patcher wraps it
        loaded: nn.Module = model_class.from_pretrained(folder, **options)
        return loaded

    with os.fdopen(os.dup(1), "w") as answers, tempfile.TemporaryDirectory() as scratch:
        os.dup2(2, 1)  # what peers print is no answer
        if task == "loads":
            loads(effect, candidate, load, answers)
        else:
            print(json.dumps(traces(candidate, load, Path(folder), Path(scratch))), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
