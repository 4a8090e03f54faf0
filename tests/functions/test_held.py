"""The functions that a value holds."""

from __future__ import annotations

from typing import Any

from patcher.functions.calls import held


class Frozen(list[Any]):
    """As `FrozenList` of pandas: what is added to it, or it to another list, is one of its own, and none changes."""

    def __radd__(self, other: Any) -> Frozen:
        return Frozen([*other, *self])

    def pop(self, *args: Any) -> Any:
        raise TypeError("'Frozen' does not support mutable operations.")


def function() -> None: ...


def test_a_list_of_another_class_is_looked_into() -> None:
    assert list(held([Frozen([function, 1])])) == [function]
