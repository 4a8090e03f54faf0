"""`qkv`: the query, key and value projections of self attention as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import nn

from patcher.fusions import Projections

#: What a part of a name says of the role; the rest of the names must agree.
ROLES = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"), ("wq", "wk", "wv"))
#: Where attention keeps the size of a head.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_per_head")


class QKV(Projections):
    """One `qkv_proj` in place of three projections of one input, and a split.

    `q_proj` / `k_proj` / `v_proj`, `query` / `key` / `value`, `q_lin` / `k_lin` / `v_lin`, `to_q` / `to_k` / `to_v`,
    ...: the names show the roles. Whether they are given one tensor is checked when they run; the source shows
    that nothing writes into it in between. Queries may have more rows than keys and values.
    """

    name = "qkv"
    joined_name: ClassVar[str] = "qkv_proj"
    subject = "three projections of queries, keys and values (q_proj, k_proj, v_proj; query, key, value; ...)"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        known = set(names)
        for name in sorted(known):
            words = name.split("_")
            for role in ROLES:
                for place, word in enumerate(words):
                    if word.lower() != role[0]:
                        continue
                    group = tuple(
                        "_".join([*words[:place], _cased(other, word), *words[place + 1 :]]) for other in role
                    )
                    if known.issuperset(group):
                        yield group

    def rows_together(self, module: nn.Module) -> int:
        """The size of a head."""
        found = {value for name in _HEAD_SIZES if isinstance(value := getattr(module, name, None), int)}
        return found.pop() if len(found) == 1 else 0


def _cased(word: str, like: str) -> str:
    return word if like.islower() else word.upper() if like.isupper() else word.capitalize()
