"""A patcher as data: `Patcher.to_dict()` and `Patcher.from_dict()`. Names travel, code never does.

```json
{"schema": 1, "fusions": ["qkv"], "new_weights": ["adapter"]}
```

What is read may come from anyone. So nothing in it is ever looked up by what it says: fusions and operations come
from tables, classes from an allow-list that the caller gives, and everything else must be of the one type that belongs
there. Expressions are compiled here, and searched only when the patcher is used.
"""

from __future__ import annotations

import importlib
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import core_model_loading

from patcher import seams
from patcher.conversions import describe, identity
from patcher.errors import InvalidPatcherError
from patcher.fusions.base import FAMILIES, Fusion, fusion_named, fusions_configured
from patcher.matching import nearest
from patcher.patcher import Patcher
from patcher.seams import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

__all__ = ["SCHEMA", "from_dict", "to_dict"]

#: Raised by one when a dict that is written now would be misread by the release before.
SCHEMA = 1

# More of anything than this is no patcher. Expressions are the costly ones: compiling takes time and memory.
_LONGEST_TEXT = 10_000
_MOST_ITEMS = 10_000

_KINDS: dict[str, type[WeightTransform]] = {"WeightRenaming": WeightRenaming, "WeightConverter": WeightConverter}


def _operations() -> dict[str, type[ConversionOps]]:
    """The operations that transformers itself offers for conversions, by name."""
    return {
        name: value
        for name, value in sorted(vars(core_model_loading).items())
        if isinstance(value, type)
        and issubclass(value, ConversionOps)
        and value is not ConversionOps
        and value.__module__ == core_model_loading.__name__
        and not name.startswith("_")
    }


# --- writing -------------------------------------------------------------------------------------------------------


def to_dict(patcher: Patcher) -> dict[str, Any]:
    """See `Patcher.to_dict`."""
    values: dict[str, Any] = {
        "name": patcher.name,
        "class_mapping": {key: _reference(key, cls) for key, cls in patcher.class_mapping.items()},
        "filtered_weight_conversion_patterns": list(patcher.filtered_weight_conversion_patterns),
        "extra_weight_conversions": [_transform_data(item) for item in patcher.extra_weight_conversions],
        "fusions": [_fusion_data(fusion) for fusion in patcher.fusions],
        "new_weights": list(patcher.new_weights),
        "dropped_weights": list(patcher.dropped_weights),
        "transformers": patcher.transformers,
        "fingerprints": {key: list(values) for key, values in patcher.fingerprints.items()},
        "any_of": [list(group) for group in patcher.any_of],
    }
    data = {"schema": SCHEMA} | {key: value for key, value in values.items() if value}
    return data if patcher.strict else data | {"strict": False}


def _reference(key: str, cls: type[nn.Module]) -> str:
    """`module:qualname` of a class that another process finds there."""
    where = f"{cls.__module__}:{cls.__qualname__}"
    found: Any = sys.modules.get(cls.__module__) if cls.__module__ != "__main__" else None
    for part in cls.__qualname__.split("."):
        found = vars(found).get(part) if found is not None else None
    if found is not cls:
        raise InvalidPatcherError(
            f"class_mapping[{key!r}]: {where} can't be said as data, because an import doesn't find it there: it was "
            "made in a notebook, a script or a function, or its name means something else by now. Put the class into "
            "a module of its own, or pickle the patcher."
        )
    return where


def _fusion_data(fusion: str | Fusion) -> Any:
    if isinstance(fusion, str):
        return fusion
    for name, home in FAMILIES.items():
        if home == f"{type(fusion).__module__}:{type(fusion).__qualname__}":
            options = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(fusion).items()}
            if not options:
                return name
            with suppress(InvalidPatcherError):  # it has attributes that are no options
                if _is_plain(options) and fusions_configured(name, options) == [fusion]:
                    return {"name": name, "options": options}
    raise InvalidPatcherError(
        f"fusions: {fusion!r} can't be said as data, it is no family that has a name ({', '.join(FAMILIES)}). "
        "Pickle the patcher, or take the fusion out and pass it in code."
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float)


def _transform_data(transform: WeightTransform) -> dict[str, Any]:
    data: dict[str, Any] = {
        "type": type(transform).__name__,
        "source_patterns": seams.source_patterns(transform),
        "target_patterns": seams.target_patterns(transform),
    }
    for field in ("scope_prefix", "base_model_prefix"):
        if getattr(transform, field) is not None:
            data[field] = getattr(transform, field)
    if isinstance(transform, WeightConverter):
        data["operations"] = [_operation_data(operation) for operation in transform.operations]
        if transform.force_cpu:
            data["force_cpu"] = True
    try:
        same = identity(_transform("", data)) == identity(transform)
    except InvalidPatcherError:
        same = False
    if not same:
        raise InvalidPatcherError(
            f"extra_weight_conversions: {describe(transform)} can't be said as data: it must be a WeightRenaming or a "
            f"WeightConverter with transformers' own operations ({', '.join(_operations())}), found a "
            f"{type(transform).__name__}. Pickle the patcher, or take the conversion out and pass it in code."
        )
    return data


def _operation_data(operation: ConversionOps) -> dict[str, Any]:
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(operation).items()}
    return {"type": type(operation).__name__} | settings


# --- reading -------------------------------------------------------------------------------------------------------


def from_dict(data: Any, allowed: str | type | Iterable[str | type] = ()) -> Patcher:
    """See `Patcher.from_dict`."""
    given = _object("the data of a patcher", data)
    schema = given.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise InvalidPatcherError(
            f"the data of a patcher: this release reads schema {SCHEMA}, found {_short(schema)}; "
            "write it with Patcher.to_dict(), or install the release of patcher that wrote it."
        )
    _only("the data of a patcher", given, ("schema", *_READERS, "class_mapping"))
    permitted = _permitted(allowed)
    settings = {key: read(key, given[key]) for key, read in _READERS.items() if key in given}
    # Last, so that nothing is imported for a patcher that is no good anyway.
    mapping = _texts_by_name("class_mapping", given.get("class_mapping", {}))
    for key, where in mapping.items():
        _check_permitted(key, where, permitted)
    try:
        Patcher(dict.fromkeys(mapping, nn.Module), **settings)
        return Patcher({key: _imported(key, where, permitted) for key, where in mapping.items()}, **settings)
    except (RecursionError, OverflowError, MemoryError) as error:  # of an expression
        raise InvalidPatcherError(
            f"the data of a patcher: an expression in it is too large to be compiled ({error})."
        ) from error


def _permitted(allowed: str | type | Iterable[str | type]) -> dict[str, type | None]:
    """What may be imported, and the classes that needn't be."""
    permitted: dict[str, type | None] = {}
    item: Any
    for item in allowed if isinstance(allowed, Iterable) and not isinstance(allowed, str) else [allowed]:
        if isinstance(item, type):
            permitted[f"{item.__module__}:{item.__qualname__}"] = item
        elif isinstance(item, str) and _is_reference(item):
            permitted[item] = None
        else:
            raise InvalidPatcherError(
                f"allowed takes classes, or texts such as 'package.module:Class', found {_short(item)}."
            )
    return permitted


def _is_reference(text: str) -> bool:
    module, _, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return all(part.isidentifier() and not part.startswith("__") for part in parts)


def _check_permitted(key: str, where: str, permitted: Mapping[str, type | None]) -> None:
    if where not in permitted:
        raise InvalidPatcherError(
            f"class_mapping[{_short(key)}]: {_short(where)} is not on the list of what may be imported "
            f"({', '.join(permitted) or 'it is empty'}). If you trust the code of that class, write "
            f"Patcher.from_dict(data, allowed=[{_short(where)}])."
        )


def _imported(key: str, where: str, permitted: Mapping[str, type | None]) -> Any:
    given = permitted[where]
    if given is not None:
        return given
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            # A class inside a class is looked up as it stands, so that no descriptor of anybody's runs.
            found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    except (ImportError, AttributeError, KeyError) as error:
        raise InvalidPatcherError(
            f"class_mapping[{key!r}]: {where} can't be imported: {type(error).__name__}: {error}. "
            "Install the package that has it, or correct the name."
        ) from error
    return found


def _fusions(field: str, value: Any) -> list[str | Fusion]:
    fusions: list[str | Fusion] = []
    for item in _list(field, value):
        if isinstance(item, str):
            fusions.append(_known(field, _text(field, item), FAMILIES))
            continue
        entry = _object(field, item)
        _only(field, entry, ("name", "options"))
        name = _known(field, _text(field, entry.get("name")), FAMILIES)
        options = _object(f"{field}: the options of {name!r}", entry.get("options", {}))
        for key, option in options.items():
            _typed(f"{field}: {name!r}: {key}", option, bool | int | str | list[str])
        fusions += fusions_configured(name, options)
    for fusion in fusions:
        fusion_named(fusion)
    return fusions


def _transforms(field: str, value: Any) -> list[WeightTransform]:
    return [_transform(f"{field}[{number}]", item) for number, item in enumerate(_list(field, value))]


def _transform(field: str, value: Any) -> WeightTransform:
    data = _object(field, value)
    kind = _KINDS[_known(field, _text(field, data.get("type")), _KINDS)]
    own = ("operations", "force_cpu") if kind is WeightConverter else ()
    _only(field, data, ("type", "source_patterns", "target_patterns", "scope_prefix", "base_model_prefix", *own))
    sources = _texts(f"{field}: source_patterns", data.get("source_patterns"))
    targets = _texts(f"{field}: target_patterns", data.get("target_patterns"))
    if not sources or not targets or "" in sources:
        raise InvalidPatcherError(f"{field}: a conversion needs source_patterns, none of them empty, and a target.")
    settings: dict[str, Any] = {}
    if kind is WeightConverter:
        listed = _list(f"{field}: operations", data.get("operations"))
        settings["operations"] = [_operation(f"{field}: operations", item) for item in listed]
        settings["force_cpu"] = _typed(f"{field}: force_cpu", data.get("force_cpu", False), bool)
    try:
        transform = kind(sources, targets, **settings)
    except (re.error, ValueError, IndexError, ArithmeticError, RecursionError, MemoryError) as error:
        raise InvalidPatcherError(f"{field}: transformers can't make a {kind.__name__} of it: {error}.") from error
    for name in ("scope_prefix", "base_model_prefix"):
        if name in data:
            setattr(transform, name, _text(f"{field}: {name}", data[name]))
    return transform


def _operation(field: str, value: Any) -> ConversionOps:
    data = _object(field, value)
    known = _operations()
    kind = known[_known(field, _text(field, data.get("type")), known)]
    hints = typing.get_type_hints(vars(kind).get("__init__", object))
    hints.pop("return", None)
    _only(f"{field}: {kind.__name__}", data, ("type", *hints))
    settings = {
        name: _typed(f"{field}: {kind.__name__}: {name}", data[name], hint)
        for name, hint in hints.items()
        if name in data
    }
    try:
        return kind(**settings)
    except TypeError as error:  # one without a default is missing
        raise InvalidPatcherError(f"{field}: {kind.__name__}: {error}.") from error


# --- what is read, of the type that belongs there ------------------------------------------------------------------


def _short(value: Any) -> str:
    """A value for a message, whatever it is: cut, however deep or long."""
    if isinstance(value, str | list | dict | bool | float | None) or (isinstance(value, int) and abs(value) < 10**18):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidPatcherError(f"{_cut(field)}: expected an object with names as keys, found {_short(value)}.")
    _limit(field, value, _MOST_ITEMS)
    for key in value:
        _limit(field, key, _LONGEST_TEXT)
    return value


def _only(field: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    names = tuple(known)
    for key in value:
        if key not in names:
            close = nearest(key, names) if len(key) < 100 else []
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
            raise InvalidPatcherError(f"{field}: unknown key {_short(key)}; {hint}")


def _known(field: str, name: str, table: Mapping[str, Any]) -> str:
    if name not in table:
        close = nearest(name, table) if len(name) < 100 else []
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InvalidPatcherError(f"{_cut(field)}: {_short(name)} is not known; {hint}Known: {', '.join(table)}.")
    return name


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidPatcherError(f"{_cut(field)}: expected a list, found {_short(value)}.")
    _limit(field, value, _MOST_ITEMS)
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidPatcherError(f"{_cut(field)}: expected a text, found {_short(value)}.")
    _limit(field, value, _LONGEST_TEXT)
    return value


def _texts(field: str, value: Any) -> list[str]:
    return [_text(field, item) for item in _list(field, value)]


def _texts_by_name(field: str, value: Any) -> dict[str, str]:
    return {key: _text(f"{field}[{_short(key)}]", item) for key, item in _object(field, value).items()}


def _lists_by_name(field: str, value: Any) -> dict[str, list[str]]:
    return {key: _texts(f"{field}[{_short(key)}]", item) for key, item in _object(field, value).items()}


def _groups(field: str, value: Any) -> list[list[str]]:
    return [_texts(field, item) for item in _list(field, value)]


def _limit(field: str, value: Any, most: int) -> None:
    if len(value) > most:
        raise InvalidPatcherError(f"{_cut(field)}: {len(value):,} is too long, at most {most:,} make sense.")


def _cut(field: str) -> str:
    return field if len(field) < 200 else f"{field[:200]}..."


def _typed(field: str, value: Any, hint: Any) -> Any:
    """A value that is of the type that an annotation says; lists become tuples where it says so."""
    made = _fitting(value, hint)
    if made is _UNFIT:
        name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise InvalidPatcherError(f"{_cut(field)}: expected {name}, found {_short(value)}.")
    return made


_UNFIT = object()


def _fitting(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return next((made for part in arguments if (made := _fitting(value, part)) is not _UNFIT), _UNFIT)
    if origin in (list, tuple):
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            return _UNFIT
        if origin is tuple and len(arguments) != len(value):
            return _UNFIT
        made = [_fitting(item, arguments[i if origin is tuple else 0]) for i, item in enumerate(value)]
        return _UNFIT if any(item is _UNFIT for item in made) else origin(made)
    if hint is type(None):
        return value if value is None else _UNFIT
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return _UNFIT
    return value if hint in (bool, int, float, str) and type(value) is hint else _UNFIT


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "filtered_weight_conversion_patterns": _texts,
    "extra_weight_conversions": _transforms,
    "fusions": _fusions,
    "new_weights": _texts,
    "dropped_weights": _texts,
    "strict": lambda field, value: _typed(field, value, bool),
    "transformers": _text,
    "fingerprints": _lists_by_name,
    "any_of": _groups,
}
