"""Replacing modules by their paths, once the outermost model has constructed all and before it uses them."""

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
    """Replace the modules that module mappings name, from the outside in.

    Raises:
        PatchConflictError: if two patterns map one module to different classes.
        PatchConstructionError: if a replacement can't be built, or the arguments of the original aren't known.
    """
    if not any(entry.patcher.module_mapping for entry in construction.rules.entries):
        return
    used: dict[str, frozenset[tuple[InForce, str]]] = {}
    paths = [""]
    for path in paths:  # grows by the children of each module
        if path and path not in used:
            _replace(construction, model, path, used)
        children = model.get_submodule(path)._modules
        paths += [inside(path) + name for name, child in children.items() if child is not None]


def _replace(
    construction: Construction, model: nn.Module, path: str, used: dict[str, frozenset[tuple[InForce, str]]]
) -> None:
    """Replace the module at a path if mappings match all of its paths.

    Args:
        used: replaced path -> the keys that matched it, which don't apply inside of it.
    """

    def used_around(path: str) -> frozenset[tuple[InForce, str]]:
        return frozenset().union(*(keys for outer, keys in used.items() if path.startswith(f"{outer}.")))

    rules, module = construction.rules, model.get_submodule(path)
    cls = stock_class(module)
    match = rules.match_path(path, cls, used_around(path))
    if match is None:
        return
    paths = [other for other, submodule in named_modules(model) if submodule is module]
    for other in paths:
        other_match = rules.match_path(other, cls, used_around(other))
        if other_match is None:
            member = match.entry, "module_mapping"
            problem = (
                f"module_mapping: {match.key!r} names {path}, which is {other} as well: a module at two paths is "
                f"replaced where both are named; add {other!r} with the same class"
            )
            outcome = Outcome(frozenset({(*member, match.key)}), {(*member, ((path, other),)): partial(str, problem)})
            construction.outcome |= outcome
            return
        if other_match.replacement is not match.replacement:
            raise PatchConflictError(
                f"module_mapping: {path} and {other} are one module, and {match.key!r} maps it to "
                f"{match.replacement.__qualname__}, {other_match.key!r} to {other_match.replacement.__qualname__}. "
                "Map both to one class."
            )
    if type(module) is not match.replacement:  # as in a part that was loaded separately
        module = rebuilt(construction, path, module, match)
    for other in paths:
        parent, _, name = other.rpartition(".")
        model.get_submodule(parent)._modules[name] = module
        keys = rules.keys_at(other, used_around(other))
        used[other] = used_around(other).union(keys)
        construction.outcome |= Outcome(frozenset((entry, "module_mapping", key) for entry, key in keys))


def rebuilt(construction: Construction, path: str, module: nn.Module, match: Match) -> nn.Module:
    """Build the replacement or fused class of a constructed module with that module's arguments.

    Raises:
        PatchConstructionError: if it can't be built, or the arguments aren't known.
    """
    cls = stock_class(module)
    if recorded := (construction.arguments or {}).get(id(module)):
        _, args, kwargs = recorded
    elif cls.__module__.startswith("torch."):
        args, kwargs = _attributes(path, module, match)
    else:
        by = "a copy of another module" if is_modeling_module(cls.__module__) else f"built by code in {cls.__module__}"
        raise PatchConstructionError(
            f"{_subject(path, match)}, and with which arguments the {cls.__qualname__} there was made can't be known: "
            f"it is {by}. {_advice(path, match)}"
        )
    new = match.original.__new__(match.original)
    construction.build(new, match, args, kwargs)
    new.train(module.training)
    return new


def _attributes(path: str, module: nn.Module, match: Match) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return constructor arguments of a module of torch, from its attributes of the same names.

    Defaults are left out if the replacement doesn't take them.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    accepted = inspect.signature(match.replacement).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype") or name.startswith("_"):
            continue
        value = getattr(module, name, parameter)
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_variadic or value is parameter or isinstance(value, nn.Module) or inspect.ismethod(value):
            raise PatchConstructionError(
                f"{_subject(path, match)}, a {type(module).__qualname__} of torch, whose constructor takes "
                f"{parameter}, and that isn't among its attributes. {_advice(path, match)}"
            )
        if name == "bias" and not isinstance(value, bool):  # the attribute is the parameter
            value = value is not None
        if parameter.default is parameter.empty:
            args.append(value)
        elif accepts_all or name in accepted or value != parameter.default:
            kwargs[name] = value
    for weight in module.parameters(recurse=False):
        if weight.dtype != torch.get_default_dtype():
            kwargs["dtype"] = weight.dtype
    return tuple(args), kwargs


def _subject(path: str, match: Match) -> str:
    return f"{match.key!r} takes {path}" if match.field == "fusions" else f"module_mapping names {path}"


def _advice(path: str, match: Match) -> str:
    if match.field == "fusions":
        return "Leave it out of the fusion: its modules=... say which it takes."
    if not (parent := path.rpartition(".")[0]):
        return "Give the class of the model another in a class_mapping, one that builds it."
    return f"Replace what is around it, {parent!r}, by a class that builds it."
