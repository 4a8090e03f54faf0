"""Classes that a fusion has rewritten, as patches of the class that they were made from."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

from torch import nn

from patcher import matching
from patcher.codegen.checkpoints import import_torch
from patcher.codegen.config import PatchConfig
from patcher.errors import CodegenError

__all__ = ["join_projections", "list_experts"]

# --- projections that are joined -----------------------------------------------------------------------------------

_JOIN = '''
def joined_linear(module, names, joined):
    """Put one nn.Linear in the place of several with the same input: its rows are theirs, in the order of the names.

    The module keeps how many rows each had as `<joined>_sizes`.
    """
    parts = [module._modules.pop(name) for name in names]
    biased = [part.bias is not None for part in parts]
    sizes = [part.out_features for part in parts]
    linear = nn.Linear(parts[0].in_features, sum(sizes), bias=all(biased), device="meta")
    linear.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
    if all(biased):
        linear.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
    elif any(biased):  # they are added after the split
        for name, part in zip(names, parts):
            if part.bias is not None:
                module.register_parameter(f"{name}_bias", part.bias)
    setattr(module, joined, linear)
    setattr(module, f"{joined}_sizes", sizes)
'''


def join_projections(described: PatchConfig, original: type[nn.Module], fused: Any) -> None:
    """The rewritten methods of a class whose projections are joined, and its `__init__`."""
    joined, name = fused._joined, original.__name__
    listed = ", ".join(joined.projections)
    node = _class_node(fused)
    text = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    rewritten = {method.name for method in methods}
    for method in methods:
        first = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
        code = textwrap.dedent("".join(text[first - 1 : method.end_lineno]))
        if f"super().{method.name}(" in code:
            raise CodegenError(
                f"{described.where}: whether {name}.{method.name} is fused is decided call by call, and a file has "
                "one forward for a class. Load with the patcher itself."
            )
        described.override_method(f"{name}.{method.name}", code, f"{listed} are one {joined.name}")
    _check_uses(described, original, joined.projections, rewritten)
    wrapper = (
        "def with_joined(original_init, self, *args, **kwargs):\n"
        "    original_init(self, *args, **kwargs)\n"
        f"    joined_linear(self, {list(joined.projections)!r}, {joined.name!r})\n"
    )
    described.modify_init(name, wrapper.replace("'", '"'), f"one {joined.name} in place of {listed}")
    if all(helper.source.name != "joined_linear" for helper in described.helpers):
        described.add_helper(_JOIN, "projections of one input as one")
        import_torch(described, sys.modules[original.__module__])


def _check_uses(
    described: PatchConfig, original: type[nn.Module], projections: tuple[str, ...], rewritten: set[str]
) -> None:
    """Nothing else in the class, or in one that inherits from it, may look for what is joined."""
    for cls in [original, *_subclasses(original)]:
        for name, value in vars(cls).items():
            inner = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            if not inspect.isfunction(inner) or name == "__init__" or (cls is original and name in rewritten):
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
            used = {part.attr for part in ast.walk(tree) if isinstance(part, ast.Attribute)} & set(projections)
            if used:
                raise CodegenError(
                    f"{described.where}: {cls.__name__}.{name} uses {', '.join(sorted(used))} as well, which the "
                    "file would no longer have. Load with the patcher itself."
                )


def _subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    return [
        other
        for other in matching.module_subclasses()
        if other is not cls and issubclass(other, cls) and other.__module__ == cls.__module__
    ]


# --- experts that are listed ---------------------------------------------------------------------------------------

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


def list_experts(described: PatchConfig, original: type[nn.Module], fused: Any) -> None:
    """The class with a list of layers in the place of each stack, and the forward that goes expert by expert.

    The whole class is replaced, because decorators of the original choose among forwards that need stacks.
    """
    if any(stack.transposed or stack.bias for stack in fused._stacks):
        raise CodegenError(
            f"{described.where}: the experts of {original.__name__} have biases or are transposed, which can't be "
            "written as a file yet. Load with the patcher itself."
        )
    lines = textwrap.dedent(inspect.getsource(original)).splitlines(keepends=True)
    (node,) = ast.parse("".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    (rewritten,) = [item for item in _class_node(fused).body if isinstance(item, ast.FunctionDef)]
    if "__init__" not in own or rewritten.name not in own or set(own) != {"__init__", rewritten.name}:
        raise CodegenError(
            f"{described.where}: {original.__name__} has other methods than __init__ and {rewritten.name}, or "
            "inherits them; such experts can't be written as a file yet. Load with the patcher itself."
        )
    listing = [f'        list_stack(self, "{stack.name}")\n' for stack in fused._stacks]
    listing.append(
        "        self._is_hf_initialized = True  # _init_weights looks for stacks here; layers have their turn\n"
    )
    fused_lines = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    forward = fused_lines[rewritten.lineno - 1 : rewritten.end_lineno]
    old, init = own[rewritten.name], own["__init__"]
    replaced = sorted([(old.lineno - 1, old.end_lineno, forward), (init.end_lineno, init.end_lineno, listing)])
    for first, last, new in reversed(replaced):
        lines[first:last] = new
    code = "".join(lines[node.lineno - 1 :])
    described.replace_class(original.__name__, code, "each expert is a plain linear layer, and runs by itself")
    described.add_helper(_LIST, "stacked weights as layers")
    import_torch(described, sys.modules[original.__module__])


def _class_node(cls: type) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node
