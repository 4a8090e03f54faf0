"""Classes whose stacked experts are listed, as code: the class itself changed, or a class that inherits from it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from patcher.codegen.builder import PatchConfig
from patcher.codegen.checkpoint_methods import import_torch
from patcher.codegen.joined_projections import add_helper_once, as_subclass, becomes_one_class, class_node
from patcher.codegen.owning_classes import Owners
from patcher.fusions.stacks import Stack

__all__ = ["list_experts"]

_LIST = '''
def list_stack(module, name):
    """Put a list of linear layers in the place of a parameter that stacks their weights, `(experts, out, in)`."""
    stack = module._parameters.pop(name).detach()
    experts = nn.ModuleList()
    for weight in stack:
        linear = nn.Linear(stack.shape[2], stack.shape[1], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.clone())
        experts.append(linear)
    setattr(module, name, experts)
'''

_LIST_WITH_BIAS = '''
def list_biased_stack(module, name, bias=None, transposed=False):
    """Put a list of linear layers in the place of parameters that stack their weights and biases.

    The weights are `(experts, out, in)`, or `(experts, in, out)` where they are transposed; biases `(experts, out)`.
    """
    stack = module._parameters.pop(name).detach()
    stack = stack.transpose(1, 2) if transposed else stack
    biases = module._parameters.pop(bias).detach() if bias else [None] * len(stack)
    experts = nn.ModuleList()
    for weight, own in zip(stack, biases):
        linear = nn.Linear(stack.shape[2], stack.shape[1], bias=own is not None, device="meta")
        linear.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
        if own is not None:
            linear.bias = nn.Parameter(own.clone())
        experts.append(linear)
    setattr(module, name, experts)
'''

_WHY = "each expert is a plain linear layer, and runs by itself"


def list_experts(
    described: PatchConfig,
    owners: Owners,
    original: type[nn.Module],
    fused: Mapping[str, Any],
    refused: Mapping[str, str],
) -> None:
    """The code of a class with a list of layers in the place of each stack, and the forward that goes one by one.

    The arguments are those of `join_projections`. The class is replaced as a whole, because decorators of the original
    choose among forwards that need stacks.
    """
    import_torch(described, sys.modules[original.__module__])
    name, variants = original.__name__, list(dict.fromkeys(fused.values()))
    alike = becomes_one_class(owners, original, fused)
    text = _replacement(described, original, variants[0]) if alike else ""
    if text:
        described.replace_class(name, text, _WHY)
        return
    for number, cls in enumerate(variants, 1):
        new = cls.__name__ if len(variants) == 1 else f"{cls.__name__}{number}"
        described.add_helper_after(name, as_subclass(cls, new, name, []), _WHY)
        for path in (path for path, found in fused.items() if found is cls):
            owner, part = owners.part(path, fused, refused)
            statement = f"{part}.__class__ = {new}\n" + "".join(_listing(described, cls._stacks, part))
            owners.add(owner, statement, f"{part.removeprefix('self.')} is a list of linear layers")


def _replacement(described: PatchConfig, original: type[nn.Module], fused: Any) -> str:
    """The class, with another forward and more in its `__init__`; empty where it doesn't have these two itself."""
    lines = textwrap.dedent(inspect.getsource(original)).splitlines(keepends=True)
    node = class_node(original)
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    (rewritten,) = [item for item in class_node(fused).body if isinstance(item, ast.FunctionDef)]
    if "__init__" not in own or rewritten.name not in own:
        return ""
    listing = [f"        {line}" for line in _listing(described, fused._stacks, "self")]
    fused_lines = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    forward = fused_lines[rewritten.lineno - 1 : rewritten.end_lineno]
    old, init = own[rewritten.name], own["__init__"]
    replaced = sorted([(old.lineno - 1, old.end_lineno, forward), (init.end_lineno, init.end_lineno, listing)])
    for first, last, new in reversed(replaced):
        lines[first:last] = new
    return "".join(lines[node.lineno - 1 :])


def _listing(described: PatchConfig, stacks: tuple[Stack, ...], module: str) -> list[str]:
    """The statements that list the stacks of a module."""
    lines = []
    for stack in stacks:
        if not stack.bias and not stack.transposed:
            add_helper_once(described, "list_stack", _LIST, "stacked weights as layers")
            lines.append(f'list_stack({module}, "{stack.name}")\n')
            continue
        add_helper_once(described, "list_biased_stack", _LIST_WITH_BIAS, "stacked weights and biases as layers")
        options = f', bias="{stack.bias}"' if stack.bias else ""
        options += ", transposed=True" if stack.transposed else ""
        lines.append(f'list_biased_stack({module}, "{stack.name}"{options})\n')
    note = "  # _init_weights looks for stacks here; layers have their turn"
    return [*lines, f"{module}._is_hf_initialized = True{note}\n"]
