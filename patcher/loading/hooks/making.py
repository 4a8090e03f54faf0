"""The seams of construction: of a model from a config, or by its class."""

from __future__ import annotations

import functools
from contextlib import suppress
from operator import attrgetter
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.models import named_modules, stock_class, ties
from patcher.compat.seams import Stock, seam
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, replace_modules
from patcher.construction.gates import building, cover_new_classes
from patcher.construction.in_force import construction_around, entered, in_force_for
from patcher.construction.lock import construction_lock
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.loading.findings import Diagnostics
from patcher.loading.initial_values import preserve_computed_buffers
from patcher.loading.load import check_constructed, check_supported, summarize
from patcher.loading.record import store_record
from patcher.patterns import inside
from patcher.resolution.resolution import (
    changes_modules,
    fuse_constructed_modules,
    rebuild_fused_modules,
    record_arguments,
    replace_functions,
)
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.forward_of import shown_name
from patcher.spec.patcher import Patcher


@seam("transformers.modeling_utils:PreTrainedModel._from_config", "config")
def from_config(
    stock: Stock, cls: type[PreTrainedModel], config: Any, *args: Any, patcher: Patcher | None = None, **kwargs: Any
) -> Any:
    is_part = patcher is None and construction_around() is not None
    entries, requested = ((), ()) if is_part else in_force_for(patcher)
    # Also for a part: a model built by hand doesn't hold the lock, and this sets torch's default dtype.
    with construction_lock.held_for(cls.__name__):
        if is_part:
            cover_new_classes()  # its code may just have been imported
        if not entries:
            return stock(cls, config, *args, **kwargs)
        check_supported(entries, None, {})
        for entry in requested:
            check_pins(entry.patcher, cls)
        construction = Construction(ClassRules(entries), by_hand=True)
        with building(construction):
            model = stock(cls, config, *args, **kwargs)
    check_constructed(construction, cls)
    Diagnostics().with_unused(requested, construction.outcome, cls.__name__).warn()
    return model


@seam("transformers.modeling_utils:PreTrainedModel.__init__", "config")
def init(stock: Stock, self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(getattr(config, "__dict__", {}).get("patcher"), Patcher):  # configs accept any keyword argument
        raise InvalidPatcherError(
            f"patcher= was given to the config of {type(self).__name__}, where no load finds it. Pass it to what "
            "loads or constructs a model; the parts of a composite model take encoder_patcher=, decoder_patcher= "
            "and so on."
        )
    construction = construction_around()
    if construction is None and entered():
        raise PatchConstructionError(
            f"{type(self).__name__}.__init__ was called without the gate that a block puts on it, so no patcher can "
            "follow what it builds: the class was defined in the block, or another tool has replaced its __init__. "
            "Define it, and use that tool, before the block begins."
        )
    if construction is not None and construction.root in (None, self) and construction.outermost in (None, self):
        construction.root = self
        record_arguments(construction)
    stock(self, config, *args, **kwargs)


@seam("transformers.modeling_utils:PreTrainedModel.post_init")
def post_init(stock: Stock, self: PreTrainedModel) -> None:
    construction = construction_around()
    # Also by hand: it rebinds `torch.nn.init`, and a load in another thread has rebound `tie_weights`.
    with construction_lock.held_for(type(self).__name__, or_without=True):
        if construction is None:
            stock(self)
        else:
            _initialise(stock, self, construction)


def _initialise(stock: Stock, self: PreTrainedModel, construction: Construction) -> None:
    is_root = construction.root is self
    if is_root and not construction.is_skeleton:
        for entry in construction.rules.entries:
            if entry.patcher.fingerprints:  # by now all code of the model is imported
                classes = {stock_class(module) for module in self.modules()}
                check_built(entry.patcher, classes, all_there=entry.origin == "patcher=")
    if is_root:
        _apply_mappings(construction, self)
    _check_ties(construction, self)
    with preserve_computed_buffers(built.module for built in construction.built if built.outermost):
        stock(self)
    if is_root:
        construction.is_constructed = True
        construction.at_end = [functools.partial(_finish, construction, self)]


def _apply_mappings(construction: Construction, model: PreTrainedModel) -> None:
    """Apply the mappings that aren't by class, and construct modules again that a family fuses so."""
    if changes_modules(construction) and construction.modules != dict(named_modules(model)):
        replace_modules(construction, model)
        replace_functions(construction, model)
        if not construction.is_skeleton:
            rebuild_fused_modules(construction, model)
        construction.modules = dict(named_modules(model))


def _finish(construction: Construction, model: PreTrainedModel) -> None:
    """Fuse a model at the end of its `__init__`: it is fully constructed, and no quantizer has changed it."""
    _apply_mappings(construction, model)  # it may have gone on after `post_init`
    construction.modules.clear()  # which would keep the layers that are joined
    if not construction.is_skeleton:
        fuse_constructed_modules(construction, model)
    if construction.by_hand:  # no load goes on with it
        construction.outcome, record, _, models = summarize(construction, model)
        store_record(models, record)


def _check_ties(construction: Construction, model: PreTrainedModel) -> None:
    """Raise if a replacement lacks a parameter that transformers ties, or has it in another shape."""
    replaced = {id(built.module): built.match for built in construction.built}
    for pair in ties(model).items() if replaced else ():
        shapes = dict.fromkeys(pair, "is missing")
        for name in pair:
            with suppress(AttributeError):
                shapes[name] = str(tuple(attrgetter(name)(model).shape))
        is_possible = len(set(shapes.values())) == 1 and "is missing" not in shapes.values()
        for path, module in () if is_possible else reversed([*named_modules(model)]):
            if id(module) in replaced and any(name.startswith(inside(path)) for name in pair):
                match, found = replaced[id(module)], " and ".join(map(" ".join, shapes.items()))
                raise PatchConstructionError(
                    f"transformers ties {' to '.join(pair)}, and with {shown_name(match.replacement)} in place of "
                    f"{match.original.__qualname__} that is impossible: {found}. Keep the parameter in the "
                    "replacement, under its name and in its shape, and compute from it in forward."
                )
