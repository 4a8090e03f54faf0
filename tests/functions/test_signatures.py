"""Whether a function can be called as another one is, decided by their parameters alone."""

from __future__ import annotations

import inspect
import itertools
import random
from inspect import Parameter, Signature
from typing import Any

import pytest

from patcher.functions.signatures import unlike

CASES = [
    ("(a, b)", "(a, b)", ""),
    ("(a, b)", "(a, b, c=1)", ""),
    ("(a, b)", "(*args, **kwargs)", ""),
    ("(a, b=1)", "(a, b)", "its parameter 'b' has no default"),
    ("(a, b)", "(a)", "it takes 1 positional arguments, and 'b' is number 2"),
    ("(a, b)", "(b, a)", "its parameter number 1 is 'b', not 'a'"),
    ("(a, b)", "(a, b, c)", "its parameter 'c' has no default, and nobody gives it"),
    ("(a, *, b)", "(a)", "it has no parameter 'b'"),
    ("(a, **kwargs)", "(a)", "it takes no **kwargs"),
    ("(*args)", "(a)", "it takes no *args"),
    ("(a)", "(*args, a)", "it takes 'a' by name only"),
    ("(*args, a)", "(a, *args)", "its parameter 'a' takes what is one of *args"),
]


def signature(text: str) -> Signature:
    space: dict[str, Any] = {}
    exec(f"def function{text}: ...", space)
    return inspect.signature(space["function"])


@pytest.mark.parametrize(("before", "after", "problem"), CASES)
def test_what_is_said(before: str, after: str, problem: str) -> None:
    assert unlike(signature(before), signature(after)) == problem


def test_what_is_said_to_fit_takes_every_call_of_the_original() -> None:
    fitting = 0
    for seed in range(1500):
        draw = random.Random(seed)
        before, after = (_drawn(draw) for _ in range(2))
        if unlike(before, after):
            assert before.parameters != after.parameters
            continue
        fitting += 1
        for args, kwargs in _calls(before):
            after.bind(*args, **kwargs)
    assert fitting > 200


def _drawn(draw: random.Random) -> Signature:
    names = ["a", "b", "c"][: draw.randint(0, 3)]
    if draw.random() < 0.2:
        draw.shuffle(names)
    cut = draw.randint(0, len(names))
    defaults = draw.randint(0, cut)
    found = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None if place >= defaults else Parameter.empty)
        for place, name in enumerate(names[:cut])
    ]
    if draw.random() < 0.25:
        found.append(Parameter("args", Parameter.VAR_POSITIONAL))
    found += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=draw.choice([None, Parameter.empty])) for name in names[cut:]
    ]
    if draw.random() < 0.35:
        found.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
    return Signature(found)


def _calls(signature: Signature) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that a signature takes: so many by position, and some of the others by name."""
    found = []
    for count in range(5):
        for named in itertools.chain.from_iterable(itertools.combinations("abcd", size) for size in range(4)):
            args, kwargs = (0,) * count, dict.fromkeys(named, 0)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                continue
            found.append((args, kwargs))
    return found
