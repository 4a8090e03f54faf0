"""The arguments of a `Patcher`, checked and normalised once; messages say what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns
from patcher.conversions.transforms import describe, identity
from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.expressions import checked_expression
from patcher.fusions.base import Fusion
from patcher.fusions.families import shortest
from patcher.patterns import is_expression, nearest

T = TypeVar("T")


def typed(kind: type[T]) -> Callable[[str, Any], T]:
    def checked(field: str, value: Any) -> T:
        if not isinstance(value, kind):
            raise InvalidPatcherError(f"{field} must be a {kind.__name__}, found {value!r} ({type(value).__name__}).")
        return value

    return checked


def class_mapping(field: str, mapping: Any) -> Mapping[str, type[nn.Module]]:
    if not isinstance(mapping, Mapping):
        raise InvalidPatcherError(
            f"{field} must map class names to classes, found {mapping!r} ({type(mapping).__name__}); "
            'write {"LlamaMLP": MyMLP}.'
        )
    for key, cls in mapping.items():
        if not isinstance(key, str) or not key:
            raise InvalidPatcherError(
                f"{field}: a key is the name of a class, or an expression, found {key!r}; "
                f"write {getattr(key, '__name__', 'LlamaMLP')!r}."
            )
        if is_expression(key):
            checked_expression(f"{field} key {key!r}", key)
        if not isinstance(cls, type):
            kind = "an object of the class" if isinstance(cls, nn.Module) else type(cls).__name__
            raise InvalidPatcherError(
                f"{field}[{key!r}] must be a class, found {cls!r} ({kind}); write the class itself, not an object."
            )
        if not issubclass(cls, nn.Module):
            raise InvalidPatcherError(
                f"{field}[{key!r}] must be a subclass of nn.Module, found {cls.__qualname__}, which derives "
                f"from {', '.join(base.__name__ for base in cls.__bases__)}; write class {cls.__name__}(nn.Module)."
            )
    return MappingProxyType(dict(mapping))


def expressions(field: str, values: str | Iterable[str]) -> tuple[str, ...]:
    listed = [values] if isinstance(values, str) else _listed(field, values, "an expression")
    for value in listed:
        if not isinstance(value, str):
            raise InvalidPatcherError(f"{field}: {value!r} ({type(value).__name__}) is no expression; write a string.")
        if not value:
            raise InvalidPatcherError(f"{field}: the empty expression is found everywhere; name what is meant.")
        checked_expression(f"{field}: {value!r}", value)
    return tuple(dict.fromkeys(listed))


def _listed(field: str, values: Any, what: str) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise InvalidPatcherError(
            f"{field} takes {what} or a list of them, found {values!r} ({type(values).__name__})."
        )
    return list(values)


def transforms(field: str, values: WeightTransform | Iterable[WeightTransform]) -> tuple[WeightTransform, ...]:
    listed = [values] if isinstance(values, WeightTransform) else _listed(field, values, "a weight transform")
    taken: dict[tuple[Any, ...], WeightTransform] = {}
    result: dict[Any, WeightTransform] = {}
    for value in listed:
        if not isinstance(value, WeightTransform):
            raise InvalidPatcherError(
                f"{field}: {value!r} ({type(value).__name__}) is no weight transform; write a WeightConverter or a "
                "WeightRenaming of transformers."
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
    listed = [values] if isinstance(values, str | Fusion) else _listed(field, values, "a fusion")
    return tuple(dict.fromkeys(shortest(value) for value in listed))


def specifier(field: str, value: Any) -> str:
    try:
        return str(SpecifierSet(typed(str)(field, value)))
    except InvalidSpecifier as error:
        raise InvalidPatcherError(
            f"{field}={value!r} is no version specifier; write for instance '>=5.20,<5.24' or '==5.23.0'."
        ) from error


def fingerprints(field: str, values: Any) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(values, Mapping):
        raise InvalidPatcherError(f"{field} must map class names to fingerprints, found {values!r}.")
    result = {}
    for key, value in values.items():
        listed = [value] if isinstance(value, str) else _listed(f"{field}[{key!r}]", value, "a fingerprint")
        if not isinstance(key, str) or not listed or not all(isinstance(item, str) and item for item in listed):
            raise InvalidPatcherError(f"{field}[{key!r}] must be a text or several, found {value!r}.")
        result[key] = tuple(sorted(set(listed)))
    return MappingProxyType(result)


def groups(field: str, values: Any) -> tuple[tuple[str, ...], ...]:
    result: dict[tuple[str, ...], None] = {}
    for value in _listed(field, values, "a group of class keys"):
        if isinstance(value, str):
            raise InvalidPatcherError(
                f"{field} takes groups of class keys, found the text {value!r}; write {field}=[[{value!r}, ...]]."
            )
        result[tuple(sorted(set(_listed(field, value, "a class key")), key=str))] = None
    return tuple(result)


def check_groups(groups: Iterable[Iterable[Any]], mapping: Mapping[str, Any]) -> None:
    """Raise for what is in a group of `alternatives` and is no class key."""
    for key in (key for group in groups for key in group if key not in mapping):
        close = nearest(str(key), mapping)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, mapping)) or 'none'}."
        raise InvalidPatcherError(f"alternatives: {key!r} is no key of the class_mapping; {hint}")
