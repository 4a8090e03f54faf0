"""A patcher without a load: for what is built in a block, and for a model that is already in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.conversions import (
    has_used_conversions,
    set_used_conversions,
    used_conversions,
)
from patcher.compat.copies import has_gradient_hooks, is_compiled, share_storage
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import (
    ORIGINAL,
    forget_no_split_names,
    kept_in_fp32,
    named_modules,
    named_parameters,
    stock_class,
)
from patcher.compat.recorders import forget_recorded
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction
from patcher.construction.in_force import Block, InForce, Outcome, entered, entering, unpatched
from patcher.construction.init_hooks import in_force
from patcher.errors import InvalidPatcherError
from patcher.functions.models import function_attributes
from patcher.layouts.either_layout import carry
from patcher.layouts.selection import converts
from patcher.loading.findings import Diagnostics, found_in_modules
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
from patcher.resolution.resolution import replace_functions, resolve_standing, skeleton
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.patcher import Patcher

#: What a load that replaces modules has judged, and what it puts down.
_JUDGED_BY_THE_LOAD = ("class_mapping", "module_mapping")
_OF_A_LOAD = ("read", "routes", "dropped", "new_weights", "dropped_weights")


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    block = Block((InForce(patcher, origin),))
    block.tell(found_in_modules(Construction(ClassRules(block.entries))))  # as long as nothing is built
    check_pins(patcher)
    with in_force(block, ClassRules((*block.entries, *entered())), models=True):
        yield patcher
    # Over the whole block: a patcher may be meant for one of several models that are built in it.
    Diagnostics().adding_unused(block.entries, block.outcome).warn()


def apply(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """See `Patcher.apply`."""
    check_can_be_copied(model)
    check_pins(patcher, stock_class(model))
    return unpatched(lambda: _patched(patcher, _as_stock(shared_copy(model))))


def _as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the classes, layers and functions of transformers, in place."""
    given = record_of(model)
    replaced = [(each.original, each.replacement) for each in given.modules] if given is not None else []
    # First: rebound classes were fused.
    unfuse(model, lambda path, carried: True, "Patcher().apply()", [replacement for _, replacement in replaced])
    record = record_of(model)
    for _, module in named_modules(model):
        module.__class__ = unrebound(type(module))
        for name, value in function_attributes(module):
            if (stock := unrebound(value)) is not value:
                module.__dict__[name] = stock
    paths, entries = replaced_paths(model), record.in_force if record is not None else ()
    if paths or (record is not None and record.dropped):
        weights = _checkpoint(model, paths)
        with entering(Block(tuple(_without_what_is_undone(each, record) for each in entries))):
            base, _ = _loaded(model, weights)
        _drop_values(base)
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
        construction.outcome |= Outcome(frozenset((entry, *each) for each in named))
    construction.root = model
    replace_functions(construction, model)
    resolution = construction.resolution = resolve_standing((entry,), model, functions=construction.functions)
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
    outcome, record, _, models = seen(construction, model)
    Diagnostics().adding_unused((entry,), outcome, type(model).__name__).warn()
    if patcher != Patcher():
        keep_record(models, replace(record, **known))
    return model


def _replaced(patcher: Patcher, model: PreTrainedModel) -> tuple[PreTrainedModel, PatchRecord]:
    """A model of transformers with the replacements of a patcher, and the record of the load that made these."""
    set_used_conversions(model, (), None)  # a key_mapping of its load would give the weights other names
    weights = _checkpoint(model, ())
    base, missing = _loaded(model, weights, patcher=Patcher())
    _drop_values(base)
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
        match = rules.match_path(path, cls) or rules.match(cls)
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


# --- a copy on the same weights --------------------------------------------------------------------------------------


def cannot(what: str, instead: str) -> InvalidPatcherError:
    return InvalidPatcherError(f"Patcher.apply can't take {what}. {instead}")


def check_can_be_copied(model: Any) -> None:
    """Raise for what a copy would lack, or would share with the given model although the two must not.

    Raises:
        InvalidPatcherError: it names what it is and where, and what to do instead.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidPatcherError(
            f"Patcher.apply takes a model of transformers, found {type(model).__name__}; "
            "take the model out of its wrapper."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise cannot("a quantized model: its weights can't be restored", "Load it again with patcher=...")
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            raise cannot(
                f"a model that is split over processes ({name})",
                "Save it with save_pretrained, and load that with patcher=...",
            )
        if parameter.is_meta:
            raise cannot("a model whose weights are offloaded", "Load it again with patcher=..., device_map=...")
        if has_gradient_hooks(parameter):
            raise cannot(f"a hook on the gradient of {name}: a copy has other gradients", "Register it on the result.")
    own = {id(parameter): name for name, parameter in named_parameters(model)}
    own |= {id(module): path or "the model" for path, module in named_modules(model)}
    for path, module in named_modules(model):
        if hasattr(module, "_hf_hook"):
            raise cannot(
                f"a model that accelerate has spread over devices ({own[id(module)]})",
                "Load it again with patcher=..., device_map=...",
            )
        if is_compiled(module):
            raise cannot(f"what is compiled ({own[id(module)]})", "Compile the result instead.")
        for name, value in vars(module).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if held := next((own[id(held)] for held in _closed_over(each) if id(held) in own), None):
                    raise cannot(
                        f"{inside(path)}{name}: a function has {held} in its closure, and a copy would go on using "
                        "that of the given model",
                        "Bind it to its module with types.MethodType(function, module), or apply the patcher first.",
                    )


def _closed_over(value: Any, depth: int = 0) -> Iterator[Any]:
    """What a function holds in its closure, as do functions in that. A copy of a function has the same closure."""
    value = getattr(value, "__func__", value.func if isinstance(value, partial) else value)
    if isinstance(value, FunctionType) and depth < 5:
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                held = cell.cell_contents
                yield getattr(held, "__self__", held)
                yield from _closed_over(held, depth + 1)


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with parameters of its own on the same storage, and buffers of its own.

    Raises:
        InvalidPatcherError: something that the model holds can't be copied.
    """
    memo: dict[int, Any] = {}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for each in [*model.parameters(), *attributes]:
        if type(each) is nn.Parameter and id(each) not in memo:
            share_storage(each, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise cannot(
            f"a model that can't be copied ({type(error).__name__}: {error})",
            "Take off what was added to it, or load it again with patcher=...",
        ) from error
    for _, module in named_modules(copied):
        forget_recorded(module)  # the hooks are installed anew, on what the modules are then
    return copied


def _drop_values(model: nn.Module) -> None:
    """Move the parameters of a model to the meta device: buffers and all else stay."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
