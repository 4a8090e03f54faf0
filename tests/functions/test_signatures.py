"""Whether a function can be called as another one is, decided by their parameters alone."""

from __future__ import annotations

import inspect
import itertools
import random
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import pytest

from patcher.functions.signatures import unlike
from patcher.source.call_sites import signature_of

CASES = [
    ("(a, b)", "(a, b)", ""),
    ("(a, b)", "(a, b, c=1)", ""),
    ("(a, b)", "(*args, **kwargs)", ""),
    ("(a, b=1)", "(a, b)", "a call f(a=a): 'b' is missing"),
    ("(a, b)", "(a)", "a call f(a=a, b=b): it has no parameter 'b'"),
    ("(a, b, /)", "(a)", "a call f(a, b): it takes 1 positional arguments, and is given 2"),
    ("(a, b)", "(b, a)", "a call f(a, b=b): 'b' is given twice"),
    ("(a, b)", "(a, b, c)", "a call f(a=a, b=b): 'c' is missing"),
    ("(a, *, b)", "(a)", "a call f(a=a, b=b): it has no parameter 'b'"),
    ("(a, **kwargs)", "(a)", "a call f(a=a, any_other_name=any_other_name): it has no parameter 'any_other_name'"),
    ("(*args)", "(a)", "a call f(): 'a' is missing"),
    ("(*args)", "(a=1)", "a call f(args_0, args_1): it takes 1 positional arguments, and is given 2"),
    ("(a)", "(*args, a)", "a call f(a): 'a' is missing"),
    ("(*args, a)", "(a, *args)", "a call f(args_0, a=a): 'a' is given twice"),
]


def signature(text: str) -> Signature:
    space: dict[str, Any] = {}
    exec(f"def function{text}: ...", space)
    return inspect.signature(space["function"])


def problem_of(before: Signature, after: Signature) -> str:
    return unlike(definition_of(before), definition_of(after))


@pytest.mark.parametrize(("before", "after", "problem"), CASES)
def test_what_is_said(before: str, after: str, problem: str) -> None:
    assert problem_of(signature(before), signature(after)) == problem


def test_what_is_said_to_fit_takes_every_call_of_the_original() -> None:
    fitting = refused = 0
    for seed in range(1500):
        draw = random.Random(seed)
        before, after = (_drawn(draw) for _ in range(2))
        calls = _calls(before)
        if problem_of(before, after):
            refused += 1
            assert not all(map(partial(_fits, after), calls)), (before, after)
            continue
        fitting += 1
        assert all(map(partial(_fits, after), calls)), (before, after)
    assert min(fitting, refused) > 200


def definition_of(signature: Signature) -> Any:
    def function() -> None: ...

    function.__signature__ = signature  # type: ignore[attr-defined]
    return signature_of(function)


def _fits(signature: Signature, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    try:
        signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


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
            if _fits(signature, (args, kwargs)):
                found.append((args, kwargs))
    return found
