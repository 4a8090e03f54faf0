"""Which rows of a packed layer belong to which part, derived from the method that splits its output.

    qkv = self.query_key_value(hidden_states).view(hidden_shape)    <- a tensor with a known row order
    query, key, value = qkv.chunk(3, dim=-1)                        <- on which rows does `query` depend?

The method's assignments are executed on small tensors, and autograd tells on which rows of the output each variable
depends. So nothing is guessed from the order of names: CodeGen has its values before its keys, Phi-4's encoder its
gate after the up projection, GPT-NeoX a part of each for every head.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Conv1D

from patcher.fusions.methods import (
    Method,
    NotUnderstoodError,
    functions_of,
    located,
    names_in,
    read_function,
    self_of,
)
from patcher.fusions.qkv import ROLES
from patcher.source.reading import signature_of

#: Word -> the word for the same role in the first group: `query` -> `q`.
_SYNONYMS = {word: role for words in ROLES for word, role in zip(words, ROLES[0], strict=True)}
#: Words that any name of a tensor or layer may have.
_GENERIC = frozenset("proj projection layer layers states state linear lin to weight".split())
#: The name of the function that is called instead of the packed layer, and the file name of executed code.
_OUTPUT, _FILE = "packed_output", "<packed>"


@dataclass(frozen=True)
class PackedRows:
    """The order of the rows of a packed layer.

    Attributes:
        sizes: part -> number of rows, in the order of the rows.
        blocks: the number of equal blocks, as heads, each with its share of every part.
    """

    sizes: Mapping[str, int]
    blocks: int


def packed_rows(owner: nn.Module, packed: str, parts: Sequence[str]) -> PackedRows:
    """Derive how the rows of a layer are divided among parts from the module that calls it.

    >>> from transformers import GPTNeoXConfig
    >>> from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    >>> attention = GPTNeoXAttention(GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1))
    >>> packed_rows(attention, "query_key_value", ["q_proj", "k_proj", "v_proj"])
    PackedRows(sizes={'q_proj': 64, 'k_proj': 64, 'v_proj': 64}, blocks=4)

    Args:
        owner: the module that has the layer, on any device.
        packed: the name of the layer in it.
        parts: the names of the parts, matched to the variables of the method by their words: `q_proj` is
            `query_states`, `query_layer` or `q`, `gate_proj` is `gate`.

    Raises:
        NotUnderstoodError: no method assigns variables of these names that depend on all rows, each row once.
    """
    if "forward" in vars(owner):
        raise NotUnderstoodError("the forward of the module around it was replaced on the object")
    methods = [read_function(function) for function in functions_of(type(owner)).values()]
    calling = [method for method in methods if any(_calls(method, packed))]
    if not calling:
        raise NotUnderstoodError(f"no method of {type(owner).__name__} calls self.{packed}(...)")
    for method in calling:
        _, first, *others = signature_of(method.function).parameters
        passed = {name for call in _calls(method, packed) for name in names_in(call)}
        # Inputs of several ranks, as text, packed sequences and images have, and of enough tokens for windows.
        shapes = ((1, 4), (4,), (1, 2, 2), (1, 256))
        for inputs, shape in itertools.product(({first}, {first, *passed}, {first, *others}), shapes):
            if rows := _Execution(owner, packed, method, inputs, shape).find(partial(_packed_rows, parts)):
                return rows
    method = calling[0]
    reason = f"its output isn't taken apart into variables named like {', '.join(parts)}"
    raise located(NotUnderstoodError(reason, next(_calls(method, packed)).lineno), method)


def _calls(method: Method, packed: str) -> Iterator[ast.Call]:
    """Yield the calls of a layer of `self` in a method."""
    layer = ast.unparse(ast.Attribute(ast.Name(self_of(method.node)), packed))
    for node in ast.walk(method.node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == layer:
            yield node


class _Execution:
    """Executes the assignments of a method one by one, leaving out those that fail.

    Args:
        inputs: the parameters that get a tensor; others get their defaults, or None.
        shape: the shape of the tensor, without its features.
    """

    def __init__(
        self, owner: nn.Module, packed: str, method: Method, inputs: set[str], shape: tuple[int, ...]
    ) -> None:
        layer: Any = owner.get_submodule(packed)
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        self.row_count: int = weight.shape[0]
        tensor = torch.zeros(*shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self.outputs: list[torch.Tensor] = []
        self.masks: dict[str, torch.Tensor] = {}  # assigned variable -> whether it depends on each row
        self.namespace: dict[str, Any] = {**method.function.__globals__, _OUTPUT: self._output}
        for parameter in signature_of(method.function).parameters.values():
            default = None if parameter.default is parameter.empty else parameter.default
            variadic: dict[Any, Any] = {parameter.VAR_POSITIONAL: (), parameter.VAR_KEYWORD: {}}
            value = tensor if parameter.name in inputs else variadic.get(parameter.kind, default)
            self.namespace[parameter.name] = value
        self.namespace[self_of(method.node)] = owner
        tree: Any = ast.parse(method.source).body[0]  # a copy, which is edited
        method = replace(method, node=tree)
        for call in _calls(method, packed):
            call.func = ast.copy_location(ast.Name(_OUTPUT, ast.Load()), call.func)
        self.body = method.node.body

    def find(self, read: Callable[[Mapping[str, torch.Tensor]], PackedRows | None]) -> PackedRows | None:
        """Return the first result that `read` gives for the masks of the variables after an assignment."""
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            return self._find(self.body, read)

    def _find(self, body: Iterable[ast.stmt], read: Callable[..., PackedRows | None]) -> PackedRows | None:
        for statement in body:
            rows = None
            if isinstance(statement, ast.If):
                rows = self._find(self._branch(statement), read)
            elif isinstance(statement, ast.With | ast.Try):
                rows = self._find(statement.body, read)
            elif names := _assigned_names(statement):
                self._assign(statement, names)
                rows = read(self.masks)
            if rows is not None:
                return rows
        return None

    def _assign(self, statement: ast.stmt, names: Collection[str]) -> None:
        for name in names:
            self.masks.pop(name, None)
        try:
            exec(compile(ast.Module([statement], []), _FILE, "exec"), self.namespace)
        except Exception:
            for name in names:
                self.namespace.pop(name, None)
        else:
            self.masks |= {name: mask for name in names if (mask := self._mask(self.namespace[name])) is not None}

    def _output(self, features: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*features.shape[:-1], self.row_count))
        # Small and positive, so that clamping and activations keep the gradient.
        values = torch.linspace(1e-3, 2e-3, shape.numel(), dtype=torch.float64, device="cpu")
        self.outputs.append(values.view(shape).requires_grad_())
        return self.outputs[-1]

    def _branch(self, statement: ast.If) -> list[ast.stmt]:
        try:
            is_true = eval(compile(ast.Expression(statement.test), _FILE, "eval"), self.namespace)
            return statement.body if is_true else statement.orelse
        except Exception:  # it depends on something unknown: execute both
            return [*statement.body, *statement.orelse]

    def _mask(self, value: Any) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not self.outputs:
            return None
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
        try:
            gradients = torch.autograd.grad(value, self.outputs, weights, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a tensor of its graph was modified in place
            return None
        masks = [grad.flatten(0, -2).any(0) for grad in gradients if grad is not None]  # type: ignore[redundant-expr]
        return torch.stack(masks).any(0) if masks else None


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement assigns; none if it does anything else."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    flat = [node for target in targets for node in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {node.id for node in flat if isinstance(node, ast.Name)}
    return names if all(isinstance(node, ast.Name) for node in flat) else set()


def _words(name: str) -> frozenset[str]:
    words = frozenset(_SYNONYMS.get(word, word) for word in name.lower().split("_") if word)
    return words - _GENERIC or words


def _packed_rows(parts: Sequence[str], masks: Mapping[str, torch.Tensor]) -> PackedRows | None:
    """Return the order of the rows if variables named like the parts depend on all rows, each row once."""
    chosen = []
    for part in parts:
        named = [mask for name, mask in masks.items() if _words(part) <= _words(name) and not mask.all()]
        if not named or any(not torch.equal(named[0], other) for other in named):
            return None
        chosen.append(named[0])
    stacked = torch.stack(chosen)
    if not (stacked.sum(0) == 1).all():
        return None
    indices, lengths = torch.unique_consecutive(stacked.int().argmax(0), return_counts=True)
    runs = list(zip(indices.tolist(), lengths.tolist(), strict=True))
    block, blocks = runs[: len(parts)], len(runs) // len(parts)
    if runs != block * blocks or len(dict(block)) < len(parts):
        return None
    return PackedRows({parts[index]: rows * blocks for index, rows in block}, blocks)
