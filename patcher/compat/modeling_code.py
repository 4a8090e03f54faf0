"""What is modeling code: of transformers itself, remote, or of a package that defines models of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn


def module_subclasses(is_meant: Callable[[str], object] | None = None) -> list[type[nn.Module]]:
    """Every live subclass of `nn.Module`, each once, or those whose name is meant.

    Every load under a patcher walks them: this must be quick, and looking into a class is what takes long.
    """
    subclasses_of = type.__subclasses__
    seen: set[type[nn.Module]] = set()
    level: set[type[nn.Module]] = {nn.Module}
    while level:
        below: set[type[nn.Module]] = set()
        for cls in level:
            if subclasses := subclasses_of(cls):  # most classes have none
                below.update(subclasses)
        level = below - seen
        seen |= below
    meant = seen if is_meant is None else [cls for cls in seen if is_meant(cls.__name__)]
    return [cls for cls in meant if "_patcher_stands_for" not in cls.__dict__]


def is_modeling_module(name: str) -> bool:
    """Whether a module is modeling code: of transformers itself, or remote code that transformers has loaded."""
    return name.startswith(("transformers.", "transformers_modules.")) or name == "transformers_modules"


def custom_modeling_modules() -> set[str]:
    """The modules outside transformers that define a `PreTrainedModel`: they are modeling code as well."""
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is None:
        return set()
    found: set[str] = set()
    seen: set[type] = set()
    stack: list[type] = [modeling_utils.PreTrainedModel]
    while stack:
        subclasses: list[type] = type.__subclasses__(stack.pop())
        for cls in subclasses:
            if cls not in seen:
                seen.add(cls)
                stack.append(cls)
                if not is_modeling_module(cls.__module__):
                    found.add(cls.__module__)
    return found
