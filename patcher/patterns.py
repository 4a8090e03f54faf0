"""Names and expressions: which one is meant, what was probably meant instead, and lists of names in short."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from torch import nn

from patcher.errors import PatchConflictError


def is_expression(key: str) -> bool:
    """Whether a key of a class mapping is a regular expression: a key that is an identifier is a class name."""
    return not key.isidentifier()


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def search(pattern: str, text: str) -> bool:
    """Whether the expression is found anywhere in the text."""
    return _compiled(pattern).search(text) is not None


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
    return [key for key in mapping if key == name or ((names_too or is_expression(key)) and search(key, name))]


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first.

    >>> nearest("LlamaMPL", ["LlamaMLP", "LlamaModel", "Linear"])[0]
    'LlamaMLP'
    """
    by_folded: dict[str, str] = {}
    for candidate in sorted(set(candidates)):
        by_folded.setdefault(candidate.casefold(), candidate)
    return [by_folded[match] for match in difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)]


def inside(path: str) -> str:
    """What the names of all that is inside of the module at a path begin with; "" is the path of the model."""
    return f"{path}." if path else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(name: str) -> str:
    """A name with `#` for each number in it: what the names of layers that are alike have in common."""
    return _NUMBER.sub("#", name)


def common_prefix(names: list[str]) -> str:
    """The longest beginning, up to a dot, that the names share and that is the whole of none."""
    shared: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)


def compress(keys: Iterable[str]) -> list[str]:
    """Parameter names with runs of layer numbers folded, in order of first appearance.

    >>> compress(["model.layers.0.mlp.x", "model.layers.1.mlp.x", "model.norm.w"])
    ['model.layers.{0..1}.mlp.x', 'model.norm.w']
    """
    current = list(dict.fromkeys(keys))
    # One number position at a time, from the right, so that `layers.0.experts.3` folds in both places.
    depth = max((key.count(".") for key in current), default=0) + 1
    for position in range(depth, -1, -1):
        groups: dict[tuple[str, ...], list[int]] = {}  # what is before and after the number, or a key without one
        for key in current:
            parts = key.split(".")
            if position < len(parts) and parts[position].isdigit():
                around = (".".join(parts[:position]), ".".join(parts[position + 1 :]))
                groups.setdefault(around, []).append(int(parts[position]))
            else:
                groups[(key,)] = []
        current = [
            ".".join(filter(None, (around[0], _ranges(numbers), around[1]))) if numbers else around[0]
            for around, numbers in groups.items()
        ]
    return current


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
