"""Regular expressions that come from users and from files: checked once, so that no search takes exponential time."""

from __future__ import annotations

import re
from functools import lru_cache

from patcher.errors import InvalidPatcherError

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\(\?#[^)]*\)|\(\??|\{\d*,?\d*\}|.", re.DOTALL)


def checked_expression(what: str, expression: str) -> str:
    """The expression, if it is one that can be searched; `what` is how the error calls it.

    Raises:
        InvalidPatcherError: it can't be compiled, or repeats what itself can match in several ways: `(a+)+$`, for
            which `re`, that can't be interrupted, takes exponential time.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise InvalidPatcherError(
            f"{what} isn't a regular expression: {error}. For a literal text write {re.escape(expression)!r}."
        ) from error
    except (RecursionError, OverflowError, MemoryError, ValueError) as error:
        raise InvalidPatcherError(f"{cut(what)}: the expression is too large to be compiled ({error}).") from error
    if _repeats_a_choice(expression):
        raise InvalidPatcherError(
            f"{cut(what)}: a group that is repeated has a repeat or alternatives in it, and searching for that can "
            "take for ever. Write a set for alternatives, '[ab]+' for '(a|b)+', and one repeat for two: 'a+$' finds "
            "what '(a+)+$' does."
        )
    return expression


def _repeats_a_choice(expression: str) -> bool:
    """Whether a group in which a match can go on in more than one way is repeated."""
    groups, closed = [False], False  # whether each group that is open has a choice, and the one that ended just now
    for token in _TOKEN.findall(expression):
        was_closed, closed = closed, False
        if token.startswith("(") and token[-1] != ")":
            groups.append(False)
        elif token == ")" and len(groups) > 1:  # in a comment of a verbose one there may be more
            closed = groups.pop()
            groups[-1] |= closed
        elif token in ("*", "+") or (token[0] == "{" and len(token) > 1):
            if was_closed:
                return True
            groups[-1] |= not token[1:-1].isdigit()
        elif token in ("?", "|"):
            groups[-1] = True
    return False


@lru_cache(maxsize=1 << 15)
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(checked_expression(repr(expression), expression))


def search(expression: str, text: str) -> bool:
    """Whether the expression is found anywhere in the text.

    >>> search(r"layers\\.\\d+$", "model.layers.12")
    True

    Raises:
        InvalidPatcherError: as `checked_expression`.
    """
    return _compiled(expression).search(text) is not None


def matches(expression: str, text: str) -> bool:
    """Whether the expression matches the whole text, as `re.fullmatch` says.

    >>> matches("(?i)a|ab", "AB"), matches("a|ab", "abc")
    (True, False)
    """
    return _compiled(expression).fullmatch(text) is not None


def cut(text: str) -> str:
    """A name or an expression as messages show it: from a file it may be of any length."""
    return text if len(text) <= 100 else f"{text[:100]}..."
