"""Quantizers: check the layer names in their configs where the patched model has joined layers instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from patcher.compat.conversions import should_convert_module
from patcher.compat.models import named_modules
from patcher.expressions import matches
from patcher.loading.integration import Integration, register
from patcher.loading.load import Selected
from patcher.loading.state_dicts import check_no_part_named, layer_name, parts_of


def check_names(load: Selected, quantizer: Any) -> None:
    """Refuse a config that names parts of joined weights and not the joined weights.

    Raises:
        InvalidPatcherError: if it does; the message has the names to write instead.
    """
    if quantizer is None or not (parts := parts_of(load)):
        return
    config: Any = quantizer.quantization_config
    skipped: Iterable[str] | None = getattr(quantizer, "modules_to_not_convert", None)  # None: it has no such list
    # The settings of torchao's `FqnToConfig` for single layers, by name or expression.
    settings: Mapping[str, Any] = getattr(getattr(config, "quant_type", None), "fqn_to_config", None) or {}
    words = "" if skipped is not None or settings else repr(config.to_dict())
    modules = {path for path, _ in named_modules(load.model)}
    joined_layers = {layer_name(name).rpartition(".")[2] for joined in parts.values() for name in joined}

    def keys_for(name: str) -> set[str]:
        """Return the keys of the config that match a parameter."""
        layer = layer_name(name)
        if words:  # how the quantizer matches names isn't known, so any word counts; a stack isn't in a layer
            word = (name if layer in modules and name in parts else layer).rpartition(".")[2]
            is_word = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", words) is not None
            return {word} if is_word and not (name in parts and word in joined_layers) else set()
        targets = layer, name
        keys = {key for key in skipped or () if not all(should_convert_module(target, [key]) for target in targets)}
        return keys | {key for key in settings if names_setting(key, layer, name)}

    keys_of_parts: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, joined in parts.items():
        keys_of_parts.setdefault(joined, {})[name] = keys_for(name)
    named: list[str] = []
    for joined, by_part in keys_of_parts.items():
        part_keys, joined_keys = set().union(*by_part.values()), [keys_for(name) for name in joined]
        # A key may match all of them; one that matches the joined layer alone is written for this model.
        if all(by_part.values()) and all(joined_keys):
            continue
        if not all(keys - part_keys for keys in joined_keys):
            named += [name for name, keys in by_part.items() if keys]
    check_no_part_named("quantization_config", named, parts)


def names_setting(key: str, layer: str, parameter: str) -> bool:
    """Whether a key of `FqnToConfig` matches a layer or its parameter; `_default` matches none."""
    if key.startswith("re:"):
        return any(matches(key[3:], name) for name in (parameter, layer))
    return key in (parameter, layer)


register(Integration("quantizers", on_routed=check_names))
