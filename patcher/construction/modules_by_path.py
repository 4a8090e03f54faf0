"""Modules that are replaced by their path: when the outermost model has constructed all, before it looks at them."""

from __future__ import annotations

import inspect
import itertools
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


def replace_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Build the replacements of the modules that a module mapping names, from the outside in.

    Raises:
        PatchConflictError: two patterns ask for different classes in place of one module.
        PatchConstructionError: a replacement can't be built, or the arguments of what it replaces can't be known.
    """
    if not any(entry.patcher.module_mapping for entry in construction.rules.entries):
        return
    used: dict[str, frozenset[tuple[InForce, str]]] = {}
    for depth in itertools.count():
        paths_of: dict[int, list[str]] = {}
        for path, module in named_modules(model):
            paths_of.setdefault(id(module), []).append(path)
        del paths_of[id(model)]
        depths = [min(path.count(".") for path in paths) for paths in paths_of.values()]
        if depth > max(depths, default=-1):
            break
        for at, paths in zip(depths, paths_of.values(), strict=True):
            if at == depth and paths[0] not in used:
                _replace(construction, model, paths, used)


def _replace(
    construction: Construction, model: nn.Module, paths: list[str], used: dict[str, frozenset[tuple[InForce, str]]]
) -> None:
    """Replace the module at some paths, if all of them are named.

    Args:
        used: the paths that are replaced, and the keys that have done it: they mean nothing inside of that.
    """
    rules, module = construction.rules, model.get_submodule(paths[0])
    around = {path: _used_around(path, used) for path in paths}
    found = {path: rules.match_path(path, stock_class(module), around[path]) for path in paths}
    matches = {path: match for path, match in found.items() if match is not None}
    if not matches:
        return
    path, match = next(iter(matches.items()))
    if other := next((other for other in paths if other not in matches), None):
        named = match.entry, "module_mapping"
        problem = (
            f"module_mapping: {match.key!r} names {path}, which is {other} as well: a module at two paths is replaced "
            f"where both are named; add {other!r} with the same class"
        )
        construction.outcome |= Outcome(
            frozenset({(*named, match.key)}), {(*named, ((path, other),)): lambda: problem}
        )
        return
    for each, its in matches.items():
        if its.replacement is not match.replacement:
            raise PatchConflictError(
                f"module_mapping: {path} and {each} are one module, and {match.key!r} maps it to "
                f"{match.replacement.__qualname__}, {its.key!r} to {its.replacement.__qualname__}. Map both to "
                "one class."
            )
    if type(module) is not match.replacement:  # as it is of a part that was loaded separately
        module = rebuilt(construction, path, module, match)
    for path in paths:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = module
        keys = rules.keys_at(path, around[path])
        used[path] = around[path].union(keys)
        construction.outcome |= Outcome(frozenset((entry, "module_mapping", key) for entry, key in keys))


def _used_around(path: str, used: dict[str, frozenset[tuple[InForce, str]]]) -> frozenset[tuple[InForce, str]]:
    """The keys that have replaced what is around the module at a path."""
    return frozenset().union(*(keys for outer, keys in used.items() if path.startswith(f"{outer}.")))


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
