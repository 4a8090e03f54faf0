"""Models of a generated file that read and write the checkpoints of the models they are made from."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from patcher.codegen.bridges.dependencies import Dependencies
from patcher.codegen.runtime import CONVERSIONS, ORIGINAL
from patcher.codegen.spec import create_patch_from_external
from patcher.compat.conversions import source_patterns, target_patterns
from patcher.errors import CodegenError
from patcher.layouts.transforms import describe, identity

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.spec.patcher import Patcher


#: method of a model, which `patcher.codegen.runtime` has as a public name -> why
_METHODS = {
    "is_custom_code": "the conversions of transformers, of parts of a model too, are those of the original",
    "from_pretrained": "checkpoints of the original are converted",
    "_from_config": "what is made without a checkpoint saves one of the original",
    "save_pretrained": "so is what is made by a call of the class",
}


def module_classes(original: ModuleType) -> dict[str, type[nn.Module]]:
    """The classes that a module defines, by name."""
    return {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == original.__name__
    }


def add_conversions(described: PatchConfig, patcher: Patcher) -> None:
    """See `PatchConfig.add_conversions`."""
    original = importlib.import_module(described.source_module)
    text = _render(patcher, Dependencies(described, original, {}))
    described.add_post_import_block(text, "how checkpoints of the original become those of the models here, and back")
    package, _, stem = original.__name__.rpartition(".")
    if package:
        described.add_import(package, names=[f"{stem} as {ORIGINAL}"])
    else:
        described.add_import(stem, alias=ORIGINAL, is_from_import=False)
    for name, cls in module_classes(original).items():
        bases = [base for base in cls.__mro__[1:] if base.__module__ == original.__name__]
        if not issubclass(cls, PreTrainedModel) or any(issubclass(base, PreTrainedModel) for base in bases):
            continue
        for method, why in _METHODS.items():
            if method in vars(cls):
                raise described.error(
                    f"{name} has a {method} of its own, which the file would have to replace. "
                    "Load with the patcher itself."
                )
            runtime = f"runtime.{method.removeprefix('_')}"
            patch = create_patch_from_external(f"{name}.{method}", "patcher.codegen", runtime, why)
            described.patches.append(replace(patch, new=True))


def _render(patcher: Patcher, dependencies: Dependencies) -> str:
    """A statement that binds a Patcher with all of a patcher but its classes and fusions, which are code in the file.

    Raises:
        CodegenError: a conversion can't be written as text.
    """
    dependencies.config.add_import("patcher", names=["Patcher"])
    lines = [f"{CONVERSIONS} = Patcher("]
    for name in ("filtered_weight_conversion_patterns", "new_weights", "dropped_weights"):
        if value := getattr(patcher, name):
            lines += _list(name, map(_text, value))
    if transforms := patcher.extra_weight_conversions:
        lines += _list("extra_weight_conversions", [_Conversion(each, dependencies).render() for each in transforms])
    if not patcher.strict:
        lines.append("    strict=False,")
    for name in ("name", "transformers"):
        if value := getattr(patcher, name):
            lines.append(f"    {name}={_text(value)},")
    lines.append(")")
    return "\n".join(lines) if len(lines) > 2 else f"{CONVERSIONS} = Patcher()"


def _list(name: str, items: Iterable[str]) -> list[str]:
    return [f"    {name}=[", *(f"        {line}" for item in items for line in f"{item},".splitlines()), "    ],"]


def _text(value: str) -> str:
    """A string as it would be written by hand: raw where it holds backslashes."""
    if "\\" in value and not value.endswith("\\") and '"' not in value and value.isprintable():
        return f'r"{value}"'
    return '"' + repr("'" + value)[2:-1].replace('"', '\\"') + '"' if "'" not in value else repr(value)


class _Conversion:
    """One weight conversion as source text, checked by evaluating it again."""

    def __init__(self, transform: WeightTransform, dependencies: Dependencies) -> None:
        self.transform = transform
        self.dependencies = dependencies
        self.namespace: dict[str, Any] = {}

    def render(self) -> str:
        """The text; what it names is imported by the file."""
        transform, kind = self.transform, type(self.transform)
        if kind not in (WeightConverter, WeightRenaming):
            raise self._no_text(f"{kind.__name__} is a class of its own")
        self.dependencies.config.add_import("transformers.core_model_loading", names=[kind.__name__])
        self.namespace[kind.__name__] = kind
        lines = [f"{kind.__name__}("]
        lines += _list("source_patterns", map(_text, source_patterns(transform)))
        lines += _list("target_patterns", map(_text, target_patterns(transform)))
        if isinstance(transform, WeightConverter):
            lines.append(f"    operations=[{', '.join(map(self._operation, transform.operations))}],")
        text = "\n".join([*lines, ")"])
        try:
            made = eval(text, self.namespace)
        except Exception as error:
            raise self._no_text(f"its text would fail with {type(error).__name__}: {error}") from error
        if identity(made) != identity(transform):
            raise self._no_text("its text would make another one")
        return text

    def _operation(self, operation: Any) -> str:
        cls = type(operation)
        arguments = {}
        for name, parameter in inspect.signature(cls).parameters.items():
            value = getattr(operation, name, parameter.empty)
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if value is parameter.empty or not named:
                raise self._no_text(f"{cls.__name__} doesn't keep its argument {name!r}")
            if value != parameter.default:
                arguments[name] = value
        return self._call(cls, arguments)

    def _call(self, cls: type, arguments: dict[str, Any]) -> str:
        self.dependencies.operation(cls, f"from_patcher(), for {describe(self.transform)},")
        self.namespace[cls.__name__] = cls
        return f"{cls.__name__}({', '.join(f'{name}={self._value(value)}' for name, value in arguments.items())})"

    def _value(self, value: Any) -> str:
        if isinstance(value, ConversionOps):  # of one that runs others; they are given the model that the file builds
            return self._operation(value)
        if hasattr(value, "_asdict"):  # a named tuple
            return self._call(type(value), value._asdict())
        if type(value) in (tuple, list):
            items = ", ".join(map(self._value, value))
            return f"[{items}]" if type(value) is list else f"({items},)" if len(value) == 1 else f"({items})"
        return repr(value)

    def _no_text(self, reason: str) -> CodegenError:
        return self.dependencies.config.error(
            f"the conversion {describe(self.transform)} can't be written into the file: {reason}. "
            "Load with the patcher itself, or give the conversion operations that keep their arguments."
        )
