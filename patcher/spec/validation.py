"""The parameters of `Patcher`, each declared once: how it is checked, and what `|` makes of two values."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns
from patcher.errors import InvalidPatcherError, PatchConflictError, did_you_mean
from patcher.expressions import check_number, checked_expression
from patcher.fusions.base import Fusion
from patcher.fusions.families import name_or_fusion
from patcher.layouts.transforms import describe, identity
from patcher.patterns import ROOT, check_path, is_expression
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import PREFIX, Like, is_reference, like

Groups = tuple[tuple[str, ...], ...]


def _typed(kind: type) -> Callable[[str, Any], Any]:
    def checked(field: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise InvalidPatcherError(f"{field} must be a {kind.__name__}, found {value!r} ({type(value).__name__}).")
        return value

    return checked


def _mapping(example: str, checked_item: Callable[[str, Any, Any], Any]) -> Callable[[str, Any], Any]:
    """The check of a mapping, of which `checked_item` gives what is kept for a key and its value."""

    def checked(field: str, given: Any) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise InvalidPatcherError(
                f"{field} must be a mapping, found {given!r} ({type(given).__name__}); write for instance "
                f"Patcher({field}={{{example}}})."
            )
        # Data has only texts.
        mapping = {like(key) if str(key).startswith(PREFIX) else key: value for key, value in given.items()}
        return MappingProxyType({key: checked_item(field, key, value) for key, value in mapping.items()})

    return checked


def _of_class(field: str, key: Any, cls: Any) -> Any:
    if not isinstance(key, str) or not key:
        raise InvalidPatcherError(
            f"{field}: a key is the name of a class, an expression, or like(...), found {key!r}; "
            f"write {getattr(key, '__name__', 'LlamaMLP')!r}."
        )
    if is_expression(key) and not isinstance(key, Like):
        checked_expression(f"{field} key {key!r}", key)
    return _replacement(f"{field}[{key!r}]", cls)


def _of_path(field: str, key: Any, cls: Any) -> Any:
    if check_path(field, key) == ROOT:
        raise InvalidPatcherError(
            f"{field}: {key!r} is the model itself; give its class in class_mapping={{...}}, by its name."
        )
    return _replacement(f"{field}[{key!r}]", cls)


def _of_function(field: str, key: Any, function: Any) -> Any:
    if not isinstance(key, Like) and not (is_reference(key) and "." not in key.rpartition(":")[2]):
        raise InvalidPatcherError(
            f"{field}: a key is the name of a function, or module:name, found {key!r}; write for instance "
            "'apply_rotary_pos_emb' or 'transformers.models.llama.modeling_llama:apply_rotary_pos_emb'."
        )
    if not callable(function) or isinstance(function, type | nn.Module) or type(function).__hash__ is None:
        raise InvalidPatcherError(
            f"{field}[{key!r}] must be a function that has a hash, found {function!r} ({type(function).__name__}); "
            "write a function with the parameters of the one that it replaces. Classes belong into class_mapping, by "
            "their names."
        )
    return function


def _of_pin(field: str, key: Any, value: Any) -> tuple[str, ...]:
    listed = _listed(f"{field}[{key!r}]", value, str, "a fingerprint", "write a text")
    if not isinstance(key, str) or not all(listed or [""]):
        raise InvalidPatcherError(f"{field}[{key!r}] must be a text or several, found {value!r}.")
    return tuple(sorted(set(listed)))


def _replacement(what: str, cls: Any) -> Any:
    """What can be built in place of a module, and whose own conversions are some."""
    if isinstance(cls, ForwardOf):
        return cls
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
    _conversions(f"{cls.__qualname__}.conversion_mapping", getattr(cls, "conversion_mapping", ()))
    return cls


def _listed(field: str, values: Any, kind: Any, what: str, instead: str) -> list[Any]:
    """Several values of a kind; one of them may be given alone."""
    if isinstance(values, kind):
        return [values]
    if not _is_list(values):
        raise InvalidPatcherError(
            f"{field} takes {what} or a list of them, found {values!r} ({type(values).__name__})."
        )
    listed = list(values)
    for value in (each for each in listed if not isinstance(each, kind)):
        raise InvalidPatcherError(f"{field}: {value!r} ({type(value).__name__}) isn't {what}; {instead}.")
    return listed


def _expressions(field: str, values: Any) -> tuple[str, ...]:
    listed = _listed(field, values, str, "an expression", "write a string")
    check_number(field, listed)
    for value in listed:
        if not value:
            raise InvalidPatcherError(f"{field}: the empty expression is found everywhere; name what is meant.")
        checked_expression(f"{field}: {value!r}", value)
    return tuple(dict.fromkeys(listed))


def _conversions(field: str, values: Any) -> tuple[WeightTransform, ...]:
    instead = "write a WeightConverter or a WeightRenaming of transformers.core_model_loading"
    taken: dict[tuple[Any, ...], WeightTransform] = {}
    result: dict[Any, WeightTransform] = {}
    for value in _listed(field, values, WeightTransform, "a weight transform", instead):
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


def _fusions(field: str, values: Any) -> tuple[str | Fusion, ...]:
    if isinstance(values, Mapping):
        raise InvalidPatcherError(
            f"{field} takes no mapping, found {values!r}; write Patcher.from_fusion_config({values!r})."
        )
    instead = "write a name, or an object of a Fusion subclass"
    return tuple(dict.fromkeys(map(name_or_fusion, _listed(field, values, str | Fusion | type, "a fusion", instead))))


def _groups(field: str, values: Any) -> Groups:
    groups: list[Any] = list(values) if _is_list(values) else [values]
    groups = [list(each) if _is_list(each) else [None] for each in groups]
    if not all(isinstance(key, str) for each in groups for key in each):
        raise InvalidPatcherError(
            f"{field} takes groups of class keys, found {values!r}; write {field}=[['LlamaMLP', ...]]."
        )
    if [] in groups:
        raise InvalidPatcherError(f"{field}: a group without class keys matches no model; take it out.")
    return tuple(sorted({tuple(sorted(set(each))) for each in groups}))


def _is_list(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, Mapping | str)


def _specifier(field: str, value: Any) -> str:
    try:
        return str(SpecifierSet(_typed(str)(field, value)))
    except InvalidSpecifier as error:
        raise InvalidPatcherError(
            f"{field}={value!r} isn't a version specifier; write for instance '>=5.20,<5.24' or '==5.23.0'."
        ) from error


def _both(field: str, one: Any, other: Any) -> Any:
    return (*one, *other)  # the constructor drops what is there twice


def _united(field: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key in (key for key in one if other.get(key, one[key]) is not one[key]):
        names = (getattr(each[key], "__qualname__", repr(each[key])) for each in (one, other))
        raise PatchConflictError(
            f"Both patchers replace {key!r}, by {' and by '.join(names)}. "
            f"Combine after taking one away: patcher.replace({field}={{...}})."
        )
    return {**one, **other}


def _all_pins(field: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (*one.get(key, ()), *other.get(key, ())) for key in {**one, **other}}


#: parameter -> what checks it, and makes of it what is kept; what makes one of two, for `|`
FIELDS: dict[str, tuple[Callable[[str, Any], Any], Callable[[str, Any, Any], Any]]] = {
    "class_mapping": (_mapping('"LlamaMLP": MyMLP', _of_class), _united),
    "filtered_weight_conversion_patterns": (_expressions, _both),
    "extra_weight_conversions": (_conversions, _both),
    "module_mapping": (_mapping('"model.layers.{0..3}.mlp": MyMLP', _of_path), _united),
    "function_mapping": (_mapping('"apply_rotary_pos_emb": my_rotary', _of_function), _united),
    "fusions": (_fusions, _both),
    "new_weights": (_expressions, _both),
    "dropped_weights": (_expressions, _both),
    "strict": (_typed(bool), lambda _, one, other: one or other),
    "name": (_typed(str), lambda _, *names: " | ".join(dict.fromkeys(filter(None, names)))),
    "transformers": (_specifier, lambda _, one, other: str(SpecifierSet(one) & SpecifierSet(other))),
    "fingerprints": (_mapping('"LlamaMLP": fingerprint(LlamaMLP)', _of_pin), _all_pins),
    "alternatives": (_groups, _both),
}
#: Those that map what is replaced to what takes its place.
MODULE_MAPPINGS = ("class_mapping", "module_mapping")
MAPPINGS = (*MODULE_MAPPINGS, "function_mapping")


def groups_of(mapping: Mapping[str, Any], groups: Groups) -> Groups:
    """Groups of the class keys of a mapping, without those of one key that say nothing.

    A key in no group is required: one that is a group by itself says more only beside others that have it.
    """
    check_number("class_mapping", list(filter(is_expression, mapping)))
    for key in (key for group in groups for key in group if key not in mapping):
        hint = did_you_mean(key, mapping, f"it has {', '.join(map(repr, mapping)) or 'none'}.")
        raise InvalidPatcherError(f"alternatives: {key!r} isn't a key of the class_mapping; {hint}")
    return tuple(group for group in groups if len(group) > 1 or sum(group[0] in each for each in groups) > 1)


def required_groups(mapping: Mapping[str, Any], groups: Groups) -> Groups:
    """The class keys that a model must have: of each group one."""
    grouped = {key for group in groups for key in group}
    return (*groups, *((key,) for key in mapping if key not in grouped))


def not_a_patcher(call: str, value: Any) -> InvalidPatcherError:
    """What a function raises that takes a Patcher and was given something else; it is called so, with `{}` for it."""
    function = call.partition("(")[0].partition("{")[0]
    instead = call.format('Patcher({"LlamaMLP": MyMLP}, fusions=["qkv"])')
    if isinstance(value, tuple | list) and value and all(hasattr(each, "class_mapping") for each in value):
        instead = f"{call.format('patchers[0]')}, or {call.format('patchers[0] | patchers[1]')}"
    return InvalidPatcherError(
        f"{function} takes a patcher.Patcher, found {reprlib.repr(value)} ({type(value).__name__}); write for "
        f"instance {instead}."
    )
