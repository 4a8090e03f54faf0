"""The base of a fusion: a layout family that is decided module by module."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from patcher.compat.models import named_modules, named_parameters, tie_partners
from patcher.errors import InvalidPatcherError
from patcher.fusions.origins import NotConvertibleError, Origins, origins_of
from patcher.fusions.weight_layout import Layout, converters_for, plan_of
from patcher.patterns import check_path, matches_path, nearest, search

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightTransform


@dataclass(frozen=True)
class Findings:
    """What a fusion has found in a model: path -> module, and path -> why a module is left alone."""

    matches: Mapping[str, nn.Module] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class Surroundings:
    """A model, as far as it decides whether a module of it can be fused: what its modules share."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules = dict(named_modules(model))
        self._times = Counter(id(module) for module in self.modules.values())
        self._owners = Counter(id(parameter) for _, parameter in named_parameters(model))
        self._tied = tie_partners(model)

    def is_shared(self, module: nn.Module) -> bool:
        """Whether the module is at several places of the model."""
        return self._times[id(module)] > 1

    def tied(self, path: str, module: nn.Module) -> list[str]:
        """The names of the module's own parameters that are tied to others."""
        named = module.named_parameters(path, recurse=False)
        return [name for name, value in named if name in self._tied or self._owners[id(value)] > 1]

    def sharing(self, path: str, module: nn.Module, subject: str) -> str:
        """Why the module isn't by itself in the model, "" if it is."""
        if self.is_shared(module):
            return f"{subject} is at several places of the model"
        return "its weights are tied" if self.tied(path, module) else ""


def more_than_a_weight_and_bias(module: nn.Module) -> str:
    """What a layer of weight and bias has that would be lost in another layout, "" if there is nothing."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        return "has parameters of its own besides weight and bias"
    return ""


class Fusion:
    r"""A layout family: which modules it takes, the class that it makes of theirs, and how the weights follow.

    >>> class Recomputed(Fusion):
    ...     target_modules_patterns = (r"\.mlp$",)
    ...     def is_fusable(self, module):
    ...         return hasattr(module, "act_fn")
    ...     def make_fused_class(self, original_cls):
    ...         def forward(self, x):
    ...             return torch.utils.checkpoint.checkpoint(super(fused, self).forward, x, use_reentrant=False)
    ...         fused = type(f"Recomputed{original_cls.__name__}", (original_cls,), {"forward": forward})
    ...         return fused
    >>> from patcher import Patcher
    >>> Patcher(fusions=[Recomputed()])
    Patcher(fusions=[Recomputed()])

    A fusion is decided per instance, on a skeleton of the model on the meta device: one class can hold layers of
    different shapes. Objects of one class with equal attributes are equal, so that patchers can be compared.
    """

    #: The name under which a Patcher finds the family. A fusion that is passed as an object needs none.
    name: str = ""

    #: Expressions, searched in the path of a module. Without any, every module is asked.
    target_modules_patterns: tuple[str, ...] = ()

    #: Where the family is asked for, if not wherever it can be: paths, in the language that reports print.
    modules: tuple[str, ...] = ()

    def __init__(self, modules: str | Iterable[str] = ()) -> None:
        """Ask for the family at some paths only: `model.layers.{0..3}.mlp`, `*` for one segment, `**` for any number.

        Raises:
            InvalidPatcherError: a path is none, or there is none.
        """
        if modules != ():  # objects without options have no attributes, whether or not this has run
            self.modules = _paths(type(self).__name__, modules)

    def is_fusable(self, module: nn.Module) -> bool:
        """Whether this very module can be fused. The module is on the meta device: look at its layout only."""
        raise NotImplementedError

    def refusal(self, module: nn.Module) -> str:
        """Why `is_fusable` said no, for the report. Only asked for modules that the patterns name."""
        return "is_fusable() says no"

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """The class built in place of `original_cls`, from the same constructor arguments."""
        raise NotImplementedError

    def make_transforms(self, config: PretrainedConfig, matches: Mapping[str, nn.Module]) -> list[WeightTransform]:
        """The conversions from the checkpoint's layout to the fused one.

        Args:
            config: the configuration of the outermost model.
            matches: path -> module (as it was, on the meta device) of what is fused. Anchor the patterns to these
                paths, so that they touch no namesake elsewhere in the model.
        """
        return []

    # What the methods above amount to in one model. A family that has to see more than one module overrides these.

    def discover(self, model: PreTrainedModel) -> Findings:
        """The modules that are fused, and those that aren't though the patterns name them.

        Args:
            model: the skeleton of the outermost model, as transformers builds it, on the meta device.
        """
        matches: dict[str, nn.Module] = {}
        refused: dict[str, str] = {}
        surroundings = Surroundings(model)
        for path, module in surroundings.modules.items():
            if not self.is_asked_for(path) or not self.is_asked(path, module):
                continue
            reason = self.obstacle(path, module, surroundings)
            if reason is None:
                matches[path] = module
            elif self.is_told(path, module):
                refused[path] = reason
        if matches:
            for path, reason in self._inconvertible(matches, origins_of(model)).items():
                refused[path] = f"its weights: {reason}"
                del matches[path]
        return Findings(matches, refused)

    def _inconvertible(self, matches: Mapping[str, nn.Module], origins: Origins) -> dict[str, str]:
        """path -> why its weights can't be converted.

        All are tried at once, as one converter may make weights of several modules, and one by one where that fails.
        """
        try:
            for layout in self.layouts(matches, origins):
                plan_of(layout, origins)
        except NotConvertibleError as error:
            if len(matches) == 1:
                return dict.fromkeys(matches, str(error))
            found: dict[str, str] = {}
            for path, module in matches.items():
                found |= self._inconvertible({path: module}, origins)
            return found
        return {}

    def is_asked_for(self, path: str) -> bool:
        """Whether what is at a path is among the `modules` that were asked for."""
        return not self.modules or any(matches_path(pattern, path) for pattern in self.modules)

    def is_asked(self, path: str, module: nn.Module) -> bool:
        """Whether the family is about this module at all."""
        patterns = self.target_modules_patterns
        return not patterns or any(search(pattern, path) for pattern in patterns)

    def obstacle(self, path: str, module: nn.Module, surroundings: Surroundings) -> str | None:
        """Why the module can't be fused where it stands; None if it can."""
        if self.is_fusable(module):
            return None
        return self.refusal(module) if self.target_modules_patterns else ""

    def is_told(self, path: str, module: nn.Module) -> bool:
        """Whether a module that is left alone is worth a line of the report."""
        return bool(self.target_modules_patterns)

    def layouts(self, matches: Mapping[str, nn.Module], origins: Origins) -> Iterable[Layout]:
        """Which parameters become which, where the engine of this package converts them."""
        return ()

    def fused_class_of(self, module: nn.Module) -> type[nn.Module]:
        """The class that one module gets; asked once for each class unless this is overridden."""
        return self.make_fused_class(type(module))

    def transforms_for(self, model: PreTrainedModel, matches: Mapping[str, nn.Module]) -> list[WeightTransform]:
        """The conversions, from the whole skeleton."""
        origins = origins_of(model)
        return [
            *converters_for(model, self.layouts(matches, origins), origins),
            *self.make_transforms(model.config, matches),
        ]

    def convert(self, module: nn.Module, fused_class: type[nn.Module]) -> nn.Module | None:
        """Turn a module that stands, initialised as stock does it, into one of the fused class.

        None where the class has to be built anew instead, from the constructor arguments of the module: the default.
        A family that converts keeps what happened to the module after its `__init__`, and its initial values.
        """
        return None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self))))  # not the values: they needn't have a hash, as lists don't

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def _paths(family: str, modules: Any) -> tuple[str, ...]:
    listed = [modules] if isinstance(modules, str) or not isinstance(modules, Iterable) else list(modules)
    if not listed:
        raise InvalidPatcherError(f"{family}: modules={modules!r} names none; leave it out for all that can be fused.")
    try:
        return tuple(sorted({check_path(pattern) for pattern in listed}))
    except InvalidPatcherError as error:
        raise InvalidPatcherError(f"{family}: modules: {error}") from error


#: Families that a Patcher finds by name, and where they live: imported when they are asked for.
FAMILIES: dict[str, str] = {
    "gate_up": "patcher.fusions.gate_up:GateUp",
    "patch_embeddings": "patcher.fusions.patch_embeddings:PatchEmbeddings",
    "qkv": "patcher.fusions.qkv:QKV",
    "sequential_experts": "patcher.fusions.sequential_experts:SequentialExperts",
}


def fusion_named(name: Any) -> Fusion:
    """The fusion called `name`, or the fusion itself.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    return name if isinstance(name, Fusion) else _family(name)()


def shortest(fusion: Any) -> str | Fusion:
    """The name of a fusion, where that says all there is to say of it; otherwise the object.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    found = fusion_named(fusion)
    known = found.name in FAMILIES and found == fusion_named(found.name)
    return found.name if known else found


def fusions_configured(name: Any, value: Any) -> list[str | Fusion]:
    """What one entry of a fusion config asks for.

    Raises:
        InvalidPatcherError: there is no such family, or it has no such option.
    """
    family = _family(name)
    if value is False:
        return []
    if value is True or (isinstance(value, Mapping) and not value):
        return [name]
    if not isinstance(value, Mapping):
        raise InvalidPatcherError(f"fusions: {name!r} takes True, False or a mapping of options, found {value!r}.")
    try:
        return [family(**value)]
    except TypeError as error:
        raise InvalidPatcherError(f"fusions: {name!r} doesn't take the options {dict(value)!r}: {error}.") from error


def _family(name: Any) -> type[Fusion]:
    if isinstance(name, str) and name in FAMILIES:
        home, _, cls = FAMILIES[name].partition(":")
        family: type[Fusion] = getattr(importlib.import_module(home), cls)
        return family
    known = ", ".join(repr(known) for known in FAMILIES)
    if not isinstance(name, str):
        hint = f"write a name ({known}) or an object of a Fusion subclass"
    elif close := nearest(name, FAMILIES):
        hint = f"did you mean {close[0]!r}? Known names: {known}"
    else:
        hint = f"known names: {known}; a family of your own is passed as an object of a Fusion subclass"
    raise InvalidPatcherError(f"fusions: {name!r} is no fusion; {hint}.")
