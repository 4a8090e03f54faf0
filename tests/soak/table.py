"""The table of actions, and what one of them is given."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.subjects import Subjects


@dataclass(frozen=True)
class Turn:
    """One action's own random numbers and empty folder, and the subjects that all share."""

    choose: random.Random
    folder: Path
    subjects: Subjects


@dataclass(frozen=True)
class Action:
    name: str
    run: Callable[[Turn], object]
    weight: int
    is_fault: bool


#: name -> action, in the order in which they are printed
ACTIONS: dict[str, Action] = {}


def action(name: str, weight: int = 1, *, is_fault: bool = False) -> Callable[[Callable[[Turn], Any]], Any]:
    """Put a function into the table. It raises if what it sees isn't right."""

    def put(run: Callable[[Turn], Any]) -> Callable[[Turn], Any]:
        assert name not in ACTIONS, name
        ACTIONS[name] = Action(name, run, weight, is_fault)
        return run

    return put
