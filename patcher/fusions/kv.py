"""`kv`: the key and value projections of cross attention as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from torch import nn

from patcher.fusions import QKV, Decision, Surroundings


class KV(QKV):
    """One `kv_proj` in place of the projections of keys and values, where queries have another input, and a split.

    That is the cross attention of a decoder, whose keys and values are made of what the encoder gives. The names show
    the roles as for `qkv`. Where all three have one input, as in self attention, the module is left to `qkv`, whether
    or not that is requested, so the
    two never claim the same one. Once a cache holds the keys and values of the encoder's output, the joined projection
    isn't called, as its parts aren't.
    """

    name = "kv"
    joined_name: ClassVar[str] = "kv_proj"
    subject = "keys and values of an input that queries don't have (k_proj, v_proj; key, value; ...)"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        for group in super().groups(names):
            yield group[1:]

    def decided(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        found, whole = super().decided(modules, surroundings), QKV().decided(modules, surroundings)
        for path in found.keys() & whole.keys():
            if not whole[path].refusal:
                found[path] = Decision(refusal="queries, keys and values have one input, for which there is 'qkv'")
        return found
