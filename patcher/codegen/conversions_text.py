"""Weight conversions as source text, checked by evaluating it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from patcher.codegen.dependencies import Dependencies
from patcher.codegen.registration import PatchRegistration
from patcher.codegen.runtime import CONVERSIONS, Unstack
from patcher.compat.conversions import source_patterns, target_patterns
from patcher.conversions.concatenate import ReversibleConcatenate
from patcher.conversions.transforms import describe, identity
from patcher.errors import CodegenError
from patcher.fusions.joining import JoinRows
from patcher.fusions.unstacking import CutStacks

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher

__all__ = ["render_conversions"]


def render_conversions(patcher: Patcher, described: PatchRegistration, dependencies: Dependencies) -> str:
    """A statement that binds a Patcher with all of a patcher but its classes and fusions, which are code in the file.

    Raises:
        CodegenError: a conversion can't be written as text.
    """
    described.add_import("patcher", names=["Patcher"])
    lines = [f"{CONVERSIONS} = Patcher("]
    for name in ("filtered_weight_conversion_patterns", "new_weights", "dropped_weights"):
        if value := getattr(patcher, name):
            lines += _list(name, [_text(item) for item in value])
    if transforms := patcher.extra_weight_conversions:
        texts = [_transform(transform, described, dependencies) for transform in transforms]
        lines += _list("extra_weight_conversions", texts)
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


def _transform(transform: WeightTransform, described: PatchRegistration, dependencies: Dependencies) -> str:
    transform = _in_plain_terms(transform)
    if type(transform) not in (WeightConverter, WeightRenaming):
        raise _no_text(transform, described, f"{type(transform).__name__} is a class of its own")
    kind = type(transform).__name__
    described.add_import("transformers.core_model_loading", names=[kind])
    namespace: dict[str, Any] = {kind: type(transform)}
    lines = [f"{kind}("]
    lines += _list("source_patterns", map(_text, source_patterns(transform)))
    lines += _list("target_patterns", map(_text, target_patterns(transform)))
    if isinstance(transform, WeightConverter):
        operations = [
            _operation(operation, transform, described, dependencies, namespace) for operation in transform.operations
        ]
        lines.append(f"    operations=[{', '.join(operations)}],")
    lines.append(")")
    text = "\n".join(lines)
    try:
        made = eval(text, namespace)
    except Exception as error:
        raise _no_text(transform, described, f"its text would fail with {type(error).__name__}: {error}") from error
    if identity(made) != identity(transform):
        raise _no_text(transform, described, "its text would make another one")
    return text


def _operation(
    operation: Any,
    transform: WeightTransform,
    described: PatchRegistration,
    dependencies: Dependencies,
    namespace: dict[str, Any],
) -> str:
    def text_of(value: Any) -> str:
        if isinstance(value, ConversionOps):  # an operation that runs others
            if "model" in inspect.signature(value.convert).parameters:
                name = type(value).__name__
                raise _no_text(transform, described, f"{name} looks at parameters that only the original has")
            return _operation(value, transform, described, dependencies, namespace)
        if hasattr(value, "_asdict"):  # a named tuple
            return bring(type(value), value._asdict())
        if type(value) in (tuple, list):
            items = ", ".join(text_of(item) for item in value)
            return f"[{items}]" if type(value) is list else f"({items},)" if len(value) == 1 else f"({items})"
        return repr(value)

    def bring(cls: type, arguments: dict[str, Any]) -> str:
        dependencies.operation(cls, f"from_patcher(), for {describe(transform)},")
        namespace[cls.__name__] = cls
        return f"{cls.__name__}({', '.join(f'{name}={text_of(value)}' for name, value in arguments.items())})"

    cls = type(operation)
    arguments = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        value = getattr(operation, name, inspect.Parameter.empty)
        if value is inspect.Parameter.empty or parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise _no_text(transform, described, f"{cls.__name__} doesn't keep its argument {name!r}")
        if value != parameter.default:
            arguments[name] = value
    return bring(cls, arguments)


def _in_plain_terms(transform: WeightTransform) -> WeightTransform:
    """What the families of this package do, said by operations of transformers, which a load reverses by the sizes.

    Rows that are joined as they come are a concatenation. Stacks that transformers merges from the tensors of the
    experts are merged by its own operations, and taken apart again.
    """
    if not isinstance(transform, WeightConverter):
        return transform
    sources, targets = source_patterns(transform), target_patterns(transform)
    operation, *more = transform.operations
    if isinstance(operation, JoinRows) and not any(step.operations for step in operation.steps):
        return WeightConverter(sources, targets, operations=[Concatenate(dim=0), *more])
    if isinstance(operation, CutStacks) and not more and len(operation.cuts) == 1:
        (cut,), (step,) = operation.cuts, operation.steps
        if not step.operations:
            return WeightConverter(sources, targets, operations=[Unstack(cut.transposed)])
        (stack,) = step.targets
        pieces = stack.removesuffix("$") + cut.pieces.removeprefix(cut.name).format(0)
        merged = [_plain(inner) for inner in step.operations]
        return WeightConverter(list(step.sources), pieces, operations=[*merged, Unstack(cut.transposed)])
    return transform


def _plain(operation: ConversionOps) -> ConversionOps:
    return Concatenate(operation.dim) if type(operation) is ReversibleConcatenate else operation


def _no_text(transform: WeightTransform, described: PatchRegistration, reason: str) -> CodegenError:
    return described.error(
        f"the conversion {describe(transform)} can't be written into the file: {reason}. "
        "Load with the patcher itself, or give the conversion operations that keep their arguments."
    )
