"""Device maps that name what a patched model has under another name, or no longer by itself.

A map for the stock model says where `self_attn.q_proj` goes; a fused layer holds it as rows of one weight. What all
parts of a layer agree on holds for the layer. transformers takes no notice of a name that the model lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from patcher.compat.conversions import (
    copy_transform,
    stock_conversions,
    stock_conversions_from_scratch,
    stock_revert,
)
from patcher.compat.models import ModelView, named_modules, state_tensors
from patcher.conversions.fused_weights import fused_modules, separated
from patcher.conversions.simulation import Outcome, simulate
from patcher.errors import InvalidPatcherError
from patcher.loading.load import Selected
from patcher.patterns import compress, inside, without_numbers
from patcher.resolution.resolution import skeleton


def for_patched_model(load: Selected, device_map: dict[str, Any]) -> dict[str, Any]:
    """A device map in the names of the patched model.

    Raises:
        InvalidPatcherError: parts of one layer are on different devices, or nobody knows what a name has become.
    """
    tensors = state_tensors(load.model)
    known = {path for path, _ in named_modules(load.model)} | {*tensors, *dict(load.model.named_buffers())}
    unknown = {key for key in device_map if key not in known}
    if not unknown:
        return device_map
    parts = _parts_of_fused(load)
    named = _naming(unknown, parts)
    if (left := unknown - named) and any(item.path not in load.record.fused for item in load.record.replaced):
        parts |= _parts_by_conversions(load, left)
        named = _naming(unknown, parts)
    asked = {name: stock for name, stock in parts.items() if any(_key_of(part, device_map) in named for part in stock)}
    devices, problems = _agreed(asked, device_map)
    placed, torn = _by_module(devices, tensors, device_map)
    if problems or torn:
        written = sorted({name.rpartition(".")[0] for name in (*problems, *torn)})
        replaced = {key for name in problems for key in _about(asked[name], name, device_map)}
        replaced |= {key for name in torn for key in device_map if key.startswith(inside(name.rpartition(".")[0]))}
        raise InvalidPatcherError(
            "The device map puts parts of one layer on different devices:\n"
            + "".join(f"  {line}\n" for line in _folded(problems | torn))
            + f"Name these modules in it, {', '.join(compress(written))}, each with one device, in the place of "
            f"{', '.join(compress(sorted(replaced.difference(written))))}."
        )
    return {key: device for key, device in device_map.items() if key not in named} | placed


def _parts_of_fused(load: Selected) -> dict[str, tuple[str, ...]]:
    """Fused parameter -> the parameters that transformers has for it."""
    return {
        f"{inside(path)}{name}": tuple(f"{inside(path)}{stock}" for stock in layout.stock)
        for path, _, carried in fused_modules(load.model)
        for layout in carried.layouts
        for name in layout.fused
    }


def _parts_by_conversions(load: Selected, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Parameter that stock doesn't have -> those that stock makes of the same tensors of a checkpoint.

    Args:
        keys: those of the device map that nothing in the model is called.

    Raises:
        InvalidPatcherError: one of them names a parameter of stock, and it isn't known what has become of it.
    """
    stock = skeleton(load.record.model_class, load.model.config)
    own = state_tensors(stock)
    if not _naming(keys, {name: (name,) for name in own}):
        return {}
    checkpoint = stock_revert(stock, dict(stock.state_dict()), stock_conversions_from_scratch(stock))
    by_stock = _sources(simulate(stock, stock_conversions(stock), checkpoint, going_on=True))
    shapes = {key: torch.empty_like(value, device="meta") for key, value in state_tensors(load.model).items()}
    shapes = separated(fused_modules(load.model), shapes)
    on_meta: Any = ModelView(load.model, state_dict=lambda: shapes)
    conversions = [*load.conversions.added, *load.conversions.kept]
    outcome = simulate(on_meta, [copy_transform(item) for item in conversions], checkpoint, going_on=True)
    makes: dict[str, list[str]] = {}  # key of the checkpoint -> what stock makes of it
    for name, taken in by_stock.items():
        for key in taken:
            makes.setdefault(key, []).append(name)
    parts = {
        name: tuple(dict.fromkeys(stock for key in taken for stock in makes.get(key, ())))
        for name, taken in _sources(outcome).items()
        if name in shapes and name not in own
    }
    replaced = tuple(inside(item.path) for item in load.record.replaced if item.path not in load.record.fused)
    unclear = {name for name in outcome.missing if name not in own and name.startswith(replaced)}
    lost = _naming(set(keys) - _naming(keys, parts), {name: (name,) for name in own})
    for key in sorted(lost):
        module = next((path for path in replaced if key.startswith(path)), "")
        if any(name.startswith(module) for name in unclear):
            raise InvalidPatcherError(
                f"The device map names {key!r}, the replacement has no such part, and no conversion says what it has "
                f"become. Name the whole module in it: {module.rstrip('.')!r}."
            )
    return parts


def _sources(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    return {name: route.keys for route in outcome.routes for name in route.parameters}


def _naming(keys: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The keys of a device map that name one of the parts, or a module that it is in."""
    above = {place for stock in parts.values() for part in stock for place in _places(part)}
    return above.intersection(keys)


def _places(name: str) -> Iterator[str]:
    """The name, and the modules that it is in, the innermost first; "" is the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _key_of(name: str, device_map: Mapping[str, Any]) -> str | None:
    """The key of a device map that decides about a parameter."""
    return next((place for place in _places(name) if place in device_map), None)


def _agreed(
    asked: Mapping[str, tuple[str, ...]], device_map: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parameter -> the device that all its parts are to be on; and of the others what is wrong."""
    devices: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, stock in asked.items():
        keys = {part: _key_of(part, device_map) for part in stock}
        own = _key_of(name, device_map)
        if own is not None and own not in _places(_common(stock)):
            keys[name] = own  # it is named as well
        found = {part: None if key is None else device_map[key] for part, key in keys.items()}
        if len(set(map(str, found.values()))) == 1:  # not None: some part is named
            devices[name] = next(iter(found.values()))
        else:
            problems[name] = _said(found, _common(stock))
    return devices, problems


def _common(names: Iterable[str]) -> str:
    """The path of the module that all of these are in."""
    paths = [list(_places(name.rpartition(".")[0])) for name in names]
    return next(place for place in paths[0] if all(place in path for path in paths))


def _by_module(
    devices: Mapping[str, Any], tensors: Iterable[str], device_map: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Module -> device, for parameters; and of those whose module is torn what is wrong.

    accelerate moves modules, so a parameter can't be elsewhere than the rest of what holds it.
    """
    placed: dict[str, Any] = {}
    torn: dict[str, str] = {}
    by_owner: dict[str, dict[str, Any]] = {}
    wanted = {name.rpartition(".")[0] for name in devices}
    for name in tensors:
        device = devices[name] if name in devices else device_map.get(_key_of(name, device_map) or "")
        for place in wanted.intersection(_places(name)):
            by_owner.setdefault(place, {})[name] = device
    for name, device in devices.items():
        owner = name.rpartition(".")[0]
        others = {other: found for other, found in by_owner[owner].items() if str(found) != str(device)}
        if others:
            torn[name] = f"{device}, and beside it {_said(others, owner)}"
        else:
            placed[owner] = device
    return placed, torn


def _about(stock: Iterable[str], name: str, device_map: Mapping[str, Any]) -> set[str]:
    """The keys of a device map that are about parts of a parameter, or about itself."""
    around = set(_places(_common(stock)))
    return {key for part in (*stock, name) if (key := _key_of(part, device_map)) is not None} - around


def _said(devices: Mapping[str, Any], module: str) -> str:
    """What is where, by names in a module."""
    head = inside(module)
    return ", ".join(
        f"{name.removeprefix(head)} {'nowhere' if at is None else f'on {at}'}" for name, at in devices.items()
    )


def _folded(problems: Mapping[str, str]) -> list[str]:
    """Parameters and what is wrong with them, those of layers that are alike in one line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in problems.items():
        alike.setdefault((without_numbers(name), text), []).append(name)
    return [f"{', '.join(compress(names))}: {text}" for (_, text), names in alike.items()]
