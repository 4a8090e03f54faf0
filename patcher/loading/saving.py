"""The original checkpoint back: key for key, shape for shape, byte for byte."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
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
from patcher.compat.models import ModelView, load_offloaded_parameter
from patcher.errors import PatchedWeightsError
from patcher.fusions.base import Fusion
from patcher.layouts.carried import Carrier, carriers, fused_modules, separated
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.pieces import Piece, UntracedError, Values, traced
from patcher.layouts.sharded import lying_as_read, on_meta, one_piece
from patcher.layouts.transforms import describe, identity
from patcher.loading.expert_names import named_as_in_checkpoint, reverted_from_scratch
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.stock_view import carriers_in, from_scratch
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
    """

    model: PreTrainedModel
    record: PatchRecord | None
    original_format: bool = True
    carrying: tuple[Carrier, ...] = ()
    conversions: tuple[WeightTransform, ...] = ()
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
        """The state dict as the stock model would save it.

        Raises:
            PatchedWeightsError: something in it can't be restored.
        """
        moved: dict[str, str] = {}
        # The load of a quantized checkpoint has read such layers as they are, and run no conversion of stacks.
        is_read = getattr(self.model, "hf_quantizer", None) is not None
        revert = reverted_from_scratch(self.model) if is_read else functools.partial(self._named, restored={})
        for each in self.carrying if not self._is_quantized_by_the_load else ():
            # Experts that a tool has quantized, where the checkpoint has names for each.
            moved |= named_as_in_checkpoint(each, state_dict, revert)
        others = {key: each for key, each in state_dict.items() if key not in moved}
        # What patchers have made, apart again; what is a tensor of a checkpoint then has only its renamings left.
        tensors, converted = separated(list(self.carrying), others)
        rest = {name: tensor for name, tensor in tensors.items() if name not in converted}
        restored = {name: tensor for name, tensor in tensors.items() if name in converted}
        return self._named(rest, restored) | {name: state_dict[key] for key, name in moved.items()}

    @torch.inference_mode(False)  # in which operations aren't shown as what they are made of
    def pieces(self, state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Where in the state dict the tensors of `saved_state_dict` lie, found without values; others as they are.

        One layer after the other, each once it is wanted: there may be thousands of tensors.

        Raises:
            PatchedWeightsError: something in it can't be restored, or not one by one.
        """
        for names, carrying in self._apart(state_dict):
            part, block = replace(self, carrying=carrying), {name: state_dict[name] for name in names}
            others = {
                n: each for n, each in block.items() if type(one_piece(each)) not in (torch.Tensor, nn.Parameter)
            }
            tensors = {name: lying_as_read(each) for name, each in block.items() if name not in others}
            try:
                yield traced(part.saved_state_dict, tensors, others)
            except UntracedError:
                raise PatchedWeightsError(
                    f"A conversion of {type(self.model).__name__} writes into the tensors that it is given, or reads "
                    "them as another type, so its weights can't be told one by one. Write its operations without that."
                ) from None

    def all_pieces(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `pieces`, of all layers.

        Raises:
            PatchedWeightsError: as `pieces`.
        """
        return {name: each for block in self.pieces(state_dict) for name, each in block.items()}

    def _apart(self, names: Iterable[str]) -> list[tuple[list[str], tuple[Carrier, ...]]]:
        """A state dict in parts that are saved independently of each other, in the order of a save.

        A part is a numbered layer, a module that carries layouts, or a tensor; or several, if they are converted
        together.

        Returns:
            The names of each part, and the modules in it that carry layouts.
        """
        paths = {in_state_dict(each.path) for each in self.carrying}
        if self.order or "" in paths or any(map(depends_on_others, self.conversions)):
            return [(list(names), self.carrying)]

        def head(name: str) -> str:
            heads = accumulate(name.split("."), "{}.{}".format)
            return next((each for each in heads if each in paths or each[-1].isdigit()), name)

        parts: dict[str, list[str]] = defaultdict(list)
        for name in names:
            parts[head(name)].append(name)
        carrying: dict[str, list[Carrier]] = defaultdict(list)
        for each in self.carrying:
            carrying[head(in_state_dict(each.path))].append(each)
        is_sorted = self.conversions or (self.record is not None and self.record.read)
        heads = sorted(parts, key=dot_natural_key) if is_sorted else list(parts)
        ends, first = list(range(len(heads))), dict[str, int]()
        if (together := reversed_together(self.conversions)) is not None:
            for number, at in enumerate(heads):
                stock = {n: layout.stock for each in carrying[at] for layout in each.all for n in layout.fused}
                for name in dict.fromkeys(each for own in parts[at] for each in stock.get(own, (own,))):
                    if (group := together(name)) is not None:
                        ends[first.setdefault(group, number)] = number
        result, end = list[tuple[list[str], tuple[Carrier, ...]]](), -1
        for number, at in enumerate(heads):
            given = result.pop() if number <= end else ([], ())
            result.append(([*given[0], *parts[at]], (*given[1], *carrying[at])))
            end = max(end, ends[number])
        return result

    def in_runtime_layout(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state dict as another load reads the fused layout, among however many processes: rows part by part."""
        result = dict(state_dict)
        for each in fused_modules(self.model):
            for layout in filter(lies_in_blocks, each.fused):
                key = layout.fused[0]
                if key in result:
                    (result[key],) = replace(layout, blocks=1).fuse(layout.separate([result[key]]))
        return result

    def _view(self, state_dict: Mapping[str, torch.Tensor]) -> Any:
        """The model for operations, which look at parameters: some of them it has in another form."""

        def get_parameter(name: str) -> torch.Tensor:
            return state_dict[name] if name in state_dict else self.model.get_parameter(name)

        return ModelView(self.model, get_parameter=get_parameter)

    def _named(self, rest: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not (self.conversions or restored or (self.record is not None and self.record.read)):
            return rest  # as transformers leaves what it has made: it sorts only what it has loaded
        renamings = [each for each in self.conversions if isinstance(each, WeightRenaming)]
        if not self.conversions and not restored:
            return dict(sorted(rest.items(), key=lambda pair: dot_natural_key(pair[0])))
        view = self._view(rest)
        result = stock_revert(view, rest, list(self.conversions)) | stock_revert(view, restored, renamings)
        return self._sorted(result) if self.order or restored else result

    def _sorted(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        keys = sorted(state_dict, key=lambda key: (self.order.get(key, len(self.order)), dot_natural_key(key)))
        return {key: state_dict[key] for key in keys}


def saved_state_dict(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model as the stock model would save it.

    Raises:
        PatchedWeightsError: something in it can't be restored.
    """
    return plan_original_format(model).saved_state_dict(state_dict)


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
        elif patched := carriers(model):
            path, _, carried = patched[0]
            what = "fused" if carried.layouts else "converted"
            raise PatchedWeightsError(
                f"{path} is {what}, and {type(model).__name__} around it was loaded without a patcher: "
                "save_original_format=False would write what nothing can load. Save in the original format."
            )
        return SavePlan(model, record, original_format)
    plan = plan_original_format(model)
    given = model.state_dict() if state_dict is None else state_dict
    # On meta this costs nothing; a tensor of a quantizer's own type says by its type that it can't be taken apart.
    plan.saved_state_dict({key: on_meta(value) for key, value in given.items()})
    return plan


def plan_original_format(model: PreTrainedModel) -> SavePlan:
    """How a model, patched or not, is saved as the stock one would be."""
    record, carrying = record_of(model), tuple(carriers_in(model))
    is_converted = any(each.carried.converted for each in carrying)
    model_class = type(model) if record is None else record.model_class
    # Not patched, by nothing that may be in force around us either; and built once.
    stock = functools.cache(lambda: skeleton(model_class, model.config))
    # Without a record of its own it is a model around patched modules; some quantizers have a model forget its load.
    is_read = record is None or (record.read and (has_used_conversions(model) or is_converted))
    if record is not None and record.read and not is_read:
        record = replace(record, read=False)
    conversions = used_conversions(model) if record is None or is_read else from_scratch(model, record, stock)[1]
    order: dict[str, int] = {}
    if is_converted or (record is not None and record.dropped):
        # transformers sorts what it has loaded, and leaves what it has made in the order of the modules.
        reversed_by = stock_conversions_from_scratch(stock()) if record is not None and is_read else conversions
        saved = stock_revert(stock(), dict(stock().state_dict()), list(reversed_by))
        order = {key: place for place, key in enumerate(saved)}
    return SavePlan(model, record, True, carrying, tuple(conversions), order)


def _check_runtime_layout(model: PreTrainedModel, record: PatchRecord) -> None:
    # Fusions that have a name are what a config can say.
    named = {identity(transform) for transform in record.fusion_transforms}
    transforms = [added.transform for route in record.routes for added in route.by]
    reasons = [describe(transform) for transform in transforms if identity(transform) not in named]
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
    replaced = tuple(inside(item.path) for item in record.replaced)
    if not replaced:
        return []
    fused = tuple(inside(item.path) for item in record.fused)
    found, stock = (
        {key for key in each.state_dict() if key.startswith(replaced) and not key.startswith(fused)}
        for each in (model, skeleton(record.model_class, model.config))
    )
    only_here = set() if getattr(model, "hf_quantizer", None) else found - stock  # companions of quantized weights
    return [f"new: {key}" for key in compress(sorted(only_here))] + [
        f"without {key}" for key in compress(sorted(stock - found))
    ]


# --- a model that is partly on the disk ------------------------------------------------------------------------------


class OffloadedCheckpoint(dict[str, Any]):
    """What `plan` saves of a state dict; tensors are on the meta device.

    transformers takes one tensor after the other out of the state dict that it saves, right before it writes the file
    which that belongs to: what it is made of is read then.
    """

    def __init__(self, plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> None:
        made = plan.all_pieces(state_dict)
        self._pieces = {name: each for name, each in made.items() if isinstance(each, Piece)}

        def own(name: str) -> torch.Tensor:
            tensor = state_dict[name]
            return load_offloaded_parameter(plan.model, name).contiguous() if tensor.is_meta else tensor

        self._values = Values(self._pieces.values(), own)
        # Each by itself: shards are cut by the size of what a tensor is a view of.
        shown = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in self._pieces.items()}
        super().__init__(made | shown)

    def pop(self, key: str, *default: Any) -> Any:
        """The values of one tensor, which are dropped here."""
        value = super().pop(key, *default)
        return self._values.take(self._pieces[key]) if key in self._pieces else value
