"""What other libraries do with models, as far as a load or a save of ours has to follow.

The core knows no library by name. An integration registers itself, and can be left out: then that library meets a
patched model as it meets any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from patcher.compat.seams import Seam, install

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from patcher.loading.load import Constructed, Selected


#: Path of a module that an adapter is around -> it, and what makes it with the adapter merged into it, if it does.
Adapted: TypeAlias = "Mapping[str, tuple[nn.Module, Callable[[], nn.Module] | None]]"


@dataclass(frozen=True)
class Integration:
    """What one library needs.

    Attributes:
        seams: its own places at which functions of ours are called.
        on_constructed: is called when the modules of a load have been made, and raises for what can't be.
        on_routed: the same when it is known what reads and converts the weights; the quantizer is given as well.
        on_saved: gives a context for a save; it is given the arguments of `save_pretrained`, which it may change.
        adapted: gives the modules that adapters are around, for weights that stream: without the adapters, or (True)
            merged with them. The model stays what it is. The last argument is the module that was given, which the
            model may be inside of.
    """

    name: str
    seams: tuple[Seam, ...] = ()
    on_constructed: Callable[[Constructed], object] = lambda load: None
    on_routed: Callable[[Selected, Any], object] = lambda load, quantizer: None
    on_saved: Callable[[PreTrainedModel, dict[str, Any]], AbstractContextManager[Any]] = lambda model, given: (
        nullcontext()
    )
    adapted: Callable[[nn.Module, bool, nn.Module], Adapted] = lambda model, merged, around: {}


_registered: dict[str, Integration] = {}


def register(integration: Integration) -> None:
    """Have loads and saves follow an integration from now on.

    Raises:
        PatcherError: the library lacks one of the seams.
    """
    install(integration.seams)
    _registered.setdefault(integration.name, integration)


def install_seams_of(name: str) -> None:
    """Install the seams of an integration whose modules have been imported since it was registered."""
    if name in _registered:
        install(_registered[name].seams)


def integrations() -> tuple[Integration, ...]:
    """Those that are registered."""
    return tuple(_registered.values())
