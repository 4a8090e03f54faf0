"""Fingerprints of the code that a patcher was verified on."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import nn

from patcher.compat.modeling_code import is_modeling_module, subclasses
from patcher.errors import InvalidPatcherError, PresetDriftError, warn
from patcher.fusions.methods import why_not_its_source
from patcher.source.alike import without_kernel
from patcher.source.reading import parsed
from patcher.source.scopes import canonical, find
from patcher.spec.like import Like
from patcher.spec.patcher import Patcher

#: Where decorators are defined that modeling code uses, and what this package wraps an `__init__` in.
_STANDARD_LIBRARY = Path(functools.__file__).parent
_OF_DECORATORS = Path(transformers.__file__).parent, Path(torch.__file__).parent, Path(__file__).parents[1]


def fingerprint(cls: type[nn.Module] | Callable[..., Any]) -> str:
    """Return the fingerprint of a class or function, and of what it uses of the file that defines it.

    >>> from patcher import Patcher
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> fingerprint(LlamaMLP)
    'eafbe94b23d9df2e'
    >>> pinned = Patcher(fusions="gate_up", fingerprints={"LlamaMLP": fingerprint(LlamaMLP)})

    It is a hash of the syntax tree: formatting, comments and docstrings don't count.

    Raises:
        OSError: if the source can't be found.
        InvalidPatcherError: if it isn't a class or a function of Python.
    """
    original: Any = inspect.unwrap(without_kernel(cls))
    try:
        path = inspect.getsourcefile(original)
    except TypeError:
        raise InvalidPatcherError(f"fingerprint takes a class or a function of Python, found {cls!r}.") from None
    if path is None:
        raise OSError(f"no source file for {original.__qualname__}")
    stat = Path(path).stat()  # a notebook cell may have been changed
    return _fingerprint_in(path, original.__qualname__.split(".")[0], stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1024)
def _fingerprint_in(path: str, name: str, *stat: int) -> str:
    tree, pending = parsed(Path(path).read_text(encoding="utf-8")), {name}
    definitions: dict[str, list[ast.stmt]] = {}
    while pending:
        used = pending.pop()
        definitions[used] = [node for node in find(tree, used) if not isinstance(node, ast.Import | ast.ImportFrom)]
        nodes = (node for definition in definitions[used] for node in ast.walk(definition))
        pending |= {node.id for node in nodes if isinstance(node, ast.Name)} - definitions.keys()
    if not definitions[name]:
        raise OSError(f"{path} defines no {name}")
    digest = hashlib.sha256()
    for definition in (definition for used in sorted(definitions) for definition in definitions[used]):
        digest.update(repr(canonical(definition)).encode())
    return digest.hexdigest()[:16]


def check_pins(patcher: Patcher, model_class: type[nn.Module] | None = None) -> None:
    """Check the pins of a patcher before a model is built; another release of transformers only warns.

    >>> check_pins(Patcher(fusions="qkv", transformers=">=5.17"))

    With a model class only code of its file is checked; without, all that is imported.
    """
    check_built(patcher, None if model_class is None else [model_class])
    installed = transformers.__version__
    if patcher.transformers and not SpecifierSet(patcher.transformers).contains(installed, prereleases=True):
        warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on transformers "
            f"{patcher.transformers}, installed is {installed}."
        )


def check_built(patcher: Patcher, classes: Iterable[type] | None, *, all_there: bool = False) -> None:
    """Check the fingerprints of a patcher.

    Args:
        classes: the original classes of a model's modules, of whose files code is checked: another imported model may
            have a class of the same name. None for all modeling files.
        all_there: whether each pinned class must exist somewhere, and one of them in this model. The others needn't:
            a preset has fingerprints of a vision tower too, and text models have none.

    Raises:
        PresetDriftError: with the names of what changed.
    """
    if not patcher.fingerprints:
        return
    if classes is None:
        homes = set(filter(is_modeling_module, list(sys.modules)))
    else:
        homes = {base.__module__ for cls in classes for base in cls.__mro__}
    # The target of a `like` key is checked for any model.
    keys = (*patcher.class_mapping, *patcher.function_mapping)
    homes |= {key.resolve().__module__ for key in keys if isinstance(key, Like)}
    pinned = {}
    for home in homes:
        namespace: dict[str, Any] = getattr(sys.modules.get(home), "__dict__", {})
        # Modules that code generation has made in memory aren't installed code.
        for key in patcher.fingerprints if Path(namespace.get("__file__") or "").is_file() else ():
            module, _, name = key.rpartition(":")
            value = without_kernel(namespace.get(name))
            is_class = isinstance(value, type) and value.__module__ == home and not module
            if is_class or (isinstance(value, FunctionType) and module in ("", home, value.__module__)):
                pinned[f"{value.__module__}.{value.__name__}", key] = value
    problems = [
        (name, key, problem)
        for (name, key), value in pinned.items()
        if (problem := _drift(value, patcher.fingerprints[key]))
    ]
    if all_there and (missing := patcher.fingerprints.keys() - {key for _, key in pinned}):
        missing -= {cls.__name__ for cls in subclasses(nn.Module)}
        missing -= _defined_in_transformers(missing) if missing else set()
        problems += [(key, key, "and there is no such class or function") for key in missing]
    if all_there and not pinned and not problems:
        warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on other models, with "
            f"{', '.join(patcher.fingerprints)}. patcher.presets.for_model(model) lists what was verified on this one."
        )
    if problems:
        lines = "\n".join(
            f"  {name}: pinned {', '.join(patcher.fingerprints[key])}, {problem}"
            for name, key, problem in sorted(problems)
        )
        raise PresetDriftError(
            f"The code that the patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on"
            f"{f' (transformers {patcher.transformers})' if patcher.transformers else ''} is not the code of the "
            f"installed transformers {transformers.__version__}:\n{lines}\n"
            "Verify it on this code by `patcher verify MODEL --preset NAME --unpinned` (--patcher MODULE:CONSTANT for "
            "one that isn't a preset), and pin what was found by patcher.replace(fingerprints={...})."
        )


def _drift(pinned: Any, fingerprints: Collection[str]) -> str:
    """Describe what isn't as pinned, "" if nothing: the source, or a function that isn't that of the source."""
    try:
        actual = fingerprint(pinned)
    except (OSError, SyntaxError) as error:
        actual = f"nothing ({error})"
    if actual not in fingerprints:
        return f"found {actual}"
    functions = list(filter(callable, vars(pinned).values() if isinstance(pinned, type) else [pinned]))
    file = inspect.getsourcefile(inspect.unwrap(pinned))
    for function in functions:  # grows by what they wrap
        functions += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
        if isinstance(function, FunctionType):
            home = Path(function.__code__.co_filename)
            if str(home) == file:
                reason = "" if hasattr(function, "__wrapped__") else why_not_its_source(function)
            elif home.parent == _STANDARD_LIBRARY or any(map(home.is_relative_to, _OF_DECORATORS)):
                reason = ""
            else:  # by another tool
                reason = f"{function.__qualname__} of {home} in its place"
            if reason:
                return f"found {reason}"
    return ""


def _defined_in_transformers(names: Collection[str]) -> set[str]:
    """Return those names that files of transformers define, bare and as `module:name`, without importing the files."""
    bare_names = "|".join(sorted(re.escape(name.rpartition(":")[2]) for name in names))
    definition = re.compile(rf"^(?:class|def) ({bare_names})\b", re.MULTILINE)
    root, defined = Path(transformers.__file__).parent, set[str]()
    for path in (*root.glob("models/*/modeling_*.py"), *root.glob("*.py")):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        for name in definition.findall(path.read_text(encoding="utf-8")):
            defined |= {name, f"{module}:{name}"}
    return defined
