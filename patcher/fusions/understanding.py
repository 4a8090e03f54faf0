"""What must be assumed of a call so that projections provably share their input: as little as possible."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from patcher.fusions.rewrite import Method, methods_with
from patcher.fusions.tracing import (
    Assumptions,
    Cluster,
    Constant,
    NotUnderstoodError,
    clusters_of,
    names_in,
    written_calls,
)
from patcher.source.call_sites import none_by_default

__all__ = ["compared_names", "joining_methods", "located", "understand", "used_names"]


def used_names(method: Method) -> set[str]:
    """Every name in the source of a method."""
    return set(names_in(method.node))


def located(error: NotUnderstoodError, method: Method) -> NotUnderstoodError:
    """The error, with the file and the line in its text."""
    return NotUnderstoodError(f"{error} ({method.at(error.line)})")


def joining_methods(original: type[nn.Module], group: tuple[str, ...]) -> list[Method]:
    """The methods that call all the projections. Where another one calls some of them, it meets the parts."""
    return methods_with(original, lambda node: {name for name, _ in written_calls(node, group)} == set(group))


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
) -> Assumptions:
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
    used = {name for method in methods for name in used_names(method)}
    known = Assumptions(
        attributes=tuple(sorted((name, value) for name, value in attributes.items() if name in used)),
        identities=tuple(sorted(used.intersection(identities))),
    )
    first: NotUnderstoodError | None = None
    fallback: Assumptions | None = None
    for assumptions in _candidates(methods, known):
        try:
            clusters: list[Cluster] = []
            for method in methods:
                try:
                    clusters += clusters_of(method.node, group, assumptions)
                except NotUnderstoodError as error:
                    raise located(error, method) from error
            if not clusters:
                raise NotUnderstoodError(f"{', '.join(group)} are never called")
        except NotUnderstoodError as error:
            first = first or error
            continue
        if not any(cluster.conditional for cluster in clusters):
            return _needed(assumptions, methods, group)
        fallback = fallback or assumptions
    if fallback is not None:
        return fallback
    assert first is not None
    raise first


def _candidates(methods: list[Method], known: Assumptions) -> Iterator[Assumptions]:
    yield Assumptions()
    if known:
        yield known
    if len(methods) > 1:
        return  # what is assumed of one method's parameters says nothing of another's
    node = methods[0].node
    optional = none_by_default(node)
    for name in optional:
        yield Assumptions(none=(name,))
    if known:
        for name in optional:
            yield replace(known, none=(name,))
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args][1:]]
    for start in range(len(names)):
        for end in range(start + 2, min(start + 4, len(names) + 1)):
            yield Assumptions(same=tuple(names[start:end]))


def _needed(assumptions: Assumptions, methods: list[Method], group: tuple[str, ...]) -> Assumptions:
    """The assumptions without what is known of the module and proves nothing."""
    for name in ("attributes", "identities"):
        for one in getattr(assumptions, name):
            fewer = replace(assumptions, **{name: tuple(x for x in getattr(assumptions, name) if x is not one)})
            try:
                clusters = [cluster for method in methods for cluster in clusters_of(method.node, group, fewer)]
            except NotUnderstoodError:
                continue
            if clusters and not any(cluster.conditional for cluster in clusters):
                assumptions = fewer
    return assumptions
