"""One module fused: its class, its parameters, what it carries, and how it is pickled.

The class that a family makes for a module is made once and remembered, so that two loads get the same one. How a
module becomes one of it, its class says: a rewritten class takes the existing object; one with a `from_module` is
made from it; any other is built again from the arguments of its constructor.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from patcher.compat.models import (
    DisableTorchFunction,
    is_initialized,
    mark_initialized,
    named_modules,
    named_parameters,
)
from patcher.errors import PatchConstructionError
from patcher.fusions.families import fusion_named, is_our_own, shortest
from patcher.fusions.looks import member
from patcher.fusions.methods import is_importable
from patcher.fusions.old_names import Moved, OldNames
from patcher.layouts.carried import RECIPE, ModuleLayouts, reduce_by_recipe
from patcher.layouts.either_layout import carry
from patcher.layouts.layouts import Layout, Rows, is_alone

if TYPE_CHECKING:
    from patcher.fusions.base import Fusion

_lock = threading.RLock()
#: original -> (family, what decides the class) -> the class
_classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.WeakValueDictionary[Any, type[nn.Module]]]
_classes = weakref.WeakKeyDictionary()
#: those of classes that live as long as their modules
_kept: dict[Any, type[nn.Module]] = {}


class MadeBy(NamedTuple):
    """What a family has made a class of."""

    fusion: Fusion
    original: type[nn.Module]
    recipe: Hashable


def original_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without what a family has made of it."""
    made_by: MadeBy | None = getattr(type(module), "_made_by", None)
    return made_by.original if made_by is not None else type(module)


def fused_class(fusion: Fusion, original: type[nn.Module], recipe: Hashable) -> type[nn.Module]:
    """The class that a family makes of another one: the same one for the same question, as long as it runs the code
    that it was made from.
    """
    key = (fusion, recipe)
    with _lock:
        made = _classes.setdefault(original, weakref.WeakValueDictionary())
        cls = made.get(key)
        if cls is None or not _is_current(cls, original):
            cls = made[key] = fusion.make_class(original, recipe)
            if issubclass(cls, FusedModule) or not is_importable(cls):
                cls._made_by = MadeBy(fusion, original, recipe)  # type: ignore[attr-defined]
                setattr(cls, RECIPE, (fused_class, fusion, original, recipe))
                if not issubclass(cls, FusedModule) and "__reduce_ex__" not in vars(cls):
                    cls.__reduce_ex__ = reduce_by_recipe  # type: ignore[method-assign]
            if is_importable(original):  # others are freed with their last object
                _kept[original, key] = cls
        return cls


def _is_current(cls: type[nn.Module], original: type[nn.Module]) -> bool:
    """Whether the methods that a class was made from are still those of the original, and run the same code."""
    return all(
        inspect.unwrap(member(original, name)) is function and function.__code__ is code
        for name, (function, code) in getattr(cls, "_made_from", {}).items()
    )


def fused_class_of(fusion: Fusion, module: nn.Module) -> type[nn.Module]:
    """The class that a family makes of that of one module."""
    return fused_class(fusion, original_of(module), fusion.recipe(module))


def fused_classes() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """(fused, original) of the rewritten classes that have been made."""
    with _lock:
        made = [(fused, original) for original, found in _classes.items() for fused in found.values()]
    return [(fused, original) for fused, original in made if issubclass(fused, FusedModule)]


def takes_modules(cls: type[nn.Module]) -> bool:
    """Whether a fused class is made from the existing module, rather than from constructor arguments."""
    return issubclass(cls, FusedModule) or hasattr(cls, "from_module")


class FusedModule(OldNames):
    """What rewritten classes have in common: a class of transformers with other parameters and other methods."""

    _made_by: ClassVar[MadeBy]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        made_by, module = self._made_by, cast(nn.Module, self)
        fuse_in_place(module, made_by.fusion.layouts(module), made_by.original, shortest(made_by.fusion))

    __reduce_ex__ = reduce_by_recipe


def fuse(
    fusion: str | Fusion, module: nn.Module, cls: type[nn.Module], layouts: Iterable[Layout] | None = None
) -> nn.Module:
    """Make an existing module one of the fused class, with its values.

    Args:
        layouts: what becomes of its parameters, where that is known; otherwise the family decides.

    Raises:
        PatchConstructionError: the class doesn't have the parameters that the layouts of the family give.
    """
    layouts = tuple(fusion_named(fusion).layouts(module) if layouts is None else layouts)
    if not issubclass(cls, FusedModule):
        return put_in_place(module, cls, layouts, shortest(fusion))
    fuse_all([(fusion, module, cls, layouts)])
    return module


def fuse_all(modules: Sequence[tuple[str | Fusion, nn.Module, type[nn.Module], Iterable[Layout]]]) -> None:
    """Make modules those of rewritten classes, each with its family and its layouts.

    Raises:
        PatchConstructionError: the layouts leave a part of a layer behind.
    """
    names = {fusion: shortest(fusion) for fusion in dict.fromkeys(fusion for fusion, *_ in modules)}
    ours = {fusion for fusion, name in names.items() if is_our_own(name)}
    for is_ours in (True, False):
        some = [each for each in modules if (each[0] in ours) is is_ours]
        # Where a device is in force, every look at a tensor passes through a mode. Ours make tensors of tensors only.
        with DisableTorchFunction() if is_ours else nullcontext():
            _fuse_in_place([(module, layouts, type(module), names[fusion]) for fusion, module, _, layouts in some])
    for _, module, cls, _ in modules:
        module.__class__ = cls  # last: it answers to the old names


def put_in_place(module: nn.Module, cls: Any, layouts: Iterable[Layout], fusion: Any) -> nn.Module:
    """A module of a class with a `from_module`, in the place of another one, with its values.

    Raises:
        PatchConstructionError: its parameters aren't those that the layouts give.
    """
    layouts = tuple(layout.of(module) for layout in layouts)
    with torch.device("meta"):
        new: nn.Module = cls.from_module(module)
    fused = _fused_parameters(module, layouts, {each: each.fused_shapes() for each in layouts if type(each) is Rows})
    taken = {name for layout in layouts for name in layout.stock}
    wanted = fused | {name: parameter for name, parameter in module.named_parameters() if name not in taken}
    found = {name: tuple(parameter.shape) for name, parameter in new.named_parameters()}
    expected = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    if found != expected:
        raise PatchConstructionError(
            f"{cls.__qualname__}.from_module() gives a module with the parameters {found}, and with the layouts of "
            f"{fusion!r} it has {expected}. Say what each parameter of a {type(module).__name__} becomes."
        )
    for name, parameter in wanted.items():
        owner, _, last = name.rpartition(".")
        new.get_submodule(owner)._parameters[last] = parameter
    new.train(module.training)
    _mark_layers(new, layouts, _initialized_layers(module), kept=["", *(wanted.keys() - fused.keys())])
    carry(new, ModuleLayouts(layouts, (), fusion, type(module), tuple(module.state_dict(keep_vars=True))))
    return new


def fuse_in_place(module: nn.Module, layouts: Iterable[Layout], original: type[nn.Module], fusion: Any) -> None:
    """Give a module the parameters of the layouts in the place of its own.

    Each `<name>.weight` of two dimensions is that of an `nn.Linear` called `<name>`. Of joined rows the module keeps
    how many each part has, as `<name>_sizes`.

    Raises:
        PatchConstructionError: the layouts leave a part of a layer behind.
    """
    _fuse_in_place([(module, layouts, original, fusion)])


def _fuse_in_place(modules: Iterable[tuple[nn.Module, Iterable[Layout], type[nn.Module], Any]]) -> None:
    """The same for many, one step after the other: most of them are alike."""
    resolved = [
        (module, tuple(each if each.stock_shapes else each.of(module) for each in layouts), *rest)
        for module, layouts, *rest in modules
    ]
    resolved = [each for each in resolved if each[1]]
    rows = {each for _, layouts, *_ in resolved for each in layouts if type(each) is Rows}
    shapes: dict[Layout, list[torch.Size]] = {each: each.fused_shapes() for each in rows}
    carried = []
    for module, layouts, original, fusion in resolved:
        names = tuple(module.state_dict(keep_vars=True))
        _replace_parameters(module, layouts, _fused_parameters(module, layouts, shapes))
        carried.append((module, ModuleLayouts(layouts, (), fusion, original, names)))
    for module, each in carried:
        carry(module, each)


def _replace_parameters(module: nn.Module, layouts: Iterable[Layout], fused: Mapping[str, nn.Parameter]) -> None:
    initialized = _initialized_layers(module)
    before = list(module._modules)
    _remove(module, [name for layout in layouts for name in layout.stock])
    _add(module, fused)
    _mark_layers(module, layouts, initialized)
    # What is new takes the place of the first that is gone, so that parameters keep their order.
    new = [name for name in module._modules if name not in before]
    order = [name for old in before for name in ([old] if old in module._modules else new)] + new
    children = {name: module._modules[name] for name in order}
    module._modules.clear()
    module._modules.update(children)
    for layout in layouts:
        module.__dict__.update({name: Moved(name, layout.fused) for name in layout.stock if "." not in name})
        owner, _, last = layout.fused[0].rpartition(".")
        if isinstance(layout, Rows) and len(layout.stock) > 1 and last == "weight":
            setattr(module, f"{owner}_sizes", tuple(shape[0] for shape in layout.stock_shapes))


def _fused_parameters(
    module: nn.Module, layouts: Iterable[Layout], shapes: Mapping[Layout, list[torch.Size]]
) -> dict[str, nn.Parameter]:
    """The parameters that layouts give.

    Args:
        shapes: of those of rows.
    """
    result, held = {}, dict(named_parameters(module))
    for layout in layouts:
        parameters: list[Any] = [held[name] for name in layout.stock]
        if type(layout) is Rows and {each.device.type for each in parameters} == {"meta"}:
            # To join rows that have no values takes torch a millisecond, and a load does it for each layer.
            tensors = [parameters[0].detach().new_empty(shape) for shape in shapes[layout]]
        else:
            with torch.no_grad():
                tensors = [_alone(each) for each in layout.fuse([parameter.detach() for parameter in parameters])]
        for name, tensor in zip(layout.fused, tensors, strict=True):
            new = nn.Parameter(tensor, requires_grad=any(each.requires_grad for each in parameters))
            if all(is_initialized(each) for each in parameters):
                mark_initialized(new)
            result[name] = new
    return result


def _initialized_layers(module: nn.Module) -> set[str]:
    return {path for path, layer in named_modules(module) if is_initialized(layer)}


def _mark_layers(
    module: nn.Module, layouts: Iterable[Layout], initialized: set[str], kept: Iterable[str] = ()
) -> None:
    """Mark layers that are made of initialised ones: a model around them shall not initialise them once more."""
    made_of: dict[str, set[str]] = {_owner(name): {_owner(name)} for name in kept}
    for layout in layouts:
        for name in layout.fused:
            made_of.setdefault(_owner(name), set()).update(map(_owner, layout.stock))
    for layer, layers in made_of.items():
        if layers <= initialized:
            mark_initialized(module.get_submodule(layer))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is a piece of another one."""
    return tensor.contiguous() if is_alone(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _remove(module: nn.Module, names: Iterable[str]) -> None:
    """Take parameters off, and the children that have nothing else."""
    taken: dict[str, list[str]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        taken.setdefault(owner, []).append(last)
    for owner in filter(None, taken):
        child = module.get_submodule(owner)
        held = {**child._parameters, **child._buffers, **child._modules}
        left = [name for name, value in held.items() if value is not None and name not in taken[owner]]
        if left:
            raise PatchConstructionError(
                f"The layouts take parameters of {owner} and leave {', '.join(left)}. Say what these become, too."
            )
    for owner, own in taken.items():
        if not owner:
            for name in own:
                del module._parameters[name]
            # The model's `_init_weights` looks for what such a module had; the new layers have their own turn.
            mark_initialized(module)
            continue
        parent, _, last = owner.rpartition(".")
        del module.get_submodule(parent)._modules[last]


def _add(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, last = name.rpartition(".")
        at, path = module, owner.split(".") if owner else []
        for number, part in enumerate(path):
            child = at._modules.get(part)
            if child is None:
                is_linear = number == len(path) - 1 and last == "weight" and parameter.dim() == 2
                # By hand: a constructor would initialise values, seconds in vain for 30,000 experts.
                child = at._modules[part] = nn.Module.__new__(nn.Linear if is_linear else nn.Module)
                nn.Module.__init__(child)
                if is_linear:
                    child.__dict__.update(zip(("out_features", "in_features"), parameter.shape, strict=True))
                    child._parameters.update(weight=None, bias=None)
                child.__dict__["training"] = module.training
            at = child
        at._parameters[last] = parameter
