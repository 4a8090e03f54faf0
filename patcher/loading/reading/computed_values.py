"""What the `__init__` of a replacement computes, where a load needs it: from the values that the checkpoint gives.

The replacement is built once more, after the weights have been read. What a parameter of the checkpoint is initialised
with is of no interest to anybody, so it stays on meta; if something was computed from it, it has its value from the
checkpoint instead, from its registration on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import named_parameters
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Built, Construction
from patcher.construction.init_hooks import building
from patcher.construction.meta_init import MetaInit
from patcher.construction.plain_tensors import TORCH_ATTRIBUTES, attributes, carried, modules_in, tensors_in
from patcher.errors import PatchConstructionError, PatcherError
from patcher.layouts.sharded import one_piece, whole
from patcher.patterns import compress, inside

_SCALARS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, eq=False)
class BuiltAgain:
    """A replacement that was built once more.

    Attributes:
        path: where the model has the replacement.
        built: how it was built.
        module: what came of it this time.
        meta_init: where its parameters went.
        copies: of the parameters that had their values from the checkpoint: where the values lie -> the name.
        without_value: the parameters of the checkpoint whose values can't be had.
    """

    path: str
    built: Built
    module: nn.Module
    meta_init: MetaInit
    copies: Mapping[int, str]
    without_value: tuple[str, ...]

    def parameter(self, model: PreTrainedModel, key: str) -> nn.Parameter | None:
        """A parameter as `__init__` makes it; None if the model has something of a quantizer in its place.

        Raises:
            PatchConstructionError: it was computed from what has no value, or `__init__` makes another one each time.
        """
        expected = model.get_parameter(key)
        try:
            value = self.module.get_parameter(key.removeprefix(inside(self.path)))
        except AttributeError:
            value = None
        if type(one_piece(expected)) not in (nn.Parameter, torch.Tensor, type(value)):
            return None
        if value is None or value.shape != expected.shape:
            raise PatchConstructionError(
                f"{self.built.replacement.__qualname__}.__init__ has made {key} of shape {tuple(expected.shape)}, and "
                f"{'not at all' if value is None else f'with {tuple(value.shape)}'} when it was called again "
                "with the same arguments: what it registers must follow from its arguments alone."
            )
        return None if value is expected or self.lacks(key, value) else value

    def lacks(self, key: str, value: torch.Tensor) -> bool:
        """Whether a value was made on meta by `__init__` itself.

        Raises:
            PatchConstructionError: it was computed from what has no value.
        """
        if value.device.type == "meta" and self.without_value:
            raise _no_values(self.built, key, self.without_value)
        return value.device.type == "meta"

    def carry_attributes(self, known: Mapping[int, nn.Module]) -> None:
        """Give the model's modules the plain attributes of these, where they hold tensors or follow from weights.

        Args:
            known: id -> module, of all of the model.

        Raises:
            PatchConstructionError: an attribute that can't be carried over.
        """
        theirs = dict(self.module.named_modules(remove_duplicate=False))
        ours = {name: module_at(self.built.module, name) for name in theirs}
        memo: dict[int, Any] = dict(known)
        for given in modules_in((self.built.args, self.built.kwargs)):
            memo |= {id(module): module for module in given.modules()}
        memo |= {id(theirs[name]): module for name, module in ours.items() if module is not None}
        for key, parameter in named_parameters(self.module):
            if (own := _parameter_at(self.built.module, key)) is not None:
                memo[id(parameter)] = own
        for key, buffer in self.module.named_buffers(remove_duplicate=False):
            if (own_buffer := _buffer_at(self.built.module, key)) is not None:
                memo[id(buffer)] = own_buffer
        for name, module in theirs.items():
            target = ours[name]
            if target is not None and type(target) is type(module):
                for attribute, value in attributes(module):
                    self._carry(target, f"{inside(self.path)}{inside(name)}{attribute}", value, memo)
                if self.built.needs_values:
                    for attribute, value in vars(module).items():
                        if isinstance(value, _SCALARS) and attribute not in TORCH_ATTRIBUTES:
                            target.__dict__[attribute] = value

    def _carry(self, target: nn.Module, key: str, value: Any, memo: dict[int, Any]) -> None:
        def is_known(module: nn.Module) -> bool:
            return id(module) in memo

        name = key.rpartition(".")[2]
        tensors = tensors_in(value, is_known)
        if (not tensors and not self.built.needs_values) or target.__dict__.get(name) is value:
            return
        if len(tensors) > len(tensors_in(value, is_known, closures=False)) or len(modules_in(value)) > len(
            modules_in(value, closures=False)
        ):
            if not self.built.needs_values:
                return  # it holds what it was built with
            raise PatchConstructionError(
                f"{key} is a function that holds tensors or modules of {self.built.replacement.__qualname__}, so it "
                "can't be given what the checkpoint gives them: make it a method."
            )
        if not tensors and not modules_in(value):
            target.__dict__[name] = value  # as it is: a lock has no copy
            return
        for tensor in tensors:
            if id(self.meta_init.registered(tensor)) not in memo:
                self.lacks(key, tensor)
        try:
            target.__dict__[name] = carried(value, memo, lambda tensor: self._own(tensor, memo))
        except PatcherError:
            raise
        except Exception as error:
            raise PatchConstructionError(
                f"{key} was computed from weights in {self.built.replacement.__qualname__}.__init__, and can't be "
                f"copied: {type(error).__name__}: {error}. Keep tensors as buffers, or in lists and dicts."
            ) from error

    def _own(self, tensor: torch.Tensor, memo: Mapping[int, Any]) -> torch.Tensor:
        """What stands for a tensor in the model: a view of its parameter, if it is one of the copy."""
        if id(self.meta_init.registered(tensor)) in memo:
            own: torch.Tensor = memo[id(self.meta_init.registered(tensor))]
            return own
        if isinstance(tensor, nn.Parameter):
            return tensor
        name = None if tensor.device.type == "meta" else self.copies.get(tensor.untyped_storage().data_ptr())
        parameter = None if name is None else self.built.module.get_parameter(name.removeprefix(inside(self.path)))
        if parameter is None or parameter.dtype != tensor.dtype or parameter.device != tensor.device:
            return tensor.detach()
        offset = parameter.storage_offset() + tensor.storage_offset()
        return parameter.detach().as_strided(tensor.size(), tensor.stride(), offset)


def build_again(
    model: PreTrainedModel,
    rules: ClassRules,
    path: str,
    built: Built,
    absent: Iterable[str],
    names: Mapping[int, str],
) -> BuiltAgain:
    """Build a replacement once more.

    Args:
        model: whose weights have been read.
        absent: the names of its parameters that the checkpoint hasn't.
        names: of those that it has, each with the place in which the replacement registered it.

    Raises:
        PatchConstructionError: it can't be built, or something is computed from what has no value.
    """
    wanted = [key.removeprefix(inside(path)) for key in absent]
    used_up = [each for each in (*built.args, *built.kwargs.values()) if isinstance(each, Iterator)]
    if used_up:
        raise PatchConstructionError(
            f"{built.replacement.__qualname__} has to be built once more for what it computes, and was built "
            f"from a {type(used_up[0]).__name__}, which can be read once: hand over a list."
        )
    construction = Construction(rules, is_skeleton=True)

    def build(meta_init: MetaInit) -> nn.Module:
        with building(construction):
            return construction.build_again(built, meta_init)

    if not built.needs_values:
        try:
            meta_init = MetaInit(to_meta=True, moved=names)
            module = build(meta_init)
        except PatchConstructionError:
            pass  # it has asked for a value
        else:
            made = dict(named_parameters(module))
            if all(made[name].device.type != "meta" for name in wanted if name in made):
                return BuiltAgain(path, built, module, meta_init, {}, ())
    given = {number: value for number, key in names.items() if (value := _value(model, key)) is not None}
    while True:
        without = tuple(key for number, key in names.items() if number not in given)
        try:
            meta_init = MetaInit(to_meta=True, moved=names, given=given)
            module = build(meta_init)
        except PatchConstructionError as error:
            if not without:
                raise
            raise _no_values(built, "something", without) from error
        modules = dict(module.named_modules(remove_duplicate=False))
        others = [number for number in given if _is_another(model, modules, path, names[number])]
        if not others:
            break
        for number in others:  # what lies there now only looks like the value
            del given[number]
    copies = {value.untyped_storage().data_ptr(): names[number] for number, value in given.items()}
    return BuiltAgain(path, built, module, meta_init, copies, without)


def _value(model: PreTrainedModel, key: str) -> torch.Tensor | None:
    """A copy of the value of a parameter; None where it isn't one tensor of ordinary numbers in memory."""
    parameter = _parameter_at(model, key)
    if parameter is None or parameter.device.type == "meta":
        return None
    value = one_piece(parameter.data)
    if type(value) is not torch.Tensor:
        return None
    plain = value.dtype.itemsize > 1 if value.is_floating_point() else type(parameter) is nn.Parameter
    if not plain:
        return None
    found: torch.Tensor = whole(parameter.detach()).to("cpu", copy=True)
    return found


def _is_another(model: PreTrainedModel, made: Mapping[str, nn.Module], path: str, key: str) -> bool:
    """Whether a parameter belongs to a module that a quantizer, or a fusion, has put in the place of the one built."""
    owner = key.rpartition(".")[0]
    built = made.get(owner.removeprefix(path).removeprefix("."))
    return built is not None and type(module_at(model, owner)) is not type(built)


def _no_values(built: Built, key: str, names: Iterable[str]) -> PatchConstructionError:
    return PatchConstructionError(
        f"{built.replacement.__qualname__}.__init__ computes {key} from weights of the checkpoint, and these have no "
        f"values there: {', '.join(compress(names))} (quantized, sharded, or on the disk). Load the model without "
        "that, or compute it in forward."
    )


def module_at(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module at a path, if there is one."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _buffer_at(module: nn.Module, key: str) -> torch.Tensor | None:
    try:
        return module.get_buffer(key)
    except AttributeError:
        return None


def _parameter_at(module: nn.Module, key: str) -> nn.Parameter | None:
    try:
        return module.get_parameter(key)
    except AttributeError:
        return None
