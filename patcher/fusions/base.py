"""The base of a fusion: a layout family that is decided module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.matching import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.core_model_loading import WeightTransform

__all__ = ["FAMILIES", "Fusion", "fusion_named"]


class Fusion:
    """A layout family: which modules it takes, the class that it makes of theirs, and how the weights follow.

    ```python
    class DoubledLinear(Fusion):
        target_modules_patterns = (r"\\.mlp$",)

        def is_fusable(self, module): ...
        def make_fused_class(self, original_cls): ...
        def make_transforms(self, config, matches): ...

    Patcher(fusions=[DoubledLinear()])
    ```

    A fusion is decided per instance, on a skeleton of the model on the meta device: one class can hold layers of
    different shapes. Objects of one class with equal attributes are equal, so that patchers can be compared.
    """

    #: The name under which a Patcher finds the family. A fusion that is passed as an object needs none.
    name: str = ""

    #: Expressions, searched in the path of a module. Without any, every module is asked.
    target_modules_patterns: tuple[str, ...] = ()

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

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), repr(sorted(vars(self).items()))))

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


#: Families that a Patcher finds by name.
FAMILIES: dict[str, type[Fusion]] = {}


def fusion_named(name: Any) -> Fusion:
    """The fusion called `name`, or the fusion itself.

    Raises:
        InvalidPatcherError: there is no such family.
    """
    if isinstance(name, Fusion):
        return name
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]()
    known = ", ".join(repr(known) for known in FAMILIES) or "none in this release"
    if not isinstance(name, str):
        hint = f"write a name ({known}) or an object of a Fusion subclass"
    elif close := nearest(name, FAMILIES):
        hint = f"did you mean {close[0]!r}? Known names: {known}"
    else:
        hint = f"known names: {known}; a family of your own is passed as an object of a Fusion subclass"
    raise InvalidPatcherError(f"fusions: {name!r} is no fusion; {hint}.")
