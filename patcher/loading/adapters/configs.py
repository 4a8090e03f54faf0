"""Configs of LoRA adapters: for the layers of a fused model, from one for those of transformers, and back.

peft finds the layers of an adapter by names and expressions, and their ranks and alphas too. What a config says is
therefore asked of peft, for the names of the layers, and where one has to be written it lists the layers one by one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from patcher.compat.adapters import is_targeted, patterns_that_match, rank_and_alpha
from patcher.loading.adapters.layers import Layers
from patcher.loading.adapters.lora import JoinedAdapter

#: Layer -> rank and alpha.
Adapted = Mapping[str, tuple[int, float]]


def for_joined_layers(config: Any, layers: Layers, adapters: Mapping[str, JoinedAdapter]) -> Any:
    """The config with which peft adapts the layers of a fused model, as another one says it for those of transformers.

    Args:
        adapters: layer -> its adapter, of those that are made of several.
    """
    others = [name for name in layers.here if name not in layers.joined and is_targeted(config, name)]
    adapted = {name: rank_and_alpha(config, name) for name in others}
    adapted |= {path: (adapter.rank, adapter.alpha) for path, adapter in adapters.items()}
    result = written_out(config, adapted, layers.here)
    result.init_lora_weights = True
    return result


def for_stock_layers(config: Any, layers: Layers, adapted: Adapted) -> Any:
    """The config with which peft adapts the layers of transformers as given: the same one where that says it."""
    for candidate in (config, _with_parts(config, layers)):
        if candidate is not None and _says(candidate, layers.stock, adapted):
            return candidate
    return written_out(config, adapted, layers.stock)


def written_out(config: Any, adapted: Adapted, names: Collection[str]) -> Any:
    """A config that lists layers with their ranks and alphas.

    Args:
        names: all modules of the model, so that none is meant that isn't listed.
    """
    result = copy.copy(config)
    result.target_modules = _targets(adapted, names)
    result.exclude_modules = None
    result.layers_to_transform = result.layers_pattern = None
    others = [name for name in adapted if rank_and_alpha(config, name) == adapted[name]]
    for number, kind in enumerate(("rank_pattern", "alpha_pattern")):
        own = {re.escape(name): pair[number] for name, pair in adapted.items() if name not in others}
        setattr(result, kind, own | patterns_that_match(getattr(config, kind), others))
    return result


def _targets(adapted: Adapted, names: Collection[str]) -> Any:
    """The names of layers; an expression, where peft would take a name for the end of another one."""
    listed = set(adapted)
    endings = {name[start:] for name in set(names) - listed for start in _dots(name)}
    return "|".join(map(re.escape, sorted(listed))) if listed & endings else listed


def _dots(name: str) -> Iterable[int]:
    return (match.end() for match in re.finditer(r"\.", name))


def _says(config: Any, names: Iterable[str], adapted: Adapted) -> bool:
    for name in names:
        if is_targeted(config, name) != (name in adapted):
            return False
        if name in adapted and rank_and_alpha(config, name) != adapted[name]:
            return False
    return True


def _with_parts(config: Any, layers: Layers) -> Any:
    """The config with the names of parts in the place of those of joined layers, None where it lists none."""
    targets = config.target_modules
    if isinstance(targets, str) or not targets:
        return None
    named: dict[str, None] = {}
    for target in sorted(targets):
        meant = [each for path, each in layers.joined.items() if path == target or path.endswith(f".{target}")]
        if not meant:
            named[target] = None
        for layer in meant:
            start = layer.path.removesuffix(target)
            if not all(part.path.startswith(start) for part in layer.parts):
                return None
            named |= dict.fromkeys(part.path.removeprefix(start) for part in layer.parts)
    result = copy.copy(config)
    result.target_modules = set(named)
    return result
