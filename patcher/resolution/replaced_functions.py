"""Function mappings at work: what those in force do to a model, and the change itself while the model is built."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from patcher.construction.construction import Construction
from patcher.construction.in_force import InForce
from patcher.construction.init_hooks import cover_new_classes
from patcher.functions.models import (
    NO_FUNCTIONS,
    Functions,
    check_initialized,
    find_functions,
    swap_functions,
)


def functions_in_force(entries: Iterable[InForce], model: nn.Module) -> Functions:
    """What the function mappings in force do to a model, the innermost first.

    Raises:
        PatchConstructionError: a replacement doesn't fit a call, or a call can't be changed for one model alone.
    """
    layers = tuple(tuple(entry.patcher.function_mapping.items()) for entry in entries)
    return find_functions(model, layers) if any(layers) else NO_FUNCTIONS


def prepare_functions(construction: Construction, functions: Functions) -> None:
    """Have the classes whose `__init__` calls a replaced function built with the replacement."""
    construction.rebound = {cls: functions.classes[cls] for cls in functions.initialized}
    cover_new_classes(functions.initialized)


def replace_functions(construction: Construction, model: PreTrainedModel) -> None:
    """Have the modules that stand call the replacements, before the model is initialised and anything is fused."""
    if construction.resolution is None:
        return
    functions: Functions = construction.resolution.functions
    check_initialized(model, functions)
    swap_functions(model, functions)
