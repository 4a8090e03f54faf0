"""The layouts that a module carries if its parameters aren't those of transformers, and state dicts in either layout.

The value is frozen, and is copied, pickled and moved with the module; it knows no model and no path. By it, state
dicts of any model that contains the module are converted to the layout of transformers, and loaded from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patcher.compat.models import add_load_hook, named_modules, remove_state_dict_hooks
from patcher.errors import PatchedWeightsError
from patcher.layouts.conversion import Converted
from patcher.layouts.layouts import Layout, by_itself, is_exact, named_parameter
from patcher.layouts.sharded import distribute_like, full_tensor, local_tensor
from patcher.patterns import in_state_dict, inside

#: The attribute of a module for its `ModuleLayouts`.
CARRIED = "_patcher_layouts"
#: The attribute of a class that was generated in one process, by which another one generates it: (function, *args).
RECIPE = "_patcher_recipe"


class PickledClass:
    """A class in a pickle, by its recipe: cloudpickle and dill pickle other classes by value."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    @staticmethod
    def of(cls: Any) -> Any:
        """Return what to pickle for a class: the class itself, if every process has it."""
        return PickledClass(cls) if RECIPE in vars(cls) else cls

    @staticmethod
    def read(value: Any) -> Any:
        """Return the class from what was pickled for it."""
        return value.cls if isinstance(value, PickledClass) else value

    def __reduce__(self) -> Any:  # unpickled as the class itself
        make, *args = vars(self.cls)[RECIPE]
        return make, tuple(PickledClass.of(arg) if isinstance(arg, type) else arg for arg in args)

    def __deepcopy__(self, memo: Any) -> PickledClass:
        return self


def reduce_by_recipe(self: Any, protocol: Any) -> Any:
    """The `__reduce_ex__` of a generated class, without effect on its subclasses."""
    cls = type(self)
    if RECIPE not in vars(cls):
        return object.__reduce_ex__(self, protocol)
    return (_bare, (PickledClass(cls),), self.__getstate__())


def _bare(pickled: Any) -> Any:
    return object.__new__(PickledClass.read(pickled))


@dataclass(frozen=True)
class ModuleLayouts:
    """How the parameters of a module are converted to those of transformers.

    Attributes:
        layouts: from parameters of transformers to those of a fused module.
        converted: from tensors of a checkpoint to what conversions of a patcher made of them.
        fusion: the name of the fusion family, or the family itself; None for modules of generated files.
        original: the stock class of a fused module.
        names: the names in the state dict of the stock module, in order, for a fused module.
    """

    layouts: tuple[Layout, ...] = ()
    converted: tuple[Layout, ...] = ()
    fusion: Any = None
    original: type[nn.Module] | None = None
    names: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleLayouts:
        return self

    def __reduce__(self) -> Any:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        original = None if self.original is None else PickledClass.of(self.original)
        return (_unpickled, (values | {"original": original},))

    @property
    def all(self) -> tuple[Layout, ...]:
        """All layouts: fused parameters are separated before conversions are reversed."""
        return (*self.layouts, *self.converted)

    @property
    def fused(self) -> frozenset[str]:
        """The fused parameters."""
        return frozenset(name for layout in self.layouts for name in layout.fused)

    @property
    def stock(self) -> frozenset[str]:
        """The stock parameters from which the fused ones are made."""
        return frozenset(name for layout in self.layouts for name in layout.stock)

    def separate(self, path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Convert the tensors of one module as `separated` does, by their names in the module.

        Raises:
            PatchedWeightsError: the module was changed so that they can't be known.
        """
        self._check(path, tensors)
        result, converted = dict(tensors), set[str]()
        for layouts in (self.layouts, self.converted):  # those of a group at once: they may exchange names
            places: dict[str, dict[str, torch.Tensor]] = {}
            for layout in layouts:
                parts = _separate(layout, inside(path), result)
                # They take the place of the first one: shards depend on the order.
                first = next((name for name in result if name in layout.fused), None)
                places |= {name: parts if name == first else {} for name in layout.fused}
                if isinstance(layout, Converted):
                    converted |= parts.keys()
            result = dict(chain.from_iterable(places.get(key, {key: value}).items() for key, value in result.items()))
        if self.names:
            order = {name: index for index, name in enumerate(self.names)}
            result = {name: result[name] for name in sorted(result, key=lambda name: order.get(name, len(order)))}
        return result, converted

    def _check(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for tensors that are quantized, were added to a fused module, or are present in both layouts."""
        prefix, fused = inside(path), self.fused
        fused_layers = tuple({f"{owner}." for name in fused if (owner := name.rpartition(".")[0])})
        for layout in self.all:
            for name in layout.fused:
                # Quantizers may have `weight._data` or `_weight_qdata` instead.
                layer = f"{name.rpartition('.')[0]}."
                others = () if name in tensors else (other for key, other in tensors.items() if key.startswith(layer))
                value = tensors.get(name, next(filter(is_quantized, others), None))
                if value is not None and is_quantized(value):
                    instead = "if only fusions made it, save_original_format=False saves it as it is"
                    if name not in fused:
                        instead = "keep the checkpoint in full precision, and quantize it at each load"
                    raise _not_saved(
                        f"{prefix}{name}",
                        f"it is quantized ({type(value).__name__} of {value.dtype}), and its scales fit this layout "
                        f"only ({instead})",
                    )
        for layout in self.layouts:
            both = [name for name in layout.stock if name in tensors and name not in layout.fused]
            if both and not set(layout.fused).isdisjoint(tensors):
                raise _not_saved(
                    f"{prefix}{both[0]}",
                    f"{', '.join(layout.fused[:2])} of a fused module holds it, and both are there. Assign "
                    "layers to a fused module by its attributes, or take the fusions off with "
                    "Patcher().apply(model)",
                )
        for name in sorted(tensors.keys() - fused - set(self.names)):
            if name.startswith(fused_layers):
                raise _not_saved(
                    f"{prefix}{name}",
                    "it was added to a fused layer, and the checkpoint has no place for it. Take it off before "
                    "saving, or take the fusions off with Patcher().apply(model) before it is added",
                )


@torch.no_grad()
def _separate(layout: Layout, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parts of one layout, {} if its parameters are absent: of a part of a model, or in stock's layout."""
    fused = {name: tensors[name] for name in layout.fused if name in tensors}
    if not fused:
        return {}
    if absent := [name for name in layout.fused if name not in fused]:
        raise _not_saved(
            f"{prefix}{absent[0]}",
            f"it is missing in the state dict, and {layout} has made it with others. Save a state dict with all "
            "of them",
        )
    for (name, tensor), shape in zip(fused.items(), layout.fused_shapes(), strict=True):
        if tensor.shape != shape:
            raise _not_saved(
                f"{prefix}{name}",
                f"it had the shape {tuple(shape)} when it was made, it has {tuple(tensor.shape)} now",
            )
    try:
        parts = dict(zip(layout.stock, layout.separate(list(fused.values())), strict=True))
    except ValueError as error:  # one of several has another dtype
        raise _not_saved(f"{prefix}{layout.stock[0]}", str(error)) from error
    wrong = [
        f"gives in reverse {name} the shape {tuple(parts[name].shape)}, the checkpoint had {tuple(shape)}"
        for name, shape in zip(layout.stock, layout.stock_shapes, strict=True)
        if tuple(parts[name].shape) != tuple(shape)
    ]
    if not wrong and not is_exact(layout, next(iter(fused.values()))):
        wrong = ["doesn't restore the values that it converts (tried with random ones)"]
    if wrong:
        raise _not_saved(
            f"{prefix}{layout.stock[0]}",
            f"{layout} {wrong[0]}. Correct its reverse, the `reverse_op` of an operation or the `separate` of a "
            "layout, or save the runtime layout yourself with `safetensors.torch.save_model(model, ...)`",
        )
    return {name: by_itself(part) for name, part in parts.items()}


def _unpickled(values: dict[str, Any]) -> ModuleLayouts:
    importlib.import_module("patcher").install()  # so that the unpickled model saves like this one
    return ModuleLayouts(**values | {"original": PickledClass.read(values["original"])})


class Carrier(NamedTuple):
    """A module that carries layouts, with its path."""

    path: str
    module: nn.Module
    carried: ModuleLayouts

    @property
    def prefix(self) -> str:
        """The prefix of its names in a state dict."""
        return inside(in_state_dict(self.path))

    @property
    def fused(self) -> list[Layout]:
        """The layouts of its fusion, by the names in the state dict of the model."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.layouts]

    @property
    def all(self) -> list[Layout]:
        """All of its layouts, by the names in the state dict of the model."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.all]


def carried_by(module: nn.Module) -> ModuleLayouts | None:
    """Return the layouts that a module carries, None if its parameters are those of transformers."""
    return module.__dict__.get(CARRIED)


def carriers(model: nn.Module) -> list[Carrier]:
    """Return the modules of a model that carry layouts."""
    return [
        Carrier(path, module, carried)
        for path, module in named_modules(model)
        if (carried := carried_by(module)) is not None
    ]


def fused_layouts(module: nn.Module) -> ModuleLayouts | None:
    """Return the layouts that a fused module carries, None if it isn't fused."""
    carried = carried_by(module)
    return carried if carried is not None and carried.layouts else None


def fused_modules(model: nn.Module) -> list[Carrier]:
    """Return the fused modules of a model."""
    return [carrier for carrier in carriers(model) if carrier.carried.layouts]


def separated(
    carrying: Iterable[Carrier], state_dict: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Convert a state dict to the layout of transformers; return also which names are tensors of a checkpoint.

    Raises:
        PatchedWeightsError: some of it can't be known.
    """
    result, converted = dict(state_dict), set[str]()
    by_depth: dict[int, dict[str, Carrier]] = {}
    for carrier in carrying:
        by_depth.setdefault(carrier.prefix.count("."), {})[carrier.prefix] = carrier
    for depth, same in sorted(by_depth.items(), reverse=True):  # modules inside of others first, the model itself last
        # The tensors of each module, in the place of its first one: shards depend on the order.
        grouped: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in result.items():
            prefix = "".join(f"{part}." for part in key.split(".", depth)[:depth])
            grouped.setdefault(prefix if prefix in same else key, {})[key] = value
        result = {}
        for prefix, tensors in grouped.items():
            if (owner := same.get(prefix)) is not None:
                inner = {key.removeprefix(prefix): value for key, value in tensors.items()}
                inner, names = owner.carried.separate(in_state_dict(owner.path), inner)
                tensors = {f"{prefix}{name}": value for name, value in inner.items()}
                converted |= {f"{prefix}{name}" for name in names}
            result |= tensors
    return result, converted


def _not_saved(name: str, reason: str) -> PatchedWeightsError:
    return PatchedWeightsError(f"{name} can't be saved in the original format: {reason}.")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a quantizer's: a subclass, or one of a one-byte dtype."""
    tensor = local_tensor(tensor)
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return not is_plain or (tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool)


# --- state dicts that are loaded -------------------------------------------------------------------------------------


def carry(module: nn.Module, carried: ModuleLayouts | None) -> None:
    """Have a module carry layouts, and load state dicts in the layout of transformers; None reverts that.

    The load hook refers to the tables of the module and not to the module itself, which it would keep alive. So it
    also works for shallow copies of the module.
    """
    remove_state_dict_hooks(module, lambda hook: isinstance(hook, _JoinParts) or hook is _mark_layout)
    if carried is None:
        module.__dict__.pop(CARRIED, None)
        return
    module.__dict__[CARRIED] = carried
    groups = (carried.converted, carried.layouts)  # converted tensors may be fused afterwards
    add_load_hook(module, _JoinParts(groups, module._parameters, module._modules))
    if any(_ambiguous_names(layout, group) for group in groups for layout in group):
        module.register_state_dict_post_hook(_mark_layout)  # type: ignore[no-untyped-call]


#: Whether the state dict that is being loaded is known to be in the layout of transformers.
_ORIGINAL: ContextVar[bool] = ContextVar("patcher_original_layout", default=False)
#: In the metadata of a state dict, where a module says that its parameters are those of the patched module.
_MARK = "patcher"


@contextmanager
def in_original_layout() -> Iterator[None]:
    """State dicts that are loaded in the block are in the layout of transformers, also by names that both have."""
    token = _ORIGINAL.set(True)
    try:
        yield
    finally:
        _ORIGINAL.reset(token)


def is_in_original_layout() -> bool:
    """Whether the state dict that is being loaded is known to be in the layout of transformers."""
    return _ORIGINAL.get()


def _mark_layout(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[_MARK] = True


def _fused_shapes(layouts: Iterable[Layout], names: Iterable[str]) -> dict[str, torch.Size]:
    """Return fused parameter -> its shape, of layouts with one of these names."""
    named = [layout for layout in layouts if not set(layout.fused).isdisjoint(names)]
    return {name: shape for layout in named for name, shape in zip(layout.fused, layout.fused_shapes(), strict=True)}


def _ambiguous_names(layout: Layout, group: Iterable[Layout]) -> list[str]:
    """Return the names that parts of a layout and fused parameters of the same shape have."""
    fused = _fused_shapes(group, layout.stock)
    return [name for name, shape in zip(layout.stock, layout.stock_shapes, strict=True) if fused.get(name) == shape]


class _JoinParts:
    """A load hook that replaces stock parameters in a state dict by those of the module.

    Parameters that don't fit are reported like torch's.
    """

    def __init__(self, groups: tuple[tuple[Layout, ...], ...], parameters: Any, modules: Any) -> None:
        self.groups, self._parameters, self._modules = groups, parameters, modules

    def __call__(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        for layout, parts in self._pop_parts(prefix, state_dict, local_metadata, error_msgs):
            given = [name for name in layout.fused if f"{prefix}{name}" in state_dict]
            current = {name: named_parameter(self, name) for name in layout.fused}
            if parts and given:
                error_msgs.append(
                    f"{prefix}{next(iter(parts))} and {prefix}{given[0]} are both in the state dict, and one is made "
                    "of the other: which is meant can't be known. Take one of them out. Where a tool has filled in "
                    "what the model has (set_model_state_dict of torch.distributed.checkpoint with "
                    "full_state_dict=True), use patcher.load_original_state_dict(model, state_dict), with a state "
                    "dict that has not been filled in."
                )
            elif parts or (_ORIGINAL.get() and not given and None not in current.values()):
                fused = _fuse_parts(layout, parts, prefix, current, missing_keys, error_msgs, assign=assign)
                # A parameter that is left as it is isn't missing: its parts are, or an error was reported.
                state_dict.update({f"{prefix}{name}": value for name, value in fused.items() if value is not None})

    def _pop_parts(
        self, prefix: str, state_dict: dict[str, Any], local_metadata: Mapping[str, Any], error_msgs: list[str]
    ) -> Iterator[tuple[Layout, dict[str, torch.Tensor]]]:
        """Pop the stock parameters of each layout from a state dict, unless that has the parameters of the module."""

        def pop(layout: Layout, group: tuple[Layout, ...]) -> dict[str, torch.Tensor]:
            values = {name: state_dict[f"{prefix}{name}"] for name in layout.stock if f"{prefix}{name}" in state_dict}
            fused = {} if _ORIGINAL.get() else _fused_shapes(group, values)
            ambiguous = [name for name in _ambiguous_names(layout, group) if name in fused]
            if ambiguous and not local_metadata.get(_MARK):
                error_msgs.append(
                    f"{prefix}{ambiguous[0]} has the same name and shape before and after {layout}, and the "
                    "state dict doesn't say which it is. For the layout of transformers use "
                    "patcher.load_original_state_dict(model, state_dict); for that of the patched model the state "
                    "dict that its state_dict() gave."
                )
                # torch, and the hooks of inner modules, write what they find beside errors.
                for name in values.keys() & set(ambiguous):
                    del state_dict[f"{prefix}{name}"]
                    if (own := named_parameter(self, name)) is not None:
                        state_dict[f"{prefix}{name}"] = own
            # A name that both layouts have is that of a part if it has the shape of one.
            parts = [name for name, value in values.items() if not ambiguous and value.shape != fused.get(name)]
            return {name: state_dict.pop(f"{prefix}{name}") for name in parts}

        for group in self.groups:  # all parts before one is written: layouts may exchange names
            yield from [(layout, pop(layout, group)) for layout in group]


def _fuse_parts(
    layout: Layout,
    parts: Mapping[str, torch.Tensor],
    prefix: str,
    current: Mapping[str, nn.Parameter | None],
    missing_keys: list[str],
    error_msgs: list[str],
    *,
    assign: bool,
) -> Mapping[str, Any]:
    """Return the parameters of a module made from parts, or the current ones if the parts don't fit."""
    fitting = {}
    for name, shape in zip(layout.stock, layout.stock_shapes, strict=True):
        if name not in parts:
            missing_keys.append(f"{prefix}{name}")
        elif parts[name].shape == shape:
            fitting[name] = parts[name]
        else:
            error_msgs.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {parts[name].shape} from "
                f"checkpoint, the shape in current model is {torch.Size(shape)}."
            )
    try:
        return _fuse(layout, fitting, current, assign) if fitting else current
    except Exception as error:  # of a layout or an operation: reported with the others, as torch does
        error_msgs.append(f"{prefix}{', '.join(fitting)} can't be written into {layout}: {error}")
        return current


@torch.no_grad()
def _fuse(
    layout: Layout, parts: Mapping[str, torch.Tensor], current: Mapping[str, nn.Parameter | None], assign: bool
) -> dict[str, torch.Tensor]:
    """Fuse parts; those that are absent are taken from the current parameters."""
    for name, parameter in current.items():
        if parameter is None or is_quantized(parameter):
            kind = "gone" if parameter is None else f"quantized ({type(parameter).__name__} of {parameter.dtype})"
            raise ValueError(f"{name} is {kind}. Load the model again with from_pretrained(..., patcher=...)")
    is_split = any(isinstance(parameter, DTensor) for parameter in current.values())
    if is_split and not _ORIGINAL.get() and not all(isinstance(part, DTensor) for part in parts.values()):
        raise ValueError(
            "these are whole tensors, and the parameter is split over processes. Use "
            "patcher.load_original_state_dict(model, state_dict), in every process with all tensors"
        )
    parts = {name: full_tensor(part) for name, part in parts.items()}
    tensors = dict(parts)
    if absent := [name for name in layout.stock if name not in parts]:
        values = [parameter.detach() for parameter in current.values() if parameter is not None]
        kinds = {(part.dtype, part.device) for part in parts.values()}
        if values[0].is_meta or (assign and kinds != {(values[0].dtype, values[0].device)}):
            raise ValueError(
                f"the values of {', '.join(absent)} aren't there in the type and on the device of the others. Give "
                "all parts of a tensor in one state dict, or leave out assign=True"
            )
        rest = dict(zip(layout.stock, layout.separate([full_tensor(value) for value in values]), strict=True))
        tensors = {name: parts[name].to(values[0].device) if name in parts else rest[name] for name in layout.stock}
    elif assign and len({part.dtype for part in parts.values()}) > 1:
        raise ValueError("with assign=True the parts of one tensor need one dtype")
    fused = layout.fuse([tensors[name].detach() for name in layout.stock])
    result = {name: tensor for name, tensor in zip(layout.fused, fused, strict=True) if name in current}
    if assign:  # a parameter doesn't share its storage
        result = {name: by_itself(tensor) for name, tensor in result.items()}
    return {name: distribute_like(tensor, current[name]) for name, tensor in result.items()}
