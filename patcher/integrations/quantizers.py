"""Quantizers: what their configs say of layers by name, where the patched model has joined layers in their place."""

from __future__ import annotations

import re
from typing import Any

from patcher.compat.quantizers import is_named, names_setting, settings_by_name, skipped_names, words_of
from patcher.loading.integration import Integration, register
from patcher.loading.load import Selected
from patcher.loading.stock_names import check_no_part_is_named, layer_name, parts_of


def check_names(load: Selected, quantizer: Any) -> None:
    """Refuse a config that says something of parts of joined weights and not of these.

    Raises:
        InvalidPatcherError: with the names to write in their place.
    """
    if quantizer is None or not (parts := parts_of(load)):
        return
    skipped, settings = skipped_names(quantizer), settings_by_name(quantizer)
    words = "" if skipped is not None or settings else words_of(quantizer)

    def is_said(name: str) -> bool:
        owner = layer_name(name)
        if words:  # how it looks for names isn't known
            return re.search(rf"(?<!\w){re.escape(owner.rpartition('.')[2])}(?!\w)", words) is not None
        return any(is_named(key, each) for key in skipped or () for each in (owner, name)) or any(
            names_setting(key, owner, name) for key in settings
        )

    siblings: dict[tuple[str, ...], list[str]] = {}
    for name, made in parts.items():
        siblings.setdefault(made, []).append(name)
    # A name may fit the joined layer by its end and one of the parts as well: that says nothing of the others.
    named = {
        name
        for made, names in siblings.items()
        if (said := [each for each in names if is_said(each)]) and not (said == names and all(map(is_said, made)))
        for name in said
    }
    check_no_part_is_named("quantization_config", named, parts)


register(Integration("quantizers", on_routed=check_names))
