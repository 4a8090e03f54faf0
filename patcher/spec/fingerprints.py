"""Fingerprints of the code that a patcher was verified on: of the syntax tree, so formatting doesn't count."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from torch import nn

from patcher.compat.modeling_code import is_modeling_module, module_subclasses
from patcher.errors import PresetDriftError, warn
from patcher.fusions.methods import why_not_its_source
from patcher.source.alike import without_kernel
from patcher.source.canonical import canonical
from patcher.source.reading import Definition
from patcher.source.scopes import bound_by, top_level
from patcher.spec.like import Like
from patcher.spec.patcher import Patcher


def fingerprint(cls: type[nn.Module] | Callable[..., Any]) -> str:
    """The fingerprint of a class, or of a function, and of what it uses of the file that defines it.

    >>> from patcher import Patcher
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> fingerprint(LlamaMLP)
    'eafbe94b23d9df2e'
    >>> pinned = Patcher(fusions="gate_up", fingerprints={"LlamaMLP": fingerprint(LlamaMLP)})

    It is of the syntax tree: formatting, comments and docstrings don't count.

    Raises:
        OSError: the source can't be found.
    """
    defined: Any = inspect.unwrap(without_kernel(cls))
    path = inspect.getsourcefile(defined)
    if path is None:
        raise OSError(f"no source file for {defined.__qualname__}")
    state = Path(path).stat()  # a notebook may write its code anew
    return _fingerprint_in((path, state.st_mtime_ns, state.st_size), defined.__qualname__.split(".")[0])


@lru_cache(maxsize=1024)
def _fingerprint_in(file: tuple[str, int, int], name: str) -> str:
    definitions = _definitions(file)
    if name not in definitions:
        raise OSError(f"{file[0]} defines no {name}")
    wanted, used = [name], {name}
    while wanted:
        for node in (node for definition in definitions[wanted.pop()] for node in ast.walk(definition)):
            if isinstance(node, ast.Name) and node.id in definitions and node.id not in used:
                used.add(node.id)
                wanted.append(node.id)
    digest = hashlib.sha256()
    for definition in (definition for each in sorted(used) for definition in definitions[each]):
        digest.update(repr(canonical(definition)).encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def _definitions(file: tuple[str, int, int]) -> dict[str, list[ast.AST]]:
    """The functions, classes and assignments of a file by name, those under a top-level `if` or `try` included."""
    found: dict[str, list[ast.AST]] = {}
    for node in top_level(ast.parse(Path(file[0]).read_text(encoding="utf-8")).body):
        if isinstance(node, (Definition, ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for name in bound_by(node):
                found.setdefault(name, []).append(node)
    return found


def check_pins(patcher: Patcher, model_class: type[nn.Module] | None = None) -> None:
    """Compare the pins of a patcher with what is installed: the fingerprints decide, the release alone only warns.

    >>> check_pins(Patcher(fusions="qkv", transformers=">=5.17"))

    It is called before a model is built. What else the model consists of is compared afterwards, by `check_built`.

    Args:
        patcher: with pins or without.
        model_class: the class of the model that is loaded. Only its own file counts: a namesake in the file of
            another model that happens to be imported doesn't count. Without it, every class that is imported counts.

    Raises:
        PresetDriftError: with the names of what changed.
    """
    _check_fingerprints(
        patcher, filter(is_modeling_module, list(sys.modules)) if model_class is None else [model_class.__module__]
    )
    installed = transformers.__version__
    if patcher.transformers and not SpecifierSet(patcher.transformers).contains(installed, prereleases=True):
        warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on transformers "
            f"{patcher.transformers}, installed is {installed}."
        )


def check_built(patcher: Patcher, classes: Iterable[type], home: str, *, all_there: bool) -> None:
    """Raise if the code of a constructed model isn't what the patcher is pinned to, its sub-models' included.

    Args:
        patcher: with pins or without.
        classes: those of the modules that the model is made of, as they were before anything was replaced.
        home: the module of the model's own class.
        all_there: whether a pinned class must exist somewhere. It needn't be in this model: a preset is pinned to the
            vision tower too, and text models have none.

    Raises:
        PresetDriftError: with the names of what changed.
    """
    bases = {base.__module__ for cls in classes for base in cls.__mro__} if patcher.fingerprints else ()
    _check_fingerprints(patcher, [home, *filter(is_modeling_module, bases)], all_there=all_there)


def homes_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, module) of each file of transformers that defines one of the classes or functions; none is imported.

    A name may be `module:name`: then it is that of this module.
    """
    requested = set(names)
    wanted = "|".join(sorted(re.escape(name.rpartition(":")[2]) for name in requested))
    if not wanted:
        return []
    head = re.compile(rf"^(?:class|def) ({wanted})\b", re.MULTILINE)
    root = Path(transformers.__file__).parent
    found = []
    for path in sorted([*root.glob("models/*/modeling_*.py"), *root.glob("*.py")]):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        for name in head.findall(path.read_text(encoding="utf-8")):
            found += [(each, module) for each in (name, f"{module}:{name}") if each in requested]
    return sorted(found)


def _rebound(pinned: Any) -> str:
    """Which function of a class isn't that of its source: another tool has put it there, or the file was edited."""
    functions = vars(pinned).values() if isinstance(pinned, type) else (pinned,)
    file = inspect.getsourcefile(inspect.unwrap(pinned))
    for function in (inspect.unwrap(each) for each in functions if callable(each)):
        if not isinstance(function, FunctionType):
            continue
        home = function.__code__.co_filename
        if home != file and not Path(home).is_relative_to(Path(transformers.__file__).parent):
            return f"{function.__qualname__} of {home} in its place"
        if home == file and (reason := why_not_its_source(function)):
            return reason
    return ""


def _check_fingerprints(patcher: Patcher, homes: Iterable[str], *, all_there: bool = False) -> None:
    """Compare what modules have by a name to which the patcher is pinned with the code that it was pinned to.

    Args:
        homes: the modules. What was made in memory, as code generation does, isn't installed code that can drift.
    """
    if not patcher.fingerprints:
        return
    pinned: dict[tuple[str, int], Any] = {}
    # A pin of what a `like` key compares with counts whatever model is loaded.
    keys = (*patcher.class_mapping, *patcher.function_mapping)
    for home in {*homes, *(key.resolve().__module__ for key in keys if isinstance(key, Like))}:
        names: dict[str, Any] = getattr(sys.modules.get(home), "__dict__", {})
        for key in patcher.fingerprints if Path(names.get("__file__") or "").is_file() else ():
            module, _, name = key.rpartition(":")
            value = without_kernel(names.get(name))
            is_class = isinstance(value, type) and value.__module__ == home and not module
            if is_class or (isinstance(value, FunctionType) and module in ("", home, value.__module__)):
                pinned[key, id(value)] = value
    problems = []
    for (key, _), thing in sorted(pinned.items(), key=lambda item: (item[1].__module__, item[1].__name__)):
        try:
            found = fingerprint(thing)
        except (OSError, SyntaxError) as error:
            found = f"nothing ({error})"
        if found not in patcher.fingerprints[key] or (found := _rebound(thing)):
            problems.append((f"{thing.__module__}.{thing.__name__}", key, f"found {found}"))
    gone = patcher.fingerprints.keys() - {key for key, _ in pinned} if all_there else set()
    gone -= {cls.__name__ for cls in module_subclasses() if cls.__name__ in gone} if gone else set()
    gone -= {name for name, _ in homes_of(gone)}
    problems += [(key, key, "and there is no such class or function") for key in sorted(gone)]
    if problems:
        listed = "\n".join(
            f"  {what}: pinned {', '.join(patcher.fingerprints[key])}, {found}" for what, key, found in problems
        )
        raise PresetDriftError(
            f"The code that the patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on"
            f"{f' (transformers {patcher.transformers})' if patcher.transformers else ''} is not the code of the "
            f"installed transformers {transformers.__version__}:\n{listed}\n"
            "Verify it on this code by `patcher verify MODEL --preset NAME --unpinned` (--patcher MODULE:CONSTANT for "
            "one that isn't a preset), and pin what was found by patcher.replace(fingerprints={...})."
        )
