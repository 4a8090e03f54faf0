"""`split`: a packed linear layer as one layer for each of its parts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import Conv1D

from patcher.errors import InvalidPatcherError
from patcher.fusions import (
    Cut,
    Decision,
    Fusion,
    Layout,
    Moved,
    NotUnderstoodError,
    OldNames,
    PackedRows,
    Surroundings,
    more_than_a_weight_and_bias,
    packed_rows,
)

#: Patterns of names of packed layers, and the names of their parts; the first that the forward splits are used.
_KNOWN = (
    (r"(?i)^w?qkv(_proj|_linear)?$|^query_key_value$|^c_attn$|^att_proj$", ("q_proj", "k_proj", "v_proj")),
    (r"(?i)^w?kv(_proj|_linear)?$|^(to|in_proj)_kv$|^key_value$|^c_attn$", ("k_proj", "v_proj")),
    (r"^gate_up_proj$", ("gate_proj", "up_proj")),
)


class SplitLinear(OldNames, nn.Module):
    """A packed linear layer computed by its parts, which are plain `nn.Linear`s.

    >>> packed = SplitLinear(8, {"q_proj": 16, "k_proj": 4, "v_proj": 4}, blocks=2)
    >>> packed
    SplitLinear(
      blocks=2
      (q_proj): Linear(in_features=8, out_features=16, bias=True)
      (k_proj): Linear(in_features=8, out_features=4, bias=True)
      (v_proj): Linear(in_features=8, out_features=4, bias=True)
    )
    >>> packed(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 24])

    It has the inputs and outputs of the packed layer: (..., in_features) -> (..., out_features), in each block part by
    part. It has no values of its own: `weight` and `bias` say that they are in the parts, which are trained.

    Args:
        sizes: part -> its number of outputs, in the order of the outputs.
        blocks: the number of equal blocks, as heads, each with its share of every part.
    """

    def __init__(
        self,
        in_features: int,
        sizes: Mapping[str, int],
        blocks: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.blocks = in_features, sum(sizes.values()), blocks
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(in_features, size, bias, device, dtype))

    #: the class of the packed layer, and the order of its rows: set by subclasses
    _original: ClassVar[type[Any]] = nn.Linear
    _rows: ClassVar[PackedRows]

    @classmethod
    def from_module(cls, packed: nn.Module) -> Self:
        """Return the split form of a packed layer, with new values."""
        weight, bias = packed._parameters["weight"], packed._parameters["bias"]
        assert weight is not None
        in_features = weight.shape[0 if isinstance(packed, Conv1D) else 1]
        return cls(in_features, cls._rows.sizes, cls._rows.blocks, bias=bias is not None, dtype=weight.dtype)

    def to_module(self) -> nn.Module:
        """Return a packed layer of the same shape, with new values."""
        if self._original is Conv1D:  # which always has a bias
            return Conv1D(self.out_features, self.in_features)  # type: ignore[no-untyped-call]
        packed: nn.Module = self._original(self.in_features, self.out_features, bias=self.bias is not None)
        return packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear has it
        return self._join([part(input) for part in self._modules.values()])  # type: ignore[misc]

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """(..., size) of each part -> (..., out_features)."""
        if self.blocks == 1:
            return torch.cat(parts, dim=-1)  # type: ignore[arg-type]
        in_blocks = [part.view(*part.shape[:-1], self.blocks, -1) for part in parts]
        return torch.cat(in_blocks, dim=-1).flatten(-2)

    @property
    def weight(self) -> Any:
        """A placeholder for the packed weight, which the model around it may initialise."""
        return self._moved("weight")

    @property
    def bias(self) -> Any:
        return self._moved("bias")

    def _moved(self, name: str) -> Moved | None:
        parts = {f"{path}.{name}": getattr(part, name) for path, part in self._modules.items()}
        first = next(iter(parts.values()))
        return None if first is None else Moved(name, [*parts], first.dtype)

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}" if self.blocks > 1 else ""


class Split(Fusion):
    """A layer for each part of a packed one: `query_key_value` as `q_proj`, `k_proj` and `v_proj`.

    >>> from patcher import Patcher
    >>> Patcher(fusions=[Split({"in_proj": ["gate", "hidden"]}), Split()])
    Patcher(fusions=[Split(parts={'in_proj': ('gate', 'hidden')}), 'split'])

    For adapters on queries and values only, and for dtypes, quantization and scales by part. Which rows belong to
    which part is derived from the forward, which splits the output into variables of such names: see `packed_rows`.
    """

    name = "split"
    subject = "a packed linear layer (qkv, query_key_value, c_attn, kv_proj, gate_up_proj, ...)"

    #: name of a packed layer -> names of its parts; empty: the common names
    parts: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def __init__(self, parts: Mapping[str, Iterable[str]] | None = None, modules: str | Iterable[str] = ()) -> None:
        """Split packed layers, by default those of common names.

        Args:
            parts: name of a packed layer -> names of its parts, in words of the variables of the forward.
            modules: paths of packed layers, as in the other families.

        Raises:
            InvalidPatcherError: a layer has fewer than two parts, or one of them twice, or a name is invalid.
        """
        super().__init__(modules)
        if parts is not None:
            self.parts = _checked(parts)

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        owner_path, _, name = path.rpartition(".")
        candidates = [self.parts[name]] if name in self.parts else []
        if not self.parts:
            candidates = [parts for pattern, parts in _KNOWN if re.search(pattern, name)]
        if not candidates or not path or next(module.parameters(), None) is None:
            return None
        if reason := _other_than_linear(module) or surroundings.sharing(path, module, "it"):
            return Decision(refusal=reason)
        owner = surroundings.modules[owner_path]
        reasons = []
        for parts in candidates:
            try:
                rows = packed_rows(owner, name, parts)
            except NotUnderstoodError as error:
                reasons.append(str(error))
            else:
                return Decision(tuple(_layouts(module, rows)), (tuple(rows.sizes.items()), rows.blocks))
        return Decision(refusal=reasons[0])

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        sizes, blocks = recipe
        members = {"__module__": __name__, "__doc__": SplitLinear.__doc__, "_original": original_cls}
        return type("SplitLinear", (SplitLinear,), members | {"_rows": PackedRows(dict(sizes), blocks)})


def _checked(parts: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(parts, Mapping) or not parts:
        raise InvalidPatcherError(
            f"Split: parts={parts!r} maps no packed layer to its parts; "
            "write Split({'qkv': ['q_proj', 'k_proj', 'v_proj']})."
        )
    checked = {}
    for name, value in parts.items():
        names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        if len(names) < 2 or len(set(names)) < len(names) or not all(map(_is_name, (name, *names))):
            raise InvalidPatcherError(
                f"Split: {name!r} has the parts {value!r}; write the names of two or more, each once, without dots."
            )
        checked[name] = names
    return checked


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not hasattr(SplitLinear, name)


def _other_than_linear(module: nn.Module) -> str:
    """Why a layer can't be split into plain linear layers, "" if it can."""
    if type(module) not in (nn.Linear, Conv1D) and not (isinstance(module, nn.Linear) and _computes_as_linear(module)):
        return f"it is a {type(module).__qualname__}, and not known to compute what nn.Linear or Conv1D does"
    reason = more_than_a_weight_and_bias(module)
    return f"it {reason}" if reason else ""


def _computes_as_linear(module: nn.Linear) -> bool:
    """Whether a subclass that only overrides forward computes the same, to the bit and in this dtype."""
    bases = type(module).__mro__[: type(module).__mro__.index(nn.Linear)]
    if {name for base in bases for name in vars(base) if not name.startswith("__")} - {"forward"}:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        small, bias = copy.copy(module), module.bias is not None
        small._parameters = dict(nn.Linear(8, 12, bias, dtype=module.weight.dtype)._parameters)
        features = torch.randn(1, 5, 8, dtype=module.weight.dtype)
        try:
            return torch.equal(small(features), nn.functional.linear(features, small.weight, small.bias))
        except Exception:  # its forward depends on the sizes of the module
            return False


def _layouts(module: nn.Module, rows: PackedRows) -> Iterator[Layout]:
    for kind in ("weight", "bias"):
        if module._parameters[kind] is not None:
            fused = tuple(f"{part}.{kind}" for part in rows.sizes)
            transposed = kind == "weight" and isinstance(module, Conv1D)
            yield Cut(kind, fused, sizes=tuple(rows.sizes.values()), blocks=rows.blocks, transposed=transposed)
