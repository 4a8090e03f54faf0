"""Integrations: how loads and saves follow what other libraries do with models.

The core doesn't know the libraries. An integration registers itself, and can be left out: then its library meets a
patched model like any other.
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


#: Path of an adapted module -> (its base layer, a function that returns it with the adapter merged, or None).
Adapted: TypeAlias = "Mapping[str, tuple[nn.Module, Callable[[], nn.Module] | None]]"


@dataclass(frozen=True)
class Integration:
    """The hooks of one library.

    Attributes:
        seams: the places of the library at which functions of ours are called.
        on_constructed: called when the modules of a load are constructed; raises for what the library doesn't support.
        on_routed: the same when the conversions are selected; the second argument is the quantizer.
        on_saved: returns a context for a save; called with the arguments of `save_pretrained`, which it may change.
        adapted: returns the modules with adapters, for streams of weights: without the adapters, or merged with them
            if the second argument is True. The model isn't changed. The last argument is the module that was passed,
            which may contain the model.
    """

    name: str
    seams: tuple[Seam, ...] = ()
    on_constructed: Callable[[Constructed], object] = lambda load: None
    on_routed: Callable[[Selected, Any], object] = lambda load, quantizer: None
    on_saved: Callable[[PreTrainedModel, dict[str, Any]], AbstractContextManager[Any]] = lambda model, arguments: (
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
    """Install the seams of an integration whose modules were imported after it was registered."""
    if name in _registered:
        install(_registered[name].seams)


def integrations() -> tuple[Integration, ...]:
    """Return the registered integrations."""
    return tuple(_registered.values())
