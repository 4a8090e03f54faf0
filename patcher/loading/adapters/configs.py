"""Configs of LoRA adapters: for the layers of a fused model, from one for those of transformers, and back.

peft finds the layers of an adapter by names and expressions, and their ranks and alphas too. What a config says is
therefore asked of peft, for the names of the layers, and where one has to be written it lists the layers one by one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from patcher.compat.adapters import is_targeted, is_targeted_parameter, patterns_that_match, rank_and_alpha
from patcher.errors import PatchedWeightsError
from patcher.loading.adapters.layers import Layers
from patcher.patterns import compress

#: Layer -> rank and alpha.
Adapted = Mapping[str, tuple[int, float]]


def for_layers_here(config: Any, layers: Layers, adapted: Adapted) -> Any:
    """The config with which peft adapts the layers of a fused model.

    Args:
        adapted: the layers, with what is made of several.
    """
    result = written_out(config, adapted, layers.here)
    if stacks := [stack.parameter for stack in layers.stacks if is_targeted_parameter(config, stack.parameter)]:
        result.target_parameters = [
            each for each in config.target_parameters if not any(f".{name}".endswith(f".{each}") for name in stacks)
        ]
    result.init_lora_weights = True
    return result


def for_stock_layers(config: Any, layers: Layers, adapted: Adapted, parameters: Adapted) -> Any:
    """The config with which peft adapts the layers of transformers as given: the same one where that says it.

    Args:
        parameters: the parameters that are adapted by themselves.

    Raises:
        PatchedWeightsError: no config says it.
    """
    short = _with_parts(config, layers)
    for candidate in (config, short, short and _with_parameters(short, parameters)):
        if candidate is not None and _says(candidate, layers, adapted, parameters):
            return candidate
    result = _with_parameters(written_out(config, adapted, layers.stock), parameters, in_full=True)
    if not _says(result, layers, adapted, parameters):
        raise PatchedWeightsError(
            f"peft has no config for an adapter of the layers {', '.join(compress(adapted))} and the parameters "
            f"{', '.join(compress(parameters)) or '(none)'} of transformers, each with the rank that it has."
        )
    return result


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


def _says(config: Any, layers: Layers, adapted: Adapted, parameters: Adapted) -> bool:
    for name in layers.stock:
        if is_targeted(config, name) != (name in adapted):
            return False
        if name in adapted and rank_and_alpha(config, name) != adapted[name]:
            return False
    for stack in layers.stacks:
        if is_targeted_parameter(config, stack.parameter) != (stack.parameter in parameters):
            return False
        if stack.parameter in parameters and rank_and_alpha(config, stack.parameter) != parameters[stack.parameter]:
            return False
    # A name that means no layer of transformers may mean what peft has experts by.
    targets = config.target_modules
    return (
        not layers.stacks
        or isinstance(targets, str)
        or all(any(f".{name}".endswith(f".{target}") for name in layers.stock) for target in targets or ())
    )


def _with_parameters(config: Any, parameters: Adapted, *, in_full: bool = False) -> Any:
    """The config with parameters that are adapted by themselves."""
    if not parameters:
        return config
    result = copy.copy(config)
    named = {name if in_full else name.rpartition(".")[2]: pair for name, pair in parameters.items()}
    own = {name: pair for name, pair in named.items() if rank_and_alpha(config, f".{name}") != pair}
    result.target_parameters = sorted({*(config.target_parameters or ()), *named})
    for number, kind in enumerate(("rank_pattern", "alpha_pattern")):
        start = "" if in_full else r".*\."
        patterns = {f"{start}{re.escape(name)}": pair[number] for name, pair in own.items()}
        setattr(result, kind, patterns | getattr(config, kind))
    return result


def _with_parts(config: Any, layers: Layers) -> Any:
    """The config with the names of parts in the place of those of joined layers, None where it lists none."""
    targets = config.target_modules
    if isinstance(targets, str) or not targets:
        return None
    named: dict[str, None] = {}
    for target in sorted(targets):
        meant = [each for path, each in layers.joined.items() if path == target or path.endswith(f".{target}")]
        if not meant and (not layers.stacks or any(f".{name}".endswith(f".{target}") for name in layers.stock)):
            named[target] = None
        for layer in meant:
            start = layer.path.removesuffix(target)
            if not all(part.path.startswith(start) for part in layer.parts):
                return None
            named |= dict.fromkeys(part.path.removeprefix(start) for part in layer.parts)
    result = copy.copy(config)
    result.target_modules = set(named)
    return result
