"""The parameters of `Patcher`: how each is checked and normalized, and how `|` combines two values."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns
from patcher.errors import InvalidPatcherError, PatchConflictError, did_you_mean
from patcher.expressions import check_number, checked_expression, cut
from patcher.fusions.base import Fusion
from patcher.fusions.families import name_or_fusion
from patcher.layouts.transforms import describe, identity
from patcher.patterns import ROOT, check_path, is_expression
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import PREFIX, Like, is_reference, like

Groups = tuple[tuple[str, ...], ...]


def _typed(kind: type) -> Callable[[str, Any], Any]:
    def check(field: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise InvalidPatcherError(f"{field} must be a {kind.__name__}, found {value!r} ({type(value).__name__}).")
        return value

    return check


def _mapping(example: str, check_item: Callable[[str, Any, Any], Any]) -> Callable[[str, Any], Any]:
    """Return the check of a mapping, whose items `check_item` checks and normalizes."""

    def check(field: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidPatcherError(
                f"{field} must be a mapping, found {value!r} ({type(value).__name__}); write for instance "
                f"Patcher({field}={{{example}}})."
            )
        # In data a `Like` is a string.
        mapping = {like(key) if str(key).startswith(PREFIX) else key: item for key, item in value.items()}
        return MappingProxyType({key: check_item(field, key, item) for key, item in mapping.items()})

    return check


def _class_item(field: str, key: Any, cls: Any) -> Any:
    if not isinstance(key, str) or not key:
        raise InvalidPatcherError(
            f"{field}: a key is the name of a class, an expression, or like(...), found {key!r}; "
            f"write {getattr(key, '__name__', 'LlamaMLP')!r}."
        )
    if is_expression(key) and not isinstance(key, Like):
        checked_expression(f"{field} key {key!r}", key)
    return _replacement(f"{field}[{key!r}]", cls)


def _path_item(field: str, key: Any, cls: Any) -> Any:
    if isinstance(key, Like):
        raise InvalidPatcherError(
            f"{field}: {key!r} is a key of class_mapping; here a key is the path of a module, such as "
            "'model.layers.{0..3}.mlp'."
        )
    if check_path(field, key) == ROOT:
        raise InvalidPatcherError(
            f"{field}: {key!r} is the model itself; give its class in class_mapping={{...}}, by its name."
        )
    return _replacement(f"{field}[{key!r}]", cls)


def _function_item(field: str, key: Any, function: Any) -> Any:
    if not isinstance(key, Like) and not (is_reference(key) and "." not in key.rpartition(":")[2]):
        raise InvalidPatcherError(
            f"{field}: a key is the name of a function, or module:name, found {key!r}; write for instance "
            "'apply_rotary_pos_emb' or 'transformers.models.llama.modeling_llama:apply_rotary_pos_emb'."
        )
    if not callable(function) or isinstance(function, type | nn.Module) or type(function).__hash__ is None:
        kind = "a function that has a hash" if callable(function) and not isinstance(function, type) else "a function"
        raise InvalidPatcherError(
            f"{field}[{key!r}] must be {kind}, found {function!r} ({type(function).__name__}); "
            "write a function with the parameters of the one that it replaces. Classes belong in class_mapping, by "
            "their names."
        )
    return function


def _fingerprint_item(field: str, key: Any, value: Any) -> tuple[str, ...]:
    fingerprints = _as_list(f"{field}[{key!r}]", value, str, "a fingerprint", "write a text")
    if not isinstance(key, str) or not all(fingerprints or [""]):
        raise InvalidPatcherError(f"{field}[{key!r}] must be a text or several, found {value!r}.")
    return tuple(sorted(set(fingerprints)))


def _replacement(what: str, cls: Any) -> Any:
    """Return a replacement class, if it and its own conversions are valid."""
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
    if inspect.isabstract(cls):
        methods = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise InvalidPatcherError(
            f"{what}: {cls.__qualname__} is abstract; write a subclass that implements {methods}."
        )
    _conversions(f"{cls.__qualname__}.conversion_mapping", getattr(cls, "conversion_mapping", ()))
    return cls


def _as_list(field: str, values: Any, kind: Any, what: str, instead: str) -> list[Any]:
    """Return values of a kind, or one such value, as a list."""
    if isinstance(values, kind):
        return [values]
    if not _is_list(values):
        raise InvalidPatcherError(
            f"{field} takes {what} or a list of them, found {cut(repr(values))} ({type(values).__name__})."
        )
    result = list(values)
    for value in result:
        if not isinstance(value, kind):
            raise InvalidPatcherError(f"{field}: {cut(repr(value))} ({type(value).__name__}) isn't {what}; {instead}.")
    return result


def _expressions(field: str, values: Any) -> tuple[str, ...]:
    expressions = _as_list(field, values, str, "an expression", "write a string")
    check_number(field, expressions)
    for expression in expressions:
        if not expression:
            raise InvalidPatcherError(f"{field}: the empty expression is found everywhere; name what is meant.")
        checked_expression(f"{field}: {expression!r}", expression)
    return tuple(dict.fromkeys(expressions))


def _conversions(field: str, values: Any) -> tuple[WeightTransform, ...]:
    instead = "write a WeightConverter or a WeightRenaming of transformers.core_model_loading"
    by_source: dict[tuple[Any, ...], WeightTransform] = {}
    result: dict[Any, WeightTransform] = {}
    for transform in _as_list(field, values, WeightTransform, "a weight transform", instead):
        checked_expression(f"{field}: {describe(transform)}", transform.compiled_sources.pattern)
        for pattern in source_patterns(transform):
            source = (transform.scope_prefix, transform.base_model_prefix, pattern)
            other = by_source.setdefault(source, transform)
            if other is not transform and identity(other) != identity(transform):
                raise PatchConflictError(
                    f"Two {field} take the same tensors, {pattern!r}: {describe(other)} and "
                    f"{describe(transform)}. Only one can; take one away."
                )
        result.setdefault(identity(transform), copy_transform(transform))
    return tuple(result.values())


def _fusions(field: str, values: Any) -> tuple[str | Fusion, ...]:
    if isinstance(values, Mapping):
        raise InvalidPatcherError(
            f"{field} takes no mapping, found {values!r}; write Patcher.from_fusion_config({values!r})."
        )
    instead = "write a name, or an object of a Fusion subclass"
    fusions = [name_or_fusion(value) for value in _as_list(field, values, str | Fusion | type, "a fusion", instead)]
    for fusion in fusions:
        if isinstance(fusion, Fusion):
            _expressions(f"{type(fusion).__name__}.target_modules_patterns", fusion.target_modules_patterns)
    return tuple(dict.fromkeys(fusions))


def _groups(field: str, values: Any) -> Groups:
    groups: list[Any] = list(values) if _is_list(values) else [values]
    groups = [list(group) if _is_list(group) else [None] for group in groups]
    if not all(isinstance(key, str) for group in groups for key in group):
        raise InvalidPatcherError(
            f"{field} takes groups of class keys, found {values!r}; write {field}=[['LlamaMLP', ...]]."
        )
    if [] in groups:
        raise InvalidPatcherError(f"{field}: a group without class keys matches no model; take it out.")
    return tuple(sorted({tuple(sorted(set(group))) for group in groups}))


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
    return (*one, *other)  # the constructor removes duplicates


def _merged(field: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key in one:
        if key in other and other[key] is not one[key]:
            names = (getattr(value, "__qualname__", repr(value)) for value in (one[key], other[key]))
            raise PatchConflictError(
                f"Both patchers replace {key!r}, by {' and by '.join(names)}. "
                f"Combine after taking one away: patcher.replace({field}={{...}})."
            )
    return {**one, **other}


def _merged_fingerprints(field: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (*one.get(key, ()), *other.get(key, ())) for key in {**one, **other}}


#: parameter -> (its check, which returns the normalized value; how `|` combines two values)
FIELDS: dict[str, tuple[Callable[[str, Any], Any], Callable[[str, Any, Any], Any]]] = {
    "class_mapping": (_mapping('"LlamaMLP": MyMLP', _class_item), _merged),
    "filtered_weight_conversion_patterns": (_expressions, _both),
    "extra_weight_conversions": (_conversions, _both),
    "module_mapping": (_mapping('"model.layers.{0..3}.mlp": MyMLP', _path_item), _merged),
    "function_mapping": (_mapping('"apply_rotary_pos_emb": my_rotary', _function_item), _merged),
    "fusions": (_fusions, _both),
    "new_weights": (_expressions, _both),
    "dropped_weights": (_expressions, _both),
    "strict": (_typed(bool), lambda _, one, other: one or other),
    "name": (_typed(str), lambda _, *names: " | ".join(dict.fromkeys(filter(None, names)))),
    "transformers": (_specifier, lambda _, one, other: str(SpecifierSet(one) & SpecifierSet(other))),
    "fingerprints": (_mapping('"LlamaMLP": fingerprint(LlamaMLP)', _fingerprint_item), _merged_fingerprints),
    "alternatives": (_groups, _both),
}
#: Those with replacements.
MODULE_MAPPINGS = ("class_mapping", "module_mapping")
MAPPINGS = (*MODULE_MAPPINGS, "function_mapping")


def groups_of(mapping: Mapping[str, Any], groups: Groups) -> Groups:
    """Check groups of class keys, and drop redundant groups of one key.

    A key without a group is required anyway, so a group of one matters only if another group has the key too.
    """
    check_number("class_mapping", list(filter(is_expression, mapping)))
    for key in (key for group in groups for key in group if key not in mapping):
        hint = did_you_mean(key, mapping, f"it has {', '.join(map(repr, mapping)) or 'none'}.")
        raise InvalidPatcherError(f"alternatives: {key!r} isn't a key of the class_mapping; {hint}")
    return tuple(group for group in groups if len(group) > 1 or sum(group[0] in other for other in groups) > 1)


def required_groups(mapping: Mapping[str, Any], groups: Groups) -> Groups:
    """Return groups of all class keys; a model must have one key of each."""
    grouped = {key for group in groups for key in group}
    return (*groups, *((key,) for key in mapping if key not in grouped))


def not_a_patcher(call: str, value: Any) -> InvalidPatcherError:
    """Return the error for an argument that isn't a Patcher; `call` is the call with `{}` for that argument."""
    function = call.partition("(")[0].partition("{")[0]
    instead = call.format('Patcher({"LlamaMLP": MyMLP}, fusions=["qkv"])')
    if isinstance(value, tuple | list) and value and all(hasattr(item, "class_mapping") for item in value):
        instead = f"{call.format('patchers[0]')}, or {call.format('patchers[0] | patchers[1]')}"
    return InvalidPatcherError(
        f"{function} takes a patcher.Patcher, found {reprlib.repr(value)} ({type(value).__name__}); write for "
        f"instance {instead}."
    )
