"""The source of a class and of its replacement, as texts to compare: the methods that change, and what they become."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import nn

from patcher.codegen.bridges.fused_layers import FusedLayers, ModuleText
from patcher.codegen.config import PatchConfig
from patcher.compat import standing_alone
from patcher.errors import CodegenError
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.layouts.carried import RECIPE
from patcher.source.reading import Location, read_source, unwrap
from patcher.source.texts import indented

#: Packages whose base classes weren't written for the patched model.
_LIBRARIES = frozenset({"torch", "transformers", "patcher", *sys.stdlib_module_names}) - {"__main__"}


class _Empty(nn.Module):
    """Has the attributes of every class."""


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """Return the methods of a class that a replacement overrides without calling them, and the replacement.

    Of a replacement that doesn't inherit from the class, all methods of the class are returned. A fused class consists
    of its methods. Both texts are empty if the replacement defines nothing.
    """
    if replacement is LinearPatchEmbedding:
        replacement = standing_alone.LinearPatchEmbedding
    if hasattr(replacement, "_rewritten") or RECIPE in vars(replacement):
        made = _methods_made(original, replacement)
        return _methods(original, made), "\n".join(made.values())
    classes = [cls for cls in reversed(replacement.__mro__) if cls not in original.__mro__]
    classes = [cls for cls in classes if cls is replacement or _package(cls) not in _LIBRARIES]
    after = "\n\n".join(map(_class_text, classes))
    if not issubclass(replacement, original):
        return _methods(original, vars(original)), after
    names = dict.fromkeys(name for cls in classes for name in _defined(cls))
    replaced = [name for name in names if not re.search(rf"\bsuper\(\)\.{name}\b", after)]
    return (_methods(original, replaced), after) if names else ("", "")


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _defined(cls: type) -> list[str]:
    return [name for name in vars(cls) if name not in vars(_Empty)]


def _methods_made(original: type[nn.Module], made: Any) -> dict[str, str]:
    """Return the methods of a class that this package has made; of a fused class as a generated file has them."""
    if not hasattr(made, "_rewritten"):  # by forward_of
        return {"forward": _member("forward", made.forward)}
    texts: dict[str, str] = {}
    if hasattr(made, "_joined"):
        # Only its patches are used. The folder of remote code, a hash, may have a name that a config can't have.
        config, module = PatchConfig("of_one_class", "of_one_class.py"), sys.modules[original.__module__]
        with suppress(CodegenError):
            layers = FusedLayers(config, ModuleText(module), {}, {}, lambda *_: None)
            text = layers.joined_init(original, made._joined)
            texts["__init__"] = re.sub(r"super\(\w+, self\)", "super()", text)
    return {name: indented(text) for name, text in (texts | made._rewritten).items()}


def _methods(cls: type, names: Iterable[str]) -> str:
    """Return those methods of a class that it has, as a class body; inherited ones unless they are of torch."""
    texts = []
    for name in names:
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        value = vars(owner).get(name)
        if isinstance(unwrap(value), FunctionType) and (owner is cls or _package(owner) not in ("torch", "builtins")):
            texts.append(_member(name, value))
    return "\n".join(texts)


def _class_text(cls: type) -> str:
    try:
        return read_source(cls, cls.__qualname__, Location("", 0)).text
    except CodegenError:  # of a notebook cell without methods, or made by a call
        bases = ", ".join(base.__name__ for base in cls.__bases__)
        return f"class {cls.__name__}({bases}):\n" + "".join(_member(name, vars(cls)[name]) for name in _defined(cls))


def _member(name: str, value: Any) -> str:
    """Return the lines of a class body that define an attribute."""
    if value is None or isinstance(value, str | int | float):
        return f"    {name} = {value!r}\n"
    with suppress(CodegenError):
        if isinstance(unwrap(value), FunctionType):
            return indented(read_source(value, name, Location("", 0)).text)
    return f"    # {name}: a {type(value).__name__} whose source can't be read\n"
