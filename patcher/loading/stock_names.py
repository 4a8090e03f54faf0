"""Names that the stock model has and the patched one hasn't: maps, lists and settings by name can't mean them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from patcher.compat.models import named_parameters, state_tensors
from patcher.errors import InvalidPatcherError
from patcher.layouts.fused_weights import fused_modules
from patcher.layouts.selection import converts
from patcher.loading.load import Constructed
from patcher.patterns import compress, inside, without_numbers
from patcher.resolution.resolution import skeleton

#: Parameter of the stock model -> those of the patched one that hold its values.
Parts = Mapping[str, tuple[str, ...]]


def parts_of(load: Constructed) -> Parts:
    """The parameters of the stock model that are parts of others in the model of a load."""
    own = dict(named_parameters(load.model))  # a quantizer adds buffers
    found = {
        f"{inside(path)}{name}": tuple(f"{inside(path)}{fused}" for fused in layout.fused)
        for path, _, carried in fused_modules(load.model)
        for layout in carried.layouts
        for name in layout.stock
    }
    replaced = [path for path, _ in load.record.replacements()]
    if replaced and any(converts(entry.patcher) for entry in load.in_force):
        stock = state_tensors(skeleton(load.record.model_class, load.model.config))
        for path in map(inside, replaced):
            made = tuple(name for name in own if name.startswith(path) and name not in stock and name not in found)
            if made:  # which of them is made of which, only the checkpoint shows
                found |= {name: made for name in stock if name.startswith(path) and name not in found}
    return {name: made for name, made in found.items() if name not in own}


def layer_name(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0]


def check_no_part_is_named(what: str, named: Iterable[str], parts: Parts) -> None:
    """Raise for parts that something names.

    Args:
        what: the argument that names them.
        named: these parts.

    Raises:
        InvalidPatcherError: with the names to write in their place.
    """
    named = sorted(named)
    if not named:
        return
    alike: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for name in named:
        part, joined = layer_name(name), tuple(dict.fromkeys(map(layer_name, parts[name])))
        alike.setdefault(tuple(map(without_numbers, (part, *joined))), {})[part] = joined
    listed = ""
    for found in alike.values():
        names = ", ".join(compress(list(found)))
        listed += f"  {names}: part of {', '.join(compress([each for joined in found.values() for each in joined]))}\n"
    raise InvalidPatcherError(
        f"{what} names layers that are parts of others in the patched model:\n{listed}"
        "Name those instead, or leave these modules out of the patcher."
    )
