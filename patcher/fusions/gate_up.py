"""`gate_up`: the gate and the up projection of a gated feed-forward layer as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from patcher.fusions import Projections

#: (gate, up): the first goes through the activation
_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"), ("w_0", "w_1"), ("proj_up_gate", "proj_up"))


class GateUp(Projections):
    """One `gate_up_proj` in place of `gate_proj` and `up_proj` (`w1` / `w3`, `wi_0` / `wi_1`, ...), and a split."""

    name = "gate_up"
    joined_name: ClassVar[str] = "gate_up_proj"
    subject = f"a gate and an up projection ({'; '.join(map(', '.join, _PAIRS))})"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        available = set(names)
        for pair in _PAIRS:
            if available.issuperset(pair):
                yield pair
