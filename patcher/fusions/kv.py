"""`kv`: the key and value projections of cross attention as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import nn

from patcher.fusions import Projections, Surroundings
from patcher.fusions.qkv import QKV, ROLES, alike, head_size


class KV(Projections):
    """One `kv_proj` in place of the projections of keys and values, where queries have another input, and a split.

    That is the cross attention of a decoder, whose keys and values are made of what the encoder gives: `k_proj` /
    `v_proj`, `key` / `value`, `k` / `v`, ... Where all three have one input, as in self attention, the module is left to
    `qkv`, whether or not that is asked for, so the two never claim the same one. Where a cache has the keys and values
    of the encoder's output already, the joined projection isn't called, as its parts aren't.
    """

    name = "kv"
    joined_name: ClassVar[str] = "kv_proj"
    subject = "a key and a value projection of an input that queries don't have (k_proj, v_proj; key, value; ...)"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        return alike(names, [role[1:] for role in ROLES])

    def obstacle(self, path: str, module: nn.Module, surroundings: Surroundings) -> str | None:
        queries = QKV()
        if queries.is_asked(path, module) and queries.obstacle(path, module, surroundings) is None:
            return "queries, keys and values have one input: 'qkv' joins all three"
        return super().obstacle(path, module, surroundings)

    def rows_together(self, module: nn.Module) -> int:
        """The size of a head."""
        return head_size(module)
