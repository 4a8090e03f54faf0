"""A patched model as a folder that anyone loads, without this package: `patcher.export(model, patcher, folder)`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
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
from patcher.display.shown import Shown
from patcher.errors import CodegenError, InvalidPatcherError, VerificationError
from patcher.source.modules import SourceModule
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher
from patcher.verification.verify import Verification, compare

#: Where in the hub a repo is: what `snapshot_download` takes.
_PLACES = ("cache_dir", "local_files_only", "revision", "token")
#: Weights in formats that `from_pretrained` doesn't look for, and what a training leaves behind.
_OTHER_WEIGHTS = "bin ckpt gguf h5 msgpack npz onnx ot pb pt pth safetensors tflite".split()
_OF_TRAINING = ("trainer_state.json", "training_args.bin")
#: What a card takes over of that of the original.
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags", "base_model")


@dataclass(frozen=True)
class Exported(Shown):
    """What `patcher.export` has written.

    Attributes:
        folder: where.
        modeling_file: the name of the modeling file.
        auto_map: Auto class -> the class of that file which it gives, as `config.json` has it.
        changes: what differs from the code of transformers, a text for each.
        files: the names of all files.
        verification: how it was compared with the original; None where it wasn't.
        address: of the commit, where it was pushed to the hub.
    """

    folder: Path
    modeling_file: str
    auto_map: Mapping[str, str]
    changes: tuple[str, ...]
    files: tuple[str, ...]
    verification: Verification | None = None
    address: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, for JSON."""
        return super().to_dict() | {"folder": str(self.folder)}

    def _headline(self) -> str:
        found = self.verification
        verified = "not verified" if found is None else f"verified in {found.seconds:.1f} s"
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
    """Write a folder from which anyone loads a patched model with torch and transformers alone.

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

    In it are a modeling file (see `patcher.codegen`), the config with an `auto_map` that names it, the weights and
    the files of tokenizer and processor, byte for byte, and a model card that says what differs, how it was verified
    and on what. Without `trust_remote_code=True` transformers loads the original model from it.

    Args:
        model: a repo id or a folder.
        patcher: what differs.
        folder: where to write; a new or an empty folder.
        model_class: the class of model that the patcher is for, or an Auto class; by default what the config names.
        verify: compare what was written with the original, as `patcher.compare` does.
        quick: in a tenth of the time, as in `patcher.verify`.
        push_to_hub: the repo to put it into, `"me/my-model"`, which is made if there is none.
        places: where in the hub the model is: `revision`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        InvalidPatcherError: no patcher, no model whose weights can be copied, or a folder in which something is.
        CodegenError: a modeling file can't do what the patcher does.
        VerificationError: what was written isn't the same as the original.

    Whatever is raised, nothing is left in `folder`.
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
        found = None
        if verify:
            found = compare(source, target, quick=quick, progress=False, trust_remote_code=True)
            if not found.passed:
                raise VerificationError(
                    f"the {cls.__name__} of {generated.config.target_file} is not what that of transformers is:\n  "
                    + "\n  ".join(found.failures)
                )
        exported = Exported(target, generated.config.target_file, auto_map, changes, (), found)
        card = _card(exported, str(model), source, patcher, generated.source, push_to_hub or target.name)
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
    files = tuple(sorted(each.relative_to(target).as_posix() for each in target.rglob("*") if each.is_file()))
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
        return build(PatchConfig.from_patcher(patcher, cls, config=config, target_file=file))
    except CodegenError as error:
        reason = str(error).partition(": ")[2]  # behind the place of a config, which here is none
        raise CodegenError(f"no modeling file can do what the patcher does: {reason}") from error


def _source(model: str | os.PathLike[str], places: Mapping[str, Any]) -> Path:
    """The folder with the files of a model: those of a repo are fetched."""
    if Path(model).is_dir():
        return Path(model)
    others = [f"*.{ending}" for ending in _OTHER_WEIGHTS if ending not in ("bin", "safetensors")]
    named = {name: places[name] for name in _PLACES if name in places}
    return Path(snapshot_download(str(model), ignore_patterns=[*others, "*/*.bin", "*/*.safetensors"], **named))


def _auto_map(cls: type[PreTrainedModel], config: PretrainedConfig, stem: str) -> dict[str, str]:
    """Auto class -> the class of the file that it gives."""
    autos = {name: getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModel")}
    chosen = {name: class_in(auto, config) for name, auto in autos.items()}
    return {
        name: f"{stem}.{each.__name__}"
        for name, each in chosen.items()
        if each is not None and each.__module__ == cls.__module__
    }


def _write(source: Path, target: Path, generated: Generated, auto_map: dict[str, str]) -> None:
    """Write all files but the card: the weights as `from_pretrained` finds them, and all that isn't weights.

    Raises:
        InvalidPatcherError: there are no weights.
    """
    files = [each for each in source.iterdir() if each.is_file() and not each.name.startswith(".")]
    weights = [each for each in files if is_default(each.name)]
    if not weights:
        raise InvalidPatcherError(
            f"{source} has no weights that from_pretrained looks for, such as model.safetensors. Load the model, and "
            "write it with save_pretrained first."
        )
    safe = [each for each in weights if "safetensors" in each.name]
    left_out = {*weights, *(source / name for name in (*_OF_TRAINING, "README.md", "config.json"))}
    rest = [each for each in files if each not in left_out and each.suffix.removeprefix(".") not in _OTHER_WEIGHTS]
    for each in [*(safe or weights), *rest]:
        shutil.copyfile(each, target / each.name)
    written = json.loads((source / "config.json").read_text("utf-8")) | {"auto_map": auto_map}
    (target / "config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", "utf-8")
    # Whoever trains the model and saves it then has the file in that folder too. Of several Auto classes the first.
    own = {reference.rpartition(".")[2]: name for name, reference in reversed(auto_map.items())}
    registered = "".join(f'{cls}.register_for_auto_class("{name}")\n' for cls, name in own.items())
    text = generated.text.rstrip("\r\n") + "\n\n# A model that is saved brings this file with it.\n" + registered
    (target / generated.config.target_file).write_text(text, "utf-8")


def _changes(generated: Generated) -> tuple[str, ...]:
    texts = [
        f"{patch.kind.value} `{patch.target}`" + (f": {patch.description}" if patch.description else "")
        for patch in generated.patches
    ]
    return (*texts, *(f"add `{helper.source.name}`" for helper in generated.config.helpers))


def _card(made: Exported, model: str, source: Path, patcher: Patcher, code: SourceModule, place: str) -> str:
    readme, is_repo = source / "README.md", not Path(model).is_dir()
    before = (metadata_load(readme) if readme.is_file() else None) or {}
    before |= {"base_model": model} if is_repo else {}
    about = ModelCardData(library_name="transformers", **{name: before[name] for name in _KEPT if name in before})
    auto = next((each for each in made.auto_map if each != "AutoModel"), "AutoModel")
    changes = "\n".join(f"- {change}" for change in made.changes)
    return f"""\
---
{about.to_yaml()}
---

The weights of {f"`{model}`" if is_repo else "the original model"}, byte for byte, with other modeling code. It needs \
torch and transformers.

```python
from transformers import {auto}

model = {auto}.from_pretrained("{place}", trust_remote_code=True)
```

Without `trust_remote_code=True` transformers loads the original model.

## What differs

`{made.modeling_file}` is `{code.name}` of {code.version or f"transformers {transformers.__version__}"}, changed by \
patcher {version("patcher")}:

```python
{patcher!r}
```

{changes}

## How it was verified

{"It was not verified." if made.verification is None else _verified(made.verification)}
"""


def _verified(found: Verification) -> str:
    rows = "\n".join(
        f"| {name} | {'passed' if stage.checked else stage.message} | {figures} | {allowed} |"
        for stage, (name, _, figures, allowed, *_) in zip(found.stages, found.rows(), strict=True)
    )
    return f"""\
By `patcher.compare` with the original, on {datetime.date.today().isoformat()}, in {found.dtype}; \
Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}; \
{platform.system()} on {platform.machine()}.

| stage | | measured | allowed |
|---|---|---|---|
{rows}"""
