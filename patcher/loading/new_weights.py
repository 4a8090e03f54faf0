"""Weights that only a patcher declares: named in the metadata of the files that have them, and kept by themselves.

    adapter.weight  -->  model.safetensors, metadata: {"patcher_new_weights": '{"of": "mine", "names": [...]}'}
                    -->  save_new_weights(model, folder): new_weights.safetensors, patcher.json, README.md

Transformers ignores what it finds in a checkpoint and the model doesn't have, with a line in a table: a model whose
trained adapter is read by somebody without the patcher would compute as if it had none. A file without metadata (a
`.bin`, or what another tool has written) names nothing: there that table is the only sign.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from transformers import PreTrainedModel

from patcher.compat.conversions import stock_revert
from patcher.compat.models import named_parameters, state_tensors, state_to_save
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.expressions import search
from patcher.layouts.sharded import distribute_like, on_meta, whole
from patcher.loading.findings import sort_names
from patcher.loading.load import Loaded, Request
from patcher.loading.reading import expressions_for
from patcher.loading.record import record_of
from patcher.loading.saving import SavePlan, plan_original_format
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton
from patcher.spec import serialization
from patcher.spec.patcher import Patcher

METADATA = "patcher_new_weights"
FILE_NAME = "new_weights.safetensors"


def save_new_weights(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    r"""Save only the weights that the model's patcher declares as new, with the patcher beside them.

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

    As an adapter is kept: a base model, and one such folder for each thing that it was trained for. The folder has
    `new_weights.safetensors`, by the names of the model's parameters, `patcher.json` for `Patcher.load`, and a model
    card. Of a model that is split over processes each has to call it; one writes.

    Raises:
        InvalidPatcherError: the model has no weights that a patcher declares as new, or its patcher can't be written
            as data.
    """
    names = sorted(new_weights(model).values())
    if not names:
        raise InvalidPatcherError(
            f"{type(model).__name__} has no weights that a patcher declares as new, so there is nothing to save. "
            "Declare them: Patcher(..., new_weights=[...])."
        )
    patcher, state = _patcher_of(model), state_tensors(model)
    data = patcher.to_dict()
    tensors = {name: whole(state[name]).detach().to("cpu").contiguous() for name in names}
    if distributed.is_initialized() and distributed.get_rank() != 0:
        return
    serialization.write(data, folder)
    metadata = metadata_with_new_weights({"format": "pt"}, names, names, model)
    save_file(tensors, Path(folder, FILE_NAME), metadata=metadata)
    sort_metadata(Path(folder, FILE_NAME))
    Path(folder, "README.md").write_text(_card(model, patcher, names), encoding="utf-8")


def load_new_weights(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    r"""Write what `save_new_weights` has saved into a model with the same patcher, in place.

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

    The base weights stay, so that several such folders can take turns on one model; see `save_new_weights`. The model
    is loaded with `patcher=Patcher.load(folder, allowed=[...])`, or with the patcher that it was saved from.

    Raises:
        InvalidPatcherError: the folder has none, or the model was patched by another patcher.
        PatchedWeightsError: names or shapes aren't those of the model's new weights. Nothing was written.
    """
    path = Path(folder, FILE_NAME)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidPatcherError(
            f"{path} can't be read ({type(error).__name__}: {str(error)[:300]}). Give the folder that "
            "patcher.save_new_weights(model, folder) has written."
        ) from error
    saved, own = serialization.read(folder, {}), _patcher_of(model).to_dict()
    differing = {name for name in {**own, **saved} if own.get(name) != saved.get(name)} - _SAYS_NOTHING
    if differing:
        raise InvalidPatcherError(
            f"The weights in {folder} are those of a patcher with other {', '.join(sorted(differing))} than that of "
            f"the model. Load the model with patcher=Patcher.load({os.fspath(folder)!r}, allowed=[...])."
        )
    state = state_tensors(model)
    wanted = {name: state[name] for name in new_weights(model).values()}
    problems = [f"missing: {each}" for each in compress(sorted(wanted.keys() - tensors.keys()))]
    problems += [f"left over: {each}" for each in compress(sorted(tensors.keys() - wanted.keys()))]
    problems += [
        f"of another shape: {name}: found {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems:
        raise PatchedWeightsError(
            "\n  ".join([f"The new weights in {folder} aren't those of the model:", *problems])
            + "\nNothing was written. Give a folder that was saved from a model of the same config."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            wanted[name].copy_(distribute_like(tensor.to(wanted[name].dtype), wanted[name]))


#: What a patcher may have in other ways, and its new weights mean the same.
_SAYS_NOTHING = frozenset({"name", "transformers", "fingerprints", "strict"})


def _patcher_of(model: nn.Module) -> Patcher:
    """The patchers that a model was loaded with, as one."""
    record = record_of(model)
    entries = () if record is None else record.in_force
    own = [each.patcher for each in entries if not each.is_registry and each.origin not in (LAYOUT, FUSION_CONFIG)]
    return functools.reduce(operator.or_, own) if own else Patcher()


def new_weights(model: PreTrainedModel, plan: SavePlan | None = None) -> dict[str, str]:
    """Name in the checkpoint -> parameter, of what patchers declare as new and the stock model doesn't have.

    Args:
        plan: how the model is saved in the original format, if that is known.
    """
    record, expressions = record_of(model), _patcher_of(model).new_weights
    if record is None or not expressions:
        return {}
    stock = skeleton(record.model_class, model.config)
    known = stock_revert(stock, dict(stock.state_dict())).keys()
    given = {name: on_meta(value) for name, value in state_to_save(model).items()}
    owners = {id(value): name for name, value in given.items()}
    made = (plan or plan_original_format(model)).saved_state_dict(given)
    new = {name: owners[id(value)] for name, value in made.items() if name not in known and id(value) in owners}
    return {
        name: own
        for name, own in new.items()
        if own in record.new_weights or any(search(each, own) for each in expressions)
    }


def metadata_with_new_weights(
    metadata: Mapping[str, str] | None, new: Iterable[str], tensors: Iterable[str], model: nn.Module
) -> dict[str, str]:
    """The metadata of a file that is about to be written, with the new weights that it has."""
    names = sorted(set(new).intersection(tensors))
    return {**(metadata or {}), METADATA: json.dumps({"of": _patcher_of(model).name, "names": names})}


def sort_metadata(path: str | os.PathLike[str]) -> None:
    """Put the metadata of a file in order: safetensors writes it in any, so that no two saves would be the same."""
    with Path(path).open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8").ljust(size)
        if len(text) == size:
            file.seek(8)
            file.write(text)


def _read(paths: Iterable[str]) -> dict[str, str]:
    """The new weights that files name -> the name of the patcher that they are of."""
    found: dict[str, str] = {}
    for path in paths:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, framework="np") as file:  # as "pt", but it maps a file larger than the memory too
            text = (file.metadata() or {}).get(METADATA)
        try:
            read = json.loads(text) if text else {"of": "", "names": []}
            found |= dict.fromkeys(map(str, read["names"]), str(read["of"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PatchedWeightsError(
                f"{path} has metadata {METADATA!r} that can't be read ({type(error).__name__}). Save the model again "
                "with the patcher that it is of."
            ) from error
    return found


def check_new_weights(load: Request, unexpected: Iterable[str]) -> Request:
    """Raise for new weights in the files of a load that go nowhere; note in its record those that it has."""
    declared = [text for entry in load.in_force for text in entry.patcher.new_weights]
    unexpected = list(unexpected)
    if not (load.files and (unexpected or declared)):
        return load  # so that a load without either opens no file for it
    new = _read(load.files)
    dropped = [text for entry in load.in_force for text in entry.patcher.dropped_weights]
    lost = [
        key
        for key in unexpected
        if any(f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}") for name in new)
        and not any(search(each, key) for each in dropped)
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
    own = {name for name, _ in named_parameters(load.model)}
    kept = [name for name in own.intersection(new) if any(search(each, name) for each in declared)]
    names = sort_names({*load.record.new_weights, *kept})
    return replace(load, record=replace(load.record, new_weights=names))


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
        *(f"- `{each}`" for each in compress(sorted(names))),
    ]
    return "\n".join(lines) + "\n"
