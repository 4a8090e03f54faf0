"""An exception out of a random call of a library's code, in this thread only."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: whose functions fail
LIBRARIES = ("transformers", "safetensors", "accelerate", "torch.nn", "huggingface_hub", "tests.support")
#: What ends something: nobody can go on from an error in there.
ENDINGS = {"__exit__", "__del__", "close", "shutdown", "__aexit__", "_at_fork_reinit"}


class Countdown:
    """Counts the calls of functions of the libraries, and raises out of one of them."""

    def __init__(self, call: int, act: Callable[[], None]) -> None:
        self.calls = 0
        self._call = call
        self._act = act

    def __enter__(self) -> Countdown:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_globals.get("__name__", "").startswith(LIBRARIES):
            return
        # A generator is called again to be closed as well.
        if frame.f_code.co_flags & inspect.CO_GENERATOR or _is_ending(frame):
            return
        self.calls += 1
        if self.calls == self._call:
            sys.setprofile(None)
            self._act()


def _is_ending(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ENDINGS:
            return True
        frame = frame.f_back
    return False


def injected(work: Callable[[str], Any], choose: random.Random, error: type[BaseException]) -> Any:
    """Do some work once, to count its calls, and again, interrupted in a random one of them.

    Args:
        work: is told which of the two it is, "whole" or "interrupted".

    Returns:
        What the work gives if the exception didn't come out of it, None otherwise.
    """
    with Countdown(0, lambda: None) as counted:
        work("whole")

    def fail() -> None:
        raise error("injected")

    try:
        with Countdown(choose.randrange(counted.calls) + 1, fail):
            return work("interrupted")
    except BaseException as found:
        each: BaseException | None = found
        chain = []
        while each is not None:
            chain.append(each)
            each.__traceback__, each = None, each.__cause__ or each.__context__
        # Not another error, that hides it.
        if not any("injected" in str(each) for each in chain):
            raise
        return None
