"""`sequential_experts`: stacked expert weights as lists of linear layers, which quantizers and adapters understand."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from patcher.compat.models import mark_initialized
from patcher.fusions.base import Fusion, Surroundings
from patcher.fusions.listed import listed
from patcher.fusions.methods import NotUnderstoodError
from patcher.fusions.origins import Origins
from patcher.fusions.rewrite import compile_subclass
from patcher.fusions.stacks import Stack, forward_of, sequential
from patcher.fusions.understanding import located
from patcher.fusions.unstacking import Cut, cut_layouts
from patcher.fusions.weight_layout import Layout

_lock = threading.RLock()
#: original -> stacked weights and their biases -> the class: one load gets the class that another got
_classes: weakref.WeakKeyDictionary[type[nn.Module], dict[tuple[tuple[str, str], ...], type[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


class ListedExperts(nn.Module):
    """What the rewritten classes have in common."""

    _stacks: ClassVar[tuple[Stack, ...]]
    _made_from: ClassVar[tuple[type[nn.Module], dict[str, str]]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time: another process makes it again.
        return (_bare, self._made_from, self.__getstate__())  # type: ignore[no-untyped-call]


def _bare(original: type[nn.Module], weights: dict[str, str]) -> nn.Module:
    cls = _class_for(original, weights)
    return cls.__new__(cls)


class SequentialExperts(Fusion):
    """Each stack of expert weights, `(experts, out, in)` -> an `nn.ModuleList` of `nn.Linear` of the same name.

    `experts.gate_up_proj[i]` is then the gate and up projection of expert i, a plain `nn.Linear`, and
    `experts.down_proj[i]` the down projection. The forward is the model's eager one, whatever
    `experts_implementation` says: the others (`grouped_mm`, `batched_mm`, ...) need stacks.
    """

    name = "sequential_experts"

    def is_fusable(self, module: nn.Module) -> bool:
        return bool(_weights_of(module)) and not self.refusal(module)

    def refusal(self, module: nn.Module) -> str:
        if not _weights_of(module):
            return "it has no stacked weights"
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        try:
            self.fused_class_of(module)
        except NotUnderstoodError as error:
            return str(error)
        return ""

    def fused_class_of(self, module: nn.Module) -> type[nn.Module]:
        """The class with the rewritten forward.

        Raises:
            NotUnderstoodError: its forward uses the stacks in another way than expert by expert.
        """
        return _class_for(type(module), _weights_of(module))

    def is_asked(self, path: str, module: nn.Module) -> bool:
        return bool(_weights_of(module))

    def obstacle(self, path: str, module: nn.Module, surroundings: Surroundings) -> str | None:
        return self.refusal(module) or surroundings.sharing(path, module, "the module") or None

    def is_told(self, path: str, module: nn.Module) -> bool:
        """Many modules with parameters of three dimensions have tables of positions."""
        return "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()

    def layouts(self, matches: Mapping[str, nn.Module], origins: Origins) -> list[Layout]:
        cuts = []
        for path, module in matches.items():
            cls = self.fused_class_of(module)
            for stack in cls._stacks:  # type: ignore[attr-defined]
                whole = f"{path}.{stack.name}" if path else stack.name
                shape = tuple(getattr(module, stack.name).shape)
                cuts.append(Cut(whole, f"{whole}.{{}}.weight", stack.transposed, shape))
                if stack.bias:
                    bias = f"{path}.{stack.bias}" if path else stack.bias
                    cuts.append(Cut(bias, f"{whole}.{{}}.bias", False, tuple(getattr(module, stack.bias).shape)))
        return cut_layouts(cuts, origins)

    def convert(self, module: nn.Module, fused_class: type[nn.Module]) -> nn.Module:
        assert issubclass(fused_class, ListedExperts)
        module.__class__ = fused_class
        for stack in fused_class._stacks:
            weight = module._parameters.pop(stack.name)
            bias = module._parameters.pop(stack.bias) if stack.bias else None
            assert weight is not None
            setattr(module, stack.name, listed(weight, bias, stack.transposed))
        # The model's `_init_weights` looks for the stacks of such a module; the linear layers have their own turn.
        mark_initialized(module)
        return module


def _weights_of(module: nn.Module) -> dict[str, str]:
    """The stacked parameters of a module, and the parameter that holds the biases of each, or ""."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    biases = {name: f"{name}_bias" for name in own}
    return {
        name: biases[name] if biases[name] in own and own[biases[name]].dim() == 2 else ""
        for name, parameter in own.items()
        if parameter.dim() == 3 and type(module).__module__.partition(".")[0] != "torch"
    }


def _class_for(original: type[nn.Module], weights: dict[str, str]) -> type[nn.Module]:
    key = tuple(weights.items())
    with _lock:
        made = _classes.setdefault(original, {})
        if key not in made:
            made[key] = _compile(original, weights)
        return made[key]


def _compile(original: type[nn.Module], weights: Mapping[str, str]) -> type[nn.Module]:
    method = forward_of(original)
    try:
        stacks, source = sequential(method, weights)
    except NotUnderstoodError as error:
        raise located(error, method) from error
    listed = " and ".join(stack.name for stack in stacks)
    cls = compile_subclass(
        f"Sequential{original.__name__}",
        f"{original.__name__} with lists of linear layers as {listed}. Rewritten by patcher from {method.at(1)}.",
        (ListedExperts, original),
        [(method, source)],
    )
    cls.__qualname__ = f"Sequential{original.__qualname__.rsplit('.', 1)[-1]}"
    cls._stacks = stacks
    cls._made_from = (original, weights)
    return cls
