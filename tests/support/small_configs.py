"""Small configs of any architecture, by one table of attribute names.

What the table can't know (sizes of one architecture that depend on each other) is tried: `small_configs` gives several
configs, and whoever uses them takes the first whose model can be built, saved, loaded and run by stock transformers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from patcher.verification.sides import with_small_sections
from tests.support.small_sizes import COUNTS_OF_LAYERS, FEW, PARTICULAR, PARTS_SET, SMALL

__all__ = ["small_configs"]


def small_configs(config_class: type[PretrainedConfig]) -> Iterator[PretrainedConfig]:
    """Configs to try, the smallest first.

    Raises:
        Exception: no config can be made: what the first attempt says.
    """
    seen: list[Any] = []
    first: Exception | None = None
    tries = product((_everything, _of_the_same_type, _numbers_of_layers, _nothing), (True, False))
    for keep, keeps_parts in tries:
        try:
            arguments = _small(config_class, keep, keeps_parts=keeps_parts)
            config = config_class(**arguments)
        except Exception as error:
            first = first or error
            continue
        if arguments not in seen:
            seen.append(arguments)
            yield config
    if not seen and first is not None:
        raise first


def _everything(name: str, value: Any, default: Any) -> bool:
    return True


def _of_the_same_type(name: str, value: Any, default: Any) -> bool:
    return type(value) is type(default)


def _numbers_of_layers(name: str, value: Any, default: Any) -> bool:
    return name in FEW and type(value) is type(default)


def _nothing(name: str, value: Any, default: Any) -> bool:
    return False


def _small(
    config_class: type[PretrainedConfig],
    keep: Any,
    default: PretrainedConfig | None = None,
    *,
    is_part: bool = False,
    keeps_parts: bool = True,
) -> dict[str, Any]:
    """Arguments for a config of this class, of those of the table that `keep` wants.

    Args:
        keeps_parts: whether parts keep what the config around them sets: layers of which a small one may have fewer.
    """
    if default is None:
        with contextlib.suppress(Exception):  # a config that has to be given something
            default = config_class()
    known = _known(config_class, default)
    parts = _parts(config_class, default)
    # One size for each stage: they are small enough, and must fit together.
    staged = any(
        isinstance(known.get(name), list | tuple) for name in ("num_heads", "num_attention_heads", "depths", "depth")
    )
    fixed = _fixed(config_class, known)
    arguments: dict[str, Any] = {}
    for name, value in SMALL.items():
        if (
            name not in known
            or name in fixed
            or name in parts
            or (staged and name not in ("num_labels", "tie_word_embeddings"))
        ):
            continue
        if name == "num_labels" and known[name] is None:
            continue
        if isinstance(value, int) and name == "image_size" and isinstance(known[name], list | tuple):
            value = [value] * len(known[name])
        if keep(name, value, known[name]):
            arguments[name] = value
    if keep is not _nothing:
        _tokens(arguments, known)
        _shorten(arguments, known, fixed)
        if "qk_rope_head_dim" in arguments:
            arguments.pop("head_dim", None)  # of the part with rotary embeddings alone: it follows
            arguments["num_key_value_heads"] = 4
        _rope(arguments, known, is_part=is_part)
    for name, (part_class, part) in parts.items():
        own = _of_its_own(part_class, part) if keeps_parts else {}
        arguments[name] = own | _small(part_class, keep, part, is_part=True, keeps_parts=keeps_parts)
        if part_class.model_type:
            arguments[name]["model_type"] = part_class.model_type
    if keep is not _nothing:
        for name, value in PARTICULAR.get(config_class.model_type, {}).items():
            *path, last = name.split(".")
            inner = arguments
            for part_name in path:
                inner = inner.setdefault(part_name, {})
            inner[last] = value
    return arguments


def _of_its_own(part_class: type[PretrainedConfig], part: PretrainedConfig | None) -> dict[str, Any]:
    """What the config around a part has set in it: which layers of a backbone it takes, which one of timm it is."""
    if part is None:
        return {}
    try:
        usual = part_class().to_dict()
    except Exception:  # it has to be given something
        return {}
    told = part.to_dict()
    return {
        name: value
        for name, value in told.items()
        if name in PARTS_SET and value is not None and value != usual.get(name)
    }


def _known(config_class: type[PretrainedConfig], default: PretrainedConfig | None) -> dict[str, Any]:
    """What a config can be given, and the values that it has then; `...` where that isn't known."""
    known: dict[str, Any] = dict.fromkeys(inspect.signature(config_class.__init__).parameters, ...)
    for base in config_class.__mro__[:-1]:
        known |= dict.fromkeys(getattr(base, "__annotations__", {}), ...)
    known |= dict.fromkeys(getattr(config_class, "attribute_map", {}), ...)
    if default is not None:
        for name in known:
            with contextlib.suppress(Exception):  # what differs from layer to layer has no value
                known[name] = getattr(default, name)
        known |= default.to_dict()
    return known


def _fixed(config_class: type[PretrainedConfig], known: Iterable[str]) -> set[str]:
    """What a config computes and can't be given."""
    other_names = getattr(config_class, "attribute_map", {})
    return {name for name in known if isinstance(getattr(config_class, other_names.get(name, name), None), property)}


def _parts(
    config_class: type[PretrainedConfig], default: PretrainedConfig | None
) -> dict[str, tuple[type[PretrainedConfig], PretrainedConfig | None]]:
    """The configs inside of a config: attribute -> class, and how it is by default."""
    parts: dict[str, tuple[type[PretrainedConfig], PretrainedConfig | None]] = {}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            parts[name] = (type(part), part)
        elif isinstance(part, dict) and part.get("model_type") in CONFIG_MAPPING:
            parts[name] = (CONFIG_MAPPING[part["model_type"]], None)
        elif part_class.__name__ != "AutoConfig" and issubclass(part_class, PretrainedConfig):
            parts[name] = (part_class, None)
    return parts


def _tokens(arguments: dict[str, Any], known: dict[str, Any]) -> None:
    """All other vocabularies are as small, and no token lies outside of them."""
    free = iter(range(127, 0, -1))
    for name, value in known.items():
        if name in arguments or not isinstance(value, int) or value < 120:
            continue
        if name.endswith("vocab_size"):
            arguments[name] = 128
        elif name.endswith(("token_id", "token_index")):
            arguments[name] = next(number for number in free if number not in arguments.values())


def _shorten(arguments: dict[str, Any], known: dict[str, Any], fixed: set[str]) -> None:
    """Lists with an entry for each layer: one layer of every kind that occurs, and at least two."""
    count_name = next(
        (name for name in COUNTS_OF_LAYERS.split() if name in arguments and isinstance(known[name], int)), None
    )
    if count_name is None:
        return
    count = known[count_name]
    lists = {
        name: value for name, value in known.items() if isinstance(value, list | tuple) and len(value) == count > 2
    }
    lists = {name: value for name, value in lists.items() if name not in arguments}
    if not lists:
        return
    kinds: dict[str, int] = {}
    for number, entries in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(entries), number)
    chosen = sorted(kinds.values())[:6]
    chosen += [number for number in range(count) if number not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    if fixed.intersection(lists):  # computed: layers can only be left out at the end
        chosen = list(range(min(count, 8, chosen[-1] + 1)))
    for name, value in lists.items():
        if name not in fixed:
            arguments[name] = [value[number] for number in chosen]
    for name in COUNTS_OF_LAYERS.split():
        if name in arguments and known[name] == count:
            arguments[name] = len(chosen)


def _rope(arguments: dict[str, Any], known: dict[str, Any], *, is_part: bool) -> None:
    """Rotary embeddings of several axes: sections that fill a small head. Others don't look at them."""
    rope = known.get("rope_parameters", ...)
    rope = {"rope_type": "default", "rope_theta": 10000.0} if rope is None else rope
    if not isinstance(rope, dict) or "rope_type" not in rope or "hidden_size" not in arguments:
        return
    if is_part or rope.get("mrope_section"):
        arguments["rope_parameters"] = with_small_sections(rope)
