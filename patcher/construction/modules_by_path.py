"""Modules that are replaced by their path: when the outermost model has constructed all, before it looks at them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import is_modeling_module
from patcher.compat.models import named_modules, stock_class
from patcher.construction.class_rules import Match
from patcher.construction.construction import Construction
from patcher.construction.in_force import InForce, Outcome
from patcher.errors import PatchConflictError, PatchConstructionError
from patcher.patterns import inside


def replace_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Build the replacements of the modules that a module mapping names, from the outside in.

    Raises:
        PatchConflictError: two patterns ask for different classes in place of one module.
        PatchConstructionError: a replacement can't be built, or the arguments of what it replaces can't be known.
    """
    if not any(entry.patcher.module_mapping for entry in construction.rules.entries):
        return
    used: dict[str, frozenset[tuple[InForce, str]]] = {}
    waiting = [""]
    for path in waiting:  # which grows, as long as there are modules inside
        if path and path not in used:
            _replace(construction, model, path, used)
        children = model.get_submodule(path)._modules
        waiting += [inside(path) + name for name, child in children.items() if child is not None]


def _replace(
    construction: Construction, model: nn.Module, path: str, used: dict[str, frozenset[tuple[InForce, str]]]
) -> None:
    """Replace the module at a path, if all paths at which the model has it are named.

    Args:
        used: the paths that are replaced, and the keys that have done it: they mean nothing inside of that.
    """

    def used_around(path: str) -> frozenset[tuple[InForce, str]]:
        return frozenset().union(*(keys for outer, keys in used.items() if path.startswith(f"{outer}.")))

    rules, module = construction.rules, model.get_submodule(path)
    cls = stock_class(module)
    match = rules.match_path(path, cls, used_around(path))
    if match is None:
        return
    paths = [other for other, each in named_modules(model) if each is module]
    for other in paths:
        its = rules.match_path(other, cls, used_around(other))
        if its is None:
            named = match.entry, "module_mapping"
            problem = (
                f"module_mapping: {match.key!r} names {path}, which is {other} as well: a module at two paths is "
                f"replaced where both are named; add {other!r} with the same class"
            )
            outcome = Outcome(frozenset({(*named, match.key)}), {(*named, ((path, other),)): partial(str, problem)})
            construction.outcome |= outcome
            return
        if its.replacement is not match.replacement:
            raise PatchConflictError(
                f"module_mapping: {path} and {other} are one module, and {match.key!r} maps it to "
                f"{match.replacement.__qualname__}, {its.key!r} to {its.replacement.__qualname__}. Map both to "
                "one class."
            )
    if type(module) is not match.replacement:  # as it is of a part that was loaded separately
        module = rebuilt(construction, path, module, match)
    for other in paths:
        parent, _, name = other.rpartition(".")
        model.get_submodule(parent)._modules[name] = module
        keys = rules.keys_at(other, used_around(other))
        used[other] = used_around(other).union(keys)
        construction.outcome |= Outcome(frozenset((entry, "module_mapping", key) for entry, key in keys))


def rebuilt(construction: Construction, path: str, module: nn.Module, match: Match) -> nn.Module:
    """What is replaced by its path, or is fused, built with the arguments that made the constructed module there.

    Raises:
        PatchConstructionError: it can't be built, or the arguments can't be known.
    """
    cls = stock_class(module)
    if found := (construction.arguments or {}).get(id(module)):
        _, args, kwargs = found
    elif cls.__module__.startswith("torch."):
        args, kwargs = _attributes(path, module, match)
    else:
        by = "a copy of another module" if is_modeling_module(cls.__module__) else f"built by code in {cls.__module__}"
        raise PatchConstructionError(
            f"{_named(path, match)}, and with which arguments the {cls.__qualname__} there was made can't be known: "
            f"it is {by}. {_instead(path, match)}"
        )
    new = match.original.__new__(match.original)
    construction.build(new, match, args, kwargs)
    new.train(module.training)
    return new


def _attributes(path: str, module: nn.Module, match: Match) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the constructor of one of torch's own modules, from its attributes of the same names.

    What has its default is given where the replacement takes it, all else in any case.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    taken = inspect.signature(match.replacement).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype") or name.startswith("_"):  # not what makes a module what it is
            continue
        value = getattr(module, name, parameter)
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_variadic or value is parameter or isinstance(value, nn.Module) or inspect.ismethod(value):
            raise PatchConstructionError(
                f"{_named(path, match)}, a {type(module).__qualname__} of torch, whose constructor takes "
                f"{parameter}, and that isn't among its attributes. {_instead(path, match)}"
            )
        if name == "bias" and not isinstance(value, bool):  # the parameter, which the argument asks for
            value = value is not None
        if parameter.default is parameter.empty:
            args.append(value)
        elif takes_all or name in taken or value != parameter.default:
            kwargs[name] = value
    for own in module.parameters(recurse=False):
        if own.dtype != torch.get_default_dtype():
            kwargs["dtype"] = own.dtype
    return tuple(args), kwargs


def _named(path: str, match: Match) -> str:
    return f"{match.key!r} takes {path}" if match.field == "fusions" else f"module_mapping names {path}"


def _instead(path: str, match: Match) -> str:
    if match.field == "fusions":
        return "Leave it out of the fusion: its modules=... say which it takes."
    if not (parent := path.rpartition(".")[0]):
        return "Give the class of the model another in a class_mapping, one that builds it."
    return f"Replace what is around it, {parent!r}, by a class that builds it."
