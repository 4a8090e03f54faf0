"""Patchers without a load: for models that are built in a block, and for a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.attributes import has_gradient_hooks, is_compiled, left_behind, share_storage
from patcher.compat.conversions import (
    has_used_conversions,
    key_renamer,
    set_used_conversions,
    stock_conversions,
    stock_conversions_from_scratch,
    used_conversions,
    was_used,
)
from patcher.compat.models import (
    ORIGINAL,
    LoadStateDictConfig,
    forget_no_split_names,
    forget_recorded,
    mark_initialized,
    named_modules,
    named_parameters,
    state_tensors,
    stock_class,
)
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction
from patcher.construction.gates import in_force
from patcher.construction.in_force import Block, InForce, Outcome, entered, unpatched
from patcher.construction.lock import construction_lock
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.expressions import search
from patcher.functions.models import restore_functions
from patcher.layouts.carried import carry
from patcher.layouts.transforms import converts, identity
from patcher.loading.findings import Diagnostics, outcome_of_modules
from patcher.loading.in_memory import Weights, copy_hooks, move_attributes, transplant, unfuse
from patcher.loading.initial_values import InitialValues, skip_complete
from patcher.loading.load import Constructed, Loaded, Request, check_supported, construct, select, summarize
from patcher.loading.reading import check_weights
from patcher.loading.record import RECORD, PatchedModule, PatchRecord, joined_record, patched_now, store_record
from patcher.loading.router import Router
from patcher.loading.saving import saved_state_dict
from patcher.loading.state_dicts import carriers_in, carry_routes, original_state_dict
from patcher.patterns import compress
from patcher.resolution.resolution import (
    check_constructor,
    fuse_constructed_modules,
    replace_functions,
    resolve_constructed,
)
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MODULE_MAPPINGS

#: The fields of a record that follow from its load.
_OF_LOAD = ("read", "routes", "dropped", "new_weights", "dropped_weights")


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    block = Block((InForce(patcher, origin),))
    block.outcome = outcome_of_modules(Construction(ClassRules(block.entries)))  # as long as nothing is built
    check_pins(patcher)
    with in_force(block, ClassRules((*block.entries, *entered())), models=PreTrainedModel):
        yield patcher
    # For the whole block: a patcher may be meant for one of several models that are built in it.
    Diagnostics().with_unused(block.entries, block.outcome).warn()


def apply(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """See `Patcher.apply`."""
    check_can_be_copied(model)
    check_pins(patcher, stock_class(model))
    on_meta = torch.empty(0).is_meta  # where values that modules compute would be lost
    with torch.device("cpu") if on_meta else nullcontext():
        return unpatched(lambda: _patched(patcher, shared_copy(model)))


def _as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the stock classes, layers and functions of a model, in place."""
    record = joined_record(model)
    replaced = [(item.original, item.replacement) for item in record.modules] if record is not None else []
    # First: rebound classes were fused.
    unfuse(model, lambda path, carried: True, "Patcher().apply()", [replacement for _, replacement in replaced])
    record = patched_now(model)
    restore_functions(model)
    origins = {name: layout.fused for carrier in carriers_in(model) for layout in carrier.all for name in layout.stock}
    if origins or any(ORIGINAL in vars(module) for _, module in named_modules(model)):
        remaining = InForce(_by_path(record.modules if record is not None else ()), "patcher=")
        try:
            base, stock = _construct(model, (remaining,)).model, _construct(model).model
        except PatchConstructionError as error:  # its advice is for a module_mapping
            raise InvalidPatcherError(
                f"Patcher.apply can't construct the model as it is, to restore it: {str(error).rpartition('. ')[0]}. "
                "Load it without a patcher, and load the state dict patcher.original_state_dict(model) into that."
            ) from error
        state, stock_state = state_tensors(model), original_state_dict(model)
        values = {name: value for name, value in stock_state.items() if name in origins or name not in state}
        move_attributes(model, base, stock)
        model = transplant(model, stock, Weights(model, values, origins))
        if has_used_conversions(model):
            _reverse_also(model, (origins.keys() | state.keys()) - stock_state.keys())
    for _, module in named_modules(model):
        for name in (RECORD, ORIGINAL):
            module.__dict__.pop(name, None)
        carry(module, None)
        if isinstance(module, PreTrainedModel):
            forget_no_split_names(module, replaced)
    return model


def _by_path(modules: Iterable[PatchedModule]) -> Patcher:
    """Return a patcher for modules as they are: patchers of loads may be for the model around this one, or a part."""
    paths: dict[type[nn.Module], list[str]] = {}
    for item in modules:
        paths.setdefault(item.replacement, []).append(item.path)
    return Patcher(
        {item.original.__name__: item.replacement for item in modules if not item.path},
        module_mapping={path: cls for cls in paths for path in compress(filter(None, paths[cls]))},
    )


def _reverse_also(model: PreTrainedModel, keys: Iterable[str]) -> None:
    """Have a save reverse the stock conversions that take keys of a checkpoint, which a patcher had taken."""
    conversions, used = stock_conversions_from_scratch(model), used_conversions(model)
    rename = key_renamer(conversions)
    for key in keys:
        rename(key)  # a match is noted on the conversion
    set_used_conversions(model, (), [*used, *_others(filter(was_used, conversions), used)])


def _others(conversions: Iterable[Any], known: Iterable[Any]) -> list[Any]:
    """Return the conversions that equal none of the known ones, also if the model was saved in between."""
    identities = {identity(conversion, written=False) for conversion in known}
    return [conversion for conversion in conversions if identity(conversion, written=False) not in identities]


def _patched(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """Patch a model, in place, by this patcher alone."""
    state, expressions = state_tensors(model), patcher.new_weights
    trained = {name: value for name, value in state.items() if any(search(text, name) for text in expressions)}
    model = _as_stock(model)
    entry = InForce(patcher, "patcher=")
    check_built(patcher, set(map(type, model.modules())), all_there=True)
    construction = Construction(ClassRules((entry,)), by_hand=True)
    recorded: dict[str, Any] = {"read": has_used_conversions(model)}
    if patcher.class_mapping or patcher.module_mapping or patcher.dropped_weights or converts(patcher):
        model, record = _replaced(patcher, model, trained)
        recorded = {name: getattr(record, name) for name in _OF_LOAD}
        # Mappings without effect have been reported.
        used = ((entry, field, key) for field in MODULE_MAPPINGS for key in getattr(patcher, field))
        construction.outcome |= Outcome(frozenset(used))
    construction.root = model
    replace_functions(construction, model)
    resolution = construction.resolution = resolve_constructed((entry,), model, functions=construction.functions)
    for path in resolution.rebuilt:
        raise InvalidPatcherError(
            f"Patcher.apply can't fuse {path}: {resolution.fused[path].__qualname__} is constructed from arguments "
            "that a model in memory doesn't have. Give it a from_module, or load the model again with patcher=..."
        )
    before = {path: model.get_submodule(path) for path in resolution.fused}
    fuse_constructed_modules(construction, model)
    for path, module in before.items():
        if (new := model.get_submodule(path)) is not module:
            copy_hooks(new, module)
    outcome, record, _, models = summarize(construction, model)
    Diagnostics().with_unused((entry,), outcome, type(model).__name__).warn()
    if patcher != Patcher():
        store_record(models, replace(record, **recorded))
    return model


def _replaced(
    patcher: Patcher, model: PreTrainedModel, trained: Mapping[str, torch.Tensor]
) -> tuple[PreTrainedModel, PatchRecord]:
    """Put the replacements of a patcher into a stock model, in the steps of a load, and return it with the record.

    Args:
        trained: the new weights of the patcher that the model had before.
    """
    entry = InForce(patcher.replace(fusions=(), function_mapping={}, transformers="", fingerprints={}), "patcher=")
    check_supported((entry,), None, {})
    base, load = _construct(model).model, _construct(model, (entry,), requested=(entry,))
    move_attributes(model, base, load.model)
    _check_not_added(load, model, base)
    stock, used = stock_conversions(load.model), used_conversions(model) if has_used_conversions(model) else []
    of_key_mapping = _others(used, stock)
    set_used_conversions(model, (), None)  # a key_mapping of its load would rename the weights
    selected, mapping = select(load, stock, None)
    added, replaced = selected.conversions.added, load.record.paths_of_replacements
    checkpoint = _checkpoint(model, base)
    router = Router(load.model, checkpoint, mapping, added, replaced=replaced, dtype=lambda name: model.dtype)
    routing = router.run()
    if problem := routing.problem or routing.failure:
        raise problem
    loaded = check_weights(selected, routing, checkpoint, routing)
    loaded.diagnostics.warn()
    InitialValues(loaded).restore(LoadStateDictConfig(device_map={"": model.device}, dtype=model.dtype))
    record = loaded.record
    origins = {name: item.stock for item in record.routes for name in item.parameters}
    weights = Weights(model, _convert(loaded, checkpoint, model), origins)
    weights.state = {**trained, **weights.state}
    model = transplant(model, loaded.model, weights)
    carry_routes(model, record.routes, record.paths_of_replacements)
    set_used_conversions(model, mapping, [*of_key_mapping, *routing.used])
    return model, record


def _check_not_added(load: Constructed, model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Raise for modules that a patcher replaces, and that aren't in the model by its config."""
    expected, rules = dict(named_modules(base)), load.rules
    for path, module in named_modules(model):
        cls = type(module)
        match = rules.match_path(path, cls) or rules.match(cls)
        if cls is not type(expected.get(path)) and match is not None and match.replacement is not cls:
            raise InvalidPatcherError(
                f"Patcher.apply can't replace {path}, a {cls.__qualname__} that was added to the model: its "
                "constructor arguments aren't known. Apply the patcher first, and add it then."
            )


def _checkpoint(model: PreTrainedModel, base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model as in its checkpoint, without those that aren't in it by its config."""
    shapes = {name: tensor.shape for name, tensor in state_tensors(base).items()}
    state = {  # the layer in an adapter is its base_layer
        key if key in shapes else key.replace(".base_layer.", "."): value.detach()
        for key, value in model.state_dict().items()
    }
    return saved_state_dict(model, {key: value for key, value in state.items() if shapes.get(key) == value.shape})


def _convert(load: Loaded, checkpoint: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters of a load that aren't those of the same name in a model."""
    state, new, converted = state_tensors(model), state_tensors(load.model), dict[str, torch.Tensor]()
    for item in load.routing.routes:
        names, layout = {*item.parameters}, item.layout
        is_unchanged = not item.added and not load.conversions.dropped and state.keys() >= names
        if is_unchanged or not new.keys() >= names:
            continue
        parts = {key: checkpoint[key] for key in item.keys}
        if layout is not None and len({part.dtype for part in parts.values()}) > 1:
            raise InvalidPatcherError(
                f"Patcher.apply can't convert weights of several dtypes: {', '.join(compress(sorted(parts))[:3])} "
                "would be joined. Cast the model to one dtype first, with model.to(...)."
            )
        values = list(parts.values())
        if layout is not None:
            values = [value.to(values[0].dtype) for value in layout.fuse(values)]  # as a load does
        converted |= zip(item.parameters, values, strict=True)
    return {name: value for name, value in converted.items() if name not in load.routing.absent}


def _construct(model: PreTrainedModel, in_force: tuple[InForce, ...] = (), **options: Any) -> Constructed:
    """Construct a model with the config of another one, on the meta device except for buffers."""
    check_constructor(stock_class(model))
    load = Request(model_class=stock_class(model), in_force=in_force, **options)  # type: ignore[arg-type]
    results: list[Constructed] = []
    # In a context of its own, without the load around this one.
    contexts = Context().run(load.model_class.get_init_context, model.dtype, False, False, None)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(construct(load, results.append))
        new = load.model_class(model.config)
    for tensor in (*new.parameters(), *new.buffers()):
        mark_initialized(tensor)
    for module in new.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=model.device)
    skip_complete(new, results[0].outermost)
    with construction_lock.held_for(type(new).__name__):
        new.initialize_weights()  # type: ignore[no-untyped-call]
    return results[0]


# --- a copy on the same weights --------------------------------------------------------------------------------------


def _unsupported(what: str, advice: str) -> InvalidPatcherError:
    return InvalidPatcherError(f"Patcher.apply can't take {what}. {advice}")


def check_can_be_copied(model: Any) -> None:
    """Raise for anything that a copy would lack, or would wrongly share with the given model."""
    if not isinstance(model, PreTrainedModel):
        advice = "load one, and write patcher.apply(model)"
        if isinstance(model, nn.Module):
            advice = "take the model out of its wrapper"
        found = type(model).__name__
        raise InvalidPatcherError(f"Patcher.apply takes a model of transformers, found {found}; {advice}.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise _unsupported("a quantized model: its weights can't be restored", "Load it again with patcher=...")
    again = "Load it again with patcher=..., device_map=..."
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            raise _unsupported(
                f"a model that is split over processes ({name})",
                "Save it with save_pretrained, and load that with patcher=...",
            )
        if parameter.is_meta:
            raise _unsupported("a model whose weights are offloaded", again)
        if has_gradient_hooks(parameter):
            what = f"a hook on the gradient of {name}: a copy has other gradients"
            raise _unsupported(what, "Register it on the result.")
    for path, module in named_modules(model):
        name = path or "the model"
        if hasattr(module, "_hf_hook"):
            raise _unsupported(f"a model that accelerate has spread over devices ({name})", again)
        if is_compiled(module):
            raise _unsupported(f"a compiled module ({name})", "Compile the result instead.")


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model, with new parameters on the same storage and new buffers."""
    memo: dict[int, Any] = {}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for value in [*model.parameters(), *attributes]:
        if type(value) is nn.Parameter and id(value) not in memo:
            share_storage(value, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise _unsupported(
            f"a model that can't be copied ({type(error).__name__}: {error})",
            "Take off what was added to it, or load it again with patcher=...",
        ) from error
    for _, module in named_modules(copied):
        forget_recorded(module)  # the hooks are installed anew, on the modules of the result
    # A copy of a function has the same closure.
    attribute, name = left_behind([*named_modules(model), *named_parameters(model)], named_modules(copied))
    if attribute:
        raise _unsupported(
            f"{attribute}: a function has {name} in its closure, and a copy would go on using that of the given model",
            "Bind it to its module with types.MethodType(function, module), or apply the patcher first.",
        )
    return copied
