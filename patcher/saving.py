"""The original checkpoint back: key for key, shape for shape, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from patcher import seams
from patcher.conversions import describe, identity
from patcher.errors import PatchedWeightsError
from patcher.giving_back import Renamed, undo
from patcher.journals import Journal, journal_of, track
from patcher.matching import compress
from patcher.record import PatchRecord, record_of
from patcher.resolution import arrange, resolve_layers, skeleton
from patcher.seams import PreTrainedModel, WeightRenaming, WeightTransform
from patcher.simulation import simulate

__all__ = ["check_saving", "original_state_dict"]


def original_state_dict(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model as the unpatched model would save it.

    Raises:
        PatchedWeightsError: something in it can't be given back.
    """
    record = record_of(model)
    if record is None:
        stock: dict[str, torch.Tensor] = seams.stock_revert(model, dict(state_dict))
        return stock
    conversions = _conversions_as_read(model, record) if record.read else _conversions_from_scratch(model, record)
    restored, rest = undo((item for item in conversions if isinstance(item, Journal)), state_dict, model)
    prefix = model.base_model_prefix
    renamings: list[Any] = []
    reversible: list[Any] = []
    for item in conversions:
        if isinstance(item, Journal):
            if item.renamed and not item.entries and isinstance(item.transform, WeightRenaming):
                renamings.append(Renamed(item, prefix))
                reversible.append(renamings[-1])
        else:
            reversible.append(item)
            if isinstance(item, WeightRenaming):
                renamings.append(item)
    # What a conversion of ours gave back has its name from before all converters: only the renamings are left.
    result = dict(seams.stock_revert(_as_loaded(model, reversible), rest))
    result.update(seams.stock_revert(_as_loaded(model, renamings), restored))
    order = _stock_order(model, record) if restored or record.dropped else {}
    keys = sorted(result, key=lambda key: (order.get(key, len(order)), seams.dot_natural_key(key)))
    return {key: result[key] for key in keys}


def _stock_order(model: PreTrainedModel, record: PatchRecord) -> dict[str, int]:
    """The place of each key in what the stock model saves: it decides which shard a tensor goes to."""
    stock = skeleton(record.model_class, model.config)
    # transformers sorts what it has loaded, and leaves what it has made in the order of the modules.
    saver = _as_loaded(stock, seams.stock_conversions_from_scratch(stock)) if record.read else stock
    return {key: place for place, key in enumerate(seams.stock_revert(saver, dict(stock.state_dict())))}


def _conversions_as_read(model: PreTrainedModel, record: PatchRecord) -> tuple[Journal | WeightTransform, ...]:
    """The conversions of the load, and those of fused parameters that came from elsewhere."""
    produced = {name for journal in record.journals for entry in journal.entries for name in entry.produced}
    left = record.fused_parameters - produced
    if not left:
        return record.conversions
    scratch = _conversions_from_scratch(model, record)
    if not produced & record.fused_parameters:
        return scratch  # the checkpoint was in the fused layout, so no conversion had anything to do
    # Parts that the checkpoint didn't have: a tower that is initialised, for one.
    added = []
    for journal in (item for item in scratch if isinstance(item, Journal)):
        entries = [entry for entry in journal.entries if left.intersection(entry.produced)]
        if entries:
            added.append(Journal(journal.transform, entries))
    return (*added, *record.conversions)


class _AsLoaded:
    """A model, as transformers' own reversal sees it, with other conversions to reverse."""

    def __init__(self, model: PreTrainedModel, conversions: list[Any]) -> None:
        self._model = model
        self._weight_conversions = conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _as_loaded(model: PreTrainedModel, conversions: list[Any]) -> Any:
    return _AsLoaded(model, conversions)


def _conversions_from_scratch(model: PreTrainedModel, record: PatchRecord) -> tuple[Journal | WeightTransform, ...]:
    """The conversions of a model that was made without a checkpoint: those that loading one would have run.

    The stock model says what its checkpoint looks like; that is loaded by name and shape, so that the conversions know
    what they would have joined.
    """
    # The skeleton is not patched, by nothing that may be in force around us either.
    stock = skeleton(record.model_class, model.config)
    stock_conversions = seams.stock_conversions_from_scratch(stock)
    checkpoint = seams.stock_revert(stock, dict(stock.state_dict()))
    fusions = record.fusion_transforms
    if record.fused and not fusions:  # a part of a fused model: its names are others
        fusions = resolve_layers(record.layers(), record.model_class, model.config).fusion_transforms
    arranged = arrange(seams.stock_conversions_from_scratch(stock), record.layers(), fusions)
    tracked = [track(transform) for transform in arranged.added]
    if not tracked and len(arranged.kept) == len(stock_conversions):
        return tuple(arranged.kept)
    simulate(_on_meta(model), [*tracked, *arranged.kept], checkpoint)
    journals = [journal for transform in tracked if (journal := journal_of(transform)) is not None]
    return (*journals, *(transform for transform in arranged.kept if seams.was_used(transform)))


def _on_meta(model: PreTrainedModel) -> Any:
    """The names and shapes of a model, for `simulate`."""
    shapes = {key: torch.empty_like(value, device="meta") for key, value in model.state_dict().items()}

    class Shapes(_AsLoaded):
        def state_dict(self) -> dict[str, torch.Tensor]:
            return shapes

    return Shapes(model, [])


def check_saving(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None, original_format: bool) -> None:
    """Raise before a file is written if the model can't be saved as asked.

    Raises:
        PatchedWeightsError: a conversion can't be reversed; or the runtime layout was asked for, and no fusion name
            describes it.
    """
    record = record_of(model)
    if record is None:
        return
    if not original_format:
        _check_runtime_layout(model, record)
        return
    given = model.state_dict() if state_dict is None else state_dict
    # On meta this costs nothing; a tensor of a quantizer's own type says by its type that it can't be taken apart.
    plain = {
        key: value.detach().to("meta") if type(value) in (torch.Tensor, nn.Parameter) else value
        for key, value in given.items()
    }
    original_state_dict(model, plain)


def _check_runtime_layout(model: PreTrainedModel, record: PatchRecord) -> None:
    # Fusions that have a name are what a config can say.
    named = {identity(transform) for transform in record.fusion_transforms}
    reasons = [
        describe(item.transform)
        for item in record.journals
        if (item.entries or item.renamed) and identity(item.transform) not in named
    ]
    reasons += [f"without {describe(transform)}" for transform, _ in record.dropped]
    reasons += [f"{fusion!r}, which no name describes" for fusion in record.fusions if not isinstance(fusion, str)]
    reasons += [f"new: {key}" for key in compress(record.new_weights)]
    reasons += _other_names(model, record)
    if not record.read:
        reasons += [
            describe(transform) for patcher, _ in record.patchers for transform in patcher.extra_weight_conversions
        ]
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(reasons))
        raise PatchedWeightsError(
            "save_original_format=False would write a checkpoint in a layout that nothing can load by name: no fusion "
            f"describes it.\n{listed}\n"
            "Save in the original format (the default), or express the layout as a fusion."
        )


def _other_names(model: PreTrainedModel, record: PatchRecord) -> list[str]:
    """What only the model or only its stock form has in the modules that a class mapping replaced.

    Loaded by name, what only the stock form has would be random.
    """
    replaced = tuple(_inside(item.path) for item in record.replaced if item.path not in record.fused)
    if not replaced:
        return []
    fused = tuple(_inside(path) for path in record.fused)
    found, stock = (
        {key for key in each.state_dict() if key.startswith(replaced) and not key.startswith(fused)}
        for each in (model, skeleton(record.model_class, model.config))
    )
    only_here = set() if getattr(model, "hf_quantizer", None) else found - stock  # companions of quantized weights
    return [f"new: {key}" for key in compress(sorted(only_here))] + [
        f"without {key}" for key in compress(sorted(stock - found))
    ]


def _inside(path: str) -> str:
    return f"{path}." if path else ""
