"""The forward of a class of experts as it is with linear layers of each: the uses of stacks and the loop, together."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from torch import nn

from patcher.fusions.experts.gate_splits import methods_of
from patcher.fusions.experts.loops import ExpertLoop, attribute_of, expert_loop
from patcher.fusions.experts.stacks import Stack, by_experts, forward_of
from patcher.fusions.experts.visits import visiting_all_in_training, visiting_all_with_all_tokens
from patcher.fusions.methods import Method, NotUnderstoodError, located, self_of, trees_of


def rewritten_forward(
    original: type[nn.Module], weights: Mapping[str, str], *, all_tokens: bool
) -> tuple[Method, str, tuple[Stack, ...], ExpertLoop | None]:
    """The forward, its new source, the stacks that it uses, and its loop over the experts, if it has one.

    Args:
        weights: the stacked parameters -> the parameter with the biases, or "".

    Raises:
        NotUnderstoodError: its forward uses the stacks in another way than expert by expert.
    """
    for name in ("__len__", "__getitem__", "__iter__"):
        if hasattr(original, name):
            raise NotUnderstoodError(f"it has {name} of its own")
    method = forward_of(original)
    _check_other_methods(original, weights)
    try:
        return method, *_rewritten(original, method, weights, all_tokens)
    except NotUnderstoodError as error:
        raise located(error, method) from error


def _rewritten(
    original: type[nn.Module], method: Method, weights: Mapping[str, str], all_tokens: bool
) -> tuple[str, tuple[Stack, ...], ExpertLoop | None]:
    methods, this = methods_of(original), self_of(method.node, "self")
    # First what it says, of the source that it has; then what becomes of it.
    stacks, source = by_experts(method.source, weights, methods)
    every = {*weights, *(bias for bias in weights.values() if bias)}
    loop = expert_loop(method.node, this, tuple(every))
    if loop is not None:
        visiting = visiting_all_with_all_tokens if all_tokens else visiting_all_in_training
        _, source = by_experts(visiting(method.source, this, loop), weights, methods)
    return source, stacks, loop


def _check_other_methods(original: type[nn.Module], weights: Mapping[str, str]) -> None:
    """Raise if another method than the forward uses a stack."""
    for name, tree in trees_of(original).items():
        read = {attribute_of(self_of(tree), node) for node in ast.walk(tree)}
        if name != "forward" and (used := sorted(read & weights.keys())):
            raise NotUnderstoodError(f"its method {name} uses {used[0]}")
