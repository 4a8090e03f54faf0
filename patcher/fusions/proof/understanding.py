"""What must be assumed of a call so that projections provably share their input: as little as possible."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from torch import nn

from patcher.fusions.methods import Method, NotUnderstoodError, located, methods_with, names_in
from patcher.fusions.proof.tracing import Constant, Guards, Proof, called_projections, prove
from patcher.fusions.proof.values import Summary
from patcher.source.call_sites import none_by_default, positional_parameters


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
    children: tuple[tuple[str, Summary], ...] = (),
) -> Guards:
    """What must be assumed of a call so that the projections provably share their input; nothing, if that will do.

    Args:
        attributes: what the module says of itself.
        identities: its children that are `nn.Identity`.
        children: what calls of its children do; see `patcher.fusions.proof.children`.

    Raises:
        NotUnderstoodError: no assumption that can be checked makes it provable.
    """
    methods = joining_methods(original, group)
    if not methods:
        raise NotUnderstoodError(f"no method of {original.__qualname__} calls {', '.join(group)} by name")
    used = {name for method in methods for name in names_in(method.node)}
    always = Guards(children=children)
    known = Guards(
        attributes=tuple(sorted((name, value) for name, value in attributes.items() if name in used)),
        identities=tuple(sorted(used.intersection(identities))),
        children=children,
    )
    first: NotUnderstoodError | None = None
    fallback: tuple[Guards, list[Proof]] | None = None
    for guards in _candidates(methods, always, known):
        try:
            proofs = _proofs(original, methods, group, guards)
        except NotUnderstoodError as error:
            first = first or error
            continue
        if not _is_conditional(proofs):
            return _needed(original, guards, proofs, methods, group)
        fallback = fallback or (guards, proofs)
    if fallback is not None:
        guards, proofs = fallback
        return replace(guards, children=_used(guards, proofs))
    assert first is not None
    raise first


def _proofs(original: type[nn.Module], methods: list[Method], group: tuple[str, ...], guards: Guards) -> list[Proof]:
    """The proof of each method, with these guards."""
    proofs: list[Proof] = []
    for method in methods:
        try:
            proofs.append(prove(original, method, group, guards))
        except NotUnderstoodError as error:
            raise located(error, method) from error
    if not any(proof.inputs for proof in proofs):
        raise NotUnderstoodError(f"{', '.join(group)} are never called")
    return proofs


def _is_conditional(proofs: list[Proof]) -> bool:
    """Whether some of the calls that share an input run only under a condition that nothing decides."""
    return any(shared.conditional for proof in proofs for shared in proof.inputs)


def _candidates(methods: list[Method], always: Guards, known: Guards) -> Iterator[Guards]:
    yield always
    if known:
        yield known
    if len(methods) > 1:
        return  # what is assumed of one method's parameters says nothing of another's
    node = methods[0].node
    optional = none_by_default(node)
    for name in optional:
        yield replace(always, none=(name,))
    if known:
        for name in optional:
            yield replace(known, none=(name,))
    names = [argument.arg for argument in positional_parameters(node)[1:]]
    for length in (2, 3):  # as few as will do
        for start in range(len(names) - length + 1):
            yield replace(always, same=tuple(names[start : start + length]))


def _used(guards: Guards, proofs: list[Proof]) -> tuple[tuple[str, Summary], ...]:
    used = {name for proof in proofs for name in proof.children}
    return tuple(one for one in guards.children if one[0] in used)


def _needed(
    original: type[nn.Module], guards: Guards, proofs: list[Proof], methods: list[Method], group: tuple[str, ...]
) -> Guards:
    """The guards without what is known of the module and proves nothing."""
    written = [proof.written for proof in proofs]
    guards = replace(guards, children=_used(guards, proofs))
    for name in ("attributes", "identities", "children"):
        for one in getattr(guards, name):
            fewer = replace(guards, **{name: tuple(x for x in getattr(guards, name) if x is not one)})
            with suppress(NotUnderstoodError):
                found = _proofs(original, methods, group, fewer)
                if not _is_conditional(found) and [proof.written for proof in found] == written:
                    guards = fewer
    return guards
