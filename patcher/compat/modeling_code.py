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


def unrebound(made: T) -> T:
    """The class or function itself, of one that was made of it and sees other globals."""
    found: T = vars(made).get(REBOUND, made)
    return found


def _subclasses(root: type[M]) -> list[type[M]]:
    """Every live subclass, some more than once: this must be quick, every load under a patcher asks."""
    found, subclasses_of = [root], type.__subclasses__
    for cls in found:
        found += subclasses_of(cls)
    return found[1:]


def module_subclasses(
    chosen: Callable[[list[type[nn.Module]]], Iterable[type[nn.Module]]] = list,
) -> list[type[nn.Module]]:
    """Every live subclass of `nn.Module`, each once, or those that a function chooses."""
    # It chooses first: looking into a class is what takes long.
    found = dict.fromkeys(chosen(_subclasses(nn.Module)))
    return [cls for cls in found if REBOUND not in cls.__dict__]


@lru_cache(maxsize=1)
def classes_of_torch() -> frozenset[type[nn.Module]]:
    """The classes of modules that torch itself had at the first call, which a load need not look at."""
    return frozenset(cls for cls in _subclasses(nn.Module) if cls.__module__.startswith("torch."))


def model_classes() -> list[type[PreTrainedModel]]:
    """Every live class of models, those apart that were made of others."""
    return [cls for cls in dict.fromkeys(_subclasses(PreTrainedModel)) if REBOUND not in cls.__dict__]


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
    homes = {model.__module__ for model in _subclasses(PreTrainedModel)} if others else ()
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
