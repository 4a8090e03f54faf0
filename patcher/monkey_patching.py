"""A process-wide registry of class replacements, with the names of transformers' own registry.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from transformers.models.llama.modeling_llama import LlamaMLP
>>> class CustomMLP(LlamaMLP): ...
>>> register_patch_mapping({"LlamaMLP": CustomMLP})  # every load from now on
>>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
>>> type(LlamaForCausalLM._from_config(config).model.layers[0].mlp).__name__
'CustomMLP'
>>> clear_patch_mapping()

Prefer a `Patcher` that is passed to one load: it is scoped, it is strict, and it converts weights. The registry is for
code that is written for that of transformers. Its contract is the one documented there: a key is an exact name or an
expression, and exact names take precedence; a class matches by its own name and by the names that modeling code binds
it to; unused keys are allowed, since it applies to every model of the process; it raises `TypeError` and `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from patcher.compat.locks import lock_for_forks
from patcher.compat.models import record_replacements
from patcher.construction.in_force import REGISTRY, registered_patcher, set_registered_patcher
from patcher.errors import PatcherError, nearest
from patcher.integrations import install
from patcher.loading.applying import applied
from patcher.patterns import find_key
from patcher.spec.patcher import Patcher

__all__ = """
    apply_monkey_patches apply_patches clear_monkey_patch_mapping clear_patch_mapping get_monkey_patch_mapping
    get_patch_mapping patch_output_recorders register_monkey_patch_mapping register_patch_mapping
    unregister_monkey_patch_mapping unregister_patch_mapping
""".split()

_lock = lock_for_forks()
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
        overwrite: whether keys that are registered already are replaced.

    Raises:
        TypeError: if it isn't a mapping, or a replacement isn't a subclass of `nn.Module`.
        ValueError: if a key is registered already, or a `Patcher` refuses it. Nothing is registered then.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"The mapping must be a mapping of class names to replacements, got {mapping!r}")
    for key, cls in mapping.items():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            value = cls.__name__ if isinstance(cls, type) else f"an instance of {type(cls).__name__}"
            raise TypeError(f"The replacement for '{key}' must be a subclass of nn.Module, got {value}")
    with _lock:
        current = get_patch_mapping()
        duplicates = [key for key in mapping if key in current]
        if duplicates and not overwrite:
            raise ValueError(
                f"'{duplicates[0]}' has a patch registered already, {current[duplicates[0]].__name__}. "
                "Pass overwrite=True to replace it."
            )
        try:
            set_registered_patcher(Patcher({**current, **mapping}, strict=False))
        except PatcherError as error:
            raise ValueError(str(error)) from error


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Remove keys, written as they were registered.

    >>> register_patch_mapping({"Qwen2MoeExperts": nn.Identity})
    >>> unregister_patch_mapping(["Qwen2MoeExperts"])
    >>> get_patch_mapping()
    {}

    Raises:
        ValueError: if a key isn't registered. Nothing is removed then.
    """
    with _lock:
        current = get_patch_mapping()
        for key in [keys] if isinstance(keys, str) else keys:
            if key not in current:
                close = nearest(str(key), get_patch_mapping())
                raise ValueError(
                    f"'{key}' was not found in monkey patch mapping cache. Cannot unregister what is not registered."
                    + (f" Did you mean '{close[0]}'?" if close else "")
                )
            del current[key]
        set_registered_patcher(Patcher(current, strict=False))


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Return a copy of the registered mapping."""
    return dict(registered_patcher().class_mapping)


def clear_patch_mapping() -> None:
    """Remove all keys."""
    with _lock:
        set_registered_patcher(Patcher(strict=False))


@contextmanager
def apply_patches() -> Iterator[None]:
    """Apply the registered mapping to models built in the block, in this thread or task: for `Model(config)`.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    >>> with apply_patches():  # nothing is registered
    ...     model = BertModel(config)
    """
    with applied(registered_patcher(), origin=REGISTRY):
        yield


def patch_output_recorders(model: nn.Module) -> None:
    """Record the outputs of replacements in a model that was patched by hand.

    >>> patch_output_recorders(nn.Identity())  # nothing is registered, so nothing is recorded

    Recorders are set on the model, never on its class. A model that was built with a patcher doesn't need this.
    """
    mapping = registered_patcher().class_mapping
    if mapping:
        record_replacements(model, lambda name: mapping.get(find_key(name, mapping, names_too=True) or ""))


register_monkey_patch_mapping = register_patch_mapping
unregister_monkey_patch_mapping = unregister_patch_mapping
clear_monkey_patch_mapping = clear_patch_mapping
get_monkey_patch_mapping = get_patch_mapping
apply_monkey_patches = apply_patches
