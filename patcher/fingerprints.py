"""Fingerprints of the code that a patcher was verified on: of the syntax tree, so formatting doesn't count."""

from __future__ import annotations

import ast
import hashlib
import inspect
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from patcher import matching
from patcher.errors import PresetDriftError
from patcher.patcher import Patcher

__all__ = ["check", "fingerprint"]


def fingerprint(cls: type[nn.Module]) -> str:
    """The fingerprint of a class and of what it uses of the file that defines it.

    ```python
    fingerprint(LlamaMLP)  # '3f0c9d2a41b7e865'
    ```

    Raises:
        OSError: the source of the class can't be found.
    """
    path = inspect.getsourcefile(cls)
    if path is None:
        raise OSError(f"no source file for {cls.__qualname__}")
    return _fingerprint_in(path, cls.__qualname__.split(".")[0])


@lru_cache(maxsize=1024)
def _fingerprint_in(path: str, name: str) -> str:
    definitions = _definitions(path)
    if name not in definitions:
        raise OSError(f"{path} defines no {name}")
    wanted, used = [name], {name}
    while wanted:
        for node in ast.walk(definitions[wanted.pop()]):
            if isinstance(node, ast.Name) and node.id in definitions and node.id not in used:
                used.add(node.id)
                wanted.append(node.id)
    digest = hashlib.sha256()
    for each in sorted(used):
        digest.update(repr(_canonical(definitions[each])).encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def _definitions(path: str) -> dict[str, ast.AST]:
    """The functions, classes and assignments at the top level of a file, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return found


def _canonical(node: Any) -> Any:
    """A syntax tree without positions, docstrings and empty fields, so that all releases of Python agree."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {}
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if name not in ("ctx", "type_comment", "kind") and value not in (None, []):
            fields[name] = _canonical(value)
    return (type(node).__name__, sorted(fields.items()))


def check(patcher: Patcher, model_class: type[nn.Module] | None = None) -> None:
    """Raise if the code that the patcher is pinned to has changed.

    Where the file of the model that is loaded has a class of the name, that is the one; a namesake in the file of
    another model, which happens to be imported, is not.

    Raises:
        PresetDriftError: with the names of what changed.
    """
    if not patcher.fingerprints:
        return
    by_name: dict[str, list[type[nn.Module]]] = {}
    for cls in matching.module_subclasses():
        named = cls.__name__ in patcher.fingerprints and matching.is_modeling_module(cls.__module__)
        if named and not _is_made_in_memory(cls):
            by_name.setdefault(cls.__name__, []).append(cls)
    changed = []
    home = model_class.__module__ if model_class is not None else ""
    for name, pinned in patcher.fingerprints.items():
        found_here = by_name.get(name, [])
        for cls in [cls for cls in found_here if cls.__module__ == home] or found_here:
            found = _found(cls)
            if found not in pinned:
                changed.append(f"  {cls.__module__}.{name}: pinned {', '.join(pinned)}, found {found}")
    if changed:
        listed = "\n".join(changed)
        option = f"--preset {patcher.name}" if patcher.name else "--patcher MODULE:CONSTANT"
        raise PresetDriftError(
            f"The code that the patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on"
            f"{f' (transformers {patcher.transformers})' if patcher.transformers else ''} is not the code of the "
            f"installed transformers {transformers.__version__}:\n{listed}\n"
            f"Verify it on this code with `patcher verify MODEL {option} --unpinned`; then "
            f"print the new pin with `patcher fingerprint {patcher.name or 'MODULE:CONSTANT'}`, and give it: "
            "patcher.replace(fingerprints={...})."
        )


def _is_made_in_memory(cls: type[nn.Module]) -> bool:
    """Whether a class comes from no file, as one that code generation has run: it is no installed code to drift."""
    try:
        return not Path(inspect.getfile(cls)).exists()
    except (OSError, TypeError):
        return True


def _found(cls: type[nn.Module]) -> str:
    try:
        return fingerprint(cls)
    except (OSError, SyntaxError) as error:
        return f"nothing ({error})"
