"""Export of a patched model to a folder that loads without this package: `patcher.export(model, patcher, folder)`."""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, ModelCardData, snapshot_download
from huggingface_hub.repocard import metadata_load
from transformers import PretrainedConfig, PreTrainedModel

from patcher.checkpoints.headers import is_default
from patcher.checkpoints.model_classes import config_of, model_class_of
from patcher.codegen.config import PatchConfig
from patcher.codegen.generation.generator import Generated, build
from patcher.compat.models import class_in
from patcher.display.parts import Cell, Notes, Part, Table
from patcher.display.shown import Displayable
from patcher.errors import CodegenError, InvalidPatcherError, VerificationError
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher
from patcher.verification.verify import Verification, compare

#: Arguments of `snapshot_download` that say where a repo is.
_PLACES = ("cache_dir", "local_files_only", "revision", "token")
#: Suffixes of files with weights, all but those that `from_pretrained` loads by default are left out.
_WEIGHT_SUFFIXES = "bin ckpt gguf h5 msgpack npz onnx ot pb pt pth safetensors tflite".split()
_TRAINER_FILES = ("trainer_state.json", "training_args.bin")
#: Metadata that the model card has from the original.
_KEPT_METADATA = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags", "base_model")


@dataclass(frozen=True, repr=False)
class Exported(Displayable):
    """The result of `patcher.export`.

    Attributes:
        folder: the folder that was written.
        modeling_file: the name of the modeling file.
        auto_map: Auto class -> the class of the modeling file that it loads, as in `config.json`.
        changes: the differences from the code of transformers, as texts.
        files: the names of all files.
        verification: the comparison with the original; None if it wasn't verified.
        address: the address of the commit if it was pushed to the hub.
    """

    folder: Path
    modeling_file: str
    auto_map: Mapping[str, str]
    changes: tuple[str, ...]
    files: tuple[str, ...]
    verification: Verification | None = None
    address: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, strings and numbers, for JSON."""
        return super().to_dict() | {"folder": str(self.folder)}

    def _headline(self) -> str:
        verification = self.verification
        verified = "not verified" if verification is None else f"verified in {verification.seconds:.1f} s"
        return f"{self.folder}: {len(self.files)} files, {verified}" + (f", {self.address}" if self.address else "")

    def _verdict(self) -> Cell | None:
        return None if self.verification is None else self.verification._verdict()

    def _parts(self) -> Iterator[Part]:
        yield Table("trust_remote_code=True gives", ("Auto class", "class"), list(self.auto_map.items()))
        yield Notes(f"{self.modeling_file} differs from the code of transformers", self.changes, "")


def export(
    model: str | os.PathLike[str],
    patcher: Patcher,
    folder: str | os.PathLike[str],
    *,
    model_class: Any = None,
    verify: bool = True,
    quick: bool = False,
    push_to_hub: str = "",
    **places: Any,
) -> Exported:
    """Write a folder from which a patched model can be loaded without this package.

    >>> import tempfile, patcher
    >>> from pathlib import Path
    >>> from patcher import Patcher
    >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> with tempfile.TemporaryDirectory() as scratch:
    ...     LlamaForCausalLM(config).save_pretrained(f"{scratch}/original")
    ...     exported = patcher.export(f"{scratch}/original", Patcher(fusions=["qkv"]), f"{scratch}/fused", quick=True)
    ...     model = AutoModelForCausalLM.from_pretrained(exported.folder, trust_remote_code=True)
    >>> sorted(exported.files)
    ['README.md', 'config.json', 'generation_config.json', 'model.safetensors', 'modeling_llama.py']
    >>> type(model.model.layers[0].self_attn).__module__.startswith("transformers_modules.")
    True

    The folder has a modeling file (see `patcher.codegen`), the config with an `auto_map` that names it, the weights
    and the files of tokenizer and processor, byte for byte, and a model card with the changes and how they were
    verified. Without `trust_remote_code=True` transformers loads the original model from it.

    Args:
        model: a repo id or a folder.
        patcher: the patcher to apply.
        folder: where to write; a new or an empty folder.
        model_class: the model class that the patcher is for, or an Auto class; by default the one in the config.
        verify: whether to compare the exported model with the original, as `patcher.compare` does.
        quick: whether to do so in a tenth of the time, as in `patcher.verify`.
        push_to_hub: the repo to push it to, `"me/my-model"`, which is created if needed.
        places: where the model is on the hub: `revision`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        InvalidPatcherError: if there is no patcher, or no model with weights to copy, or the folder isn't empty.
        CodegenError: if a modeling file can't do what the patcher does.
        VerificationError: if the exported model doesn't compute the same as the original.

    If it raises, nothing is left in `folder`.
    """
    if not isinstance(patcher, Patcher):
        raise not_a_patcher("export(model, {}, folder)", patcher)
    for name in places.keys() - {*_PLACES, "trust_remote_code"}:
        raise InvalidPatcherError(f"export doesn't take {name}=; it takes {', '.join(_PLACES)}.")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidPatcherError(f"{target} is not an empty folder; export(..., folder) writes into a new one.")
    config = config_of(model, places)
    cls = model_class_of(config, model_class, model, places)
    generated = _generated(patcher, cls, config)
    changes, auto_map = _changes(generated), _auto_map(cls, config, cls.__module__.rpartition(".")[2])
    source = _source(model, places)
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        _write(source, target, generated, auto_map)
        verification = None
        if verify:
            verification = compare(source, target, quick=quick, progress=False, trust_remote_code=True)
            if not verification.passed:
                raise VerificationError(
                    f"the {cls.__name__} of {generated.config.target_file} isn't the same as that of transformers:\n  "
                    + "\n  ".join(verification.failures)
                )
        exported = Exported(target, generated.config.target_file, auto_map, changes, (), verification)
        card = _card(exported, str(model), source, patcher, generated, push_to_hub or target.name)
        (target / "README.md").write_text(card, "utf-8")
        if push_to_hub:
            api = HfApi(token=places.get("token"))
            repo = api.create_repo(push_to_hub, exist_ok=True).repo_id
            address = api.upload_folder(repo_id=repo, folder_path=target, commit_message="Upload a patched model")
            exported = replace(exported, address=str(address))
    except BaseException:
        shutil.rmtree(target)
        if not is_new:
            target.mkdir()
        raise
    files = tuple(sorted(file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()))
    return replace(exported, files=files)


def _generated(patcher: Patcher, cls: type[PreTrainedModel], config: PretrainedConfig) -> Generated:
    home = cls.__module__
    if not home.startswith("transformers."):
        raise InvalidPatcherError(
            f"{cls.__name__} is a class of {home}, and export writes the modeling file of a model that transformers "
            "has. Patch that code with patcher.codegen.PatchConfig, and publish its file."
        )
    file = f"{home.rpartition('.')[2]}.py"
    try:
        described = PatchConfig.from_patcher(patcher, cls, config=config, target_file=file)
        described.made_by = "patcher export, or patcher.export(model, patcher, folder)"
        generated = build(described)
    except CodegenError as error:
        reason = str(error).partition(": ")[2]  # without the location of the config, which has none here
        raise CodegenError(f"no modeling file can do what the patcher does: {reason}") from error
    if described.renamed and getattr(config, "quantization_config", None) is not None:
        raise InvalidPatcherError(
            f"The checkpoint is quantized, and a modeling file that converts weights for {patcher!r} can't convert "
            "quantized ones. Export the full-precision checkpoint, and quantize that while it loads."
        )
    return generated


def _source(model: str | os.PathLike[str], places: Mapping[str, Any]) -> Path:
    """Return the folder with the files of a model; download it if it is a repo."""
    if Path(model).is_dir():
        return Path(model)
    others = [f"*.{suffix}" for suffix in _WEIGHT_SUFFIXES if suffix not in ("bin", "safetensors")]
    arguments = {name: places[name] for name in _PLACES if name in places}
    return Path(snapshot_download(str(model), ignore_patterns=[*others, "*/*.bin", "*/*.safetensors"], **arguments))


def _auto_map(cls: type[PreTrainedModel], config: PretrainedConfig, stem: str) -> dict[str, str]:
    """Return Auto class -> the class of the modeling file that it loads."""
    auto_classes = {name: getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModel")}
    classes = {name: class_in(auto_class, config) for name, auto_class in auto_classes.items()}
    # With `trust_remote_code` a load gives the class this config, where it would give that of a part to a text model.
    return {
        name: f"{stem}.{model_class.__name__}"
        for name, model_class in classes.items()
        if model_class is not None
        and model_class.__module__ == cls.__module__
        and isinstance(config, model_class.config_class or PretrainedConfig)
    }


def _write(source: Path, target: Path, generated: Generated, auto_map: dict[str, str]) -> None:
    """Write all files but the card: the weights that `from_pretrained` loads, and all files without weights.

    Raises:
        InvalidPatcherError: if there are no weights.
    """
    files = [file for file in source.iterdir() if file.is_file() and not file.name.startswith(".")]
    weights = [file for file in files if is_default(file.name)]
    if not weights:
        raise InvalidPatcherError(
            f"{source} has no weights that from_pretrained looks for, such as model.safetensors. Load the model, and "
            "write it with save_pretrained first."
        )
    safetensors = [file for file in weights if "safetensors" in file.name]
    left_out = {*weights, *(source / name for name in (*_TRAINER_FILES, "README.md", "config.json"))}
    others = [file for file in files if file not in left_out and file.suffix.removeprefix(".") not in _WEIGHT_SUFFIXES]
    for file in [*(safetensors or weights), *others]:
        shutil.copyfile(file, target / file.name)
    for folder in filter(_is_of_a_processor, source.iterdir()):
        shutil.copytree(folder, target / folder.name)
    config = json.loads((source / "config.json").read_text("utf-8")) | {"auto_map": auto_map}
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    # So that `save_pretrained` copies the file. A class in several Auto classes is registered for the first one.
    auto_classes = {reference.rpartition(".")[2]: name for name, reference in reversed(auto_map.items())}
    calls = "".join(f'{cls}.register_for_auto_class("{name}")\n' for cls, name in auto_classes.items())
    text = generated.text.rstrip("\r\n") + "\n\n# save_pretrained copies this file.\n" + calls
    # A load with `trust_remote_code` requires every package that a statement imports, also where it is never run.
    text = re.sub(r"(?m)^( +)import deepspeed$", r'\1deepspeed = __import__("deepspeed")', text)
    (target / generated.config.target_file).write_text(text, "utf-8")


def _is_of_a_processor(folder: Path) -> bool:
    """Whether a folder beside the files of a model has files of its tokenizer or processor: more chat templates, or a
    tokenizer beside the first one. A checkpoint of a training has such too, and weights."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    has_config = not names.isdisjoint(("tokenizer_config.json", "preprocessor_config.json"))
    is_of_templates = bool(names) and folder.name == "additional_chat_templates"
    return is_of_templates or (has_config and not any(map(is_default, names)))


def _changes(generated: Generated) -> tuple[str, ...]:
    texts = [
        f"{patch.kind.value} `{patch.target}`" + (f": {patch.description}" if patch.description else "")
        for patch in generated.patches
    ]
    for helper in generated.config.helpers:
        about = ast.get_docstring(helper.source.tree()) or ""
        texts.append(f"add `{helper.source.name}`" + (f": {about.splitlines()[0]}" if about else ""))
    texts += [f"the package `{package}`, without which it isn't loaded" for package in _packages(generated)]
    return tuple(texts)


def _packages(generated: Generated) -> list[str]:
    """Return the packages besides torch and transformers that the patches import."""
    packages = {statement.module.partition(".")[0] for statement in generated.config.imports}
    return sorted(packages - {"torch", "transformers", *sys.stdlib_module_names})


def _card(exported: Exported, model: str, source: Path, patcher: Patcher, generated: Generated, repo: str) -> str:
    readme, is_repo = source / "README.md", not Path(model).is_dir()
    original = (metadata_load(readme) if readme.is_file() else None) or {}
    original |= {"base_model": model} if is_repo else {}
    kept = {name: original[name] for name in _KEPT_METADATA if name in original}
    metadata = ModelCardData(library_name="transformers", **kept)
    auto_class = next((name for name in exported.auto_map if name != "AutoModel"), "AutoModel")
    changes = "\n".join(f"- {change}" for change in exported.changes)
    *packages, last = [*_packages(generated), "torch", "transformers"]
    code = generated.source
    return f"""\
---
{metadata.to_yaml()}
---

The weights of {f"`{model}`" if is_repo else "the original model"}, byte for byte, with other modeling code. It needs \
{", ".join(packages)} and {last}.

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{repo}", trust_remote_code=True)
```

Without `trust_remote_code=True` transformers loads the original model.

## What differs

`{exported.modeling_file}` is `{code.name}` of {code.version or f"transformers {transformers.__version__}"}, changed \
by patcher {version("patcher")}:

```python
{patcher!r}
```

{changes}

## How it was verified

{"It was not verified." if exported.verification is None else _verification_section(exported.verification)}
"""


def _verification_section(verification: Verification) -> str:
    rows = "\n".join(
        f"| {name} | {'passed' if stage.checked else stage.message} | {figures} | {allowed} |"
        for stage, (name, _, figures, allowed, *_) in zip(verification.stages, verification.rows(), strict=True)
    )
    return f"""\
By `patcher.compare` with the original, on {datetime.date.today().isoformat()}, in {verification.dtype}; \
Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}; \
{platform.system()} on {platform.machine()}.

| stage | | measured | allowed |
|---|---|---|---|
{rows}"""
