"""How a module is fused: its class, its parameters, the layouts that it carries, and how it is pickled.

The class that a family makes for a module is cached, so that two loads get the same one. It decides how a module is
converted: an existing module is assigned a rewritten class; a class with `from_module` is constructed from the module;
any other is constructed from the arguments of the original.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import nn

from patcher.compat.locks import lock_for_forks
from patcher.compat.models import (
    is_initialized,
    mark_initialized,
    named_modules,
    named_parameters,
)
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.fusions.families import name_or_fusion
from patcher.fusions.methods import is_importable, member
from patcher.fusions.old_names import Moved, OldNames
from patcher.layouts.carried import RECIPE, ModuleLayouts, carry, reduce_by_recipe
from patcher.layouts.layouts import Layout, Rows, is_alone

if TYPE_CHECKING:
    from patcher.fusions.base import Fusion

_lock = lock_for_forks()
#: original class -> (fusion, recipe) -> fused class
_classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.WeakValueDictionary[Any, type[nn.Module]]]
_classes = weakref.WeakKeyDictionary()
#: strong references to the fused classes of importable originals, which are never freed
_kept: dict[Any, type[nn.Module]] = {}


class MadeBy(NamedTuple):
    """The arguments of `fused_class` for a class."""

    fusion: Fusion
    original: type[nn.Module]
    recipe: Hashable


def original_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before it was fused."""
    made_by: MadeBy | None = getattr(type(module), "_made_by", None)
    return made_by.original if made_by is not None else type(module)


def fused_class(fusion: Fusion, original: type[nn.Module], recipe: Hashable) -> type[nn.Module]:
    """Return the class that a family makes of another one; cached as long as the original runs the same code."""
    key = (fusion, recipe)
    with _lock:
        classes = _classes.setdefault(original, weakref.WeakValueDictionary())
        cls = classes.get(key)
        if cls is None or not _is_current(cls, original):
            made: Any = fusion.make_class(original, recipe)
            if not (isinstance(made, type) and issubclass(made, nn.Module)):
                what = f"{fusion!r}.make_fused_class({original.__name__})"
                raise InvalidPatcherError(f"{what} must return a subclass of nn.Module, found {made!r}.")
            cls = classes[key] = made
            if issubclass(cls, FusedModule) or not is_importable(cls):
                cls._made_by = MadeBy(fusion, original, recipe)  # type: ignore[attr-defined]
                setattr(cls, RECIPE, (fused_class, fusion, original, recipe))
                if not issubclass(cls, FusedModule) and "__reduce_ex__" not in vars(cls):
                    cls.__reduce_ex__ = reduce_by_recipe  # type: ignore[method-assign]
            if is_importable(original):  # others are freed with their last object
                _kept[original, key] = cls
        return cls


def _is_current(cls: type[nn.Module], original: type[nn.Module]) -> bool:
    """Whether the methods that a class was made from are still those of the original, with the same code."""
    return all(
        member(original, name) is attribute and inspect.unwrap(attribute).__code__ is code
        for name, (attribute, code) in getattr(cls, "_made_from", {}).items()
    )


def fused_class_of(fusion: Fusion, module: nn.Module) -> type[nn.Module]:
    """Return the fused class of a module."""
    return fused_class(fusion, original_of(module), fusion.recipe(module))


def fused_classes() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """Return pairs of the rewritten classes that exist and their originals."""
    with _lock:
        pairs = [(fused, original) for original, classes in _classes.items() for fused in classes.values()]
    return [(fused, original) for fused, original in pairs if issubclass(fused, FusedModule)]


def takes_modules(cls: type[nn.Module]) -> bool:
    """Whether a fused module is made from the existing module, rather than from constructor arguments."""
    return issubclass(cls, FusedModule) or hasattr(cls, "from_module")


class FusedModule(OldNames):
    """The base of rewritten classes: subclasses of modeling classes with other parameters and methods."""

    _made_by: ClassVar[MadeBy]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        made_by, module = self._made_by, cast(nn.Module, self)
        layouts, name = made_by.fusion.layouts(module), name_or_fusion(made_by.fusion)
        fuse_in_place([(module, layouts, made_by.original, name)])

    __reduce_ex__ = reduce_by_recipe


def put_in_place(module: nn.Module, cls: Any, layouts: Iterable[Layout], fusion: Any) -> nn.Module:
    """Replace a module by one that the `from_module` of a class constructs, with its values.

    Raises:
        PatchConstructionError: the new module doesn't have the parameters that the layouts give.
    """
    layouts = tuple(layout.of(module) for layout in layouts)
    with torch.device("meta"):
        new: nn.Module = cls.from_module(module)
    fused = _fused_parameters(module, layouts, {rows: rows.fused_shapes() for rows in layouts if type(rows) is Rows})
    taken = {name for layout in layouts for name in layout.stock}
    expected = fused | {name: parameter for name, parameter in module.named_parameters() if name not in taken}
    shapes = {name: tuple(parameter.shape) for name, parameter in new.named_parameters()}
    expected_shapes = {name: tuple(parameter.shape) for name, parameter in expected.items()}
    if shapes != expected_shapes:
        raise PatchConstructionError(
            f"{cls.__qualname__}.from_module() gives a module with the parameters {shapes}, and with the layouts of "
            f"{fusion!r} it has {expected_shapes}. Say what each parameter of a {type(module).__name__} becomes."
        )
    for name, parameter in expected.items():
        owner, _, last = name.rpartition(".")
        new.get_submodule(owner)._parameters[last] = parameter
    new.train(module.training)
    _mark_layers(new, layouts, _initialized_layers(module), kept=["", *(expected.keys() - fused.keys())])
    carry(new, ModuleLayouts(layouts, (), fusion, type(module), tuple(module.state_dict(keep_vars=True))))
    return new


def fuse_in_place(modules: Iterable[tuple[nn.Module, Iterable[Layout], type[nn.Module], Any]]) -> None:
    """Replace the parameters of modules by the fused ones, step by step: equal layouts are resolved once.

    A two-dimensional `<name>.weight` becomes the weight of an `nn.Linear` called `<name>`. The numbers of rows of
    joined parts are kept as `<name>_sizes`.

    Args:
        modules: for each module its layouts, its original class, and its fusion, by name or as an object.

    Raises:
        PatchConstructionError: the layouts leave a part of a layer behind.
    """
    resolved = [
        (module, tuple(layout if layout.stock_shapes else layout.of(module) for layout in layouts), *rest)
        for module, layouts, *rest in modules
    ]
    resolved = [entry for entry in resolved if entry[1]]
    rows = {layout for _, layouts, *_ in resolved for layout in layouts if type(layout) is Rows}
    shapes: dict[Layout, list[torch.Size]] = {layout: layout.fused_shapes() for layout in rows}
    carried = []
    for module, layouts, original, fusion in resolved:
        names = tuple(module.state_dict(keep_vars=True))
        _replace_parameters(module, layouts, _fused_parameters(module, layouts, shapes))
        carried.append((module, ModuleLayouts(layouts, (), fusion, original, names)))
    for module, module_layouts in carried:
        carry(module, module_layouts)


def _replace_parameters(module: nn.Module, layouts: Iterable[Layout], fused: Mapping[str, nn.Parameter]) -> None:
    initialized = _initialized_layers(module)
    before = list(module._modules)
    _remove(module, [name for layout in layouts for name in layout.stock])
    for layout in layouts:
        _add(module, {name: fused[name] for name in layout.fused}, layout.container)
    _mark_layers(module, layouts, initialized)
    # New children take the place of the first that is removed, to keep the order of the parameters.
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
    """Return the parameters that layouts give.

    Args:
        shapes: the shapes that `Rows` layouts give.
    """
    result, parameters = {}, dict(named_parameters(module))
    for layout in layouts:
        stock: list[Any] = [parameters[name] for name in layout.stock]
        if type(layout) is Rows and {parameter.device.type for parameter in stock} == {"meta"}:
            # Concatenating meta tensors takes a millisecond, for each layer of a load.
            tensors = [stock[0].detach().new_empty(shape) for shape in shapes[layout]]
        else:
            with torch.no_grad():
                tensors = list(map(_contiguous, layout.fuse([parameter.detach() for parameter in stock])))
        for name, tensor in zip(layout.fused, tensors, strict=True):
            fused = nn.Parameter(tensor, requires_grad=any(parameter.requires_grad for parameter in stock))
            if all(map(is_initialized, stock)):
                mark_initialized(fused)
            result[name] = fused
    return result


def _initialized_layers(module: nn.Module) -> set[str]:
    return {path for path, layer in named_modules(module) if is_initialized(layer)}


def _mark_layers(
    module: nn.Module, layouts: Iterable[Layout], initialized: set[str], kept: Iterable[str] = ()
) -> None:
    """Mark layers whose sources are initialised, so that transformers doesn't initialise them again."""
    sources: dict[str, set[str]] = {_owner(name): {_owner(name)} for name in kept}
    for layout in layouts:
        for name in layout.fused:
            sources.setdefault(_owner(name), set()).update(map(_owner, layout.stock))
    for layer, origins in sources.items():
        if origins <= initialized:
            mark_initialized(module.get_submodule(layer))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, copied if it shares its storage with another one."""
    return tensor.contiguous() if is_alone(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _remove(module: nn.Module, names: Iterable[str]) -> None:
    """Remove parameters, and the children that they leave empty."""
    taken: dict[str, list[str]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        taken.setdefault(owner, []).append(last)
    for owner in filter(None, taken):
        child = module.get_submodule(owner)
        members = {**child._parameters, **child._buffers, **child._modules}
        left = [name for name, value in members.items() if value is not None and name not in taken[owner]]
        if left:
            raise PatchConstructionError(
                f"The layouts take parameters of {owner} and leave {', '.join(left)}. Say what these become, too."
            )
    for owner, attributes in taken.items():
        if not owner:
            for name in attributes:
                del module._parameters[name]
            # `_init_weights` would look for the removed parameters; new layers are initialised by themselves.
            mark_initialized(module)
            continue
        parent, _, last = owner.rpartition(".")
        del module.get_submodule(parent)._modules[last]


def _add(module: nn.Module, parameters: Mapping[str, nn.Parameter], container: type[nn.Module]) -> None:
    for name, parameter in parameters.items():
        owner, _, last = name.rpartition(".")
        parent, path = module, owner.split(".") if owner else []
        for depth, part in enumerate(path):
            child = parent._modules.get(part)
            if child is None:
                is_linear = depth == len(path) - 1 and last == "weight" and parameter.dim() == 2
                # Not by the constructor, which would initialise values: seconds for 30,000 experts.
                child = parent._modules[part] = nn.Module.__new__(nn.Linear if is_linear else container)
                nn.Module.__init__(child)
                if is_linear:
                    child.__dict__.update(zip(("out_features", "in_features"), parameter.shape, strict=True))
                    child._parameters.update(weight=None, bias=None)
                child.__dict__["training"] = module.training
            parent = child
        parent._parameters[last] = parameter
