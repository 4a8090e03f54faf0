"""Access to fused parameters by their old names: values are written in place to the new ones, all else is refused.

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
from patcher.layouts.layouts import memory_of
from patcher.layouts.sharded import Copied

ADVICE = "Take the fusions off with Patcher().apply(model) first, or load the model without them."
#: Methods that change a tensor other than by writing its values. `torch.utils.swap_tensors` calls the last one first.
_REFUSED = """
    requires_grad_ register_hook register_post_accumulate_grad_hook set_ resize_ resize_as_ as_strided_ t_ transpose_
    swapaxes_ swapdims_ squeeze_ unsqueeze_ rename_ _use_count
""".split()


class _View:
    """The base of views of parameters."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        """The view of the gradient of the parameter."""
        parameter, see, what = vars(self)["_view"]
        return None if parameter.grad is None else view_of(parameter.grad, see, f"the gradient of {what}")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        grad = self.grad
        if grad is not None and value is not None and value.shape == grad.shape:
            with torch.no_grad():
                grad.copy_(value)
        elif grad is not value:
            self._refuse("a gradient of its own")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" and _is_memory_of(self, value):
            return  # `view.data += x` has written, and assigns what it has written to
        if "_view" in vars(self) and name not in ("grad", "_backward_hooks"):  # autograd itself sets the latter
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
            f"{vars(self)['_view'][2]} and takes values in place only: {change} would have no effect. {ADVICE}"
        )


def _is_memory_of(view: Any, value: Any) -> bool:
    """Whether a tensor is the very memory of a view, in the same form."""
    is_sharded = isinstance(view, DTensor) or isinstance(value, DTensor)
    return isinstance(value, torch.Tensor) and not is_sharded and memory_of(view) == memory_of(value)


def _make_refusal(name: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: self._refuse(name)


for _name in _REFUSED:
    setattr(_View, _name, _make_refusal(_name))


class PartView(_View, torch.Tensor):
    """A view of a parameter. Operations on it return plain tensors; `nn.Parameter(view)` takes its `detach()`."""

    __torch_function__ = nn.Parameter.__torch_function__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SplitView(_View, Copied):
    """A read-only view of a parameter that is sharded over processes."""

    __slots__ = ()


def view_of(parameter: torch.Tensor, see: Callable[[torch.Tensor], torch.Tensor], what: str) -> torch.Tensor:
    """Return a view of a parameter that accepts writes of values only; marked as initialised like the parameter.

    Args:
        see: returns the view, of the parameter and of its gradient.
        what: a description of the view for messages: "q_proj.weight is rows of qkv_proj.weight".
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
        vars(view)["_view"] = parameter, see, what  # the view refuses changes from now on
    return view


def count_references(table: dict[str, Any], name: str) -> int:
    """Return the reference count of a value of a dict."""
    return sys.getrefcount(table[name])


#: The count of a value that only the dict refers to.
SINGLE_REFERENCE = count_references({"": object()}, "")


def more_than_values(rows: torch.Tensor, whole: torch.Tensor, value: Any, *, is_shared: bool) -> str:
    """Why the values of a tensor can't be written into rows of a parameter, or what else would be lost; "" if nothing.

    Args:
        whole: the parameter.
        is_shared: whether there are other references to the tensor, which wouldn't see the rows.
    """
    if isinstance(rows, DTensor):  # a process may not have all of them
        return "is split over processes, and can't be written"
    if rows.is_meta or value.is_meta:
        return "or the assigned tensor has no values yet (it is on the meta device)"
    if is_quantized(whole) or is_quantized(value.detach()):
        return "or the assigned tensor is quantized"
    if isinstance(value, PartView):
        is_shared = value.data_ptr() != rows.data_ptr()  # the same after `weight += 1`
    elif not isinstance(value, nn.Parameter):
        return ""  # torch refuses it on the stock module too
    elif value.requires_grad != whole.requires_grad:
        return f"has requires_grad={whole.requires_grad}, as all rows have, and not {value.requires_grad}"
    elif value.grad is not None or value._backward_hooks:
        return "takes values, and this parameter has a gradient or hooks"
    return is_shared * (
        "takes the values of a new parameter, and there are other references to this one, which would not be shared "
        "(copy_(...), in torch.no_grad(), writes its values)"
    )


def fused_of(module: Any, name: str) -> Sequence[str]:
    """Return the fused parameters that have the values of an old name; none if the name isn't an old one."""
    # `vars` instead of `carried_by`, for speed: a load looks up many names.
    carried: ModuleLayouts | None = vars(module).get(CARRIED)
    for layout in carried.layouts if carried is not None else ():
        if any(stock.partition(".")[0] == name for stock in layout.stock):
            return () if any(fused.partition(".")[0] == name for fused in layout.fused) else layout.fused
    return ()


class OldNames:
    """A module that refuses to assign its old names: no method would use the value."""

    def _assign(self, name: str, value: Any) -> None:
        raise PatchConflictError(f"{_describe(name, fused_of(self, name))}, and nothing can take its place. {ADVICE}")

    def __setattr__(self, name: str, value: Any) -> None:
        (self._assign if fused_of(self, name) else super().__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        if fused := fused_of(self, name):
            raise PatchConflictError(f"{_describe(name, fused)}, and can't be deleted by itself. {ADVICE}")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        (self._assign if fused_of(self, name) else super().add_module)(name, module)  # type: ignore[misc]


def _describe(name: str, fused: Sequence[str]) -> str:
    """Describe where the values of a fused parameter or layer are."""
    return f"{name} is fused: its values are in {', '.join(fused[:3])}{', ...' if len(fused) > 3 else ''}"


class Moved:
    """A placeholder for a fused parameter of the module itself, which a model around it may initialise.

    It is marked as initialised. All other access is an error.

    Args:
        dtype: the dtype of the parameter, if that may be read.
    """

    def __init__(self, name: str, fused: Sequence[str], dtype: torch.dtype | None = None) -> None:
        mark_initialized(self)
        if dtype is not None:
            self.dtype = dtype
        self._text = _describe(name, fused)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._text}. Use {name!r} of these")

    def __getitem__(self, index: Any) -> Any:
        raise PatchConflictError(f"{self._text}. Use these. {ADVICE}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_text" in vars(self):
            self._refuse()
        super().__setattr__(name, value)

    def _refuse(self, *args: Any) -> NoReturn:
        raise PatchConflictError(f"{self._text}, and it can't be written under this name. {ADVICE}")

    __setitem__ = __delitem__ = __delattr__ = __iadd__ = __imul__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._text}>"
