"""`patcher.like(target)`: a key that matches every class or function that computes the same as the target."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from patcher.compat.modeling_code import home_of
from patcher.errors import InvalidPatcherError
from patcher.patterns import agreed
from patcher.source.alike import candidates, difference, without_kernel

PREFIX = "like:"
_NAME = r"(?!__)[^\W\d]\w*"
_REFERENCE = re.compile(rf"(?:{_NAME}(?:\.{_NAME})*:)?{_NAME}(?:\.{_NAME})*")


def is_reference(text: Any) -> bool:
    """Whether a value is the name of a class or function, or `module:name`, without dunder names."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def reference(thing: Any) -> str:
    """Return `module:name` of a class or function, which needn't be importable."""
    return f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', repr(thing))}"


def imported(what: str, where: str) -> Any:
    """Import `module:name`; an error begins with `what`."""
    try:
        return pkgutil.resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidPatcherError(
            f"{what}: {where} can't be imported: {type(error).__name__}: {error}. "
            "Install the package that has it, or correct the name."
        ) from error


class Like(str):
    """A key of `class_mapping` or `function_mapping`, returned by `patcher.like`. In data it is a plain string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"like({self.target!r})"

    @property
    def target(self) -> str:
        """`module:name`, or the name of a class of transformers."""
        return self.removeprefix(PREFIX)

    def resolve(self) -> Any:
        """Import the target."""
        return imported(repr(self), self.target if ":" in self.target else f"{home_of(self.target)}:{self.target}")

    def matches(self, other: type | Callable[..., Any]) -> bool:
        """Whether a class or function computes the same as the target, by the code that runs.

        >>> from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
        >>> like("LlamaRMSNorm").matches(MistralRMSNorm), like("LlamaRMSNorm").matches(MistralMLP)
        (True, False)
        """
        return not self.why_not(other)

    def why_not(self, other: type | Callable[..., Any]) -> str:
        """Return the first difference to the target, "" if there is none.

        >>> from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
        >>> like("LlamaRMSNorm").why_not(GemmaRMSNorm)
        'LlamaRMSNorm: only one has _norm'
        """
        return difference(self.resolve(), other)


def like(target: str | type | Callable[..., Any]) -> Like:
    """Make a key of a `class_mapping` or `function_mapping` that matches all that computes the same, by any name.

    >>> from torch import nn
    >>> from patcher import Patcher, like
    >>> class MyNorm(nn.RMSNorm): ...
    >>> Patcher({like("LlamaRMSNorm"): MyNorm})
    Patcher(class_mapping={like('LlamaRMSNorm'): MyNorm})

    Two classes or functions are alike if their code objects are the same except for names of classes, functions and
    locals, docstrings and annotations; if their bases are alike; and if their global names mean the same objects, or
    alike ones. Another default, another order of casts, a `1 + weight` makes a difference. What can't be compared
    (code in C, tables that only one class has, code that reads its own name) isn't alike.

    Exact names and expressions win over it; two such keys that match one class conflict.

    Args:
        target: a class or function; its `module:name`; or the name of a class in a modeling file of transformers.

    Raises:
        InvalidPatcherError: if the target is none of these, or transformers has no class of that name.
    """
    target = without_kernel(target)
    name = (target if isinstance(target, str) else reference(target)).removeprefix(PREFIX)
    if not is_reference(name):
        raise InvalidPatcherError(
            f"like: {target!r} is not a class or function that its module has, or a name; write like('LlamaRMSNorm') "
            "or like('module:name')."
        )
    if ":" not in name and not home_of(name):
        raise InvalidPatcherError(
            f"like: transformers has no class {name!r}: not in the modeling files of models with which this name "
            f"begins. Correct it, or write like('module:{name}'), as a function needs it."
        )
    return Like(PREFIX + name)


def may_match(keys: Iterable[Like], classes: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    """Preselect the classes that a key may match; fast, as each load calls it with all live classes."""
    return candidates([target for key in keys if isinstance(target := key.resolve(), type)], classes)


def find_like(thing: Any, mapping: Mapping[str, Any], alike: Iterable[Like] | None = None) -> Like | None:
    """Return the key of a mapping that matches, if the keys `alike` that do are known, of these; two have to agree."""
    if alike is None:
        alike = [key for key in mapping if isinstance(key, Like) and key.matches(thing)]
    keys = [key for key in alike if key in mapping]
    # Code also finds callable objects, which have no name.
    return agreed(keys, mapping, thing.__qualname__, thing.__name__) if keys else None
