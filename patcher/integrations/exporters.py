"""transformers' exporters, which change classes of models while they trace.

They put methods that can be traced into classes by name: an attention that loops over the images of a batch gets a
`forward` without the loop. A fused class has a `forward` of its own, which would hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from patcher.compat.seams import Stock, seam, seams_in
from patcher.fusions.fused_module import fused_classes
from patcher.loading.integration import Integration, register

#: The owner of an attribute, its name, and what makes the replacement from the original.
Patch = tuple[Any, str, Callable[[Any], Any]]


@seam("transformers.exporters.utils:patch_attributes", "patches")
def patch_attributes(stock: Stock, patches: Iterable[Patch]) -> Any:
    """Give fused classes the methods that the classes they were made of are given.

    These know the projections by their old names, under which a fused module has its parts.
    """
    patches = list(patches)
    return stock([*patches, *(found for patch in patches for found in _in_fused_classes(*patch))])


def _in_fused_classes(owner: Any, name: str, factory: Callable[[Any], Any]) -> Iterator[Patch]:
    if not isinstance(owner, type):
        return
    method = getattr(owner, name, None)
    for fused, original in fused_classes():
        if name in vars(fused) and issubclass(original, owner) and getattr(original, name) is method:
            yield fused, name, lambda _: factory(method)


register(Integration("exporters", seams_in(__name__)))
