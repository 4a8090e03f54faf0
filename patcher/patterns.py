"""Names and paths: which ones match a key or pattern, and short lists of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, TypeVar

from torch import nn

from patcher.errors import InvalidPatcherError, PatchConflictError, nearest
from patcher.expressions import search

K = TypeVar("K", bound=str)


def is_expression(key: str) -> bool:
    """Whether a key of a class mapping is a regular expression, and not an identifier, which is a class name."""
    return not key.isidentifier()


def find_key(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> str | None:
    """Return the key for the class called `name`: the exact name, or an expression; two have to agree.

    With `names_too`, the rule of the process-wide registry, identifiers are searched as expressions too, and the first
    match wins.
    """
    if name in mapping:
        return name
    keys = hits(name, mapping, names_too=names_too)
    return keys[0] if keys and names_too else agreed(keys, mapping, f"the class {name}", name)


def hits(name: str, mapping: Mapping[str, type[nn.Module]], *, names_too: bool = False) -> list[str]:
    """Return all keys that match the class called `name`, also those that another key wins over."""
    keys = [key for key in mapping if (names_too or is_expression(key)) and search(key, name)]
    return list(dict.fromkeys([name, *keys] if name in mapping else keys))


def agreed(keys: Sequence[K], mapping: Mapping[Any, Any], what: str, exact: str, kind: str = "name") -> K | None:
    """Return the first of the keys that match something; raise if they have different replacements."""
    for key in keys[1:]:
        if mapping[key] is not mapping[keys[0]]:
            replacements = " and ".join(getattr(mapping[match], "__qualname__", "?") for match in (keys[0], key))
            raise PatchConflictError(
                f"{keys[0]!r} and {key!r} both match {what}, and they ask for different replacements, {replacements}. "
                f"Narrow one of them, or add the exact {kind}, which wins: {exact!r}: ..."
            )
    return keys[0] if keys else None


#: The names of modules in wrappers of activation checkpointing and FullyShardedDataParallel, which state dicts omit.
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def in_state_dict(name: str) -> str:
    """Return the name of a module or parameter in state dicts, without those of some wrappers.

    >>> in_state_dict("layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'layers.0.mlp.up_proj.weight'
    """
    if "_wrapped_module" not in name:  # fast
        return name
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPED)


def unwrapped(name: str) -> str:
    """Return the name of a module or parameter without those of wrappers, as `torch.distributed.checkpoint` does."""
    return ".".join(segment for segment in in_state_dict(name).split(".") if segment != "_orig_mod")


def inside(path: str) -> str:
    """Return the prefix of names inside of the module at a path; "" is the path of the model."""
    return f"{path}." if path else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def parents(path: str) -> list[str]:
    """Return the paths of the modules around a module or tensor, from that of the model on.

    >>> parents("model.layers.0.mlp")
    ['', 'model', 'model.layers', 'model.layers.0']
    """
    *names, _ = path.split(".")
    return ["", *accumulate(names, "{}.{}".format)] if path else []


def without_numbers(name: str) -> str:
    """Replace each number in a name by `#`, so that names of different layers are equal."""
    return _NUMBER.sub("#", name)


#: The model itself, whose path is "", in reports.
ROOT = "(root)"
#: A segment of a path pattern: a name or wildcard, or (first, last) of runs of numbers.
_Segment = str | tuple[tuple[int, int], ...]
_ONE, _ANY = "*", "**"
#: A separator, and not one of the two dots in `{0..3}`.
_DOT = re.compile(r"(?<!\.)\.(?!\.)")
_NOT_IN_NAMES = frozenset("\\^$[]()|+?*{}.")


def matches_path(pattern: str, path: str) -> bool:
    """Whether a pattern, in the language of `compress`, matches a path of a module or parameter.

    >>> matches_path("model.layers.{0..3}.mlp", "model.layers.2.mlp")
    True
    >>> matches_path("model.layers.*", "model.layers.2.mlp"), matches_path("**.mlp", "model.layers.2.mlp")
    (False, True)

    `{0..3}` and `{0,2..5}` match the numbers in them, `*` one segment, `**` any number of segments including none, and
    `(root)` the model itself. All else is the name of a segment.
    """
    names = path.split(".") if path else []
    reached = {0}  # the numbers of names that the segments so far may match, without backtracking
    for segment in _segments(pattern):
        if segment == _ANY:
            reached = set(range(min(reached, default=len(names) + 1), len(names) + 1))
        else:
            reached = {count + 1 for count in reached if count < len(names) and _matches(segment, names[count])}
    return len(names) in reached


def _matches(segment: _Segment, name: str) -> bool:
    if isinstance(segment, str):
        return segment in (name, _ONE)
    return is_number(name) and any(first <= int(name) <= last for first, last in segment)


def is_number(text: str) -> bool:
    """Whether a segment is an index: `00` is a name."""
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0") and len(text) < 20


def check_path(what: str, pattern: object) -> str:
    """Return the pattern if it is valid; an error begins with `what`."""
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
        runs = (run.partition("..") for run in text[1:-1].split(","))
        bounds = [(first, last if dots else first) for first, dots, last in runs]
        if all(is_number(first) and is_number(last) and int(first) <= int(last) for first, last in bounds):
            return tuple((int(first), int(last)) for first, last in bounds)
    elif text and _NOT_IN_NAMES.isdisjoint(text):
        return text
    raise InvalidPatcherError(
        f"{pattern!r} isn't a path of modules: {text!r} in it has no meaning (a path isn't a regular expression). "
        "Write names with one dot between them, {0..3} or {0,2..5} for numbers in ascending order, * for one whole "
        "name, ** for any number of names."
    )


def nearest_paths(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """Return the paths most like a pattern, best first, with runs of numbers folded.

    >>> nearest_paths("model.layer.{0..9}.mlp", ["model.layers.0.mlp", "model.layers.1.mlp", "model.norm"])[0]
    'model.layers.{0..1}.mlp'
    """
    text, folded = _unnumbered(pattern), {_unnumbered(path): path for path in compress(paths)}
    matches = nearest(text, folded, count)
    if not matches:  # by the name of the module
        names = {path: path.rpartition(".")[2] for path in folded}
        close = nearest(text.rpartition(".")[2], names.values(), count)
        matches = [path for name in close for path in names if names[path] == name]
    return [folded[match] for match in matches[:count]]


def _unnumbered(pattern: str) -> str:
    return re.sub(r"\{[^{}]*\}|\*+", "#", without_numbers(pattern))


def compress(keys: Iterable[str]) -> list[str]:
    """Fold the indices of layers in parameter names, in order of first appearance.

    >>> compress(["model.layers.0.mlp.x", "model.layers.1.mlp.x", "model.norm.w"])
    ['model.layers.{0..1}.mlp.x', 'model.norm.w']
    """
    names = [tuple(key.split(".")) for key in dict.fromkeys(keys)]
    digits = {segment for segment in set(chain.from_iterable(names)) if is_number(segment)}
    # One position at a time, from the right, so that `layers.0.experts.3` is folded twice.
    positions = {position for name in names for position, segment in enumerate(name) if segment in digits}
    for position in sorted(positions, reverse=True):
        groups: dict[tuple[Any, ...], list[int]] = {}  # (segments before, segments after) -> indices, or name -> []
        for name in names:
            if position < len(name) and name[position] in digits:
                groups.setdefault((name[:position], name[position + 1 :]), []).append(int(name[position]))
            else:
                groups[name] = []
        names = [(*key[0], _ranges(indices), *key[1]) if indices else key for key, indices in groups.items()]
    return [".".join(name) for name in names]


def _ranges(numbers: list[int]) -> str:
    """Format `[0, 1, 2]` as `{0..2}`, `[0, 2, 3]` as `{0,2..3}`, one number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["..".join(map(str, run)) for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"
