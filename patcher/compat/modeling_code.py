"""What is modeling code: of transformers itself, remote, or of a package that defines models of its own."""

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

#: On a function that sees other globals, and on a class of such functions: what it was made of.
REBOUND = "_patcher_rebound"
#: On a class that passes for another one for a while: that one.
STANDS_FOR = "_patcher_stands_for"


def unrebound(made: T) -> T:
    """The class or function itself, of one that was made of it and sees other globals."""
    found: T = vars(made).get(REBOUND, made)
    return found


def subclasses(root: type[M], is_meant: Callable[[type[M]], bool] = lambda cls: True) -> list[type[M]]:
    """Every live subclass that is meant, each once, without those that were made of others for one model."""
    found, chosen = [root], dict[type[M], None]()
    # One pass over a list that grows: every load under a patcher asks, and looking into a class takes long.
    for cls in found:
        found += type.__subclasses__(cls)
        if is_meant(cls) and REBOUND not in cls.__dict__ and STANDS_FOR not in cls.__dict__:
            chosen[cls] = None
    return [cls for cls in chosen if cls is not root]


@lru_cache(maxsize=1)
def classes_of_torch() -> frozenset[type[nn.Module]]:
    """The classes of modules that torch itself had at the first call, which a load need not look at."""
    return frozenset(cls for cls in subclasses(nn.Module) if cls.__module__.startswith("torch."))


def is_modeling_module(name: str) -> bool:
    """Whether a module is modeling code: of transformers itself, or remote code that transformers has loaded."""
    return name.startswith(("transformers.", "transformers_modules.")) or name == "transformers_modules"


def is_architecture_module(name: str) -> bool:
    """Whether a module is the code of some models, rather than what transformers has for all of them."""
    return name.startswith(("transformers.models.", "transformers_modules.", "transformers.modeling_layers"))


def of_modeling_code(classes: Iterable[type[nn.Module]]) -> set[type[nn.Module]]:
    """Those of some classes that modeling code defines, also in a module of a package that defines a model itself."""
    listed = set(classes)
    others = {cls for cls in listed if not is_modeling_module(cls.__module__)}
    homes = {model.__module__ for model in subclasses(PreTrainedModel)} if others else ()
    return {cls for cls in listed if cls not in others or cls.__module__ in homes}


def chosen_in(registry: Any, config: Any) -> tuple[str, str] | None:
    """What a config chooses in a registry of transformers, with the argument that says so; None where it has nothing.

    Then what the modeling code has as its default runs, which is called "eager".
    """
    for kind, argument in ((AttentionInterface, "attn_implementation"), (ExpertsInterface, "experts_implementation")):
        if isinstance(registry, kind) and (chosen := getattr(config, f"_{argument}", None)) in registry:
            return argument, str(chosen)
    return None


def registered(registry: Any) -> list[Any]:
    """What is in a registry of transformers, `ALL_ATTENTION_FUNCTIONS`: of the process, and of the object."""
    of_process, of_object = (getattr(registry, name, {}) for name in ("_global_mapping", "_local_mapping"))
    return list({**of_process, **of_object}.values())


@lru_cache(maxsize=1024)
def home_of(name: str) -> str:
    """The modeling module of transformers that defines a class, "" if none does; nothing is imported.

    >>> home_of("LlamaRMSNorm")
    'transformers.models.llama.modeling_llama'

    The name of a class begins with that of its model: the folders are looked into whose name it begins with.
    """
    folders = (Path(transformers.__file__).parent / "models").iterdir()
    named = [each for each in folders if name.lower().startswith(each.name.replace("_", ""))]
    for folder in sorted(named, key=lambda folder: len(folder.name), reverse=True):
        for file in sorted(folder.glob("modeling_*.py")):
            if re.search(rf"^class {re.escape(name)}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                return f"transformers.models.{folder.name}.{file.stem}"
    return ""
