"""Decorators of transformers, by name: files are generated where neither torch nor transformers is imported."""

from __future__ import annotations

#: What dispatches on the config, and what lets a kernel run, which needn't be installed.
_REPLACING_FORWARD = frozenset({"use_experts_implementation", "use_kernel_forward_from_hub"})


def replaces_forward(name: str) -> bool:
    """Whether a decorator `name`, as written above a class, may run other code than the `forward` of the class.

    >>> replaces_forward("integrations.use_kernel_forward_from_hub"), replaces_forward("auto_docstring")
    (True, False)
    """
    return name.rpartition(".")[2] in _REPLACING_FORWARD
