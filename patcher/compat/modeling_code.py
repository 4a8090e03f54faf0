"""Modeling code: of transformers, remote, or of another package that defines models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

#: Attribute of a function with other globals, and of a class of such functions: the original.
REBOUND = "_patcher_rebound"
#: Attribute of a stand-in for a class: that class.
STANDS_FOR = "_patcher_stands_for"


def unrebound(copied: T) -> T:
    """Return the original of a class or function with other globals; any other one itself."""
    original: T = vars(copied).get(REBOUND, copied)
    return original


def subclasses(root: type[M], predicate: Callable[[type[M]], bool] = lambda cls: True) -> list[type[M]]:
    """Return the live subclasses with a predicate, without rebound classes and stand-ins."""
    classes, chosen = [root], dict[type[M], None]()
    for cls in classes:  # grows; one pass, as each load under a patcher calls this
        classes += type.__subclasses__(cls)
        if predicate(cls) and REBOUND not in cls.__dict__ and STANDS_FOR not in cls.__dict__:
            chosen[cls] = None
    return [cls for cls in chosen if cls is not root]


def is_module_class(value: Any) -> bool:
    """Whether a value is a class of modules."""
    return isinstance(value, type) and issubclass(value, nn.Module)


@lru_cache(maxsize=1)
def classes_of_torch() -> frozenset[type[nn.Module]]:
    """Return the module classes that torch had at the first call."""
    return frozenset(cls for cls in subclasses(nn.Module) if cls.__module__.startswith("torch."))


def is_modeling_module(name: str) -> bool:
    """Whether a module is of transformers itself, or remote code that it has loaded."""
    return name.startswith(("transformers.", "transformers_modules.")) or name == "transformers_modules"


def is_architecture_module(name: str) -> bool:
    """Whether a module is the code of an architecture, rather than of all models."""
    return name.startswith(("transformers.models.", "transformers_modules.", "transformers.modeling_layers"))


def of_modeling_code(classes: Iterable[type[nn.Module]]) -> set[type[nn.Module]]:
    """Return those classes that modeling code defines, including modules of other packages that define a model."""
    classes = set(classes)
    others = {cls for cls in classes if not is_modeling_module(cls.__module__)}
    homes = {model.__module__ for model in subclasses(PreTrainedModel)} if others else ()
    return {cls for cls in classes if cls not in others or cls.__module__ in homes}


def chosen_in(registry: Any, config: Any) -> tuple[str, str] | None:
    """Return the argument and the name by which a config chooses from a registry; None for the "eager" default."""
    for kind, argument in ((AttentionInterface, "attn_implementation"), (ExpertsInterface, "experts_implementation")):
        if isinstance(registry, kind) and (chosen := getattr(config, f"_{argument}", None)) in registry:
            return argument, str(chosen)
    return None


def registered(registry: Any) -> list[Any]:
    """Return the functions in a registry of transformers such as `ALL_ATTENTION_FUNCTIONS`."""
    return list({**getattr(registry, "_global_mapping", {}), **getattr(registry, "_local_mapping", {})}.values())


@lru_cache(maxsize=1024)
def home_of(name: str) -> str:
    """Return the modeling module of transformers that defines a class, "" if none does, without importing it.

    >>> home_of("LlamaRMSNorm")
    'transformers.models.llama.modeling_llama'

    Only models by whose name that of the class begins are searched.
    """
    folders = (Path(transformers.__file__).parent / "models").iterdir()
    candidates = [folder for folder in folders if name.lower().startswith(folder.name.replace("_", ""))]
    for folder in sorted(candidates, key=lambda folder: len(folder.name), reverse=True):
        for file in sorted(folder.glob("modeling_*.py")):
            if re.search(rf"^class {re.escape(name)}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                return f"transformers.models.{folder.name}.{file.stem}"
    return ""
