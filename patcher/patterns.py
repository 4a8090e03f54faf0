"""Names and paths: which one is meant, and lists of names in short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from torch import nn

from patcher.errors import InvalidPatcherError, PatchConflictError, nearest
from patcher.expressions import search

K = TypeVar("K", bound=str)


def is_expression(key: str) -> bool:
    """Whether a key of a class mapping is a regular expression: a key that is an identifier is a class name."""
    return not key.isidentifier()


def find_key(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> str | None:
    """The key that decides about the class called `name`: an exact name, before an expression; two have to agree.

    With `names_too` a key that is an identifier is searched as an expression as well, and the first one found wins,
    which is the rule of the process-wide registry.
    """
    if name in mapping:
        return name
    found = hits(name, mapping, names_too=names_too)
    return found[0] if found and names_too else agreed(found, mapping, f"the class {name}", name)


def hits(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> list[str]:
    """Every key that means the class called `name`, those included that another key wins over."""
    found = [key for key in mapping if (names_too or is_expression(key)) and search(key, name)]
    return list(dict.fromkeys([name, *found] if name in mapping else found))


def agreed(keys: Sequence[K], mapping: Mapping[Any, Any], what: str, exact: str, kind: str = "name") -> K | None:
    """The first of the keys that match one thing; raises if they ask for different replacements."""
    for key in keys[1:]:
        if mapping[key] is not mapping[keys[0]]:
            replacements = " and ".join(getattr(mapping[each], "__qualname__", "?") for each in (keys[0], key))
            raise PatchConflictError(
                f"{keys[0]!r} and {key!r} both match {what}, and they ask for different replacements, {replacements}. "
                f"Narrow one of them, or add the exact {kind}, which wins: {exact!r}: ..."
            )
    return keys[0] if keys else None


#: What activation checkpointing and FullyShardedDataParallel call a module that they are around: names in state dicts
#: are without it.
_LEFT_OUT = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def in_state_dict(name: str) -> str:
    """The name of a module or parameter as state dicts have it, which know nothing of some wrappers.

    >>> in_state_dict("layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'layers.0.mlp.up_proj.weight'
    """
    if "_wrapped_module" not in name:  # most
        return name
    return ".".join(segment for segment in name.split(".") if segment not in _LEFT_OUT)


def inside(path: str) -> str:
    """What the names of all that is inside of the module at a path begin with; "" is the path of the model."""
    return f"{path}." if path else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with `#` for each number in it: what the names of layers that are alike have in common."""
    return _NUMBER.sub("#", name)


#: How reports name the model itself, whose path is "".
ROOT = "(root)"
#: What one segment of a path pattern matches: a name, runs of numbers, any one segment, or any number of segments.
_Segment = str | tuple[tuple[int, int], ...]
_ONE, _ANY = "*", "**"
#: Between two segments is one dot, in `{0..3}` are two.
_DOT = re.compile(r"(?<!\.)\.(?!\.)")
_NOT_IN_NAMES = frozenset("\\^$[]()|+?*{}.")


def matches_path(pattern: str, path: str) -> bool:
    """Whether a pattern, in the language of `compress`, means the module or parameter at a path.

    >>> matches_path("model.layers.{0..3}.mlp", "model.layers.2.mlp")
    True
    >>> matches_path("model.layers.*", "model.layers.2.mlp"), matches_path("**.mlp", "model.layers.2.mlp")
    (False, True)

    `{0..3}` and `{0,2..5}` stand for the numbers in them, `*` for one segment, `**` for any number of segments, none
    included, and `(root)` for the model itself. All else is what the segment is called.
    """
    names = path.split(".") if path else []
    reached = {0}  # how many names the segments so far may stand for: no backtracking
    for segment in _segments(pattern):
        if segment == _ANY:
            reached = set(range(min(reached, default=len(names) + 1), len(names) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(names) and _fits(segment, names[at])}
    return len(names) in reached


def _fits(segment: _Segment, name: str) -> bool:
    if isinstance(segment, str):
        return segment in (name, _ONE)
    return is_number(name) and any(first <= int(name) <= last for first, last in segment)


def is_number(text: str) -> bool:
    """Whether a segment is a number as lists count: `00` is a name."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and len(text) < 20


def check_path(what: str, pattern: object) -> str:
    """The pattern, if it is one; `what` is how the error begins."""
    if not isinstance(pattern, str):
        raise InvalidPatcherError(
            f"{what}: {pattern!r} ({type(pattern).__name__}) isn't a path of a module; write for instance "
            "'model.layers.{0..3}.mlp'."
        )
    try:
        _segments(pattern)
    except InvalidPatcherError as error:
        raise InvalidPatcherError(f"{what}: {error}") from error
    return pattern


@lru_cache(maxsize=4096)
def _segments(pattern: str) -> tuple[_Segment, ...]:
    if not pattern:
        raise InvalidPatcherError(f"the empty path is ambiguous; write {ROOT!r} for the model itself, '**' for all.")
    return () if pattern == ROOT else tuple(_segment(pattern, text) for text in _DOT.split(pattern))


def _segment(pattern: str, text: str) -> _Segment:
    if text in (_ONE, _ANY):
        return text
    if text.startswith("{") and text.endswith("}"):
        parted = (run.partition("..") for run in text[1:-1].split(","))
        bounds = [(first, last if dots else first) for first, dots, last in parted]
        if all(is_number(first) and is_number(last) and int(first) <= int(last) for first, last in bounds):
            return tuple((int(first), int(last)) for first, last in bounds)
    elif text and _NOT_IN_NAMES.isdisjoint(text):
        return text
    raise InvalidPatcherError(
        f"{pattern!r} isn't a path of modules, nor is it a regular expression: {text!r} in it has no meaning. Write "
        "names with one dot between them, {0..3} or {0,2..5} for numbers in ascending order, * for one whole name, ** "
        "for any number of names."
    )


def nearest_paths(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """The paths most like a pattern, best first, with runs of numbers folded.

    >>> nearest_paths("model.layer.{0..9}.mlp", ["model.layers.0.mlp", "model.layers.1.mlp", "model.norm"])[0]
    'model.layers.{0..1}.mlp'
    """
    wanted, folded = _unnumbered(pattern), {_unnumbered(path): path for path in compress(paths)}
    found = nearest(wanted, folded, count)
    if not found:  # by what the module is called
        called = {text: text.rpartition(".")[2] for text in (wanted, *folded)}
        names = nearest(called.pop(wanted), called.values(), count)
        found = [text for name in names for text in called if called[text] == name]
    return [folded[text] for text in found[:count]]


def _unnumbered(pattern: str) -> str:
    return re.sub(r"\{[^{}]*\}|\*+", "#", without_numbers(pattern))


def compress(keys: Iterable[str]) -> list[str]:
    """Parameter names with runs of layer numbers folded, in order of first appearance.

    >>> compress(["model.layers.0.mlp.x", "model.layers.1.mlp.x", "model.norm.w"])
    ['model.layers.{0..1}.mlp.x', 'model.norm.w']
    """
    current = [tuple(key.split(".")) for key in dict.fromkeys(keys)]
    digits = {part for part in set(chain.from_iterable(current)) if is_number(part)}
    # One number position at a time, from the right, so that `layers.0.experts.3` folds in both places.
    positions = {place for parts in current for place, part in enumerate(parts) if part in digits}
    for position in sorted(positions, reverse=True):
        groups: dict[tuple[Any, ...], list[int]] = {}  # what is before and after the number, or a key without one
        for parts in current:
            if position < len(parts) and parts[position] in digits:
                around = parts[:position], parts[position + 1 :]
                groups.setdefault(around, []).append(int(parts[position]))
            else:
                groups[parts] = []
        current = [
            (*around[0], _ranges(numbers), *around[1]) if numbers else around for around, numbers in groups.items()
        ]
    return [".".join(parts) for parts in current]


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2]` as `{0..2}`, `[0, 2, 3]` as `{0,2..3}`, one number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["..".join(map(str, run)) for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"
