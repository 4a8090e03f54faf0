"""Names and expressions: which one is meant, what was probably meant instead, and lists of names in short."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import nn

from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.expressions import search


def is_expression(key: str) -> bool:
    """Whether a key of a class mapping is a regular expression: a key that is an identifier is a class name."""
    return not key.isidentifier()


def find_key(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> str | None:
    """The key that decides about the class called `name`: an exact name wins over an expression.

    With `names_too` a key that is an identifier is searched as an expression as well, and the first one found wins,
    which is the rule of the process-wide registry.

    Raises:
        PatchConflictError: two expressions are found in the name and their replacements differ.
    """
    if name in mapping:
        return name
    found = hits(name, mapping, names_too=names_too)
    for key in () if names_too else found[1:]:
        if mapping[key] is not mapping[found[0]]:
            raise PatchConflictError(
                f"The expressions {found[0]!r} and {key!r} both match the class {name}, and they ask for different "
                f"replacements, {mapping[found[0]].__qualname__} and {mapping[key].__qualname__}. Narrow one of the "
                f"expressions, or add the exact name, which wins over expressions: {name!r}: ..."
            )
    return found[0] if found else None


def hits(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> list[str]:
    """Every key that means the class called `name`, those included that another key wins over."""
    found = [key for key in mapping if (names_too or is_expression(key)) and search(key, name)]
    return list(dict.fromkeys([name, *found] if name in mapping else found))


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first.

    >>> nearest("LlamaMPL", ["LlamaMLP", "LlamaModel", "Linear"])[0]
    'LlamaMLP'
    """
    by_folded: dict[str, str] = {}
    for candidate in sorted(set(candidates)):
        by_folded.setdefault(candidate.casefold(), candidate)
    return [by_folded[match] for match in difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about a name that isn't one of those that are known, or what else it says."""
    close = nearest(name, known, 1) if len(name) < 100 else []
    return f"did you mean {close[0]!r}?" if close else otherwise


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
_IN_OTHERS = frozenset("\\^$[]()|+?*{}")


def matches_path(pattern: str, path: str) -> bool:
    """Whether a pattern, in the language of `compress`, means the module or parameter at a path.

    >>> matches_path("model.layers.{0..3}.mlp", "model.layers.2.mlp")
    True
    >>> matches_path("model.layers.*", "model.layers.2.mlp"), matches_path("**.mlp", "model.layers.2.mlp")
    (False, True)

    `{0..3}` and `{0,2..5}` stand for the numbers in them, `*` for one segment, `**` for any number of segments, none
    included, and `(root)` for the model itself. All else is what the segment is called.

    Raises:
        InvalidPatcherError: the pattern is none.
    """
    segments = _segments(pattern)
    # How many segments of the pattern can be used up, after each segment of the path: no backtracking.
    reached = _over_any(segments, {0})
    for name in path.split(".") if path else ():
        fitting = {at for at in reached if at < len(segments) and _fits(segments[at], name)}
        reached = _over_any(segments, {at + (segments[at] != _ANY) for at in fitting})
    return len(segments) in reached


def check_path(pattern: object) -> str:
    """The pattern, if it is one.

    Raises:
        InvalidPatcherError: it isn't, and what to write instead.
    """
    if not isinstance(pattern, str):
        raise InvalidPatcherError(
            f"{pattern!r} ({type(pattern).__name__}) isn't a path of a module; write for instance "
            "'model.layers.{0..3}.mlp'."
        )
    _segments(pattern)
    return pattern


def nearest_paths(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """The paths most like a pattern, best first, with runs of numbers folded.

    >>> nearest_paths("model.layer.{0..9}.mlp", ["model.layers.0.mlp", "model.layers.1.mlp", "model.norm"])[0]
    'model.layers.{0..1}.mlp'
    """
    folded = {_unnumbered(path): path for path in compress(paths)}
    found = nearest(_unnumbered(pattern), folded, count)
    if not found:  # by what the module is called
        by_name: dict[str, list[str]] = {}
        for text in folded:
            by_name.setdefault(text.rpartition(".")[2], []).append(text)
        last = _unnumbered(pattern).rpartition(".")[2]
        found = [text for name in nearest(last, by_name, count) for text in by_name[name]]
    return [folded[text] for text in found[:count]]


def _unnumbered(pattern: str) -> str:
    return re.sub(r"\{[^{}]*\}", "#", without_numbers(pattern.replace(_ANY, "#").replace(_ONE, "#")))


def _over_any(segments: tuple[_Segment, ...], reached: set[int]) -> set[int]:
    """With what is reached when each `**` means no segment."""
    for at, segment in enumerate(segments):
        if segment == _ANY and at in reached:
            reached.add(at + 1)
    return reached


def _fits(segment: _Segment, name: str) -> bool:
    if isinstance(segment, str):
        return segment in (name, _ONE, _ANY)
    return is_number(name) and any(first <= int(name) <= last for first, last in segment)


def is_number(text: str) -> bool:
    """Whether a segment is a number as lists count: `00` is a name."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and len(text) < 20


@lru_cache(maxsize=4096)
def _segments(pattern: str) -> tuple[_Segment, ...]:
    if pattern == ROOT:
        return ()
    if not pattern:
        raise InvalidPatcherError(f"the empty path is ambiguous; write {ROOT!r} for the model itself, '**' for all.")
    texts = re.sub(r"\{[^}]*", lambda braces: braces[0].replace(".", "\0"), pattern).split(".")
    return tuple(_segment(pattern, text.replace("\0", ".")) for text in texts)


def _segment(pattern: str, text: str) -> _Segment:
    if text in (_ONE, _ANY):
        return text
    if text.startswith("{") and text.endswith("}"):
        parted = (run.partition("..") for run in text[1:-1].split(","))
        bounds = [(first, last if dots else first) for first, dots, last in parted]
        if all(is_number(first) and is_number(last) and int(first) <= int(last) for first, last in bounds):
            return tuple((int(first), int(last)) for first, last in bounds)
    elif text and _IN_OTHERS.isdisjoint(text):
        return text
    raise InvalidPatcherError(
        f"{pattern!r} isn't a path of modules, nor is it a regular expression: {text!r} in it has no meaning. Write "
        "names with one dot between them, {0..3} or {0,2..5} for numbers in ascending order, * for one whole name, ** "
        "for any number of names."
    )


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
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return texts[0] if len(texts) == 1 and ".." not in texts[0] else "{" + ",".join(texts) + "}"
