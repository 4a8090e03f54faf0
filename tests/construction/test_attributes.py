"""What an object holds, however its class has itself read."""

from __future__ import annotations

from typing import Any

from torch import nn

from patcher.compat.attributes import parts_of


class Frozen(list[Any]):
    """As `FrozenList` of pandas, and a mapping that imports a file for each entry: reading it is its own affair."""

    def __iter__(self) -> Any:
        raise AssertionError("iterated by somebody")

    def __radd__(self, other: Any) -> Frozen:
        return Frozen([*other, *self])

    def pop(self, *args: Any) -> Any:
        raise TypeError("'Frozen' does not support mutable operations.")


def function() -> None: ...


def test_a_list_of_another_class_is_looked_into() -> None:
    assert {*parts_of(Frozen([function, 1]))} == {function, Frozen}


def test_the_attributes_of_an_object_are_found_in_its_dict() -> None:
    """The garbage collector of Python 3.13 doesn't: they are stored in the object."""
    holder = nn.Identity()
    holder.function = function  # type: ignore[assignment]
    assert function in parts_of(vars(holder))
