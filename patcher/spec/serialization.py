"""A patcher as data and as a file: `to_dict`, `from_dict`, `save`, `load`. Data has names, never code.

```json
{"schema": 1, "fusions": ["qkv"], "new_weights": ["adapter"]}
```

Data is untrusted: it must be JSON of limited size, fusions come from a table and classes from an allow-list, and the
constructor of `Patcher` checks the rest.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers.core_model_loading import WeightTransform

from patcher.errors import InvalidPatcherError
from patcher.fusions.base import Fusion
from patcher.fusions.families import FAMILIES, fusions_configured
from patcher.layouts.transforms import describe
from patcher.spec.forward_of import ForwardOf, forward_of
from patcher.spec.like import imported, is_reference, reference
from patcher.spec.validation import MAPPINGS

FILE_NAME = "patcher.json"
#: The prefix of `ForwardOf` values.
FORWARD_OF = "forward_of:"
#: Incremented when data of this release would be misread by the previous one.
SCHEMA = 1
#: The limit of data in characters.
_MAX_LENGTH = 1_000_000
_NO_CONVERSIONS = (
    "can't be written as data. Put it into the `conversion_mapping` of the class that needs it, which has a name, or "
    "pickle the patcher."
)
#: Classes and functions that may be used or imported.
Allowed = str | Callable[..., Any] | Iterable[str | Callable[..., Any]]


def to_dict(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a patcher with some arguments, the others being the defaults."""
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


def _reference(field: str, thing: Any) -> str:
    """Return `module:name` of a class or function that another process can import."""
    name = reference(thing)
    with suppress(InvalidPatcherError):
        if not name.startswith("__main__:") and imported(field, name) is thing:
            return name
    raise InvalidPatcherError(
        f"{field}: {name} can't be written as data, because an import doesn't find it there: it was made in a "
        "notebook, a script or a function, or its name means something else by now. Put it into a module of its own, "
        "or pickle the patcher."
    )


def _fusion_data(field: str, fusion: Fusion) -> dict[str, Any]:
    with suppress(InvalidPatcherError, TypeError, ValueError):  # attributes that aren't options, or aren't data
        data: dict[str, Any] = json.loads(json.dumps({"name": fusion.name, "options": vars(fusion)}))
        if _fusion_from(field, data) == fusion:
            return data
    raise InvalidPatcherError(
        f"{field}: {fusion!r} can't be written as data, it isn't a family that has a name ({', '.join(FAMILIES)}). "
        "Pickle the patcher, or take the fusion out and pass it in code."
    )


def arguments_of(data: Any, allowed: Allowed = ()) -> dict[str, Any]:
    """Return the arguments of the patcher with this data."""
    what = "the data of a patcher"
    try:
        text = json.dumps(data)  # makes a copy, with types of JSON only
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has {len(text):,} characters")
        arguments = json.loads(text)
        if not isinstance(arguments, dict):
            raise TypeError(f"it is {reprlib.repr(arguments)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPatcherError(
            f"{what}: expected an object of JSON of at most {_MAX_LENGTH:,} characters: {str(error)[:200]}."
        ) from error
    schema = arguments.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise InvalidPatcherError(
            f"{what}: this release reads schema {SCHEMA}, found {reprlib.repr(schema)}; "
            "write it with Patcher.to_dict(), or install the release of patcher that wrote it."
        )
    if "extra_weight_conversions" in arguments:
        raise InvalidPatcherError(f"{what}: a conversion {_NO_CONVERSIONS}")
    permitted = _permitted(allowed)
    for field in MAPPINGS:
        if isinstance(values := arguments.get(field), dict):
            arguments[field] = {key: _value(f"{field}[{reprlib.repr(key)}]", values[key], permitted) for key in values}
    if isinstance(fusions := arguments.get("fusions"), list):
        arguments["fusions"] = [_fusion_from("fusions", fusion) for fusion in fusions]
    return arguments


def _value(field: str, value: Any, permitted: Mapping[str, Any]) -> Any:
    name = str(value).removeprefix(FORWARD_OF)
    if name not in permitted:
        raise InvalidPatcherError(
            f"{field}: {reprlib.repr(name)} is not on the list of what may be imported "
            f"({', '.join(permitted) or 'it is empty'}). If you trust that code, write "
            f"Patcher.from_dict(data, allowed=[{reprlib.repr(name)}])."
        )
    thing = permitted[name] or imported(field, name)
    return thing if name == value else forward_of(thing)


def _permitted(allowed: Any) -> dict[str, Any]:
    """Return name -> the class or function itself, or None for one that may be imported."""
    permitted: dict[str, Any] = {}
    for item in allowed if isinstance(allowed, Iterable) and not isinstance(allowed, str) else [allowed]:
        if isinstance(item, str) and ":" in item and is_reference(item):
            permitted[item] = None
        elif callable(item) and hasattr(item, "__qualname__"):
            permitted[reference(item)] = item
        else:
            raise InvalidPatcherError(
                "allowed takes classes and functions, or texts such as 'package.module:Class', found "
                f"{reprlib.repr(item)}."
            )
    return permitted


def _fusion_from(field: str, data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    options = data.get("options", {})
    if data.keys() - {"name", "options"} or not isinstance(options, dict):
        raise InvalidPatcherError(
            f"{field}: a fusion is a name, or an object of a name and its options, found {reprlib.repr(data)}."
        )
    return fusions_configured(data.get("name"), options)[0]


def write(data: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write data into a folder, which is created if needed."""
    path = Path(folder, FILE_NAME)
    if path.parent.is_file():
        raise InvalidPatcherError(f"{path.parent} is a file; a patcher is saved in a folder, as {FILE_NAME}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(folder_or_repo: str | os.PathLike[str], places: Mapping[str, Any]) -> Any:
    """Read the data of a folder, or of a repo on the hub with options of `hf_hub_download`."""
    path = Path(folder_or_repo, FILE_NAME)
    if not path.parent.is_dir():
        try:
            path = Path(hf_hub_download(os.fspath(folder_or_repo), FILE_NAME, **places))
        except (OSError, ValueError, RuntimeError) as error:  # not found, no access, no network
            raise InvalidPatcherError(
                f"{os.fspath(folder_or_repo)!r} is not a folder, and no {FILE_NAME} of such a repo on the hub can be "
                f"fetched ({type(error).__name__}: {' '.join(str(error).split())[:300]}). Write the path of a folder "
                "in which Patcher.save has put one."
            ) from error
    try:
        if path.stat().st_size > 10 * _MAX_LENGTH:  # up to six bytes per character, and indentation
            raise ValueError(f"it has more than {10 * _MAX_LENGTH:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidPatcherError(
            f"{path} is not the file of a patcher ({type(error).__name__}: {str(error)[:300]}). Write it with "
            "Patcher.save."
        ) from error
