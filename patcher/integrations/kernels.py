"""`use_kernels=True` and `kernel_config=` of transformers, which put forwards of the `kernels` package on modules.

transformers finds these modules by an attribute of their class, which subclasses inherit. A module that a patcher has
replaced, or that contains one, keeps the forward of its class. All others get their kernels as in the stock model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from patcher.compat.models import ModelView, chooses_kernel, functions_alone, kernel_name, stock_class
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError
from patcher.loading.hooks.loads import current_load
from patcher.loading.integration import Integration, register


class _Kernelizable(ModelView):
    """A view of a model that hides the kernels of patched modules. Attributes are set on the model itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            yield path, module if _takes_kernel(module) else functions_alone(module)


@seam("transformers.integrations.hub_kernels:kernelize", "model", follow=True)
def kernelize(stock: Stock, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Put kernels on the modules that no patcher has changed."""
    return stock(_Kernelizable(model), *args, **kwargs)


@seam("transformers.integrations.hub_kernels:register_patch_mapping", "mapping")
def register_layouts(stock: Stock, mapping: Mapping[str, type[nn.Module]], *args: Any, **kwargs: Any) -> None:
    """Refuse replacements that transformers would apply to every later load of the process.

    Raises:
        InvalidPatcherError: if a kernel brings module classes, and the load has a patcher.
    """
    load = current_load()
    if load is not None and mapping:
        name, layout = next(iter(mapping.items()))
        raise InvalidPatcherError(
            f"kernel_config= replaces {name} by {layout.__qualname__}, which transformers registers for every later "
            "load of the process, and this load has a patcher. Leave it out of kernel_config=, and replace that class "
            f"by the patcher: class_mapping={{{name!r}: ...}}, with a class of that layout that has the kernel's "
            "forward."
        )
    stock(mapping, *args, **kwargs)


def _takes_kernel(module: nn.Module) -> bool:
    """Whether nothing in a module is patched, or its replacement declares a kernel itself."""
    original = stock_class(module)
    if type(module) is not original:
        return chooses_kernel(type(module), original)
    return not kernel_name(original) or all(type(child) is stock_class(child) for child in module.modules())


register(Integration("kernels", seams_in(__name__)))
