"""Saving a model as the original checkpoint: key for key, shape for shape, byte for byte."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import (
    depends_on_others,
    dot_natural_key,
    has_used_conversions,
    is_prequantized,
    reversed_together,
    stock_conversions_from_scratch,
    stock_revert,
    used_conversions,
)
from patcher.compat.models import ModelView, load_offloaded_parameter, stock_class, write_count
from patcher.errors import PatchedWeightsError
from patcher.fusions.base import Fusion
from patcher.layouts.carried import Carrier, carriers, fused_modules, separated
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sharded import to_meta
from patcher.layouts.transforms import describe, identity
from patcher.loading.experts import default_revert, expert_checkpoint_names, group_by_layer
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.state_dicts import carriers_in, routes_from_scratch
from patcher.patterns import compress, in_state_dict, inside
from patcher.resolution.resolution import skeleton


@dataclass(frozen=True, eq=False)
class SavePlan:
    """How one model is saved."""

    model: PreTrainedModel
    record: PatchRecord | None
    original_format: bool = True
    carrying: tuple[Carrier, ...] = ()
    #: the conversions of transformers to reverse
    conversions: tuple[WeightTransform, ...] = ()
    #: key -> its place in what the stock model saves, which decides on the shard of a tensor
    order: Mapping[str, int] = field(default_factory=dict)
    #: whether experts that the checkpoint has one by one are returned as they are in the model; not for files, since
    #: stock saves what it splits from one stack into one shard
    unstacks: bool = False
    #: the tensors of a part of the model, by their names in the state dict: see `split`
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fusions(self) -> tuple[str | Fusion, ...]:
        """The fusions in whose layout the weights are saved, none in the original format."""
        return () if self.original_format or self.record is None else tuple(self.record.fusions)

    def saved_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert a state dict to what the stock model would save."""
        renamed: dict[str, str] = {}
        unstacked: dict[str, str] = {}
        # The load of a quantized checkpoint read such layers unchanged, and ran no conversion of stacks.
        quantizer = getattr(self.model, "hf_quantizer", None)
        revert = default_revert(self.model) if quantizer else functools.partial(self._revert, tensors={})
        by_layer = group_by_layer(state_dict)
        # A quantizer that has quantized a checkpoint while loading takes stacks when it reads the saved file.
        for carrier in self.carrying if quantizer is None or is_prequantized(quantizer) else ():
            quantized, plain = expert_checkpoint_names(carrier, state_dict, by_layer, revert)
            renamed |= quantized
            unstacked |= plain if self.unstacks else {}
        # Experts that are stacked and split again are unchanged, so their stack needs no values.
        others = {key: value for key, value in state_dict.items() if key not in renamed}
        others |= {key: to_meta(others[key]) for key in unstacked}
        # Tensors of a checkpoint, which patchers' conversions had taken, only have their renamings reversed.
        tensors, converted = separated(list(self.carrying), others)
        parameters = {name: tensor for name, tensor in tensors.items() if name not in converted}
        originals = {name: tensor for name, tensor in tensors.items() if name in converted}
        saved = self._revert(parameters, originals)
        return saved | {name: state_dict[key] for key, name in {**unstacked, **renamed}.items()}

    def on_meta(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what `saved_state_dict` does on the meta device; a quantizer's own tensors stay as they are."""
        with torch.inference_mode(False), torch.no_grad():
            inputs = {key: to_meta(value) for key, value in state_dict.items()}
            versions = {key: write_count(value) for key, value in inputs.items() if value.is_meta}
            result = self.saved_state_dict(inputs)
        if any(write_count(inputs[key]) != version for key, version in versions.items()):
            raise PatchedWeightsError(
                f"A conversion of {type(self.model).__name__} writes into the tensors that it is given, so a save "
                "would change the model. Write its operations without that."
            )
        return result

    def split(self, state_dict: Mapping[str, Any]) -> list[SavePlan]:
        """Return plans for the parts of a state dict that are saved independently, in the order of a save.

        A part is a numbered layer, a module that carries layouts, or a tensor; or all of the model, if several of
        these are converted together.
        """
        whole, paths = replace(self, state=state_dict), {in_state_dict(carrier.path) for carrier in self.carrying}
        if "" in paths or any(map(depends_on_others, self.conversions)):
            return [whole]

        def head_of(name: str) -> str:
            heads = accumulate(name.split("."), "{}.{}".format)
            return next((head for head in heads if head in paths or head[-1].isdigit()), name)

        states: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in state_dict.items():
            states[head_of(name)][name] = value
        carrying: dict[str, list[Carrier]] = defaultdict(list)
        for carrier in self.carrying:
            carrying[head_of(in_state_dict(carrier.path))].append(carrier)
        is_sorted = self.conversions or (self.record is not None and self.record.read)
        heads = sorted(states, key=dot_natural_key) if is_sorted else list(states)
        if self.order:
            places = {head_of(key): place for key, place in reversed(list(self.order.items()))}
            heads.sort(key=lambda head: places.get(head, len(self.order)))
        group_of, owners = reversed_together(self.conversions), dict[str, str]()
        for head in heads if group_of is not None else ():
            layouts = [layout for carrier in carrying[head] for layout in carrier.all]
            stock = {name: layout.stock for layout in layouts for name in layout.fused}
            parameters = [part for name in states[head] for part in stock.get(name, (name,))]
            groups = set(map(group_of, parameters)) - {None}  # type: ignore[arg-type]
            if any(owners.setdefault(group, head) != head for group in groups):  # type: ignore[arg-type]
                return [whole]
        return [replace(self, carrying=tuple(carrying[head]), state=states[head]) for head in heads]

    def in_runtime_layout(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state dict in which joined rows lie part by part, for loads by any number of processes."""
        result = dict(state_dict)
        for carrier in fused_modules(self.model):
            for layout in filter(lies_in_blocks, carrier.fused):
                key = layout.fused[0]
                if key in result:
                    (result[key],) = replace(layout, blocks=1).fuse(layout.separate([result[key]]))
        return result

    def _revert(self, weights: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reverse the conversions of transformers for parameters, and the renamings for tensors of a checkpoint."""
        if not (self.conversions or tensors or (self.record is not None and self.record.read)):
            return weights  # transformers sorts only what it has loaded
        if not self.conversions and not tensors:
            return dict(sorted(weights.items(), key=lambda item: dot_natural_key(item[0])))

        # Operations read parameters of the model, which may be in another layout there.
        def get_parameter(name: str) -> torch.Tensor:
            return weights[name] if name in weights else self.model.get_parameter(name)

        view: Any = ModelView(self.model, get_parameter=get_parameter)
        renamings = [item for item in self.conversions if isinstance(item, WeightRenaming)]
        result = stock_revert(view, weights, list(self.conversions)) | stock_revert(view, tensors, renamings)
        return self.in_order(result) if self.order or tensors else result

    def in_order(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        keys = sorted(state_dict, key=lambda key: (self.order.get(key, len(self.order)), dot_natural_key(key)))
        return {key: state_dict[key] for key in keys}


def saved_state_dict(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the state dict of a model to what the stock model would save, as `SavePlan.saved_state_dict`."""
    return plan_original_format(model).saved_state_dict(state_dict)


def plan_saving(model: PreTrainedModel, state: Mapping[str, torch.Tensor] | None, original_format: bool) -> SavePlan:
    """Plan how a model is saved, and try it before a file is written.

    Raises:
        PatchedWeightsError: a conversion can't be reversed; or the runtime layout was requested, and no fusion name
            describes it.
    """
    if original_format:
        plan = plan_original_format(model)
        plan.on_meta(model.state_dict() if state is None else state)
        return plan
    record = record_of(model)
    if record is not None:
        _check_runtime_layout(model, record)
    elif carrying := carriers(model):
        path, _, carried = carrying[0]
        what = "fused" if carried.layouts else "converted"
        raise PatchedWeightsError(
            f"{path} is {what}, and {type(model).__name__} around it was loaded without a patcher: "
            "save_original_format=False would write what nothing can load. Save in the original format."
        )
    return SavePlan(model, record, original_format)


def plan_original_format(model: PreTrainedModel) -> SavePlan:
    """Plan how a model, patched or not, is saved as the stock one would be."""
    record, carrying = record_of(model), tuple(carriers_in(model))
    is_converted = any(carrier.carried.converted for carrier in carrying)
    # Stock whatever is in force around us, and built once.
    stock: Any = functools.cache(lambda: skeleton(stock_class(model), model.config))  # type: ignore[arg-type]
    # Without a record it is a model around patched modules; and some quantizers clear the conversions of the load.
    is_read = record is None or (record.read and (has_used_conversions(model) or is_converted))
    if record is not None and record.read and not is_read:
        record = replace(record, read=False)
    if record is None or is_read:
        conversions: Iterable[WeightTransform] = used_conversions(model)
    else:
        _, conversions = routes_from_scratch(model, record, stock)
    order: dict[str, int] = {}
    if is_converted or (record is not None and record.dropped):
        # transformers sorts a loaded model, and leaves others in the order of the modules.
        reverse = stock_conversions_from_scratch(stock()) if record is not None and is_read else conversions
        saved = stock_revert(stock(), dict(stock().state_dict()), list(reverse))
        order = {key: place for place, key in enumerate(saved)}
    return SavePlan(model, record, True, carrying, tuple(conversions), order)


def _check_runtime_layout(model: PreTrainedModel, record: PatchRecord) -> None:
    """Raise for changes that the names of fusions don't describe, and a config can only have these names."""
    of_fusions = {identity(transform) for transform in record.fusion_transforms}
    transforms = [added.transform for route in record.routes for added in route.added]
    reasons = [describe(transform) for transform in transforms if identity(transform) not in of_fusions]
    reasons += [f"without {describe(transform)}" for transform, _ in record.dropped]
    reasons += [f"{fusion!r}, which no name describes" for fusion in record.fusions if not isinstance(fusion, str)]
    unfused = [path for path, fusion in record.unfused.items() if fusion in record.fusions]
    reasons += [f"not fused, as others are: {path}" for path in compress(unfused)]
    new, absent = set(record.new_weights), set[str]()
    if replaced := tuple(inside(item.path) for item in record.replaced):
        # A load by name would leave weights random that only the stock form of a replaced module has.
        fused, stock = tuple(inside(item.path) for item in record.fused), skeleton(record.model_class, model.config)
        names, stock_names = (
            {key for key in part.state_dict() if key.startswith(replaced) and not key.startswith(fused)}
            for part in (model, stock)
        )
        new |= set() if getattr(model, "hf_quantizer", None) else names - stock_names  # quantizers add tensors
        absent = stock_names - names
    reasons += [f"new: {key}" for key in compress(sorted(new))]
    reasons += [f"without {key}" for key in compress(sorted(absent))]
    if not record.read:
        reasons += [describe(transform) for transform in record.added]
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(reasons))
        raise PatchedWeightsError(
            "save_original_format=False would write a checkpoint in a layout that nothing can load by name: no fusion "
            f"describes it.\n{listed}\n"
            "Save in the original format (the default), or express the layout as a fusion."
        )


# --- a model that is partly offloaded to disk ------------------------------------------------------------------------


class OffloadedCheckpoint(dict[str, Any]):
    """What a plan saves of a state dict, with tensors on the meta device.

    transformers pops one tensor after the other out of the state dict that it saves, right before it writes the file
    of the tensor. The layer of the tensor is read at that point.
    """

    def __init__(self, plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> None:
        #: name in the checkpoint -> its part, and the tensors of that which were read and not popped yet
        self._parts: dict[str, tuple[SavePlan, dict[str, torch.Tensor]]] = {}
        on_meta: dict[str, torch.Tensor] = {}
        for part in plan.split(state_dict):
            saved = part.on_meta(part.state)
            self._parts |= dict.fromkeys(saved, (part, {}))
            # Without views: shards are split by the size of storages.
            for name, value in saved.items():
                on_meta[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        super().__init__(plan.in_order(on_meta) if plan.order else on_meta)

    def pop(self, key: str, *default: Any) -> Any:
        """Return the values of one tensor, and drop them here."""
        value = super().pop(key, *default)
        if key not in self._parts:
            return value
        part, tensors = self._parts[key]
        if key not in tensors:
            values = {name: load_if_offloaded(part.model, name, value) for name, value in part.state.items()}
            tensors |= part.saved_state_dict(values)
        return tensors.pop(key)


def load_if_offloaded(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a model with its values, read from disk if it is offloaded."""
    return load_offloaded_parameter(model, name).contiguous() if tensor.is_meta else tensor
