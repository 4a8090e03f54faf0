"""A patcher as data: `Patcher.to_dict()` and `Patcher.from_dict()`. Names travel, code never does.

```json
{"schema": 1, "fusions": ["qkv"], "new_weights": ["adapter"]}
```

What is read may come from anyone. So it must be JSON of limited size, and nothing in it is ever looked up by what it
says: fusions come from a table, classes from an allow-list that the caller gives. What the constructor of `Patcher`
validates is validated there only. Expressions are compiled there, and searched only when the patcher is used.
Conversions are code: a class that is named may carry them.
"""

from __future__ import annotations

import importlib
import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from transformers.core_model_loading import WeightTransform

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion
from patcher.fusions.families import FAMILIES, fusions_configured
from patcher.layouts.transforms import describe
from patcher.spec.forward_of import ForwardOf, forward_of
from patcher.spec.validation import MAPPINGS

#: What the text of such a value begins with.
FORWARD_OF = "forward_of:"
#: Raised by one when a dict that is written now would be misread by the release before.
SCHEMA = 1

#: Longer data isn't that of a patcher.
_LONGEST = 1_000_000

_NO_CONVERSIONS = (
    "can't be written as data. Put it into the `conversion_mapping` of the class that needs it, which has a name, or "
    "pickle the patcher."
)
_What = TypeVar("_What")


def to_dict(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `Patcher.to_dict`.

    Args:
        arguments: of the patcher, without those that are the default.
    """
    return {"schema": SCHEMA} | {name: _data(name, value) for name, value in arguments.items()}


def _data(field: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _data(f"{field}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_data(field, item) for item in value]
    if isinstance(value, Fusion):
        return _fusion_data(field, value)
    if isinstance(value, WeightTransform):
        raise InvalidPatcherError(f"{field}: {describe(value)} {_NO_CONVERSIONS}")
    if isinstance(value, ForwardOf):
        return FORWARD_OF + _reference(field, value.layer)
    return _reference(field, value) if callable(value) else value


def _reference(field: str, named: Any) -> str:
    """`module:qualname` of a class or function that another process finds there."""
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", repr(named))
    found: Any = sys.modules.get(module) if module is not None and module != "__main__" else None
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if found is not named:
        raise InvalidPatcherError(
            f"{field}: {module}:{name} can't be written as data, because an import doesn't find it there: it was "
            f"made in a notebook, a script or a function, or its name means something else by now. Put it into "
            "a module of its own, or pickle the patcher."
        )
    return f"{module}:{name}"


def _fusion_data(field: str, fusion: Fusion) -> dict[str, Any]:
    data = {"name": fusion.name, "options": {name: _plain(option) for name, option in vars(fusion).items()}}
    with suppress(InvalidPatcherError):  # its attributes aren't options, or aren't data
        if _fusion(field, data) == fusion:
            return data
    raise InvalidPatcherError(
        f"{field}: {fusion!r} can't be written as data, it isn't a family that has a name ({', '.join(FAMILIES)}). "
        "Pickle the patcher, or take the fusion out and pass it in code."
    )


def _plain(option: Any) -> Any:
    """An option of a fusion as JSON has it, with lists in place of tuples."""
    if isinstance(option, Mapping):
        return {name: _plain(item) for name, item in option.items()}
    return [_plain(item) for item in option] if isinstance(option, tuple | list) else option


def from_dict(
    make: Callable[..., _What], data: Any, allowed: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = ()
) -> _What:
    """See `Patcher.from_dict`.

    Args:
        make: the constructor of a patcher.
    """
    what = "the data of a patcher"
    try:
        text = json.dumps(data)  # also a copy, of the types that JSON has
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text):,} characters")
        given = json.loads(text)
        if not isinstance(given, dict):
            raise TypeError(f"it is {reprlib.repr(given)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPatcherError(
            f"{what}: expected an object of JSON of at most {_LONGEST:,} characters: {str(error)[:200]}."
        ) from error
    schema = given.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise InvalidPatcherError(
            f"{what}: this release reads schema {SCHEMA}, found {reprlib.repr(schema)}; "
            "write it with Patcher.to_dict(), or install the release of patcher that wrote it."
        )
    if "extra_weight_conversions" in given:
        raise InvalidPatcherError(f"{what}: a conversion {_NO_CONVERSIONS}")
    permitted = _permitted(allowed)
    mappings = {field: given[field] for field in MAPPINGS if isinstance(given.get(field), dict)}
    for field, key, value in ((field, *item) for field, mapping in mappings.items() for item in mapping.items()):
        where = str(value).removeprefix(FORWARD_OF)
        if where not in permitted:
            raise InvalidPatcherError(
                f"{field}[{reprlib.repr(key)}]: {reprlib.repr(where)} is not on the list of what may be imported "
                f"({', '.join(permitted) or 'it is empty'}). If you trust that code, write "
                f"Patcher.from_dict(data, allowed=[{reprlib.repr(where)}])."
            )
    for field, mapping in mappings.items():
        given[field] = {key: _value(f"{field}[{key!r}]", value, permitted) for key, value in mapping.items()}
    if isinstance(given.get("fusions"), list):
        given["fusions"] = [_fusion("fusions", each) if isinstance(each, dict) else each for each in given["fusions"]]
    return make(**given)


def _value(field: str, value: str, permitted: Mapping[str, Any]) -> Any:
    where = value.removeprefix(FORWARD_OF)
    found = permitted[where] or _imported(field, where)
    return found if where == value else forward_of(found)


def _permitted(allowed: Any) -> dict[str, Callable[..., Any] | None]:
    """What may be imported, and the classes and functions that needn't be."""
    permitted: dict[str, Callable[..., Any] | None] = {}
    item: Any
    for item in allowed if isinstance(allowed, Iterable) and not isinstance(allowed, str) else [allowed]:
        if isinstance(item, str) and _is_reference(item):
            permitted[item] = None
        elif callable(item) and hasattr(item, "__qualname__"):
            permitted[f"{item.__module__}:{item.__qualname__}"] = item
        else:
            raise InvalidPatcherError(
                "allowed takes classes and functions, or texts such as 'package.module:Class', found "
                f"{reprlib.repr(item)}."
            )
    return permitted


def _is_reference(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() and not part.startswith("__") for part in (*module.split("."), *name.split(".")))


def _imported(field: str, where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            # A class inside a class is looked up statically, so that no descriptor runs.
            found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    except (ImportError, AttributeError, KeyError) as error:
        raise InvalidPatcherError(
            f"{field}: {where} can't be imported: {type(error).__name__}: {error}. "
            "Install the package that has it, or correct the name."
        ) from error
    return found


def _fusion(field: str, data: Mapping[str, Any]) -> str | Fusion:
    options = data.get("options", {})
    if data.keys() - {"name", "options"} or not isinstance(options, dict):
        raise InvalidPatcherError(
            f"{field}: a fusion is a name, or an object of a name and its options, found {reprlib.repr(data)}."
        )
    return fusions_configured(data.get("name"), options)[0]
