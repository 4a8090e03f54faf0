"""The original checkpoint back: key for key, shape for shape, byte for byte."""

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
from patcher.compat.models import ModelView, load_offloaded_parameter, stock_class
from patcher.errors import PatchedWeightsError
from patcher.fusions.base import Fusion
from patcher.layouts.carried import Carrier, carriers, fused_modules, separated
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sharded import on_meta
from patcher.layouts.transforms import describe, identity
from patcher.loading.experts import default_revert, expert_checkpoint_names
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.stock_view import carriers_in, routes_from_scratch
from patcher.patterns import compress, in_state_dict, inside
from patcher.resolution.resolution import skeleton


@dataclass(frozen=True, eq=False)
class SavePlan:
    """How one model is saved.

    Attributes:
        record: what was patched, None if nothing was.
        carrying: the modules whose parameters are others than in transformers.
        conversions: those of transformers, to be reversed.
        order: the place of each key in what the stock model saves: it decides which shard a tensor goes to.
        one_by_one: whether experts that the checkpoint has one by one are given as they are. What stock cuts from one
            stack goes into one shard, so for files a stack is made.
    """

    model: PreTrainedModel
    record: PatchRecord | None
    original_format: bool = True
    carrying: tuple[Carrier, ...] = ()
    conversions: tuple[WeightTransform, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    one_by_one: bool = False

    @property
    def fusions(self) -> tuple[str | Fusion, ...]:
        """Those in whose layout the weights are saved, none in the original format."""
        return () if self.original_format or self.record is None else tuple(self.record.fusions)

    def saved_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict as the stock model would save it."""
        moved: dict[str, str] = {}
        same: dict[str, str] = {}
        # The load of a quantized checkpoint has read such layers as they are, and run no conversion of stacks.
        quantizer = getattr(self.model, "hf_quantizer", None)
        revert = default_revert(self.model) if quantizer else functools.partial(self._named, restored={})
        # A quantizer that has quantized what no file has had so takes stacks, if it reads the file.
        for each in self.carrying if quantizer is None or is_prequantized(quantizer) else ():
            quantized, plain = expert_checkpoint_names(each, state_dict, revert)
            moved |= quantized
            same |= plain if self.one_by_one else {}
        # What is cut from a stack again as it was put there is what it was: the stack needs no values.
        others = {key: on_meta(each) if key in same else each for key, each in state_dict.items() if key not in moved}
        # What patchers have made, apart again; what is a tensor of a checkpoint then has only its renamings left.
        tensors, converted = separated(list(self.carrying), others)
        rest = {name: tensor for name, tensor in tensors.items() if name not in converted}
        restored = {name: tensor for name, tensor in tensors.items() if name in converted}
        return self._named(rest, restored) | {name: state_dict[key] for key, name in {**same, **moved}.items()}

    def shown(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `saved_state_dict` makes, without values: on the meta device this costs nothing.

        A tensor of a quantizer's own type is left as it is: by its type it says that it can't be taken apart.
        """
        with torch.inference_mode(False), torch.no_grad():
            given = {key: on_meta(value) for key, value in state_dict.items()}
            versions = {key: value._version for key, value in given.items() if value.is_meta}
            result = self.saved_state_dict(given)
        if any(given[key]._version != version for key, version in versions.items()):
            raise PatchedWeightsError(
                f"A conversion of {type(self.model).__name__} writes into the tensors that it is given, so a save "
                "would change the model. Write its operations without that."
            )
        return result

    def parts(self, names: Iterable[str]) -> list[tuple[SavePlan, list[str]]]:
        """The names of a state dict in parts that are saved independently of each other, in the order of a save.

        A part is a numbered layer, a module that carries layouts, or a tensor; or all, if several of these are
        converted together.
        """
        names, paths = list(names), {in_state_dict(each.path) for each in self.carrying}
        if "" in paths or any(map(depends_on_others, self.conversions)):
            return [(self, names)]

        def head(name: str) -> str:
            heads = accumulate(name.split("."), "{}.{}".format)
            return next((each for each in heads if each in paths or each[-1].isdigit()), name)

        own: dict[str, list[str]] = defaultdict(list)
        for name in names:
            own[head(name)].append(name)
        carrying: dict[str, list[Carrier]] = defaultdict(list)
        for each in self.carrying:
            carrying[head(in_state_dict(each.path))].append(each)
        is_sorted = self.conversions or (self.record is not None and self.record.read)
        heads = sorted(own, key=dot_natural_key) if is_sorted else list(own)
        if self.order:
            places = {head(key): place for key, place in reversed(list(self.order.items()))}
            heads.sort(key=lambda each: places.get(each, len(self.order)))
        together, owners = reversed_together(self.conversions), dict[str, str]()
        for at in heads if together is not None else ():
            stock = {name: layout.stock for each in carrying[at] for layout in each.all for name in layout.fused}
            groups = {together(each) for name in own[at] for each in stock.get(name, (name,))} - {None}  # type: ignore[misc]
            if any(owners.setdefault(group, at) != at for group in groups):  # type: ignore[arg-type]
                return [(self, names)]
        return [(replace(self, carrying=tuple(carrying[at])), own[at]) for at in heads]

    def in_runtime_layout(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict as another load reads the fused layout, among however many processes: rows part by part."""
        result = dict(state_dict)
        for each in fused_modules(self.model):
            for layout in filter(lies_in_blocks, each.fused):
                key = layout.fused[0]
                if key in result:
                    (result[key],) = replace(layout, blocks=1).fuse(layout.separate([result[key]]))
        return result

    def _named(self, rest: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters and tensors of a checkpoint, both by the names that files have."""
        if not (self.conversions or restored or (self.record is not None and self.record.read)):
            return rest  # as transformers leaves what it has made: it sorts only what it has loaded
        if not self.conversions and not restored:
            return dict(sorted(rest.items(), key=lambda pair: dot_natural_key(pair[0])))

        # Operations look at it; the model may have another form of it.
        def get_parameter(name: str) -> torch.Tensor:
            return rest[name] if name in rest else self.model.get_parameter(name)

        view: Any = ModelView(self.model, get_parameter=get_parameter)
        renamings = [each for each in self.conversions if isinstance(each, WeightRenaming)]
        result = stock_revert(view, rest, list(self.conversions)) | stock_revert(view, restored, renamings)
        return self.in_order(result) if self.order or restored else result

    def in_order(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        keys = sorted(state_dict, key=lambda key: (self.order.get(key, len(self.order)), dot_natural_key(key)))
        return {key: state_dict[key] for key in keys}


def saved_state_dict(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model as the stock model would save it, or the error of `SavePlan.saved_state_dict`."""
    return plan_original_format(model).saved_state_dict(state_dict)


def plan_saving(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None, original_format: bool
) -> SavePlan:
    """How a model will be saved, found out and tried before a file is written.

    Raises:
        PatchedWeightsError: a conversion can't be reversed; or the runtime layout was requested, and no fusion name
            describes it.
    """
    if original_format:
        plan = plan_original_format(model)
        plan.shown(model.state_dict() if state_dict is None else state_dict)
        return plan
    record = record_of(model)
    if record is not None:
        _check_runtime_layout(model, record)
    elif patched := carriers(model):
        path, _, carried = patched[0]
        what = "fused" if carried.layouts else "converted"
        raise PatchedWeightsError(
            f"{path} is {what}, and {type(model).__name__} around it was loaded without a patcher: "
            "save_original_format=False would write what nothing can load. Save in the original format."
        )
    return SavePlan(model, record, original_format)


def plan_original_format(model: PreTrainedModel) -> SavePlan:
    """How a model, patched or not, is saved as the stock one would be."""
    record, carrying = record_of(model), tuple(carriers_in(model))
    is_converted = any(each.carried.converted for each in carrying)
    # Not patched, by nothing that may be in force around us either; and built once.
    stock: Any = functools.cache(lambda: skeleton(stock_class(model), model.config))  # type: ignore[arg-type]
    # Without a record of its own it is a model around patched modules; some quantizers have a model forget its load.
    is_read = record is None or (record.read and (has_used_conversions(model) or is_converted))
    if record is not None and record.read and not is_read:
        record = replace(record, read=False)
    conversions = (
        used_conversions(model) if record is None or is_read else routes_from_scratch(model, record, stock)[1]
    )
    order: dict[str, int] = {}
    if is_converted or (record is not None and record.dropped):
        # transformers sorts what it has loaded, and leaves what it has made in the order of the modules.
        reversed_by = stock_conversions_from_scratch(stock()) if record is not None and is_read else conversions
        saved = stock_revert(stock(), dict(stock().state_dict()), list(reversed_by))
        order = {key: place for place, key in enumerate(saved)}
    return SavePlan(model, record, True, carrying, tuple(conversions), order)


def _check_runtime_layout(model: PreTrainedModel, record: PatchRecord) -> None:
    """Raise for a model that isn't what the names of its fusions say, which are all that a config can say."""
    named = {identity(transform) for transform in record.fusion_transforms}
    transforms = [added.transform for route in record.routes for added in route.added]
    reasons = [describe(transform) for transform in transforms if identity(transform) not in named]
    reasons += [f"without {describe(transform)}" for transform, _ in record.dropped]
    reasons += [f"{fusion!r}, which no name describes" for fusion in record.fusions if not isinstance(fusion, str)]
    torn = [path for path, fusion in record.unfused.items() if fusion in record.fusions]
    reasons += [f"not fused, as others are: {path}" for path in compress(torn)]
    new, without = set(record.new_weights), set[str]()
    if replaced := tuple(inside(item.path) for item in record.replaced):
        # Loaded by name, what only the stock form of a replaced module has would be random.
        fused, stock = tuple(inside(item.path) for item in record.fused), skeleton(record.model_class, model.config)
        own, expected = (
            {key for key in each.state_dict() if key.startswith(replaced) and not key.startswith(fused)}
            for each in (model, stock)
        )
        new |= set() if getattr(model, "hf_quantizer", None) else own - expected  # beside quantized weights lie others
        without = expected - own
    reasons += [f"new: {key}" for key in compress(sorted(new))]
    reasons += [f"without {key}" for key in compress(sorted(without))]
    if not record.read:
        reasons += [describe(transform) for transform in record.added]
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(reasons))
        raise PatchedWeightsError(
            "save_original_format=False would write a checkpoint in a layout that nothing can load by name: no fusion "
            f"describes it.\n{listed}\n"
            "Save in the original format (the default), or express the layout as a fusion."
        )


# --- a model that is partly on the disk ------------------------------------------------------------------------------


class OffloadedCheckpoint(dict[str, Any]):
    """What `plan` saves of a state dict; tensors are on the meta device.

    transformers takes one tensor after the other out of the state dict that it saves, right before it writes the file
    which that belongs to: the layer that it is of is read then.
    """

    def __init__(self, plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> None:
        self._state_dict = state_dict
        #: name in the checkpoint -> its part, and what is left of that once it is read
        self._parts: dict[str, tuple[SavePlan, list[str], dict[str, torch.Tensor]]] = {}
        shown: dict[str, torch.Tensor] = {}
        for part, names in plan.parts(state_dict):
            made = part.shown({name: state_dict[name] for name in names})
            self._parts |= dict.fromkeys(made, (part, names, {}))
            # Each alone: shards are cut by the size of what a tensor is a view of.
            shown |= {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in made.items()}
        super().__init__(plan.in_order(shown) if plan.order else shown)

    def pop(self, key: str, *default: Any) -> Any:
        """The values of one tensor, which are dropped here."""
        value = super().pop(key, *default)
        if key not in self._parts:
            return value
        part, names, made = self._parts[key]
        if key not in made:
            own = {name: self._state_dict[name] for name in names}
            made |= part.saved_state_dict(
                {name: load_if_offloaded(part.model, name, value) for name, value in own.items()}
            )
        return made.pop(key)


def load_if_offloaded(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of a model, read from the disk if they are there."""
    return load_offloaded_parameter(model, name).contiguous() if tensor.is_meta else tensor
