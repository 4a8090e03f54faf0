"""Quantizers: what their configs say of layers by name, where the patched model has joined layers in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from patcher.compat.conversions import should_convert_module
from patcher.compat.models import named_modules
from patcher.expressions import matches
from patcher.loading.integration import Integration, register
from patcher.loading.load import Selected
from patcher.loading.stock_view import check_no_part_is_named, layer_name, parts_of


def check_names(load: Selected, quantizer: Any) -> None:
    """Refuse a config that says something of parts of joined weights and not of these.

    Raises:
        InvalidPatcherError: with the names to write in their place.
    """
    if quantizer is None or not (parts := parts_of(load)):
        return
    config: Any = quantizer.quantization_config
    skipped: Iterable[str] | None = getattr(quantizer, "modules_to_not_convert", None)  # None: it keeps no such list
    # What torchao's `FqnToConfig` has for single layers, by name or expression.
    settings: Mapping[str, Any] = getattr(getattr(config, "quant_type", None), "fqn_to_config", None) or {}
    words = "" if skipped is not None or settings else repr(config.to_dict())
    modules = {path for path, _ in named_modules(load.model)}
    of_made = {layer_name(name).rpartition(".")[2] for made in parts.values() for name in made}

    def keys_for(name: str) -> set[str]:
        """What of the config says something of a parameter."""
        owner = layer_name(name)
        if words:  # how it looks for names isn't known, so any word may be one; a stack has no layer of its own
            word = (name if owner in modules and name in parts else owner).rpartition(".")[2]
            is_word = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", words) is not None
            return {word} if is_word and not (name in parts and word in of_made) else set()
        named = (owner, name)
        found = {key for key in skipped or () if not all(should_convert_module(each, [key]) for each in named)}
        return found | {key for key in settings if names_setting(key, owner, name)}

    siblings: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, made in parts.items():
        siblings.setdefault(made, {})[name] = keys_for(name)
    named: list[str] = []
    for made, of_parts in siblings.items():
        about_parts, about_made = set().union(*of_parts.values()), [keys_for(name) for name in made]
        # A key may name all of them; one that names the joined layer alone is for this model.
        if all(of_parts.values()) and all(about_made):
            continue
        if not all(keys - about_parts for keys in about_made):
            named += [name for name, keys in of_parts.items() if keys]
    check_no_part_is_named("quantization_config", named, parts)


def names_setting(key: str, layer: str, parameter: str) -> bool:
    """Whether a key of these settings names a layer, or its parameter; the default names none."""
    if key.startswith("re:"):
        return any(matches(key[3:], name) for name in (parameter, layer))
    return key in (parameter, layer)


register(Integration("quantizers", on_routed=check_names))
