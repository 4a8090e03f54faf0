"""`qkv`: the query, key and value projections of self attention as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import nn

from patcher.fusions import Projections

#: The word of a name that tells queries, keys and values apart; the rest of the names must agree.
ROLES = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"), ("wq", "wk", "wv"))
#: The attributes in which attention modules keep the size of a head.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_per_head")


class QKV(Projections):
    """One `qkv_proj` in place of three projections of one input, and a split.

    `q_proj` / `k_proj` / `v_proj`, `query` / `key` / `value`, `q_lin` / `k_lin` / `v_lin`, `to_q` / `to_k` / `to_v`,
    ...: they are matched by name. Whether they get the same tensor is checked at run time; the source shows that
    nothing writes into it in between. Queries may have more rows than keys and values.
    """

    name = "qkv"
    joined_name: ClassVar[str] = "qkv_proj"
    subject = "three projections of queries, keys and values (q_proj, k_proj, v_proj; query, key, value; ...)"

    def groups(self, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
        available = set(names)
        for name in sorted(available):
            words = name.split("_")
            for roles in ROLES:
                for index, word in enumerate(words):
                    if word.lower() != roles[0]:
                        continue
                    group = tuple(
                        "_".join([*words[:index], _cased(role, word), *words[index + 1 :]]) for role in roles
                    )
                    if available.issuperset(group):
                        yield group

    def rows_together(self, module: nn.Module) -> int:
        """The size of a head."""
        sizes = {value for name in _HEAD_SIZES if isinstance(value := getattr(module, name, None), int)}
        return sizes.pop() if len(sizes) == 1 else 0


def _cased(word: str, like: str) -> str:
    return word if like.islower() else word.upper() if like.isupper() else word.capitalize()
