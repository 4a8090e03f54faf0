"""The base class of layout families."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.layouts.layouts import Layout
from patcher.patterns import check_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.core_model_loading import WeightTransform

    from patcher.fusions.finding import Surroundings


@dataclass(frozen=True)
class Decision:
    """What a family does with one module.

    Attributes:
        layouts: which of its parameters become which.
        recipe: what determines the fused class, besides the class of the module.
        refusal: why the module isn't fused, "" if it is.
        is_told: whether the refusal is worth a line of the report; where nothing is fused it is reported anyway.
    """

    layouts: tuple[Layout, ...] = ()
    recipe: Hashable = ()
    refusal: str = ""
    is_told: bool = True


class Fusion:
    r"""A layout family: which modules it fuses, the layouts of their parameters, and the class they get.

    >>> class Halves(nn.Module):
    ...     # a linear layer without bias that computes its output in two halves
    ...     def __init__(self, in_features, out_features):
    ...         super().__init__()
    ...         self.upper = nn.Parameter(torch.empty(out_features // 2, in_features))
    ...         self.lower = nn.Parameter(torch.empty(out_features // 2, in_features))
    ...     @classmethod
    ...     def from_module(cls, linear):
    ...         return cls(linear.in_features, linear.out_features)
    ...     def forward(self, x):
    ...         return torch.cat([x @ self.upper.T, x @ self.lower.T], dim=-1)
    >>> from patcher.fusions import Layout
    >>> class Cut(Layout):
    ...     def fuse(self, tensors):
    ...         return list(tensors[0].chunk(2))
    ...     def separate(self, tensors):
    ...         return [torch.cat(tensors)]
    >>> class InHalves(Fusion):
    ...     target_modules_patterns = (r"\.down_proj$",)
    ...     def is_fusable(self, module):
    ...         return type(module) is nn.Linear and module.bias is None
    ...     def layouts(self, module):
    ...         return [Cut("weight", ("upper", "lower"))]
    ...     def make_fused_class(self, original_cls):
    ...         return Halves
    >>> from patcher import Patcher
    >>> Patcher(fusions=[InHalves()])
    Patcher(fusions=[InHalves()])

    The engine finds the modules, reads and saves their weights, and pickles them. A fusion is decided
    per instance, on a skeleton of the model on the meta device: layers of one class can have different shapes.
    Objects of one class with equal attributes are equal, so that patchers can be compared.
    """

    #: The name under which a Patcher finds the family. A fusion that is passed as an object doesn't need one.
    name: str = ""

    #: Regular expressions, or one, that are searched in the path of a module. Empty: every module is considered.
    target_modules_patterns: str | Sequence[str] = ()

    #: What the family looks for, for the error of a model without it: "no module has ...".
    subject: str = ""

    #: Path patterns of the modules to fuse, as reports print them. Empty: all that can be fused.
    modules: tuple[str, ...] = ()

    def __init__(self, modules: str | Iterable[str] = ()) -> None:
        """Apply the family at some paths only: `model.layers.{0..3}.mlp`, `*` for one segment, `**` for any number.

        Raises:
            InvalidPatcherError: a path is invalid, or the list is empty.
        """
        if modules != ():  # without options there are no attributes, so that a subclass needn't call this
            self.modules = _paths(type(self).__name__, modules)

    def is_fusable(self, module: nn.Module) -> bool:
        """Whether this module can be fused. The module is on the meta device: look at its layout only."""
        raise NotImplementedError

    def refusal(self, module: nn.Module) -> str:
        """Why a module can't be fused, for the report. Called for modules that the patterns match."""
        return "is_fusable() is False"

    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        """Return the layouts of a module: which of its parameters become which."""
        return ()

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """Return the class of the fused module; called once for each original class.

        A class with a class method `from_module(module)` is constructed from the existing module and takes over its
        values. Any other class is constructed with the arguments of the original module.
        """
        raise NotImplementedError

    def make_transforms(self, config: PretrainedConfig, matches: Mapping[str, nn.Module]) -> list[WeightTransform]:
        """Return conversions from the checkpoint to the fused layout that aren't layouts of a single module.

        Args:
            config: the configuration of the outermost model.
            matches: path -> original module, on the meta device, of the modules that are fused. Anchor the patterns
                to these paths, so that they don't match parameters of the same name elsewhere in the model.
        """
        return []

    # For families that need more than the class of a module, or have to see the modules around it.

    def recipe(self, module: nn.Module) -> Hashable:
        """Return what determines the fused class, besides the class of the module.

        It is pickled with the module; unpickling creates the class from it.
        """
        return ()

    def make_class(self, original_cls: type[nn.Module], recipe: Hashable) -> type[nn.Module]:
        """Return the fused class for a recipe."""
        return self.make_fused_class(original_cls)

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        """Decide about the module at a path of the model; None where the family doesn't apply to it.

        Unless overridden, it calls the methods above. Called for modules that the patterns match.
        """
        has_patterns = bool(self.target_modules_patterns)
        if not self.is_fusable(module):
            return Decision(refusal=self.refusal(module) or Fusion.refusal(self, module)) if has_patterns else None
        layouts = tuple(self.layouts(module))
        if layouts and (reason := surroundings.sharing(path, module, "it")):
            return Decision(refusal=reason, is_told=has_patterns)
        return Decision(layouts, self.recipe(module))

    def decisions(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        """Return the decisions about modules by path, without those that the family doesn't apply to."""
        decisions = {path: self.decide(path, module, surroundings) for path, module in modules.items()}
        return {path: decision for path, decision in decisions.items() if decision is not None}

    def rows_together(self, module: nn.Module) -> int:
        """The number of rows that tensor parallelism must not separate, as those of a head; 0 if it isn't known."""
        return 1

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self))))  # without the values, which may not be hashable

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def more_than_a_weight_and_bias(module: nn.Module) -> str:
    """Describe what a layer would lose in another layout, besides weight and bias; "" if nothing."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
        return "has a forward of its own"
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        return "has parameters of its own besides weight and bias"
    return ""


def why_unlike(names: Sequence[str], layers: Sequence[nn.Module | None]) -> str:
    """Why layers can't be joined as rows of one linear layer, "" if they can."""
    for name, layer in zip(names, layers, strict=True):
        if type(layer) is not nn.Linear:
            cls = type(layer)
            other = f" of {cls.__module__}" if cls.__name__ == "Linear" else ""  # of an adapter or a quantizer
            return f"{name} is {'absent' if layer is None else f'a {cls.__qualname__}{other}, not an nn.Linear'}"
        if reason := more_than_a_weight_and_bias(layer):
            return f"{name} {reason}"
    linears: Any = layers
    if len({linear.in_features for linear in linears}) > 1:
        return f"{', '.join(names)} take inputs of different sizes"
    return ""


def _paths(family: str, modules: Any) -> tuple[str, ...]:
    patterns = [modules] if isinstance(modules, str) or not isinstance(modules, Iterable) else list(modules)
    if not patterns:
        raise InvalidPatcherError(f"{family}: modules={modules!r} is empty; leave it out to fuse all that can be.")
    return tuple(sorted({check_path(f"{family}: modules", pattern) for pattern in patterns}))
