"""Which rows of a packed layer are whose, read from the method that takes its output apart.

    qkv = self.query_key_value(hidden_states).view(hidden_shape)    <- a tensor of which each row is known
    query, key, value = qkv.chunk(3, dim=-1)                        <- from which rows is `query` made?

The method's assignments run on small tensors, as they are written, and autograd says which rows of the output each
variable depends on. So nothing is guessed from the order of names: CodeGen has its values before its keys, Phi-4's
encoder its gate behind what it gates, GPT-NeoX a part of each for every head.
"""

from __future__ import annotations

import ast
import inspect
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

#: What modeling code calls the same thing.
_SYNONYMS = {word: role for words in ROLES for word, role in zip(words, ROLES[0], strict=True)}
#: Any tensor or layer.
_GENERIC = frozenset("proj projection layer layers states state linear lin to weight".split())
#: The function that the output of the packed layer comes from, and what the code that runs is called.
_OUTPUT, _NAME = "packed_output", "<packed>"


@dataclass(frozen=True)
class PackedRows:
    """How the rows of a packed layer lie.

    Attributes:
        sizes: part -> how many rows it has, in the order in which they lie.
        blocks: how many equal blocks they lie in, each with its share of every part, as heads do.
    """

    sizes: Mapping[str, int]
    blocks: int


def packed_rows(owner: nn.Module, packed: str, parts: Sequence[str]) -> PackedRows:
    """How the rows of a layer are divided among parts, by what the module that calls it makes of its output.

    >>> from transformers import GPTNeoXConfig
    >>> from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    >>> attention = GPTNeoXAttention(GPTNeoXConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1))
    >>> packed_rows(attention, "query_key_value", ["q_proj", "k_proj", "v_proj"])
    PackedRows(sizes={'q_proj': 64, 'k_proj': 64, 'v_proj': 64}, blocks=4)

    Args:
        owner: the module that has the layer, on any device.
        packed: the name of the layer in it.
        parts: the names of the parts, in words that the method has for its variables: `q_proj` is `query_states`,
            `query_layer` or `q`, `gate_proj` is `gate`.

    Raises:
        NotUnderstoodError: no method assigns variables of these names that have all rows among them, each row once.
    """
    if "forward" in vars(owner):
        raise NotUnderstoodError("the forward of the module around it was replaced on the object")
    methods = [read_function(function) for function in functions_of(type(owner)).values()]
    calling = [method for method in methods if any(_calls(method, packed))]
    if not calling:
        raise NotUnderstoodError(f"no method of {type(owner).__name__} calls self.{packed}(...)")
    for method in calling:
        _, first, *others = inspect.signature(method.function).parameters
        called_with = {name for call in _calls(method, packed) for name in names_in(call)}
        # Inputs of several ranks, as text, packed sequences and images have, and of enough tokens for windows.
        shapes = ((1, 4), (4,), (1, 2, 2), (1, 256))
        for inputs, shape in itertools.product(({first}, {first, *called_with}, {first, *others}), shapes):
            if found := _Run(owner, packed, method, inputs, shape).first(partial(_packed, parts)):
                return found
    method = calling[0]
    reason = f"its output isn't taken apart into variables named like {', '.join(parts)}"
    raise located(NotUnderstoodError(reason, next(_calls(method, packed)).lineno), method)


def _calls(method: Method, packed: str) -> Iterator[ast.Call]:
    """Where a method calls the layer of its `self`."""
    layer = ast.unparse(ast.Attribute(ast.Name(self_of(method.node)), packed))
    for node in ast.walk(method.node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == layer:
            yield node


class _Run:
    """The assignments of a method, carried out one by one; what can't be is left out.

    Args:
        shape: of the input, but for its features.
        inputs: the parameters that are given a tensor; others have their defaults, or None.
    """

    def __init__(
        self, owner: nn.Module, packed: str, method: Method, inputs: set[str], shape: tuple[int, ...]
    ) -> None:
        layer: Any = owner.get_submodule(packed)
        weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        self.count: int = weight.shape[0]
        given = torch.zeros(*shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self.outputs: list[torch.Tensor] = []
        self.rows: dict[str, torch.Tensor] = {}  # of what has been assigned: whether it depends on each
        self.known: dict[str, Any] = {**method.function.__globals__, _OUTPUT: self._output}
        for each in inspect.signature(method.function).parameters.values():
            default = None if each.default is each.empty else each.default
            absent: dict[Any, Any] = {each.VAR_POSITIONAL: (), each.VAR_KEYWORD: {}}
            self.known[each.name] = given if each.name in inputs else absent.get(each.kind, default)
        self.known[self_of(method.node)] = owner
        tree: Any = ast.parse(method.source).body[0]  # of its own, to be changed
        method = replace(method, node=tree)
        for call in _calls(method, packed):
            call.func = ast.copy_location(ast.Name(_OUTPUT, ast.Load()), call.func)
        self.body = method.node.body

    def first(self, look: Callable[[Mapping[str, torch.Tensor]], PackedRows | None]) -> PackedRows | None:
        """What is first found in the variables and the rows that they depend on, after any of the assignments."""
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            return self._first(self.body, look)

    def _first(self, body: Iterable[ast.stmt], look: Callable[..., PackedRows | None]) -> PackedRows | None:
        for statement in body:
            found = None
            if isinstance(statement, ast.If):
                found = self._first(self._branch(statement), look)
            elif isinstance(statement, ast.With | ast.Try):
                found = self._first(statement.body, look)
            elif names := _assigned(statement):
                self._assign(statement, names)
                found = look(self.rows)
            if found is not None:
                return found
        return None

    def _assign(self, statement: ast.stmt, names: Collection[str]) -> None:
        for name in names:
            self.rows.pop(name, None)
        try:
            exec(compile(ast.Module([statement], []), _NAME, "exec"), self.known)
        except Exception:
            for name in names:
                self.known.pop(name, None)
        else:
            self.rows |= {name: rows for name in names if (rows := self._rows(self.known[name])) is not None}

    def _output(self, features: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*features.shape[:-1], self.count))
        # Small and positive: what is clamped, or goes through an activation, keeps its gradient.
        values = torch.linspace(1e-3, 2e-3, shape.numel(), dtype=torch.float64, device="cpu")
        self.outputs.append(values.view(shape).requires_grad_())
        return self.outputs[-1]

    def _branch(self, statement: ast.If) -> list[ast.stmt]:
        try:
            holds = eval(compile(ast.Expression(statement.test), _NAME, "eval"), self.known)
            return statement.body if holds else statement.orelse
        except Exception:  # it depends on what isn't known: what either does is looked at
            return [*statement.body, *statement.orelse]

    def _rows(self, value: Any) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not self.outputs:
            return None
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
        try:
            gradients = torch.autograd.grad(value, self.outputs, weights, retain_graph=True, allow_unused=True)
        except RuntimeError:  # something was written into what it is made of
            return None
        used = [each.flatten(0, -2).any(0) for each in gradients if each is not None]  # type: ignore[redundant-expr]
        return torch.stack(used).any(0) if used else None


def _assigned(statement: ast.stmt) -> set[str]:
    """The variables that a statement assigns; none if it does anything else."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {each.id for each in flat if isinstance(each, ast.Name)}
    return names if all(isinstance(each, ast.Name) for each in flat) else set()


def _words(name: str) -> frozenset[str]:
    words = frozenset(_SYNONYMS.get(word, word) for word in name.lower().split("_") if word)
    return words - _GENERIC or words


def _packed(parts: Sequence[str], owned: Mapping[str, torch.Tensor]) -> PackedRows | None:
    """How the rows lie, where variables named like the parts have all rows among them, and each row once."""
    chosen = []
    for part in parts:
        named = [rows for name, rows in owned.items() if _words(part) <= _words(name) and not rows.all()]
        if not named or any(not torch.equal(named[0], other) for other in named):
            return None
        chosen.append(named[0])
    each = torch.stack(chosen)
    if not (each.sum(0) == 1).all():
        return None
    numbers, lengths = torch.unique_consecutive(each.int().argmax(0), return_counts=True)
    runs = list(zip(numbers.tolist(), lengths.tolist(), strict=True))
    block, blocks = runs[: len(parts)], len(runs) // len(parts)
    if runs != block * blocks or len(dict(block)) < len(parts):
        return None
    return PackedRows({parts[number]: rows * blocks for number, rows in block}, blocks)
