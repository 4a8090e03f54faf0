"""`kv`: the key and value projections of cross attention as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from torch import nn

from patcher.fusions import QKV, Decision, Surroundings


class KV(QKV):
    """One `kv_proj` in place of the projections of keys and values, where queries have another input, and a split.

    That is the cross attention of a decoder, whose keys and values are computed from the output of the encoder. The
    projections are matched by name, as for `qkv`. Where all three have one input, as in self attention, the module is
    left to `qkv`, whether or not that is requested, so the two never match the same module. Once a cache has the keys
    and values of the encoder's output, the joined projection isn't called, as its parts aren't.
    """

    name = "kv"
    joined_name: ClassVar[str] = "kv_proj"
    subject = "keys and values of an input that queries don't have (k_proj, v_proj; key, value; ...)"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        for group in super().groups(names):
            yield group[1:]

    def decide_all(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        decisions, of_qkv = super().decide_all(modules, surroundings), QKV().decide_all(modules, surroundings)
        for path in decisions.keys() & of_qkv.keys():
            if not of_qkv[path].refusal:
                decisions[path] = Decision(refusal="queries, keys and values have one input, for which there is 'qkv'")
        return decisions
