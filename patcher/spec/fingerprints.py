"""Fingerprints of the code that a patcher was verified on: of the syntax tree, so formatting doesn't count."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from torch import nn

from patcher.compat.modeling_code import is_modeling_module, subclasses
from patcher.errors import PresetDriftError, warn
from patcher.fusions.methods import why_not_its_source
from patcher.source.alike import without_kernel
from patcher.source.definitions import canonical, find
from patcher.source.reading import parsed
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
    return _fingerprint_in(path, defined.__qualname__.split(".")[0], state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1024)
def _fingerprint_in(path: str, name: str, *state: int) -> str:
    tree, wanted = parsed(Path(path).read_text(encoding="utf-8")), {name}
    used: dict[str, list[ast.stmt]] = {}
    while wanted:
        each = wanted.pop()
        used[each] = [node for node in find(tree, each) if not isinstance(node, ast.Import | ast.ImportFrom)]
        nodes = (node for definition in used[each] for node in ast.walk(definition))
        wanted |= {node.id for node in nodes if isinstance(node, ast.Name)} - used.keys()
    if not used[name]:
        raise OSError(f"{path} defines no {name}")
    digest = hashlib.sha256()
    for definition in (definition for each in sorted(used) for definition in used[each]):
        digest.update(repr(canonical(definition)).encode())
    return digest.hexdigest()[:16]


def check_pins(patcher: Patcher, model_class: type[nn.Module] | None = None) -> None:
    """Compare the pins of a patcher with what is installed, before a model is built; the release alone only warns.

    >>> check_pins(Patcher(fusions="qkv", transformers=">=5.17"))

    With the class of a model only what is in its file counts; without, all that is imported.
    """
    check_built(patcher, None if model_class is None else [model_class])
    installed = transformers.__version__
    if patcher.transformers and not SpecifierSet(patcher.transformers).contains(installed, prereleases=True):
        warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on transformers "
            f"{patcher.transformers}, installed is {installed}."
        )


def check_built(patcher: Patcher, classes: Iterable[type] | None, *, all_there: bool = False) -> None:
    """Raise if code isn't what the patcher is pinned to.

    Args:
        classes: those of the modules that a model is made of, as they were before anything was replaced. Only what
            is in their files counts: a namesake of another model that happens to be imported doesn't.
        all_there: whether a pinned class must exist somewhere. It needn't be in this model: a preset is pinned to the
            vision tower too, and text models have none.

    Raises:
        PresetDriftError: with the names of what changed.
    """
    if not patcher.fingerprints:
        return
    if classes is None:
        homes = set(filter(is_modeling_module, list(sys.modules)))
    else:
        homes = {base.__module__ for cls in classes for base in cls.__mro__}
    # A pin of what a `like` key compares with counts whatever model is loaded.
    keys = (*patcher.class_mapping, *patcher.function_mapping)
    homes |= {key.resolve().__module__ for key in keys if isinstance(key, Like)}
    pinned = {}
    for home in homes:
        names: dict[str, Any] = getattr(sys.modules.get(home), "__dict__", {})
        # What was made in memory, as code generation does, isn't installed code that can drift.
        for key in patcher.fingerprints if Path(names.get("__file__") or "").is_file() else ():
            module, _, name = key.rpartition(":")
            value = without_kernel(names.get(name))
            is_class = isinstance(value, type) and value.__module__ == home and not module
            if is_class or (isinstance(value, FunctionType) and module in ("", home, value.__module__)):
                pinned[f"{value.__module__}.{value.__name__}", key] = value
    problems = [(*each, found) for each in pinned if (found := _drifted(patcher.fingerprints[each[1]], pinned[each]))]
    if all_there and (gone := patcher.fingerprints.keys() - {key for _, key in pinned}):
        gone -= {cls.__name__ for cls in subclasses(nn.Module)}
        gone -= _shipped(gone) if gone else set()
        problems += [(key, key, "and there is no such class or function") for key in gone]
    if problems:
        listed = "\n".join(
            f"  {what}: pinned {', '.join(patcher.fingerprints[key])}, {found}"
            for what, key, found in sorted(problems)
        )
        raise PresetDriftError(
            f"The code that the patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on"
            f"{f' (transformers {patcher.transformers})' if patcher.transformers else ''} is not the code of the "
            f"installed transformers {transformers.__version__}:\n{listed}\n"
            "Verify it on this code by `patcher verify MODEL --preset NAME --unpinned` (--patcher MODULE:CONSTANT for "
            "one that isn't a preset), and pin what was found by patcher.replace(fingerprints={...})."
        )


def _drifted(pins: Collection[str], pinned: Any) -> str:
    """What is found in the place of what is pinned: another text, or a function that isn't that of the text."""
    try:
        found = fingerprint(pinned)
    except (OSError, SyntaxError) as error:
        found = f"nothing ({error})"
    if found not in pins:
        return f"found {found}"
    functions = map(inspect.unwrap, filter(callable, vars(pinned).values() if isinstance(pinned, type) else [pinned]))
    file = inspect.getsourcefile(inspect.unwrap(pinned))
    for function in (each for each in functions if isinstance(each, FunctionType)):
        home = function.__code__.co_filename
        if home != file and not Path(home).is_relative_to(Path(transformers.__file__).parent):
            return f"found {function.__qualname__} of {home} in its place"  # another tool has put it there
        if home == file and (reason := why_not_its_source(function)):
            return f"found {reason}"
    return ""


def _shipped(names: Collection[str]) -> set[str]:
    """Those that files of transformers define of some names, bare and as `module:name`; none is imported."""
    wanted = "|".join(sorted(re.escape(name.rpartition(":")[2]) for name in names))
    head = re.compile(rf"^(?:class|def) ({wanted})\b", re.MULTILINE)
    root, found = Path(transformers.__file__).parent, set[str]()
    for path in (*root.glob("models/*/modeling_*.py"), *root.glob("*.py")):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        for name in head.findall(path.read_text(encoding="utf-8")):
            found |= {name, f"{module}:{name}"}
    return found
