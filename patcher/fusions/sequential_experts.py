"""`sequential_experts`: stacked expert weights as linear layers of each expert, for quantizers and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.fusions import (
    Decision,
    FusedModule,
    Fusion,
    NotUnderstoodError,
    Surroundings,
    compile_subclass,
    fused_class_of,
)
from patcher.fusions.experts.forwards import rewritten_forward
from patcher.fusions.experts.listed import ListedExperts
from patcher.fusions.experts.loops import ExpertLoop
from patcher.fusions.experts.matrices import Matrices
from patcher.fusions.experts.stacks import Stack


class RewrittenExperts(FusedModule, ListedExperts):
    """What the rewritten classes have in common."""

    _stacks: ClassVar[tuple[Stack, ...]]
    _loop: ClassVar[ExpertLoop | None]


class SequentialExperts(Fusion):
    """Each expert as linear layers of its own: `experts.3.gate_proj`, `experts.3.up_proj`, `experts.3.down_proj`.

    That is so in every architecture, whatever it calls its stacks and however gate and up lie in them; a stack whose
    role isn't known keeps its name, and a module of one stack called `weight` becomes a list of linear layers. The
    experts are indexed like an `nn.ModuleList`. The forward is the model's eager one, whatever
    `experts_implementation` says: the others (`grouped_mm`, `batched_mm`, ...) need stacks.

    In training an expert without tokens runs on no rows, so that its gradient is zero and not None; so does each in an
    exported program, which has no loop that depends on the data.

    Args:
        modules: where, as paths of modules in the language of the reports.
        all_tokens: every expert computes every token, and what a token didn't choose weighs nothing. Then nothing
            depends on the data: for `torch.compile(fullgraph=True)`, for programs without sizes that do
            (`torch.export`), and for calibration, where hooks on the layers of every expert see every token.
    """

    name = "sequential_experts"
    subject = "weights of experts that are stacked in one parameter of three dimensions"

    all_tokens = False

    def __init__(self, modules: str | Iterable[str] = (), *, all_tokens: bool = False) -> None:
        super().__init__(modules)
        if all_tokens:
            self.all_tokens = True

    def is_fusable(self, module: nn.Module) -> bool:
        return bool(_weights_of(module)) and not self.refusal(module)

    def refusal(self, module: nn.Module) -> str:
        if not _weights_of(module):
            return "it has no stacked weights"
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        try:
            cls: Any = fused_class_of(self, module)
            _check(module, cls._stacks, cls._loop)
            for layout in self.layouts(module):
                layout.of(module)
        except (NotUnderstoodError, InvalidPatcherError) as error:
            return str(error)
        return ""

    def layouts(self, module: nn.Module) -> Iterator[Matrices]:
        cls: Any = fused_class_of(self, module)
        for stack in cls._stacks:
            for name, kind in ((stack.name, "weight"), (stack.bias, "bias")):
                if name:
                    layers = tuple(f"{part}.{kind}" if part else kind for part in stack.parts)
                    transposed = stack.transposed and kind == "weight"
                    yield Matrices(name, layers=layers, transposed=transposed, interleaved=stack.interleaved)

    def recipe(self, module: nn.Module) -> tuple[tuple[str, str], ...]:
        """The stacks, and the parameter that holds the biases of each."""
        if isinstance(module, RewrittenExperts):
            known: Any = module._made_by.recipe
            return tuple(known)
        return tuple(_weights_of(module).items())

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        """The class with the rewritten forward.

        Raises:
            NotUnderstoodError: its forward uses the stacks in another way than expert by expert.
        """
        return _compile(original_cls, dict(recipe), self.all_tokens)

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        if not _weights_of(module):
            return None
        if reason := self.refusal(module) or surroundings.sharing(path, module, "the module"):
            # Many modules with parameters of three dimensions have tables of positions.
            is_told = "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
            return Decision(refusal=reason, is_told=is_told)
        return Decision(tuple(self.layouts(module)), self.recipe(module))


def _weights_of(module: nn.Module) -> dict[str, str]:
    """The stacked parameters of a module, and the parameter that holds the biases of each, or ""."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    biases = {name: f"{name}_bias" for name in own}
    return {
        name: biases[name] if biases[name] in own and own[biases[name]].dim() == 2 else ""
        for name, parameter in own.items()
        if parameter.dim() == 3 and type(module).__module__.partition(".")[0] != "torch"
    }


def _check(module: nn.Module, stacks: tuple[Stack, ...], loop: ExpertLoop | None) -> None:
    """Whether the module is as its forward was understood.

    Raises:
        NotUnderstoodError: it isn't.
    """
    if numbered := [name for name in (*module._modules, *module._parameters) if name.isdigit()]:
        raise NotUnderstoodError(f"it has {numbered[0]} already, which an expert would be called")
    numbers = {stack.name: len(getattr(module, stack.name)) for stack in stacks}
    most, fewest = max(numbers.values()), min(numbers.values())
    for stack in stacks:
        if stack.counted and numbers[stack.name] != most:
            raise NotUnderstoodError(f"it asks {stack.name} for the number of experts, and other stacks have more")
    if loop is None:
        if most != fewest:
            raise NotUnderstoodError(f"its stacks are of different numbers of experts: {numbers}")
        return
    for names, least in ((loop.beyond, most), (loop.complete, fewest)):
        for name in names:
            value = getattr(module, name, None)
            if not isinstance(value, int) or value < least:
                raise NotUnderstoodError(f"{name} is {value!r}, and experts up to {least} have weights")
    if most != fewest and not loop.complete:
        raise NotUnderstoodError(f"its stacks are of different numbers of experts: {numbers}")


def _compile(original: type[nn.Module], weights: Mapping[str, str], all_tokens: bool) -> type[nn.Module]:
    method, source, stacks, loop = rewritten_forward(original, weights, all_tokens=all_tokens)
    prefix = "AllTokens" if all_tokens else "Sequential"
    cls = compile_subclass(
        f"{prefix}{original.__name__}",
        f"{original.__name__} with linear layers for each expert. Rewritten by patcher from {method.at(1)}.",
        (RewrittenExperts, original),
        [(method, source)],
    )
    cls._stacks, cls._loop = stacks, loop
    return cls
