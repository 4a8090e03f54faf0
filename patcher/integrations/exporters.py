"""transformers' exporters, which patch model classes while they trace.

They replace methods of classes by traceable ones: an attention that loops over the images of a batch gets a `forward`
without the loop. A fused class overrides `forward`, which would hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from patcher.compat.seams import Stock, seam, seams_in
from patcher.fusions.fused_module import fused_classes
from patcher.loading.integration import Integration, register

#: The owner of an attribute, its name, and a function that makes the replacement from the original.
Patch = tuple[Any, str, Callable[[Any], Any]]


@seam("transformers.exporters.utils:patch_attributes", "patches")
def patch_attributes(stock: Stock, patches: Iterable[Patch]) -> Any:
    """Apply the patches of a class to the fused classes made from it as well.

    The patched methods use the projections by their original names, which fused modules have too.
    """
    patches = list(patches)
    return stock([*patches, *(fused_patch for patch in patches for fused_patch in _for_fused_classes(*patch))])


def _for_fused_classes(owner: Any, name: str, factory: Callable[[Any], Any]) -> Iterator[Patch]:
    if not isinstance(owner, type):
        return
    method = getattr(owner, name, None)
    for fused, original in fused_classes():
        if name in vars(fused) and issubclass(original, owner) and getattr(original, name) is method:
            yield fused, name, lambda _: factory(method)


register(Integration("exporters", seams_in(__name__)))
