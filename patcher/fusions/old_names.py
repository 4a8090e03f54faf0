"""What answers to names from before a fusion: values written in place reach what holds them, all else is refused.

>>> whole = nn.Parameter(torch.zeros(4, 2))
>>> rows = view_of(whole, lambda tensor: tensor[2:], "k_proj.weight is rows of kv_proj.weight")
>>> nn.init.ones_(rows).sum(), whole.sum()
(tensor(4., grad_fn=<SumBackward0>), tensor(4., grad_fn=<SumBackward0>))
>>> rows.data = torch.zeros(2, 2)
Traceback (most recent call last):
    ...
patcher.errors.PatchConflictError: k_proj.weight is rows of kv_proj.weight and takes values in place only: ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patcher.compat.models import is_initialized, mark_initialized
from patcher.errors import PatchConflictError
from patcher.layouts.carried import CARRIED, ModuleLayouts, is_quantized
from patcher.layouts.sharded import Copied, Whole

ADVICE = "Take the fusions off with Patcher().apply(model) first."
#: Methods of tensors that change one otherwise than by writing its values. The last is what `torch.utils.swap_tensors`
#: calls before it changes anything.
_REFUSED = """
    requires_grad_ register_hook register_post_accumulate_grad_hook set_ resize_ resize_as_ as_strided_ t_ transpose_
    swapaxes_ swapdims_ squeeze_ unsqueeze_ rename_ _use_count
""".split()


class _View:
    """What both kinds of views have in common."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        """What belongs to it of the gradient of the parameter."""
        parameter, see, what = vars(self)["_seen"]
        return None if parameter.grad is None else view_of(parameter.grad, see, f"the gradient of {what}")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        own = self.grad
        if own is not None and value is not None and value.shape == own.shape:
            with torch.no_grad():
                own.copy_(value)
        elif own is not value:
            self._refuse("a gradient of its own")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_seen" in vars(self) and name not in ("grad", "_backward_hooks"):  # autograd itself sets the latter
            self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse(f"del {name}")

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def _refuse(self, change: str) -> NoReturn:
        change = "swap_tensors" if change == "_use_count" else change
        raise PatchConflictError(
            f"{vars(self)['_seen'][2]} and takes values in place only: {change} would have no effect. {ADVICE}"
        )


def _refusing(name: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: self._refuse(name)


for _name in _REFUSED:
    setattr(_View, _name, _refusing(_name))


class PartView(_View, torch.Tensor):
    """A view of a parameter. What is computed from it is a plain tensor; `nn.Parameter` takes its `detach()`."""

    __torch_function__ = nn.Parameter.__torch_function__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SplitView(_View, Copied):
    """A view of a parameter that processes share: it can be read only."""

    __slots__ = ()


def view_of(parameter: torch.Tensor, see: Callable[[torch.Tensor], torch.Tensor], what: str) -> torch.Tensor:
    """A view of a parameter; it counts as initialised if the parameter does: transformers looks at the tensor itself.

    Args:
        see: makes the view, of the parameter and of its gradient.
        what: what the view is, for messages: "q_proj.weight is rows of qkv_proj.weight".
    """
    view = see(parameter)
    if torch.compiler.is_compiling():  # traced code computes with it
        return view
    if isinstance(view, DTensor):
        view.__class__ = SplitView
    elif type(view) is torch.Tensor:
        view = view.as_subclass(PartView)
    if is_initialized(parameter):
        mark_initialized(view)
    if isinstance(view, _View):
        vars(view)["_seen"] = parameter, see, what  # from here on it refuses
    return view


def whole_of(parts: Sequence[torch.Tensor], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """Several parameters joined into one tensor, to be read only. It counts as initialised if all of them do.

    >>> parts = [torch.zeros(2), torch.ones(1)]
    >>> whole_of(parts, torch.cat).sum()
    tensor(1.)
    >>> whole_of(parts, torch.cat).zero_()
    Traceback (most recent call last):
        ...
    patcher.errors.PatchConflictError: These rows were put together of the parts of a packed layer, so they ...
    """
    joined = join(parts)
    if torch.compiler.is_compiling() or type(joined) is not torch.Tensor:
        return joined
    whole: torch.Tensor = Whole.of(joined)
    if all(map(is_initialized, parts)):
        mark_initialized(whole)
    return whole


def holders(table: dict[str, Any], name: str) -> int:
    """How many references there are to what a table holds."""
    return sys.getrefcount(table[name])


#: The number for what is held by a table alone.
ONE_HOLDER = holders({"": object()}, "")


def more_than_values(rows: torch.Tensor, whole: torch.Tensor, value: Any, *, is_shared: bool) -> str:
    """Why the values of a tensor can't be written into rows of a parameter, or what else of it would be lost.

    Args:
        whole: the parameter.
        is_shared: whether somebody else holds the tensor, who would go on with it and not with the rows.
    """
    if isinstance(rows, DTensor):  # a process has some of them, or none
        return "is split over processes, and can't be written"
    if rows.is_meta or value.is_meta:
        return "or what it is given has its values elsewhere (it is on the meta device)"
    if is_quantized(whole) or is_quantized(value.detach()):
        return "or what it is given is quantized"
    if isinstance(value, PartView):
        is_shared = value.data_ptr() != rows.data_ptr()  # the same after `weight += 1`
    elif not isinstance(value, nn.Parameter):
        return ""  # on the stock model torch itself refuses it, so nothing is lost
    elif value.requires_grad != whole.requires_grad:
        return f"has requires_grad={whole.requires_grad}, as all rows have, and not {value.requires_grad}"
    elif value.grad is not None or value._backward_hooks:
        return "takes values, and this parameter has a gradient or hooks"
    return is_shared * (
        "takes the values of a new parameter, and this one is held elsewhere too, and would not be shared "
        "(copy_(...), in torch.no_grad(), writes its values)"
    )


def holding(module: Any, name: str) -> Sequence[str]:
    """The parameters that hold what a fused module had under a name; none where the name is its own."""
    # Not by carried_by: a load looks up so many names that each would be one more way into the other file and back.
    carried: ModuleLayouts | None = vars(module).get(CARRIED)
    for layout in carried.layouts if carried is not None else ():
        if any(stock.partition(".")[0] == name for stock in layout.stock):
            return () if any(fused.partition(".")[0] == name for fused in layout.fused) else layout.fused
    return ()


class OldNames:
    """A module under whose old names nothing is put: no method would see it."""

    def _assign(self, name: str, value: Any) -> None:
        raise PatchConflictError(f"{described(name, holding(self, name))}, and nothing can take its place. {ADVICE}")

    def __setattr__(self, name: str, value: Any) -> None:
        (self._assign if holding(self, name) else super().__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        if held := holding(self, name):
            raise PatchConflictError(f"{described(name, held)}, and can't be deleted by itself. {ADVICE}")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        (self._assign if holding(self, name) else super().add_module)(name, module)  # type: ignore[misc]


def described(name: str, fused: Sequence[str]) -> str:
    """Where the values of something are that was fused."""
    return f"{name} is fused: its values are in {', '.join(fused[:3])}{', ...' if len(fused) > 3 else ''}"


class Moved:
    """What a fused module has under the name of a parameter of its own, which modules around it may initialise.

    It says that it is initialised. All other access is an error.
    """

    def __init__(self, name: str, fused: Sequence[str]) -> None:
        mark_initialized(self)
        self._text = described(name, fused)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._text}. It has no {name!r}: ask these")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_text" in vars(self):
            self._refuse()
        super().__setattr__(name, value)

    def _refuse(self, *args: Any) -> NoReturn:
        raise PatchConflictError(f"{self._text}, and it can't be written under this name. {ADVICE}")

    __setitem__ = __delitem__ = __delattr__ = __iadd__ = __imul__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._text}>"
