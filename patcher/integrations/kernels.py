"""`use_kernels=True` and `kernel_config=` of transformers, which put forwards of the `kernels` package on modules.

transformers finds these modules by an attribute of their class, which classes that are derived from it inherit. What a
patcher has replaced, or something below a module, has a forward that was chosen for it: it keeps that. All else gets
its kernel as in the stock model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from patcher.compat.models import (
    ModelView,
    chooses_kernel,
    functions_alone,
    kernel_functions,
    kernel_name,
    named_modules,
    stock_class,
)
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError
from patcher.loading.hooks.loads import current_load
from patcher.loading.integration import Integration, register
from patcher.loading.load import Constructed


class _Kernelizable(ModelView):
    """A model without the kernels that modules must not get. What is set on it is set on the model."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            yield path, module if _takes_kernel(module) else functions_alone(module)


@seam("transformers.integrations.hub_kernels:kernelize", "model", follow=True)
def kernelize(stock: Stock, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the modules that a patcher has changed as they are."""
    return stock(_Kernelizable(model), *args, **kwargs)


@seam("transformers.integrations.hub_kernels:register_patch_mapping", "mapping")
def register_layouts(stock: Stock, mapping: Mapping[str, type[nn.Module]], *args: Any, **kwargs: Any) -> None:
    """Refuse what transformers would replace for all models that are loaded from then on.

    Raises:
        InvalidPatcherError: a kernel brings classes of modules, and the load has a patcher.
    """
    load = current_load()
    if load is not None and mapping:
        name, layout = next(iter(mapping.items()))
        raise InvalidPatcherError(
            f"kernel_config= has {name} built as {layout.__qualname__}, which transformers registers for every later "
            "load of the process, and this load has a patcher. Leave it out of kernel_config=, and replace that class "
            f"by the patcher: class_mapping={{{name!r}: ...}}, with a class of that layout that has the kernel's "
            "forward."
        )
    stock(mapping, *args, **kwargs)


def check(load: Constructed) -> None:
    """Refuse a kernel that nothing of the model would run.

    Raises:
        InvalidPatcherError: the patcher replaces all modules that have the kernel, or the function that it is for.
    """
    wanted = getattr(load.options.get("kernel_config"), "kernel_mapping", None)
    kept, taken = set[str](), dict[str, str]()
    for path, module in named_modules(load.model) if isinstance(wanted, Mapping) else ():
        cls = stock_class(module)
        for name, is_kept in {kernel_name(cls): _takes_kernel(module), **_functions(module)}.items():
            kept.update({name} if is_kept else ())
            taken.setdefault(name, f"{cls.__name__} (at {path})")
    for name in wanted or () if taken else ():
        if name in taken and name not in kept:
            raise InvalidPatcherError(
                f"kernel_config= has a kernel for {name!r}, which no module would run: in {taken[name]} and all "
                "others that transformers has it for, the patcher has replaced the class, a module of it, or the "
                "function. "
                f"Take {name!r} out of kernel_config=, or its classes and functions out of the patcher."
            )


def _takes_kernel(module: nn.Module) -> bool:
    """Whether the forward of a module is stock's, all through, or one that has chosen a kernel itself."""
    original = stock_class(module)
    if type(module) is not original:
        return chooses_kernel(type(module), original)
    return not kernel_name(original) or all(type(each) is stock_class(each) for each in module.modules())


def _functions(module: nn.Module) -> dict[str, bool]:
    """The functions with a kernel of a module, and whether it calls them: a patcher may have replaced them."""
    called = inspect.unwrap(type(module).forward).__globals__.values()
    return {name: any(each is function for each in called) for name, function in kernel_functions(module).items()}


register(Integration("kernels", seams_in(__name__), on_constructed=check))
