"""What must be assumed of a call so that projections provably share their input: as little as possible."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from torch import nn

from patcher.fusions.rewrite import Method, methods_with
from patcher.fusions.tracing import (
    Constant,
    Guards,
    NotUnderstoodError,
    SharedInput,
    called_projections,
    names_in,
    shared_inputs_of,
)
from patcher.source.call_sites import none_by_default, positional_parameters


def located(error: NotUnderstoodError, method: Method) -> NotUnderstoodError:
    """The error, with the file and the line in its text."""
    return NotUnderstoodError(f"{error} ({method.at(error.line)})")


def joining_methods(original: type[nn.Module], group: tuple[str, ...]) -> list[Method]:
    """The methods that call all the projections. Where another one calls some of them, it meets the parts."""
    return methods_with(original, lambda node: called_projections(node, group) == set(group))


def compared_names(original: type[nn.Module], group: tuple[str, ...]) -> frozenset[str]:
    """The attributes of the module that the methods compare with something: what they are may decide a branch."""
    return frozenset(
        attribute.attr
        for method in joining_methods(original, group)
        for node in ast.walk(method.node)
        if isinstance(node, ast.Compare)
        for attribute in ast.walk(node)
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.value, ast.Name)
    )


def understand(
    original: type[nn.Module],
    group: tuple[str, ...],
    attributes: Mapping[str, Constant],
    identities: Iterable[str] = (),
) -> Guards:
    """What must be assumed of a call so that the projections provably share their input; nothing, if that will do.

    Args:
        attributes: what the module says of itself.
        identities: its children that are `nn.Identity`.

    Raises:
        NotUnderstoodError: no assumption that can be checked makes it provable.
    """
    methods = joining_methods(original, group)
    if not methods:
        raise NotUnderstoodError(f"no method of {original.__qualname__} calls {', '.join(group)} by name")
    used = {name for method in methods for name in names_in(method.node)}
    known = Guards(
        attributes=tuple(sorted((name, value) for name, value in attributes.items() if name in used)),
        identities=tuple(sorted(used.intersection(identities))),
    )
    first: NotUnderstoodError | None = None
    fallback: Guards | None = None
    for guards in _candidates(methods, known):
        try:
            conditional = _is_conditional(methods, group, guards)
        except NotUnderstoodError as error:
            first = first or error
            continue
        if not conditional:
            return _needed(guards, methods, group)
        fallback = fallback or guards
    if fallback is not None:
        return fallback
    assert first is not None
    raise first


def _is_conditional(methods: list[Method], group: tuple[str, ...], guards: Guards) -> bool:
    """Whether some of the calls that share an input run only under a condition that nothing decides."""
    shared_inputs: list[SharedInput] = []
    for method in methods:
        try:
            shared_inputs += shared_inputs_of(method.node, group, guards)
        except NotUnderstoodError as error:
            raise located(error, method) from error
    if not shared_inputs:
        raise NotUnderstoodError(f"{', '.join(group)} are never called")
    return any(shared.conditional for shared in shared_inputs)


def _candidates(methods: list[Method], known: Guards) -> Iterator[Guards]:
    yield Guards()
    if known:
        yield known
    if len(methods) > 1:
        return  # what is assumed of one method's parameters says nothing of another's
    node = methods[0].node
    optional = none_by_default(node)
    for name in optional:
        yield Guards(none=(name,))
    if known:
        for name in optional:
            yield replace(known, none=(name,))
    names = [argument.arg for argument in positional_parameters(node)[1:]]
    for start in range(len(names)):
        for end in range(start + 2, min(start + 4, len(names) + 1)):
            yield Guards(same=tuple(names[start:end]))


def _needed(guards: Guards, methods: list[Method], group: tuple[str, ...]) -> Guards:
    """The guards without what is known of the module and proves nothing."""
    for name in ("attributes", "identities"):
        for one in getattr(guards, name):
            fewer = replace(guards, **{name: tuple(x for x in getattr(guards, name) if x is not one)})
            with suppress(NotUnderstoodError):
                if not _is_conditional(methods, group, fewer):
                    guards = fewer
    return guards
