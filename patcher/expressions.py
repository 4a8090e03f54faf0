"""Regular expressions of users and files: checked once, and searched with a time limit.

`re` can't be interrupted, and takes exponential time for `(a+)+$`. So it searches only short texts, for expressions
with at most one repeat or two alternatives. `regex` searches all else, as it has a timeout, but it takes 4 times as
long to compile and 17 times to search. Expressions mean the same in both, except that beyond ASCII `\\w` includes
marks and `\\s` no control characters.
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

#: The limit of an expression's searches within a minute; searches below `_NEGLIGIBLE` seconds don't count.
SEARCH_SECONDS = 1.0
_MINUTE = 60.0
_NEGLIGIBLE = 0.001
#: The length of texts in which `re` is fast: one repeat takes quadratic time.
_SHORT = 250
#: Limits of time and memory for compiling: characters, repeats (`regex` unrolls `(?:a{30}){30}`).
_MAX_LENGTH = 10_000
_MAX_REPEATS = 1000
#: Each may be searched in thousands of names.
_MAX_EXPRESSIONS = 250

_SET = r"\[\^?\]?(?:\\.|[^\\\]])*\]"
#: Tokens with more than one way to match, or that are slow; and tokens to skip.
_CHOICE = re.compile(rf"\\[1-9]|[*+?{{|]|\\.|{_SET}", re.DOTALL)
_QUANTIFIER_OR_SET = re.compile(rf"\(\?#[^)]*\)|\\.|{_SET}|\{{\d*(?:,\d*)?\}}|\{{", re.DOTALL)
_EXACTLY = re.compile(r"\{(\d+)")


def checked_expression(what: str, expression: str) -> str:
    """Return the expression if it can be compiled; an error begins with `what`."""
    try:
        if len(expression) > _MAX_LENGTH:
            raise MemoryError(f"it has more than {_MAX_LENGTH:,} characters")
        if prod(max(1, int(count)) for count in _EXACTLY.findall(expression)) > _MAX_REPEATS:
            raise MemoryError(
                f"it repeats more than {_MAX_REPEATS:,} times, and no name is that long; write smaller numbers in "
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
    """Raise if there are too many expressions."""
    if len(expressions) > _MAX_EXPRESSIONS:
        raise InvalidPatcherError(
            f"{field}: {len(expressions):,} expressions are too many, at most {_MAX_EXPRESSIONS} are searched; fold "
            "those that differ in numbers alone."
        )


def search(expression: str, text: str) -> bool:
    """Whether the expression matches anywhere in the text; raises if the search takes too long.

    >>> search(r"layers\\.\\d+$", "model.layers.12")
    True
    """
    return compiled(expression).search(text) is not None


def matches(expression: str, text: str) -> bool:
    """Whether the expression matches the whole text, as `re.fullmatch`; raises if that takes too long.

    >>> matches("(?i)a|ab", "AB"), matches("a|ab", "abc")
    (True, False)
    """
    return compiled(expression).search(text, "fullmatch") is not None


@lru_cache(maxsize=1 << 15)
def compiled(expression: str) -> _Expression:
    """Return an object that searches an expression."""
    return _Expression(expression)


class _Expression:
    """An expression compiled by `re` or, when it is first needed, by `regex`; searches return matches of either."""

    def __init__(self, expression: str) -> None:
        self.pattern = expression
        self._since, self._spent = 0.0, 0.0  # a race of threads does no harm
        self._quick = re.compile(expression) if is_quick(expression) else None
        self._limited: Any = None

    def __reduce__(self) -> Any:
        return compiled, (self.pattern,)

    @property
    def groupindex(self) -> Mapping[str, int]:
        """As in `re.Pattern`."""
        return re.compile(self.pattern).groupindex

    def search(self, text: str, how: str = "search") -> Any:
        if self._quick is not None and len(text) <= _SHORT:
            return getattr(self._quick, how)(text)
        return self._limited_search(text, how)

    def _limited_search(self, text: str, how: str = "search") -> Any:
        if self._limited is None:
            self._limited = regex.compile(_as_in_re(self.pattern), regex.VERSION0, cache_pattern=False)
        wall, cpu = time.perf_counter(), time.thread_time()
        if wall - self._since > _MINUTE:  # pauses of the machine would add up over days
            self._since, self._spent = wall, 0.0
        try:
            match = getattr(self._limited, how)(text, timeout=max(SEARCH_SECONDS - self._spent, _NEGLIGIBLE))
        except TimeoutError:
            self._spent = SEARCH_SECONDS
            raise InvalidPatcherError(
                f"The expression {cut(self.pattern)!r} takes too long: searching for it, last in {cut(text)!r}, has "
                f"reached the limit of {SEARCH_SECONDS:g} seconds. Take out repeats inside of repeats, and "
                "alternatives that match the same: 'a+$' finds what '(a+)+$' does."
            ) from None
        # The smaller one: another thread may have run, or the CPU clock have a low resolution.
        elapsed = min(time.perf_counter() - wall, time.thread_time() - cpu)
        self._spent += elapsed if elapsed > _NEGLIGIBLE else 0
        return match


def is_quick(expression: str) -> bool:
    """Whether an expression has at most one token with more than one way to match."""
    if "(?" in expression:  # flags, lookaround or comments
        return False
    choices = [token for token in _CHOICE.findall(expression) if token in "*+?{|" or token[1:].isdigit()]
    return len(choices) <= 1


def _as_in_re(expression: str) -> str:
    """Escape what only `regex` interprets: fuzzy matches `x{e}` and classes `[[:alpha:]]`."""
    if re.search(r"\(\?[a-wyz]*x", expression):  # verbose: comments may contain anything
        return expression

    def escaped(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == "[":
            return "[" + re.sub(r"\\.|\[", lambda inner: r"\[" if inner[0] == "[" else inner[0], token[1:])
        return r"\{" if token == "{" else token

    return _QUANTIFIER_OR_SET.sub(escaped, expression)


def cut(text: str) -> str:
    """Truncate a name or an expression for a message."""
    return text if len(text) <= 100 else f"{text[:100]}..."
