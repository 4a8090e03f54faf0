"""The arguments of a `Patcher`, checked and normalised once; messages say what to write instead."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns
from patcher.errors import InvalidPatcherError, PatchConflictError, did_you_mean
from patcher.expressions import check_number, checked_expression
from patcher.fusions.base import Fusion
from patcher.fusions.families import shortest
from patcher.layouts.transforms import describe, identity
from patcher.patterns import ROOT, check_path, is_expression
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import PREFIX, Like, like

T = TypeVar("T")


def typed(kind: type[T]) -> Callable[[str, Any], T]:
    def checked(field: str, value: Any) -> T:
        if not isinstance(value, kind):
            raise InvalidPatcherError(f"{field} must be a {kind.__name__}, found {value!r} ({type(value).__name__}).")
        return value

    return checked


def class_mapping(field: str, mapping: Any) -> Mapping[str, type[nn.Module]]:
    mapping = _checked_mapping(field, mapping, "class names to classes", 'Patcher({"LlamaMLP": MyMLP})')
    for key, cls in mapping.items():
        if not isinstance(key, str) or not key:
            raise InvalidPatcherError(
                f"{field}: a key is the name of a class, an expression, or like(...), found {key!r}; "
                f"write {getattr(key, '__name__', 'LlamaMLP')!r}."
            )
        if is_expression(key) and not isinstance(key, Like):
            checked_expression(f"{field} key {key!r}", key)
        _check_replacement(f"{field}[{key!r}]", cls)
    check_number(field, list(filter(is_expression, mapping)))
    return MappingProxyType(dict(mapping))


def module_mapping(field: str, mapping: Any) -> Mapping[str, type[nn.Module]]:
    instead = 'Patcher(module_mapping={"model.layers.{0..3}.mlp": MyMLP})'
    mapping = _checked_mapping(field, mapping, "paths of modules to classes", instead, may_be_like=False)
    for key, cls in mapping.items():
        try:
            check_path(key)
        except InvalidPatcherError as error:
            raise InvalidPatcherError(f"{field}: {error}") from error
        if key == ROOT:
            raise InvalidPatcherError(
                f"{field}: {key!r} is the model itself; give its class in class_mapping={{...}}, by its name."
            )
        _check_replacement(f"{field}[{key!r}]", cls)
    return MappingProxyType(dict(mapping))


def function_mapping(field: str, mapping: Any) -> Mapping[str, Callable[..., Any]]:
    instead = 'Patcher(function_mapping={"apply_rotary_pos_emb": my_rotary})'
    mapping = _checked_mapping(field, mapping, "names of functions to functions", instead)
    for key, function in mapping.items():
        module, _, name = getattr(key, "target", key).rpartition(":") if isinstance(key, str) else ("", "", "")
        if not name.isidentifier() or (":" in key and not all(part.isidentifier() for part in module.split("."))):
            raise InvalidPatcherError(
                f"{field}: a key is the name of a function, or module:name, found {key!r}; write for instance "
                "'apply_rotary_pos_emb' or 'transformers.models.llama.modeling_llama:apply_rotary_pos_emb'."
            )
        if not callable(function) or isinstance(function, type | nn.Module) or type(function).__hash__ is None:
            kind = type(function).__name__
            raise InvalidPatcherError(
                f"{field}[{key!r}] must be a function that has a hash, found {function!r} ({kind}); write a function "
                "with the parameters of the one that it replaces. Classes belong into class_mapping, by their "
                "names."
            )
    return MappingProxyType(dict(mapping))


def _checked_mapping(field: str, mapping: Any, what: str, instead: str, *, may_be_like: bool = True) -> dict[Any, Any]:
    """What must be a mapping. Keys that begin with "like:", as data has them, become what they mean."""
    if not isinstance(mapping, Mapping):
        raise InvalidPatcherError(
            f"{field} must map {what}, found {mapping!r} ({type(mapping).__name__}); write for instance {instead}."
        )
    if not may_be_like:
        return dict(mapping)
    return {like(key) if str(key).startswith(PREFIX) else key: value for key, value in mapping.items()}


def _check_replacement(what: str, cls: Any) -> None:
    """Raise for what can't be built in place of a module, or whose own conversions are none."""
    if isinstance(cls, ForwardOf):
        return
    if not isinstance(cls, type):
        kind = "an object of the class" if isinstance(cls, nn.Module) else type(cls).__name__
        raise InvalidPatcherError(
            f"{what} must be a class, found {cls!r} ({kind}); write the class itself, derived "
            "from the class that it replaces: not an object, its name, or a function that makes one."
        )
    if not issubclass(cls, nn.Module):
        raise InvalidPatcherError(
            f"{what} must be a subclass of nn.Module, found {cls.__qualname__}, which derives "
            f"from {', '.join(base.__name__ for base in cls.__bases__)}; write class {cls.__name__}(nn.Module)."
        )
    transforms(f"{cls.__qualname__}.conversion_mapping", getattr(cls, "conversion_mapping", ()))


def not_a_patcher(call: str, value: Any) -> InvalidPatcherError:
    """What a function raises that takes a Patcher and was given something else.

    Args:
        call: how the function is called, with `{}` for the patcher.
    """
    function = call.partition("(")[0].partition("{")[0]
    instead = call.format('Patcher({"LlamaMLP": MyMLP}, fusions=["qkv"])')
    if isinstance(value, tuple | list) and value and all(hasattr(each, "class_mapping") for each in value):
        instead = f"{call.format('patchers[0]')}, or {call.format('patchers[0] | patchers[1]')}"
    return InvalidPatcherError(
        f"{function} takes a patcher.Patcher, found {reprlib.repr(value)} ({type(value).__name__}); write for "
        f"instance {instead}."
    )


def expressions(field: str, values: str | Iterable[str]) -> tuple[str, ...]:
    listed = _listed(field, values, "an expression", str)
    for value in listed:
        if not isinstance(value, str):
            raise InvalidPatcherError(
                f"{field}: {value!r} ({type(value).__name__}) isn't an expression; write a string."
            )
        if not value:
            raise InvalidPatcherError(f"{field}: the empty expression is found everywhere; name what is meant.")
        checked_expression(f"{field}: {value!r}", value)
    check_number(field, listed)
    return tuple(dict.fromkeys(listed))


def _listed(field: str, values: Any, what: str, *single: type) -> list[Any]:
    """Several values, or one of a type of which one may be given alone."""
    if isinstance(values, single):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, Mapping | str):
        raise InvalidPatcherError(
            f"{field} takes {what} or a list of them, found {values!r} ({type(values).__name__})."
        )
    return list(values)


def transforms(field: str, values: WeightTransform | Iterable[WeightTransform]) -> tuple[WeightTransform, ...]:
    listed = _listed(field, values, "a weight transform", WeightTransform)
    taken: dict[tuple[Any, ...], WeightTransform] = {}
    result: dict[Any, WeightTransform] = {}
    for value in listed:
        if not isinstance(value, WeightTransform):
            raise InvalidPatcherError(
                f"{field}: {value!r} ({type(value).__name__}) isn't a weight transform; write a WeightConverter or a "
                "WeightRenaming of transformers.core_model_loading."
            )
        checked_expression(f"{field}: {describe(value)}", value.compiled_sources.pattern)
        for pattern in source_patterns(value):
            other = taken.setdefault((value.scope_prefix, value.base_model_prefix, pattern), value)
            if other is not value and identity(other) != identity(value):
                raise PatchConflictError(
                    f"Two {field} take the same tensors, {pattern!r}: {describe(other)} and "
                    f"{describe(value)}. Only one can; take one away."
                )
        result.setdefault(identity(value), copy_transform(value))
    return tuple(result.values())


def fusions(field: str, values: str | Fusion | Iterable[str | Fusion]) -> tuple[str | Fusion, ...]:
    if isinstance(values, Mapping):
        raise InvalidPatcherError(
            f"{field} takes no mapping, found {values!r}; write Patcher.from_fusion_config({values!r})."
        )
    return tuple(dict.fromkeys(map(shortest, _listed(field, values, "a fusion", str, Fusion, type))))


def specifier(field: str, value: Any) -> str:
    try:
        return str(SpecifierSet(typed(str)(field, value)))
    except InvalidSpecifier as error:
        raise InvalidPatcherError(
            f"{field}={value!r} isn't a version specifier; write for instance '>=5.20,<5.24' or '==5.23.0'."
        ) from error


def fingerprints(field: str, values: Any) -> Mapping[str, tuple[str, ...]]:
    instead, result = 'Patcher(fingerprints={"LlamaMLP": fingerprint(LlamaMLP)})', {}
    for key, value in _checked_mapping(field, values, "names to fingerprints", instead, may_be_like=False).items():
        listed = _listed(f"{field}[{key!r}]", value, "a fingerprint", str)
        if not isinstance(key, str) or not listed or not all(isinstance(item, str) and item for item in listed):
            raise InvalidPatcherError(f"{field}[{key!r}] must be a text or several, found {value!r}.")
        result[key] = tuple(sorted(set(listed)))
    return MappingProxyType(result)


def groups(field: str, values: Any) -> tuple[tuple[str, ...], ...]:
    result: dict[tuple[str, ...], None] = {}
    for value in _listed(field, values, "a group of class keys"):
        listed = [] if isinstance(value, str) else _listed(field, value, "a class key")
        if isinstance(value, str) or not all(isinstance(key, str) for key in listed):
            raise InvalidPatcherError(
                f"{field} takes groups of class keys, found {value!r}; write {field}=[['LlamaMLP', ...]]."
            )
        keys = tuple(sorted(set(listed)))
        if not keys:
            raise InvalidPatcherError(f"{field}: a group without class keys matches no model; take it out.")
        result[keys] = None
    return tuple(result)


def groups_of(mapping: Mapping[str, Any], groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """The groups of `alternatives` that say something; raises for what is in one and is not a class key.

    A key in no group is required, so that a group which holds it alone says something only beside others that have it.
    """
    for key in (key for group in groups for key in group if key not in mapping):
        hint = did_you_mean(str(key), mapping, f"it has {', '.join(map(repr, mapping)) or 'none'}.")
        raise InvalidPatcherError(f"alternatives: {key!r} isn't a key of the class_mapping; {hint}")
    return tuple(group for group in groups if len(group) > 1 or sum(group[0] in each for each in groups) > 1)


#: The parameters of `Patcher`: what checks each, and makes of it what is kept.
FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "class_mapping": class_mapping,
    "filtered_weight_conversion_patterns": expressions,
    "extra_weight_conversions": transforms,
    "module_mapping": module_mapping,
    "function_mapping": function_mapping,
    "fusions": fusions,
    "new_weights": expressions,
    "dropped_weights": expressions,
    "strict": typed(bool),
    "name": typed(str),
    "transformers": specifier,
    "fingerprints": fingerprints,
    "alternatives": groups,
}
#: Those that map what is replaced to what takes its place.
MODULE_MAPPINGS = ("class_mapping", "module_mapping")
MAPPINGS = (*MODULE_MAPPINGS, "function_mapping")
