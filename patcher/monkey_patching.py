"""A process-wide registry of class swaps, under the names that transformers gives to its own.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from transformers.models.llama.modeling_llama import LlamaMLP
>>> class CustomMLP(LlamaMLP): ...
>>> register_patch_mapping({"LlamaMLP": CustomMLP})  # every load from now on
>>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
>>> type(LlamaForCausalLM._from_config(config).model.layers[0].mlp).__name__
'CustomMLP'
>>> clear_patch_mapping()

A `Patcher` passed to one load is the better tool: it is scoped, it is strict, and it converts weights. The registry is
for code that is written against that of transformers. Its contract is the one documented there: a key is an exact name
or an expression, exact before expression; the names that modeling code binds classes to count as well as their own;
nothing is checked strictly, since it meets every model of the process; it raises `TypeError` and `ValueError`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from patcher.compat.recorders import record_replacements
from patcher.construction.in_force import REGISTRY, registered_patcher, set_registered_patcher
from patcher.errors import PatcherError
from patcher.integrations import install
from patcher.loading.applying import applied
from patcher.patterns import find_key, nearest
from patcher.spec.patcher import Patcher

__all__ = [
    "apply_monkey_patches",
    "apply_patches",
    "clear_monkey_patch_mapping",
    "clear_patch_mapping",
    "get_monkey_patch_mapping",
    "get_patch_mapping",
    "patch_output_recorders",
    "register_monkey_patch_mapping",
    "register_patch_mapping",
    "unregister_monkey_patch_mapping",
    "unregister_patch_mapping",
]

_writing = threading.Lock()
install()


def register_patch_mapping(mapping: Mapping[str, Any], overwrite: bool = False) -> None:
    """Replace classes in every model that is loaded from now on.

    >>> from torch import nn
    >>> register_patch_mapping({"Qwen2MoeExperts": nn.Identity, ".*RMSNorm$": nn.RMSNorm})
    >>> sorted(get_patch_mapping())
    ['.*RMSNorm$', 'Qwen2MoeExperts']
    >>> clear_patch_mapping()

    Args:
        mapping: exact class name or regular expression -> replacement.
        overwrite: whether a key that is registered already may be replaced.

    Raises:
        TypeError: a replacement that isn't a subclass of `nn.Module`.
        ValueError: a key that is registered already, or that isn't a regular expression, or a replacement whose
            `conversion_mapping` isn't made of weight transforms.

    Nothing is registered then.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"The mapping must map class names to classes, got {type(mapping).__name__}: {mapping!r}")
    for key, cls in mapping.items():
        if not isinstance(key, str):
            raise TypeError(f"A key must be the name of a class or an expression, got {type(key).__name__}: {key!r}")
        if not isinstance(cls, type):
            raise TypeError(f"The replacement for '{key}' must be a class, got {type(cls).__name__}")
        if not issubclass(cls, nn.Module):
            bases = ", ".join(base.__name__ for base in cls.__mro__[1:])
            raise TypeError(
                f"The replacement for '{key}' must be a subclass of nn.Module, got {cls.__name__}, "
                f"which inherits from {bases}"
            )
    with _writing:
        current = dict(registered_patcher().class_mapping)
        taken = [key for key in mapping if key in current]
        if taken and not overwrite:
            raise ValueError(
                f"'{taken[0]}' has a patch registered already, {current[taken[0]].__name__}. "
                "Pass overwrite=True to replace it."
            )
        try:
            set_registered_patcher(Patcher({**current, **mapping}, strict=False))
        except PatcherError as error:
            raise ValueError(str(error)) from error


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Take keys out, written as they were registered.

    >>> register_patch_mapping({"Qwen2MoeExperts": nn.Identity})
    >>> unregister_patch_mapping(["Qwen2MoeExperts"])
    >>> get_patch_mapping()
    {}

    Raises:
        ValueError: a key that is not registered. Nothing is taken out then.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    with _writing:
        current = dict(registered_patcher().class_mapping)
        for key in wanted:
            if key not in current:
                close = nearest(str(key), current)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                raise ValueError(
                    f"'{key}' was not found in monkey patch mapping cache. "
                    f"Cannot unregister what is not registered.{hint}"
                )
        set_registered_patcher(Patcher({key: cls for key, cls in current.items() if key not in wanted}, strict=False))


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """A copy of what is registered."""
    return dict(registered_patcher().class_mapping)


def clear_patch_mapping() -> None:
    """Take everything out."""
    with _writing:
        set_registered_patcher(Patcher(strict=False))


@contextmanager
def apply_patches() -> Iterator[None]:
    """Build with what is registered inside the block, in this thread or task: for `Model(config)`.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    >>> with apply_patches():  # nothing is registered
    ...     model = BertModel(config)
    """
    with applied(registered_patcher(), origin=REGISTRY):
        yield


def patch_output_recorders(model: nn.Module) -> None:
    """Have a model that was patched by hand record the outputs of its replacements.

    >>> patch_output_recorders(nn.Identity())  # nothing is registered, and it records nothing

    Recorders are put on the model itself, never on its class. A model that was built under a patcher needs no call.
    """
    mapping = registered_patcher().class_mapping
    if mapping:
        record_replacements(model, lambda name: mapping.get(find_key(name, mapping, names_too=True) or ""))


register_monkey_patch_mapping = register_patch_mapping
unregister_monkey_patch_mapping = unregister_patch_mapping
clear_monkey_patch_mapping = clear_patch_mapping
get_monkey_patch_mapping = get_patch_mapping
apply_monkey_patches = apply_patches
