"""All of transformers: what is alike computes the same to the bit; what is the same to the letter is alike."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, ViTConfig

from patcher import like
from tests.support.tiny import DECODER_SIZES, tiny_bert_config

pytestmark = pytest.mark.project

LLAMA = LlamaConfig(**DECODER_SIZES, attn_implementation="eager")
BERT = tiny_bert_config()
VIT = ViTConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def modeling_files() -> list[Any]:
    models = Path(transformers.__file__).parent / "models"
    names = (".".join((path.parent.name, path.stem)) for path in sorted(models.glob("*/modeling_*.py")))
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(f"transformers.models.{name}"))
        except ImportError:  # one that needs a package that isn't installed
            continue
    assert len(found) > 400
    return found


@cache
def classes() -> list[type[nn.Module]]:
    values = (value for module in modeling_files() for value in vars(module).values())
    return list({value: None for value in values if isinstance(value, type) and issubclass(value, nn.Module)})


@cache
def functions() -> list[Callable[..., Any]]:
    values = (value for module in modeling_files() for value in vars(module).values())
    return list({value: None for value in values if inspect.isfunction(value)})


def hidden(width: int = 64) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 5, width),)


def positions() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 5, 64), torch.arange(5).expand(2, 5)


#: class -> how it is built, and what its forward is given
CLASSES: dict[str, tuple[tuple[Any, ...], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "LlamaRMSNorm": ((64,), hidden),
    "T5LayerNorm": ((64,), hidden),
    "GemmaRMSNorm": ((64,), hidden),
    "LlamaMLP": ((LLAMA,), hidden),
    "LlamaRotaryEmbedding": ((LLAMA,), positions),
    "BertIntermediate": ((BERT,), hidden),
    "BertPooler": ((BERT,), hidden),
    "BertSelfOutput": ((BERT,), lambda: (*hidden(), *hidden())),
    "ViTMLP": ((VIT,), hidden),
}


def rotated() -> tuple[Any, ...]:
    return tuple(torch.randn(2, 4, 5, 16) for _ in range(2)) + tuple(torch.randn(2, 5, 16) for _ in range(2))


#: function -> what it is given
FUNCTIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "llama.modeling_llama:apply_rotary_pos_emb": rotated,
    "llama.modeling_llama:rotate_half": lambda: (torch.randn(2, 4, 5, 16),),
    "llama.modeling_llama:repeat_kv": lambda: (torch.randn(2, 4, 5, 16), 3),
}


def outputs(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from outputs(each)


def results(function: Callable[..., Any], inputs: tuple[Any, ...], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is computed, and the gradients of all that it is computed from."""
    own = [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x for x in inputs]
    found = list(outputs(function(*own)))
    leaves = [*leaves, *(x for x in own if isinstance(x, torch.Tensor) and x.requires_grad)]
    if sum(x.sum() for x in found).requires_grad:
        gradients = torch.autograd.grad(sum((x.float() ** 2).sum() for x in found), leaves, allow_unused=True)
        found += [x for x in gradients if x is not None]
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_that_is_alike_computes_the_same_to_the_bit(name: str) -> None:
    arguments, inputs_of = CLASSES[name]
    target = like(name).resolve()
    found = [cls for cls in classes() if like(name).matches(cls)]
    assert target in found
    for cls in found:
        for dtype in DTYPES:
            torch.manual_seed(0)
            one, other = (each(*arguments).to(dtype).eval() for each in (target, cls))
            for weight in one.parameters():
                nn.init.normal_(weight, std=0.2)
            other.load_state_dict(one.state_dict())
            inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs_of())
            expected, found_here = (results(each, inputs, list(each.parameters())) for each in (one, other))
            assert equal(expected, found_here), f"{cls.__module__}.{cls.__name__} in {dtype}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_that_is_alike_computes_the_same_to_the_bit(name: str) -> None:
    key = like(f"transformers.models.{name}")
    found = [function for function in functions() if key.matches(function)]
    assert len(found) > 20
    for function in found:
        for dtype in DTYPES:
            inputs = tuple(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in FUNCTIONS[name]())
            expected, found_here = (results(each, inputs, []) for each in (key.resolve(), function))
            assert equal(expected, found_here), f"{function.__module__}.{function.__name__} in {dtype}"


class Canonical(ast.NodeTransformer):
    """The syntax tree of a class without its name, docstrings, annotations and what chooses a kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("_" if node.id == self.name else node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.returns = None
        for parameter in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]:
            parameter.annotation = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = "_"
        node.decorator_list = [each for each in node.decorator_list if "kernel" not in ast.unparse(each)]
        node.body = [each for each in node.body if not (isinstance(each, ast.Expr) or _is_shown(each))] or [ast.Pass()]
        return self.generic_visit(node)


def _is_shown(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "extra_repr"


@cache
def letters() -> dict[str, str]:
    """module.name of each class of a modeling file -> its syntax tree, but for what makes no difference."""
    found = {}
    for module in modeling_files():
        for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                name = node.name
                found[f"{module.__name__}.{name}"] = ast.dump(Canonical(name).visit(node))
    return found


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm", "LlamaMLP", "BertIntermediate", "BertPooler"])
def test_what_is_the_same_to_the_letter_is_alike(name: str) -> None:
    by_name = {f"{cls.__module__}.{cls.__name__}": cls for cls in classes()}
    target = like(name).resolve()
    text = letters()[f"{target.__module__}.{name}"]
    same = [by_name[where] for where, written in letters().items() if written == text and where in by_name]
    alike = [cls for cls in same if like(name).matches(cls)]
    assert len(alike) >= 0.97 * len(same), {cls.__name__: like(name).why_not(cls) for cls in set(same) - set(alike)}


def test_how_many_norms_are_one() -> None:
    norms = [cls for cls in classes() if cls.__name__.endswith("RMSNorm")]
    assert sum(map(like("LlamaRMSNorm").matches, norms)) >= 100
