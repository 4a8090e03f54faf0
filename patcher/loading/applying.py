"""A patcher without a load: for what is built in a block, and for a model that is already in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.conversions import (
    forget_used_conversions,
    has_used_conversions,
    set_used_conversions,
    used_conversions,
)
from patcher.compat.copies import drop_values
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import ORIGINAL, forget_no_split_names, kept_in_fp32, named_modules, stock_class
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction
from patcher.construction.in_force import Block, InForce, Matched, entered, entering, unpatched
from patcher.construction.init_hooks import in_force
from patcher.errors import InvalidPatcherError
from patcher.functions.models import Functions, function_attributes, swap_functions
from patcher.layouts.either_layout import carry
from patcher.layouts.selection import converts
from patcher.loading.checks import Diagnostics
from patcher.loading.copying import check_can_be_copied, shared_copy
from patcher.loading.load import seen
from patcher.loading.record import RECORD, PatchRecord, keep_record, record_of
from patcher.loading.saving import saved_state_dict
from patcher.loading.transplanting import (
    Transplant,
    check_as_constructed,
    converted_names,
    outermost_of,
    replaced_paths,
)
from patcher.loading.unfusing import take_hooks, unfuse
from patcher.patterns import compress, inside
from patcher.resolution.fused_modules import fuse_standing_modules
from patcher.resolution.replaced_functions import functions_in_force, matched_functions
from patcher.resolution.resolution import resolve_standing, skeleton
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.patcher import Patcher

#: What a load that replaces modules has judged, and what it puts down.
_JUDGED_BY_THE_LOAD = ("class_mapping", "module_mapping")
_OF_A_LOAD = ("read", "routes", "dropped", "new_weights", "dropped_weights")


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    block = Block((InForce(patcher, origin),))
    check_pins(patcher)
    with in_force(block, ClassRules((*block.entries, *entered())), models=True):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    Diagnostics().adding_matches(block.entries, block.matched).warn()


def apply(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """See `Patcher.apply`."""
    check_can_be_copied(model)
    check_pins(patcher, stock_class(model))
    return unpatched(lambda: _patched(patcher, _as_stock(shared_copy(model))))


def _as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the classes, layers and functions of transformers, in place."""
    given = record_of(model)
    replaced = [(each.original, each.replacement) for each in given.replaced] if given is not None else []
    # First: rebound classes were fused.
    unfuse(model, lambda path, carried: True, "Patcher().apply()", [replacement for _, replacement in replaced])
    record = record_of(model)
    for _, module in named_modules(model):
        module.__class__ = unrebound(type(module))
        for name, value in function_attributes(module):
            if (stock := unrebound(value)) is not value:
                module.__dict__[name] = stock
    paths, entries = replaced_paths(model), record.in_force if record is not None else ()
    _functions(entries, model)
    if paths or (record is not None and record.dropped):
        weights = _checkpoint(model, paths)
        with entering(Block(tuple(_without_what_is_undone(each, record) for each in entries))):
            base, _ = _loaded(model, weights)
        drop_values(base)
        stock, missing = _loaded(model, weights, patcher=Patcher())
        _check_found(missing, paths)
        converted = [(own, names) for names, own in converted_names(model)]
        model = Transplant(model, base, stock, converted).run(paths)
        set_used_conversions(model, (), used_conversions(stock))
    for _, module in named_modules(model):
        for name in (RECORD, ORIGINAL):
            module.__dict__.pop(name, None)
        carry(module, None)
        if isinstance(module, PreTrainedModel):
            forget_no_split_names(module, replaced)
    return model


def _without_what_is_undone(entry: InForce, record: PatchRecord | None) -> InForce:
    """What is in force, but for functions, and for fusions whose modules are those of transformers again."""
    left = record.fusions if record is not None else ()
    fusions = [each for each in entry.patcher.fusions if each in left]
    return replace(entry, patcher=entry.patcher.replace(fusions=fusions, function_mapping={}))


def _functions(entries: Iterable[InForce], model: PreTrainedModel) -> Functions:
    """What function mappings do to a model of transformers, or have done."""
    functions = functions_in_force(entries, model)
    if functions.initialized:
        names = ", ".join(sorted(each.__name__ for each in functions.initialized))
        raise InvalidPatcherError(
            f"Patcher.apply can't replace a function that {names} calls while it is constructed, nor undo that. Load "
            "the model again with the patcher that it is to have."
        )
    return functions


def _patched(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """A model of transformers with what a patcher makes of it, in place."""
    entry = InForce(patcher, "patcher=")
    check_built(patcher, set(map(type, model.modules())), type(model).__module__, all_there=True)
    construction = Construction(ClassRules((entry,)), by_hand=True)
    known: dict[str, Any] = {"read": has_used_conversions(model)}
    if patcher.class_mapping or patcher.module_mapping or patcher.dropped_weights or converts(patcher):
        model, record = _replaced(patcher, model)
        known = {name: getattr(record, name) for name in _OF_A_LOAD}
        named = ((kind, key) for kind in _JUDGED_BY_THE_LOAD for key in getattr(patcher, kind))
        construction.matched |= Matched(frozenset((entry, *each) for each in named))
    construction.root = model
    functions = _functions((entry,), model)
    swap_functions(model, functions)
    construction.matched |= matched_functions((entry,), functions)
    resolution = construction.resolution = resolve_standing((entry,), model, functions=functions)
    if resolution.fusion_plan.rebuilt:
        path = min(resolution.fusion_plan.rebuilt)
        raise InvalidPatcherError(
            f"Patcher.apply can't fuse {path}: {resolution.fused[path].__qualname__} is constructed from arguments "
            "that a model in memory doesn't have. Give it a from_module, or load the model again with patcher=..."
        )
    before = {path: model.get_submodule(path) for path in resolution.fused}
    fuse_standing_modules(construction, model)
    for path, module in before.items():
        if (new := model.get_submodule(path)) is not module:
            take_hooks(new, module)
    matched, record, _, models = seen(construction, model)
    Diagnostics().adding_matches((entry,), matched, type(model).__name__).warn()
    if patcher != Patcher():
        keep_record(models, replace(record, **known))
    return model


def _replaced(patcher: Patcher, model: PreTrainedModel) -> tuple[PreTrainedModel, PatchRecord]:
    """A model of transformers with the replacements of a patcher, and the record of the load that made these."""
    forget_used_conversions(model)  # a key_mapping of its load would give the weights other names
    weights = _checkpoint(model, ())
    base, missing = _loaded(model, weights, patcher=Patcher())
    drop_values(base)
    _check_replaceable(patcher, model, base)  # before a load says what is missing
    only = patcher.replace(fusions=(), function_mapping={}, transformers="", fingerprints={})
    made, _ = _loaded(model, weights, patcher=only)
    record, paths = record_of(made), replaced_paths(made)
    assert record is not None
    _check_found(missing, paths)
    model = Transplant(model, base, made, converted_names(made), frozenset(record.new_weights)).run(paths)
    set_used_conversions(model, (), used_conversions(made))
    return model, record


def _check_replaceable(patcher: Patcher, model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Raise where what a patcher replaces isn't as the config of the model says, or isn't in there."""
    rules, expected = ClassRules((InForce(patcher, "patcher="),)), dict(named_modules(base))

    def is_replaced(path: str, cls: type[nn.Module]) -> bool:
        match = rules.match_path(path) or rules.match(cls)
        return match is not None and match.replacement is not cls

    named = outermost_of(path for path, module in expected.items() if is_replaced(path, type(module)))
    check_as_constructed(model, base, named)
    for path, module in named_modules(model):
        if type(module) is not type(expected.get(path)) and is_replaced(path, type(module)):
            raise InvalidPatcherError(
                f"Patcher.apply can't replace {path}, a {type(module).__qualname__} that was added to the model: with "
                "which arguments it was made isn't known. Apply the patcher first, and add it then."
            )


def _checkpoint(model: PreTrainedModel, changed: Iterable[str]) -> dict[str, torch.Tensor]:
    """The weights of a model as its checkpoint has them, without what is not from its config.

    Args:
        changed: the paths of its modules whose names and shapes aren't those of transformers.
    """
    record, unchanged = record_of(model), skeleton(stock_class(model), model.config).state_dict()  # type: ignore[arg-type]
    new = record.new_weights if record is not None else ()  # these belong to the patcher that is left behind
    under = tuple(map(inside, changed))
    tensors = {  # an adapter has what it is put around as its base_layer
        key if key in unchanged else key.replace(".base_layer.", "."): value.detach()
        for key, value in model.state_dict().items()
    }
    own = {
        key: value
        for key, value in tensors.items()
        if key not in new and (key.startswith(under) or (key in unchanged and unchanged[key].shape == value.shape))
    }
    return saved_state_dict(model, own)


def _loaded(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """A model of the same config on the same weights, and the keys that it found no weights for."""
    devices = {tensor.device for tensor in weights.values()}
    if len(devices) == 1 and devices != {torch.device("cpu")}:
        options["device_map"] = {"": devices.pop()}
    options |= {"config": model.config, "state_dict": dict(weights), "dtype": model.dtype}
    load: Any = stock_class(model)
    result, found = load.from_pretrained(None, output_loading_info=True, **options)
    _keep_dtypes(model, result, weights)
    return result, set(found["missing_keys"])


def _check_found(missing: Iterable[str], paths: Iterable[str]) -> None:
    """Raise for weights of stock modules that are missing where modules change places: they would be random."""
    under = tuple(map(inside, paths))
    if absent := sorted(key for key in missing if key.startswith(under)):
        raise InvalidPatcherError(
            f"Patcher.apply finds no weights for {', '.join(compress(absent)[:3])}: the checkpoint of the model has "
            "other names for them, as with key_mapping=. Load the model again with the patcher that it is to have."
        )


def _keep_dtypes(model: PreTrainedModel, result: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """A load casts everything to one dtype: give back what had another one."""
    others = {key for key, value in weights.items() if value.is_floating_point() and value.dtype != model.dtype}
    for name, tensor in result.state_dict(keep_vars=True).items():
        if name in others and tensor.shape == weights[name].shape:
            tensor.data = weights[name]
            others.remove(name)
    record = record_of(result)
    others.difference_update(record.dropped_weights if record is not None else ())
    # A load keeps them itself, some in float16 alone.
    converted = [key for key in others if not kept_in_fp32(model, key)[model.dtype != torch.float16]]
    if converted:
        raise InvalidPatcherError(
            f"Patcher.apply can't convert weights of several dtypes: {', '.join(compress(sorted(converted))[:3])} "
            f"would become {model.dtype}. Cast the model to one dtype first, with model.to(...)."
        )
