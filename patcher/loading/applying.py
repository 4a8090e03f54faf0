"""A patcher without a load: for what is built in a block, and for a model that is already in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.attributes import has_gradient_hooks, is_compiled, share_storage
from patcher.compat.conversions import (
    has_used_conversions,
    set_used_conversions,
    stock_conversions,
    stock_conversions_from_scratch,
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
from patcher.errors import InvalidPatcherError
from patcher.functions.models import restore_functions
from patcher.layouts.either_layout import carry
from patcher.layouts.transforms import converts
from patcher.loading.findings import Diagnostics, found_in_modules
from patcher.loading.initial_values import InitialValues
from patcher.loading.judgement import judge
from patcher.loading.load import Constructed, Loaded, Request, check_supported, construct, seen, select
from patcher.loading.read import stock_routing
from patcher.loading.record import RECORD, PatchRecord, keep_record, record_of
from patcher.loading.routes import Conversions, route
from patcher.loading.saving import saved_state_dict
from patcher.loading.state_dicts import original_state_dict
from patcher.loading.stock_view import carriers_in, carry_routes
from patcher.loading.transplanting import Weights, keep_what_is_held, transplant
from patcher.loading.unfusing import take_hooks, unfuse
from patcher.patterns import compress, inside
from patcher.resolution.resolution import fuse_standing_modules, replace_functions, resolve_standing
from patcher.spec.fingerprints import check_built, check_pins
from patcher.spec.patcher import Patcher

#: What a load that replaces modules has judged, and what it puts down.
_JUDGED_BY_THE_LOAD = ("class_mapping", "module_mapping")
_OF_A_LOAD = ("read", "routes", "dropped", "new_weights", "dropped_weights")


@contextmanager
def applied(patcher: Patcher, *, origin: str = "applied()") -> Iterator[Patcher]:
    """See `Patcher.applied`."""
    block = Block((InForce(patcher, origin),))
    block.outcome = found_in_modules(Construction(ClassRules(block.entries)))  # as long as nothing is built
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
    restore_functions(model)
    made_of = {name: layout.fused for each in carriers_in(model) for layout in each.all for name in layout.stock}
    if made_of or any(ORIGINAL in vars(module) for _, module in named_modules(model)):
        left: list[InForce] = []  # functions are those of transformers by now, and so are the modules of most fusions
        for each in record.in_force if record is not None else ():
            fusions = [fusion for fusion in each.patcher.fusions if fusion in record.fusions]  # type: ignore[union-attr]
            left.append(replace(each, patcher=each.patcher.replace(fusions=fusions, function_mapping={})))
        base, stock = _constructed(model, tuple(left)).model, _constructed(model).model
        own = state_tensors(model)
        values = original_state_dict(model)
        made = {name: value for name, value in values.items() if name in made_of or name not in own}
        keep_what_is_held(model, base, stock)
        model = transplant(model, stock, Weights(model, made, made_of))
    if record is not None and record.dropped:  # what a save reverses
        conversions = stock_conversions_from_scratch(model)
        set_used_conversions(model, conversions, conversions)
    for _, module in named_modules(model):
        for name in (RECORD, ORIGINAL):
            module.__dict__.pop(name, None)
        carry(module, None)
        if isinstance(module, PreTrainedModel):
            forget_no_split_names(module, replaced)
    return model


def _patched(patcher: Patcher, model: PreTrainedModel) -> PreTrainedModel:
    """A model of transformers with what a patcher makes of it, in place."""
    entry = InForce(patcher, "patcher=")
    check_built(patcher, set(map(type, model.modules())), all_there=True)
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
    """A model of transformers with the replacements of a patcher, and the record of what was done.

    It goes the way of a load, but that nothing is read which the model has as it is.
    """
    entry = InForce(patcher.replace(fusions=(), function_mapping={}, transformers="", fingerprints={}), "patcher=")
    check_supported((entry,), None, {})
    base, load = _constructed(model).model, _constructed(model, (entry,), own=(entry,))
    keep_what_is_held(model, base, load.model)
    _check_not_added(load, model, base)
    set_used_conversions(model, (), None)  # a key_mapping of its load would give the weights other names
    selected, mapping = select(load, stock_conversions(load.model), None)
    conversions = Conversions(mapping, selected.conversions.added, 0, load.record.paths_of_replacements)
    checkpoint = _checkpoint(model, base)
    routing = route(load.model, checkpoint, conversions, dtype=lambda name: model.dtype)
    if problem := routing.problem or routing.failure:
        raise problem
    of_stock = partial(stock_routing, selected, checkpoint)
    loaded = judge(selected, routing, checkpoint, routing, of_stock)
    loaded.diagnostics.warn()
    InitialValues(loaded).put_back(LoadStateDictConfig(device_map={"": model.device}, dtype=model.dtype))
    record = loaded.record
    made_of = {name: each.stock for each in record.routes for name in each.parameters}
    model = transplant(model, loaded.model, Weights(model, _made(loaded, checkpoint, model), made_of))
    carry_routes(model, record.routes, record.paths_of_replacements)
    set_used_conversions(model, mapping, routing.used)
    return model, record


def _check_not_added(load: Constructed, model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Raise where what a patcher replaces isn't in what the config of the model says."""
    expected, rules = dict(named_modules(base)), load.rules
    for path, module in named_modules(model):
        cls = type(module)
        match = rules.match_path(path, cls) or rules.match(cls)
        if cls is not type(expected.get(path)) and match is not None and match.replacement is not cls:
            raise InvalidPatcherError(
                f"Patcher.apply can't replace {path}, a {cls.__qualname__} that was added to the model: with "
                "which arguments it was made isn't known. Apply the patcher first, and add it then."
            )


def _checkpoint(model: PreTrainedModel, base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model as its checkpoint has them, without what is not from its config."""
    shapes = {name: each.shape for name, each in state_tensors(base).items()}
    own = {  # an adapter has what it is put around as its base_layer
        key if key in shapes else key.replace(".base_layer.", "."): value.detach()
        for key, value in model.state_dict().items()
    }
    return saved_state_dict(model, {key: value for key, value in own.items() if shapes.get(key) == value.shape})


def _made(load: Loaded, checkpoint: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters of a load that aren't those of the same name in a model."""
    own, new, made = state_tensors(model), state_tensors(load.model), dict[str, torch.Tensor]()
    for each in load.routing.routes:
        is_other = each.by or load.conversions.dropped or not own.keys() >= {*each.parameters}
        if not is_other or not new.keys() >= {*each.parameters}:
            continue
        parts = {key: checkpoint[key] for key in each.keys}
        if each.layout is not None and len({part.dtype for part in parts.values()}) > 1:
            raise InvalidPatcherError(
                f"Patcher.apply can't convert weights of several dtypes: {', '.join(compress(sorted(parts))[:3])} "
                "would be joined. Cast the model to one dtype first, with model.to(...)."
            )
        values = list(parts.values())
        made |= zip(each.parameters, each.layout.fuse(values) if each.layout is not None else values, strict=True)
    return {name: value for name, value in made.items() if name not in load.routing.absent}


def _constructed(
    model: PreTrainedModel, entries: tuple[InForce, ...] = (), own: tuple[InForce, ...] = ()
) -> Constructed:
    """What a load constructs of the same config: on the meta device, but for buffers, which have their values."""
    load, found = Request(model_class=stock_class(model), in_force=entries, own=own), list[Constructed]()  # type: ignore[arg-type]
    # In a context of its own, which knows of no load around this.
    contexts = Context().run(load.model_class.get_init_context, model.dtype, False, False, None)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(construct(load, found.append))
        made = load.model_class(model.config)
    for tensor in (*made.parameters(), *made.buffers()):
        mark_initialized(tensor)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=model.device)
    with construction_lock.held_for(type(made).__name__):
        made.initialize_weights()  # type: ignore[no-untyped-call]
    return found[0]


# --- a copy on the same weights --------------------------------------------------------------------------------------


def _cannot(what: str, instead: str) -> InvalidPatcherError:
    return InvalidPatcherError(f"Patcher.apply can't take {what}. {instead}")


def check_can_be_copied(model: Any) -> None:
    """Raise for what a copy would lack, or would share with the given model although the two must not."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidPatcherError(
            f"Patcher.apply takes a model of transformers, found {type(model).__name__}; "
            "take the model out of its wrapper."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise _cannot("a quantized model: its weights can't be restored", "Load it again with patcher=...")
    again = "Load it again with patcher=..., device_map=..."
    own: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        own.setdefault(id(parameter), name)
        if isinstance(parameter, DTensor):
            raise _cannot(
                f"a model that is split over processes ({name})",
                "Save it with save_pretrained, and load that with patcher=...",
            )
        if parameter.is_meta:
            raise _cannot("a model whose weights are offloaded", again)
        if has_gradient_hooks(parameter):
            raise _cannot(
                f"a hook on the gradient of {name}: a copy has other gradients", "Register it on the result."
            )
    own |= {id(module): path or "the model" for path, module in named_modules(model)}
    for path, module in named_modules(model):
        if hasattr(module, "_hf_hook"):
            raise _cannot(f"a model that accelerate has spread over devices ({own[id(module)]})", again)
        if is_compiled(module):
            raise _cannot(f"what is compiled ({own[id(module)]})", "Compile the result instead.")
        for name, value in vars(module).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if held := next((own[id(held)] for held in _closed_over(each) if id(held) in own), None):
                    raise _cannot(
                        f"{inside(path)}{name}: a function has {held} in its closure, and a copy would go on using "
                        "that of the given model",
                        "Bind it to its module with types.MethodType(function, module), or apply the patcher first.",
                    )


def _closed_over(value: Any, depth: int = 0) -> Iterator[Any]:
    """What a function holds in its closure, as do functions in that. A copy of a function has the same closure."""
    value = getattr(value, "__func__", value.func if isinstance(value, partial) else value)
    for cell in (value.__closure__ or ()) if isinstance(value, FunctionType) and depth < 5 else ():
        with suppress(ValueError):  # it is empty
            held = cell.cell_contents
            yield getattr(held, "__self__", held)
            yield from _closed_over(held, depth + 1)


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with parameters of its own on the same storage, and buffers of its own."""
    memo: dict[int, Any] = {}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for each in [*model.parameters(), *attributes]:
        if type(each) is nn.Parameter and id(each) not in memo:
            share_storage(each, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise _cannot(
            f"a model that can't be copied ({type(error).__name__}: {error})",
            "Take off what was added to it, or load it again with patcher=...",
        ) from error
    for _, module in named_modules(copied):
        forget_recorded(module)  # the hooks are installed anew, on what the modules are then
    return copied
