"""Weights that only a patcher declares: named in the metadata of checkpoint files, and saved separately.

    adapter.weight  -->  model.safetensors, metadata: {"patcher_new_weights": '{"of": "mine", "names": [...]}'}
                    -->  save_new_weights(model, folder): new_weights.safetensors, patcher.json, README.md

transformers ignores tensors of a checkpoint that the model doesn't have, with a line in a table of its log: without
the patcher, a model would compute as if it had no adapter. Files without this metadata (`.bin`, or those that other
tools wrote) name no new weights, so the table is the only sign.
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from transformers import PreTrainedModel

from patcher.compat.conversions import stock_revert
from patcher.compat.models import named_parameters, state_to_save
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, REGISTRY
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.expressions import search
from patcher.layouts.sharded import distribute_like, full_tensor, to_meta
from patcher.loading.findings import sort_names
from patcher.loading.load import Loaded, Request
from patcher.loading.reading import expressions_for
from patcher.loading.record import joined_record, patched_models, record_of
from patcher.loading.saving import SavePlan, load_if_offloaded, plan_original_format
from patcher.loading.state_dicts import check_in_memory, model_of_transformers
from patcher.patterns import compress, inside
from patcher.resolution.resolution import skeleton
from patcher.spec import serialization
from patcher.spec.patcher import Patcher

METADATA = "patcher_new_weights"
FILE_NAME = "new_weights.safetensors"


def save_new_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    r"""Save only the weights that the model's patcher declares as new, and the patcher.

    >>> import tempfile
    >>> from torch.nn import LayerNorm
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, load_new_weights, save_new_weights
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> patcher = Patcher({"LlamaRMSNorm": LayerNorm}, new_weights=r"norm\.bias$")
    >>> model = LlamaForCausalLM._from_config(config, patcher=patcher)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_new_weights(model, folder)
    ...     load_new_weights(model, folder)

    Like adapters: one base model, and such a folder for each task that it was trained for. The folder contains
    `new_weights.safetensors`, by the names of the model's parameters, `patcher.json` for `Patcher.load`, and a model
    card. If a model is split over processes, each of them has to call this, and one writes. The model may be inside of
    another module, as `DistributedDataParallel` or a model of PEFT is.

    Raises:
        InvalidPatcherError: the model has no weights that a patcher declares as new, or its patcher can't be written
            as data.
    """
    model = model_of_transformers(model)
    names = sorted(new_weights(model).values())
    if not names:
        raise InvalidPatcherError(
            f"{type(model).__name__} has no weights that a patcher declares as new, so there is nothing to save. "
            "Declare them: Patcher(..., new_weights=[...])."
        )
    patcher, state = _patcher_of(model), state_to_save(model)
    data = patcher.to_dict()
    tensors = {
        name: full_tensor(load_if_offloaded(model, name, state[name])).detach().cpu().contiguous() for name in names
    }
    if distributed.is_initialized() and distributed.get_rank() != 0:
        return
    serialization.write(data, folder)
    metadata = metadata_with_new_weights({"format": "pt"}, names, names, model)
    save_file(tensors, Path(folder, FILE_NAME), metadata=metadata)
    sort_metadata(Path(folder, FILE_NAME))
    Path(folder, "README.md").write_text(_card(model, patcher, names), encoding="utf-8")


def load_new_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    r"""Load the weights of `save_new_weights` into a model with the same patcher, in place.

    >>> import tempfile, torch
    >>> from torch.nn import LayerNorm
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher, load_new_weights, save_new_weights
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> patcher = Patcher({"LlamaRMSNorm": LayerNorm}, new_weights=r"norm\.bias$")
    >>> first, other = (LlamaForCausalLM._from_config(config, patcher=patcher) for _ in range(2))
    >>> _ = torch.nn.init.constant_(first.model.norm.bias, 2.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_new_weights(first, folder)
    ...     load_new_weights(other, folder)
    >>> torch.equal(other.model.norm.bias, first.model.norm.bias)
    True

    The base weights don't change, so several such folders can be used in turn with one model. Load the model with
    `patcher=Patcher.load(folder, allowed=[...])`, or with the patcher of the model that was saved.

    Raises:
        InvalidPatcherError: the folder has no new weights, the model was patched by another patcher, or new weights
            of it are on the disk.
        PatchedWeightsError: names or shapes aren't those of the model's new weights. Nothing was written.
    """
    path, model = Path(folder, FILE_NAME), model_of_transformers(model)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidPatcherError(
            f"{path} can't be read ({type(error).__name__}: {str(error)[:300]}). Give the folder that "
            "patcher.save_new_weights(model, folder) has written."
        ) from error
    saved, current = serialization.read(folder, {}), _patcher_of(model).to_dict()
    differing = {name for name in {**current, **saved} if current.get(name) != saved.get(name)} - _IRRELEVANT
    if differing:
        raise InvalidPatcherError(
            f"The weights in {folder} are those of a patcher with other {', '.join(sorted(differing))} than that of "
            f"the model. Load the model with patcher=Patcher.load({os.fspath(folder)!r}, allowed=[...])."
        )
    state = state_to_save(model)
    expected = {name: state[name] for name in new_weights(model).values()}
    problems = [f"missing: {name}" for name in compress(sorted(expected.keys() - tensors.keys()))]
    problems += [f"left over: {name}" for name in compress(sorted(tensors.keys() - expected.keys()))]
    problems += [
        f"of another shape: {name}: found {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        for name, tensor in tensors.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if problems:
        raise PatchedWeightsError(
            "\n  ".join([f"The new weights in {folder} aren't those of the model:", *problems])
            + "\nNothing was written. Give a folder that was saved from a model of the same config."
        )
    for name, value in expected.items():
        check_in_memory(name, value, model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameter = expected[name]
            parameter.copy_(distribute_like(tensor.to(parameter.dtype), parameter))


#: Fields of a patcher that don't matter for its new weights.
_IRRELEVANT = frozenset({"name", "transformers", "fingerprints", "strict"})


def _patcher_of(model: nn.Module) -> Patcher:
    """Return the patchers that a model was loaded with, as one."""
    if parts := [path for path, *_ in patched_models(model, separately=True) if path]:
        raise InvalidPatcherError(
            f"{', '.join(parts)} of {type(model).__name__} were patched separately, each with a patcher of its own. "
            f"Save and load the new weights of each: save_new_weights(model.{parts[0]}, folder)."
        )
    entries = () if (record := record_of(model)) is None else record.in_force
    excluded = (REGISTRY, LAYOUT, FUSION_CONFIG)
    patchers = [entry.patcher for entry in entries if entry.origin not in excluded]
    return functools.reduce(operator.or_, patchers) if patchers else Patcher()


def new_weights(model: PreTrainedModel, plan: SavePlan | None = None, *, declared: bool = True) -> dict[str, str]:
    """Return name in the checkpoint -> parameter, for weights that patchers declare as new.

    Without `declared`, also for those that needn't be declared: of a model that was constructed without a checkpoint,
    and of one whose checkpoint has them.
    """
    record = joined_record(model)
    if record is None:
        return {}
    expressions = [text for patcher in record.patchers for text in patcher.new_weights]
    made = record.paths_of_replacements if not (declared or record.read) else ()
    if not (expressions or made or (record.new_weights and not declared)):
        return {}
    stock = skeleton(record.model_class, model.config)
    known = stock_revert(stock, dict(stock.state_dict())).keys()
    state = {name: to_meta(value) for name, value in state_to_save(model).items()}
    names = {id(value): name for name, value in state.items()}
    saved = (plan or plan_original_format(model)).saved_state_dict(state)
    new = {key: names[id(value)] for key, value in saved.items() if key not in known and id(value) in names}
    prefixes = tuple(map(inside, made))
    return {
        key: name
        for key, name in new.items()
        if name in record.new_weights or name.startswith(prefixes) or any(search(text, name) for text in expressions)
    }


def metadata_with_new_weights(
    metadata: Mapping[str, str] | None, new: Iterable[str], tensors: Iterable[str], model: nn.Module
) -> dict[str, str]:
    """Return the metadata of a file that is about to be written, with the names of its new weights."""
    names, record = sorted(set(new).intersection(tensors)), joined_record(model)
    # Not those of one patcher made of them: patchers in force may have replacements for the same class.
    of = [] if record is None else [entry.patcher.name for entry in record.in_force if entry.origin != REGISTRY]
    text = json.dumps({"of": " | ".join(dict.fromkeys(filter(None, of))), "names": names})
    return {**(metadata or {}), METADATA: text}


def sort_metadata(path: str | os.PathLike[str]) -> None:
    """Sort the metadata of a file: safetensors writes it in random order, so saves would differ."""
    with Path(path).open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8").ljust(size)
        if len(text) == size:
            file.seek(8)
            file.write(text)


def _read(paths: Iterable[str]) -> dict[str, str]:
    """Return new weight -> name of its patcher, as named in the metadata of files."""
    names: dict[str, str] = {}
    for path in paths:
        if not str(path).endswith(".safetensors"):
            continue
        with Path(path).open("rb") as file:  # not by safe_open, which takes a hundredth of a small load
            header = file.read(int.from_bytes(file.read(8), "little"))
        if METADATA.encode() not in header:
            continue
        try:
            metadata = json.loads(header).get("__metadata__", {})
            values = json.loads(metadata.get(METADATA, '{"of": "", "names": []}'))
            names |= dict.fromkeys(map(str, values["names"]), str(values["of"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PatchedWeightsError(
                f"{path} has metadata {METADATA!r} that can't be read ({type(error).__name__}). Save the model again "
                "with the patcher that it is of."
            ) from error
    return names


def check_new_weights(load: Request, unexpected: Iterable[str]) -> Request:
    """Raise for new weights in the files of a load that it doesn't use, and record those that it does."""
    replaces = any(entry.patcher.class_mapping or entry.patcher.module_mapping for entry in load.in_force)
    unexpected = list(unexpected)
    if not (load.files and (unexpected or replaces)):
        return load  # so that a load without either opens no file for it
    if not (new := _read(load.files)):
        return load
    dropped = [text for entry in load.in_force for text in entry.patcher.dropped_weights]
    lost = [
        key
        for key in unexpected
        if any(f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}") for name in new)
        and not any(search(text, key) for text in dropped)
    ]
    if lost:
        of = " and ".join(sorted({repr(name) if name else "a patcher without a name" for name in new.values()}))
        text = "\n".join(
            (
                "The checkpoint has weights that a patcher has added, and this load has no place for them:",
                *(f"  {key}" for key in compress(sort_names(lost))),
                f"They are of {of}. Load the model with that patcher, from_pretrained(..., patcher=patcher); or leave "
                f"them out: patcher=Patcher(dropped_weights={expressions_for({*lost}, ())!r}).",
            )
        )
        if load.strict or not load.in_force:
            raise PatchedWeightsError(text)
        warn(text)
    if not isinstance(load, Loaded):
        return load
    names = {name for name, _ in named_parameters(load.model)}
    record = replace(load.record, new_weights=sort_names({*load.record.new_weights, *names.intersection(new)}))
    return replace(load, record=record)


def _card(model: PreTrainedModel, patcher: Patcher, names: Iterable[str]) -> str:
    base = model.name_or_path or model.config.model_type
    lines = [
        "---",
        "library_name: transformers",
        "tags: [patcher]",
        "---",
        f"# New weights of {patcher.name or 'a patcher'} for {type(model).__name__}",
        "",
        f"These are not a model: they are the weights that a patcher adds to {base}. With the package `patcher`:",
        "",
        "```python",
        f"from transformers import {type(model).__name__}",
        "from patcher import Patcher, load_new_weights",
        "",
        'folder = "."  # this folder',
        "patcher = Patcher.load(folder, allowed=[...])  # the classes and functions that patcher.json names",
        f"model = {type(model).__name__}.from_pretrained({base!r}, patcher=patcher)",
        "load_new_weights(model, folder)",
        "```",
        "",
        "Weights:",
        "",
        *(f"- `{name}`" for name in compress(sorted(names))),
    ]
    return "\n".join(lines) + "\n"
