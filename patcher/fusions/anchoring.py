"""Names of weights as expressions: the beginnings of those that a fusion found, and of no others."""

from __future__ import annotations

import re
from collections.abc import Iterable


def anchored(prefixes: Iterable[str], tails: Iterable[str], every: set[str], base: str) -> str:
    """An expression, with one group, for these beginnings of names and no others that occur.

    Args:
        prefixes: the beginnings, up to a dot.
        tails: expressions for what follows them.
        every: all names that occur.
        base: the prefix of the base model, "" if there is none. A checkpoint of the base model, or of a model with a
            head, has the same names with or without it.
    """
    wanted, tail = list(dict.fromkeys(prefixes)), f"(?:{'|'.join(tails)})"
    by_template: dict[str, list[str]] = {}
    for prefix in wanted:
        by_template.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "#", prefix), []).append(prefix)
    alternatives = []
    for template, members in by_template.items():
        body = re.escape(template).replace(re.escape("#"), r"\d+")
        expression = re.compile(f"({body}){tail}")
        found = {match[1] for key in every if (match := expression.fullmatch(key))}
        alternatives += [body] if found <= set(wanted) else [_listed(template, members)]
    if base:
        stem = re.escape(f"{base}.")
        bare = [text.removeprefix(stem) for text in alternatives]
        inside = all(prefix.startswith(f"{base}.") for prefix in wanted)
        text = rf"(?:{stem})?{_either(bare if inside else alternatives)}"
        expression, beginnings = re.compile(f"{text}{tail}"), tuple(wanted)
        if not any(expression.fullmatch(key) and not key.startswith(beginnings) for key in every):
            return f"^({text})"
    return f"^({_either(alternatives)})"


def _either(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def _listed(template: str, members: list[str]) -> str:
    """The members by number where they have one number, otherwise each by itself."""
    if template.count("#") == 1:
        head, tail = template.split("#")
        numbers = sorted(int(member.removeprefix(head).removesuffix(tail)) for member in members)
        return f"{re.escape(head)}(?:{'|'.join(map(str, numbers))}){re.escape(tail)}"
    return f"(?:{'|'.join(re.escape(member) for member in members)})"
