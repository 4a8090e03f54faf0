"""The original checkpoint back: key for key, shape for shape, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import (
    dot_natural_key,
    has_used_conversions,
    stock_conversions_from_scratch,
    stock_revert,
    used_conversions,
    was_used,
)
from patcher.compat.models import ModelView, named_modules
from patcher.compat.quantizers import is_prequantized
from patcher.errors import PatchedWeightsError
from patcher.fusions.base import Fusion
from patcher.layouts.converted_weights import converted_weights
from patcher.layouts.either_layout import modules_with_layouts
from patcher.layouts.fused_weights import FusedWeights, fused_modules, fused_weights, separated
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.layouts.reversal import ReversibleRenaming, reverse_conversions
from patcher.layouts.selection import in_order, select_conversions
from patcher.layouts.sharded import on_meta
from patcher.layouts.simulation import simulate
from patcher.layouts.tracing import ConversionTrace, trace_of, with_trace
from patcher.layouts.transforms import describe, identity
from patcher.loading.expert_names import named_as_in_checkpoint, reverted_from_scratch
from patcher.loading.record import PatchRecord, record_of
from patcher.patterns import compress, in_state_dict, inside
from patcher.resolution.resolution import resolve_in_force, skeleton


@dataclass(frozen=True, eq=False)
class TakenApart:
    """A state dict of which ours is undone, and what transformers has done is not.

    Attributes:
        rest: what has the names that it has in the model of transformers.
        restored: what a conversion of ours gave back: its names are those from before all converters.
        as_they_are: what has its name in the checkpoint.
    """

    rest: dict[str, torch.Tensor]
    restored: dict[str, torch.Tensor] = field(default_factory=dict)
    as_they_are: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SavePlan:
    """How one model is saved.

    Attributes:
        record: what was patched, None if nothing was.
        conversions: the conversions to reverse, in the order in which a load runs them.
        order: the place of each key in what the stock model saves: it decides which shard a tensor goes to.
    """

    model: PreTrainedModel
    record: PatchRecord | None
    original_format: bool = True
    conversions: tuple[ConversionTrace | WeightTransform, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The class that the checkpoint is of."""
        return type(self.model) if self.record is None else self.record.model_class

    @property
    def fusions(self) -> tuple[str | Fusion, ...]:
        """Those in whose layout the weights are saved, none in the original format."""
        return () if self.original_format or self.record is None else tuple(self.record.fusions)

    @property
    def _is_quantized_by_the_load(self) -> bool:
        """Whether the quantizer that would read the file has quantized what no file has had: it takes stacks then."""
        quantizer = getattr(self.model, "hf_quantizer", None)
        return quantizer is not None and not is_prequantized(quantizer)

    def saved_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict as the unpatched model would save it.

        Raises:
            PatchedWeightsError: something in it can't be given back.
        """
        return self.named(self.taken_apart(state_dict, fused_modules(self.model)))

    def in_runtime_layout(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict as another load reads the fused layout, among however many processes: rows part by part."""
        result = dict(state_dict)
        for path, _, carried in fused_modules(self.model):
            for layout in carried.layouts:
                key = f"{inside(path)}{layout.fused[0]}"
                if lies_in_blocks(layout) and key in result:
                    (result[key],) = replace(layout, blocks=1).fuse(layout.separate([result[key]]))
        return result

    def taken_apart(
        self, state_dict: Mapping[str, torch.Tensor], fused: Iterable[tuple[str, nn.Module, FusedWeights]]
    ) -> TakenApart:
        """What ours have joined, apart again; the conversions of transformers are still to be reversed.

        Args:
            fused: the fused modules that the state dict is of.

        Raises:
            PatchedWeightsError: something in it can't be given back.
        """
        moved: dict[str, str] = {}
        # The load of a quantized checkpoint has read such layers as they are, and run no conversion of stacks.
        is_read = getattr(self.model, "hf_quantizer", None) is not None
        revert = reverted_from_scratch(self.model) if is_read else self._reverted
        for path, _, carried in fused if not self._is_quantized_by_the_load else ():
            # Experts that a tool has quantized, where the checkpoint has names for each.
            moved |= named_as_in_checkpoint(path, carried, state_dict, revert)
        as_they_are = {name: state_dict[key] for key, name in moved.items()}
        state_dict = {key: value for key, value in state_dict.items() if key not in moved}
        return replace(self._without_traces(separated(fused, state_dict)), as_they_are=as_they_are)

    def named(self, parts: TakenApart) -> dict[str, torch.Tensor]:
        """The checkpoint of what has been taken apart: the conversions of transformers are reversed."""
        return self._named(parts) | parts.as_they_are

    def _reverted(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The checkpoint of a state dict in the layout of transformers."""
        return self._named(self._without_traces(state_dict))

    def _view(self, state_dict: Mapping[str, torch.Tensor]) -> Any:
        """The model for operations, which look at parameters: some of them it has in another form."""

        def get_parameter(name: str) -> torch.Tensor:
            return state_dict[name] if name in state_dict else self.model.get_parameter(name)

        return ModelView(self.model, get_parameter=get_parameter)

    def _without_traces(self, state_dict: Mapping[str, torch.Tensor]) -> TakenApart:
        traces = [item for item in self.conversions if isinstance(item, ConversionTrace)]
        restored, rest = reverse_conversions(traces, state_dict, self._view(state_dict))
        for path, layout in self._from_elsewhere(traces, rest):
            fused, stock = ([f"{inside(path)}{name}" for name in names] for names in (layout.fused, layout.stock))
            parts = dict(zip(stock, layout.separate([rest.pop(name) for name in fused]), strict=True))
            # The name of a tensor that is whole is that in the model of transformers, of any other that in its file.
            (rest if isinstance(layout, Rows) else restored).update(parts)
        return TakenApart(rest, restored)

    def _from_elsewhere(
        self, traces: Iterable[ConversionTrace], state_dict: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, Layout]]:
        """(path, layout) of what modules carry that the load of this model hasn't made: they were put into it.

        Raises:
            PatchedWeightsError: only a part of it is in the state dict.
        """
        prefix = inside(self.model.base_model_prefix)
        renamed = {name for trace in traces for name in trace.renamed.values()}
        found = []
        for path, module in named_modules(self.model):
            path, carried = in_state_dict(path), converted_weights(module)
            for layout in carried.layouts if carried is not None else ():
                names = {f"{inside(path)}{name}" for name in layout.fused}
                known = renamed.intersection(*({name, prefix + name, name.removeprefix(prefix)} for name in names))
                if not names & state_dict.keys() or (known and isinstance(layout, Rows)):
                    continue
                if absent := names - state_dict.keys():
                    raise PatchedWeightsError(
                        f"{', '.join(sorted(names - absent))} can't be saved in the original format without "
                        f"{', '.join(sorted(absent))}: {layout} has made them. Save a state dict that has them all."
                    )
                found.append((path, layout))
        return found

    def _named(self, parts: TakenApart) -> dict[str, torch.Tensor]:
        rest, restored = parts.rest, parts.restored
        model = self._view(rest)
        if self.record is None:
            renamings = [each for each in used_conversions(self.model) if isinstance(each, WeightRenaming)]
            return self._sorted(stock_revert(model, rest) | stock_revert(model, restored, renamings))
        traces = [item for item in self.conversions if isinstance(item, ConversionTrace)]
        reversible: list[Any] = []
        for item in self.conversions:
            if not isinstance(item, ConversionTrace):
                reversible.append(item)
            elif item.renamed and not item.entries and isinstance(item.transform, WeightRenaming):
                reversible.append(ReversibleRenaming(item, model.base_model_prefix))
        renamings = [item for item in reversible if isinstance(item, WeightRenaming)]
        if not (reversible or restored or self.record.read):
            return rest  # as transformers leaves what it has made: it sorts only what it has loaded
        # What a conversion of ours gave back has its name from before all converters: only the renamings are left.
        result = stock_revert(model, rest, reversible) | stock_revert(model, restored, renamings)
        return self._sorted(result) if self.order or traces else result

    def _sorted(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.record is None and not self.order:
            return state_dict
        keys = sorted(state_dict, key=lambda key: (self.order.get(key, len(self.order)), dot_natural_key(key)))
        return {key: state_dict[key] for key in keys}


def saved_state_dict(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model as the unpatched model would save it.

    Raises:
        PatchedWeightsError: something in it can't be given back.
    """
    record = record_of(model)
    return _plan_original_format(model, record).saved_state_dict(state_dict)


def plan_saving(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None, original_format: bool
) -> SavePlan:
    """How a model will be saved, found out and tried before a file is written.

    Raises:
        PatchedWeightsError: a conversion can't be reversed; or the runtime layout was asked for, and no fusion name
            describes it.
    """
    record = record_of(model)
    if not original_format:
        if record is not None:
            _check_runtime_layout(model, record)
        elif patched := modules_with_layouts(model):
            path, module, _ = patched[0]
            what = "converted" if fused_weights(module) is None else "fused"
            raise PatchedWeightsError(
                f"{path} is {what}, and {type(model).__name__} around it was loaded without a patcher: "
                "save_original_format=False would write what nothing can load. Save in the original format."
            )
        return SavePlan(model, record, original_format)
    plan = _plan_original_format(model, record)
    given = model.state_dict() if state_dict is None else state_dict
    # On meta this costs nothing; a tensor of a quantizer's own type says by its type that it can't be taken apart.
    plan.saved_state_dict({key: on_meta(value) for key, value in given.items()})
    return plan


def _plan_original_format(model: PreTrainedModel, record: PatchRecord | None) -> SavePlan:
    if record is None:
        if not any(map(converted_weights, model.modules())):
            return SavePlan(model, None)
        unpatched = skeleton(type(model), model.config)
        saved = stock_revert(unpatched, dict(unpatched.state_dict()), used_conversions(model))
        return SavePlan(model, None, order={key: place for place, key in enumerate(saved)})
    if record.read and not record.traces and not has_used_conversions(model):
        # What has read the file took back the conversions of it: the checkpoint is that of a model made here.
        record = replace(record, read=False, conversions=())
    # Not patched, by nothing that may be in force around us either; and built once.
    stock = functools.cache(lambda: skeleton(record.model_class, model.config))
    conversions = record.conversions if record.read else conversions_from_scratch(model, record, stock)
    order: dict[str, int] = {}
    traces = [item for item in conversions if isinstance(item, ConversionTrace)]
    is_converted = any(item.entries for item in traces) or any(converted_weights(each) for each in model.modules())
    if record.dropped or is_converted:
        # transformers sorts what it has loaded, and leaves what it has made in the order of the modules.
        reversed_by = stock_conversions_from_scratch(stock()) if record.read else None
        saved = stock_revert(stock(), dict(stock().state_dict()), reversed_by)
        order = {key: place for place, key in enumerate(saved)}
    return SavePlan(model, record, True, conversions, order)


def conversions_from_scratch(
    model: PreTrainedModel, record: PatchRecord, stock: Callable[[], PreTrainedModel] | None = None
) -> tuple[ConversionTrace | WeightTransform, ...]:
    """The conversions of a model that was made without a checkpoint: those that loading one would have run.

    The stock model says what its checkpoint looks like; that is loaded by name and shape, so that the conversions know
    what they would have joined.

    Args:
        stock: gives the model as transformers has it, on the meta device.
    """
    stock = stock or functools.cache(lambda: skeleton(record.model_class, model.config))
    conversions = stock_conversions_from_scratch(stock())
    checkpoint = stock_revert(stock(), dict(stock().state_dict()))
    fusions = record.fusion_transforms
    if record.fused and not fusions:  # a part of a fused model: its names are others
        fusions = resolve_in_force(record.in_force, record.model_class, model.config).fusion_plan.transforms
    selected = select_conversions(conversions, record.patchers, fusions, record.replacements(), model)
    traced = [with_trace(transform) for transform in selected.added]
    if not traced and len(selected.kept) == len(conversions):
        return selected.kept
    shapes = {key: torch.empty_like(value, device="meta") for key, value in model.state_dict().items()}
    shapes = separated(fused_modules(model), shapes)
    on_meta: Any = ModelView(model, state_dict=lambda: shapes)
    ordered = in_order(traced, selected.kept)
    simulate(on_meta, ordered, checkpoint)
    return tuple(trace_of(item) or item for item in ordered if trace_of(item) is not None or was_used(item))


def _check_runtime_layout(model: PreTrainedModel, record: PatchRecord) -> None:
    # Fusions that have a name are what a config can say.
    named = {identity(transform) for transform in record.fusion_transforms}
    reasons = [
        describe(item.transform)
        for item in record.traces
        if (item.entries or item.renamed) and identity(item.transform) not in named
    ]
    reasons += [f"without {describe(transform)}" for transform, _ in record.dropped]
    reasons += [f"{fusion!r}, which no name describes" for fusion in record.fusions if not isinstance(fusion, str)]
    torn = [path for path, fusion in record.unfused.items() if fusion in record.fusions]
    reasons += [f"not fused, as others are: {path}" for path in compress(torn)]
    reasons += [f"new: {key}" for key in compress(record.new_weights)]
    reasons += _other_names(model, record)
    if not record.read:
        reasons += [describe(transform) for transform in record.added]
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
    replaced = tuple(inside(item.path) for item in record.replaced if item.path not in record.fused)
    if not replaced:
        return []
    fused = tuple(inside(path) for path in record.fused)
    found, stock = (
        {key for key in each.state_dict() if key.startswith(replaced) and not key.startswith(fused)}
        for each in (model, skeleton(record.model_class, model.config))
    )
    only_here = set() if getattr(model, "hf_quantizer", None) else found - stock  # companions of quantized weights
    return [f"new: {key}" for key in compress(sorted(only_here))] + [
        f"without {key}" for key in compress(sorted(stock - found))
    ]
