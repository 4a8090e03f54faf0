"""Regular expressions that come from users and from files: checked once, and searched for a limited time.

`re` can't be interrupted, and takes exponential time for `(a+)+$`. So it searches short texts only, for expressions
with one choice at most: one repeat, or two alternatives. All else is searched by `regex`, which gives up when told to;
it takes 4 times as long to compile and 17 times to search. Expressions mean there what they mean to `re`, but beyond
ASCII, where `\\w` includes marks, and `\\s` no control characters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import regex  # type: ignore[import-untyped]

from patcher.errors import InvalidPatcherError

#: For how long one expression may be searched within a minute, all searches together that are not over at once.
SEARCH_SECONDS = 1.0
_MINUTE = 60.0
_AT_ONCE = 0.001
#: `re` is quick in what is no longer: one repeat takes quadratic time.
_SHORT = 250
#: Compiling takes time and memory.
_LONGEST = 10_000
#: `regex` unrolls `(?:a{30}){30}`, in memory.
_MOST_REPEATS = 1000
#: Each may be searched in thousands of names.
_MOST_EXPRESSIONS = 250

_SET = r"\[\^?\]?(?:\\.|[^\\\]])*\]"
#: What leaves a match a choice, or takes long by itself, and what to skip when looking for it.
_CHOICE = re.compile(rf"\\[1-9]|[*+?{{|]|\\.|{_SET}", re.DOTALL)
_QUANTIFIER_OR_SET = re.compile(rf"\(\?#[^)]*\)|\\.|{_SET}|\{{\d*(?:,\d*)?\}}|\{{", re.DOTALL)
_EXACTLY = re.compile(r"\{(\d+)")


def checked_expression(what: str, expression: str) -> str:
    """The expression, if it is one that can be compiled; `what` is how the error calls it."""
    try:
        if len(expression) > _LONGEST:
            raise MemoryError(f"it has more than {_LONGEST:,} characters")
        if prod(max(1, int(count)) for count in _EXACTLY.findall(expression)) > _MOST_REPEATS:
            raise MemoryError(
                f"it repeats more than {_MOST_REPEATS:,} times, and no name is that long; write smaller numbers in "
                "braces, or + in their place"
            )
        re.compile(expression)
    except re.error as error:
        raise InvalidPatcherError(
            f"{what} isn't a regular expression: {error}. For a literal text write {re.escape(expression)!r}."
        ) from error
    except (RecursionError, OverflowError, MemoryError, ValueError) as error:
        raise InvalidPatcherError(f"{cut(what)}: the expression is too large to be compiled ({error}).") from error
    return expression


def check_number(field: str, expressions: Collection[str]) -> None:
    """Raise for more expressions than can be searched."""
    if len(expressions) > _MOST_EXPRESSIONS:
        raise InvalidPatcherError(
            f"{field}: {len(expressions):,} expressions are too many, at most {_MOST_EXPRESSIONS} are searched; fold "
            "those that differ in numbers alone."
        )


def search(expression: str, text: str) -> bool:
    """Whether the expression is found anywhere in the text; raises if the search takes too long.

    >>> search(r"layers\\.\\d+$", "model.layers.12")
    True
    """
    return compiled(expression).search(text) is not None


def matches(expression: str, text: str) -> bool:
    """Whether the expression matches the whole text, as `re.fullmatch` says; raises if that takes too long.

    >>> matches("(?i)a|ab", "AB"), matches("a|ab", "abc")
    (True, False)
    """
    return compiled(expression).search(text, "fullmatch") is not None


@lru_cache(maxsize=1 << 15)
def compiled(expression: str) -> _Expression:
    """What searches an expression. Compiled when it is first needed: of ten thousand few are."""
    return _Expression(expression)


class _Expression:
    """An expression, with the two engines that search it. What it finds are matches of either."""

    def __init__(self, expression: str) -> None:
        self.pattern = expression
        self._since, self._spent = 0.0, 0.0  # threads may both add to it, and one of them be lost: no harm
        self._quick = re.compile(expression) if is_quick(expression) else None
        self._limited: Any = None

    def __reduce__(self) -> Any:  # of copies and pickles: what was spent stays here
        return compiled, (self.pattern,)

    @property
    def groupindex(self) -> Mapping[str, int]:
        """As of what `re` compiles."""
        return re.compile(self.pattern).groupindex

    def search(self, text: str, how: str = "search") -> Any:
        if self._quick is not None and len(text) <= _SHORT:
            return getattr(self._quick, how)(text)
        return self._limited_search(text, how)

    def _limited_search(self, text: str, how: str = "search") -> Any:
        if self._limited is None:
            self._limited = regex.compile(_as_in_re(self.pattern), regex.VERSION0, cache_pattern=False)
        wall, cpu = time.perf_counter(), time.thread_time()
        if wall - self._since > _MINUTE:  # in a process that goes on for days, pauses of the machine would add up
            self._since, self._spent = wall, 0.0
        try:
            found = getattr(self._limited, how)(text, timeout=max(SEARCH_SECONDS - self._spent, _AT_ONCE))
        except TimeoutError:
            self._spent = SEARCH_SECONDS
            raise InvalidPatcherError(
                f"The expression {cut(self.pattern)!r} takes too long: searching for it, last in {cut(text)!r}, has "
                f"reached the limit of {SEARCH_SECONDS:g} seconds. Take out repeats inside of repeats, and "
                "alternatives that match the same: 'a+$' finds what '(a+)+$' does."
            ) from None
        # Waiting for a turn doesn't count, nor does a clock that ticks seldom.
        took = min(time.perf_counter() - wall, time.thread_time() - cpu)
        self._spent += took if took > _AT_ONCE else 0
        return found


def is_quick(expression: str) -> bool:
    """Whether there is at most one place where a match can go on in more than one way."""
    if "(?" in expression:  # flags, groups that look around, comments: not told apart here
        return False
    choices = [token for token in _CHOICE.findall(expression) if token in "*+?{|" or token[1:].isdigit()]
    return len(choices) <= 1


def _as_in_re(expression: str) -> str:
    """The expression for `regex`, to which `x{e}` is a fuzzy match and `[[:alpha:]]` a class."""
    if re.search(r"\(\?[a-wyz]*x", expression):  # verbose: a comment may hold anything
        return expression

    def escaped(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == "[":
            return "[" + re.sub(r"\\.|\[", lambda each: r"\[" if each[0] == "[" else each[0], token[1:])
        return r"\{" if token == "{" else token

    return _QUANTIFIER_OR_SET.sub(escaped, expression)


def cut(text: str) -> str:
    """A name or an expression as messages show it: from a file it may be of any length."""
    return text if len(text) <= 100 else f"{text[:100]}..."
