"""Everything that patcher raises on its own behalf: when, an example, what to write instead.

>>> from patcher import Patcher, PatcherError
>>> try:
...     Patcher(fusions="qkw")
... except PatcherError as error:
...     print(f"{type(error).__name__}: {error}")
InvalidPatcherError: fusions: 'qkw' isn't a fusion; did you mean 'qkv'? Known names: ...

None derives from `OSError`, `ValueError`, `TypeError` or `RuntimeError`: `transformers.pipeline` catches those and
tries the next model class, which would turn one clear error into a list of unrelated ones. For the same reason the
registry of `patcher.monkey_patching`, which keeps the contract of transformers' own, raises built-in errors.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

__all__ = [
    "CodegenError",
    "InvalidPatcherError",
    "PatchConflictError",
    "PatchConstructionError",
    "PatchedWeightsError",
    "PatcherError",
    "PatcherWarning",
    "PresetDriftError",
    "UnmatchedPatchError",
    "VerificationError",
]


class PatcherError(Exception):
    """The base class: a message says what was requested, what was found, and what to write instead."""


class InvalidPatcherError(PatcherError):
    """An invalid argument, or a combination that isn't supported: raised where it is given, before a load.

    >>> from patcher import Patcher
    >>> Patcher({"LlamaMLP": "MyMLP"})
    Traceback (most recent call last):
        ...
    patcher.errors.InvalidPatcherError: class_mapping['LlamaMLP'] must be a class, found 'MyMLP' (str); write the class
    itself, derived from the class that it replaces: not an object, its name, or a function that makes one.

    For a combination that isn't supported the message says how to do without.
    """


class NoSuchNameError(InvalidPatcherError, AttributeError):
    """A name that a module or a Patcher doesn't have, or that can't be set: write the one that the message says.

    >>> import patcher
    >>> hasattr(patcher, "Pacher")
    False
    """


class PatchConflictError(PatcherError):
    """Two patches want different things of one class, module or tensor: combine patchers after taking one away.

    >>> from torch import nn
    >>> from patcher import Patcher
    >>> Patcher({"LlamaMLP": nn.Identity}) | Patcher({"LlamaMLP": nn.Linear})
    Traceback (most recent call last):
        ...
    patcher.errors.PatchConflictError: Both patchers replace 'LlamaMLP', by Identity and by Linear. Combine after
    taking one away: patcher.replace(class_mapping={...}).
    """


class UnmatchedPatchError(PatcherError):
    """A key, filter, conversion or fusion had no effect: raised by a load, before it reads, and at a block's end.

    >>> from torch import nn
    >>> from patcher import Patcher
    >>> with Patcher({"LlamaMPL": nn.Identity}).applied():
    ...     pass  # what the patcher is for is built here
    Traceback (most recent call last):
        ...
    patcher.errors.UnmatchedPatchError: These parts of the patcher have no effect:
      class_mapping: no class of the model matches 'LlamaMPL'...

    A key that only some models have belongs into `alternatives=`. `patcher.plan(model, patcher)` finds all of them.
    """


class PatchConstructionError(PatcherError):
    """A replacement could not be built; `__cause__` is the exception that it raised.

    >>> from torch import nn
    >>> from transformers import LlamaConfig, LlamaModel
    >>> from patcher import Patcher
    >>> Patcher({"LlamaMLP": nn.Linear}).resolve(LlamaModel, LlamaConfig())
    Traceback (most recent call last):
        ...
    patcher.errors.PatchConstructionError: Linear could not be built in place of LlamaMLP, in __init__ of
    LlamaDecoderLayer (modeling_llama.py:...): TypeError: Linear.__init__() missing 1 required positional argument: ...
    It was called as Linear(<LlamaConfig>). A replacement is constructed with the arguments of LlamaMLP.__init__: take
    them all, or accept **kwargs.
    """


class PatchedWeightsError(PatcherError):
    """Weights are missing, unused or of another shape, or can't be saved in the original format.

    Raised by a load before weights are read, by `Patcher.apply`, and by a save before a file is written.

    >>> from torch import nn
    >>> from transformers import LlamaConfig, LlamaModel
    >>> from patcher import Patcher
    >>> Patcher({"LlamaRMSNorm": nn.LayerNorm}).apply(LlamaModel(LlamaConfig(hidden_size=32, num_hidden_layers=0)))
    Traceback (most recent call last):
        ...
    patcher.errors.PatchedWeightsError: The replaced modules and the checkpoint don't fit together.
    Not in the checkpoint, so these would keep their initial values:
      norm.bias
    If a conversion is missing, add it: ...
    If they are meant to be new, add to the Patcher: new_weights=[...]
    """


class VerificationError(PatcherError):
    """A patched model differs from the stock model: raised by `Verification.raise_on_failure`.

    >>> from transformers import LlamaConfig
    >>> from patcher import Patcher, verify
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> without_positions = Patcher(function_mapping={"apply_rotary_pos_emb": lambda q, k, *_: (q, k)})
    >>> verify(config, without_positions, quick=True).raise_on_failure()
    Traceback (most recent call last):
        ...
    patcher.errors.VerificationError: ...it begins in model.layers.0.self_attn...

    It names the stage, the module in which the difference begins, and the member of the patcher that causes it.
    """


class PresetDriftError(PatcherError):
    """The code that a patcher is pinned to, by `fingerprints=`, isn't the code that is installed.

    >>> from transformers import LlamaModel
    >>> from patcher import Patcher
    >>> with Patcher(fusions="qkv", fingerprints={"LlamaAttention": "0123456789abcdef"}).applied():
    ...     pass
    Traceback (most recent call last):
        ...
    patcher.errors.PresetDriftError: The code that the patcher was verified on is not the code of the installed ...:
      transformers.models.llama.modeling_llama.LlamaAttention: pinned 0123456789abcdef, found ...
    Verify it on this code by `patcher verify MODEL --preset NAME --unpinned` (--patcher MODULE:CONSTANT ...
    """


class CodegenError(PatcherError):
    """A modeling file could not be generated, or is no longer what its config says.

    >>> from patcher.codegen import PatchConfig, generate
    >>> generate(PatchConfig("transformers.models.llama.modeling_lama", target_file="patched_modeling_llama.py"))
    Traceback (most recent call last):
        ...
    patcher.errors.CodegenError: ...the source module 'transformers.models.llama.modeling_lama' can't be found: there
    is no 'modeling_lama' in transformers.models.llama (nearest: modeling_llama). Correct the name, or ...

    The message begins with the file and the line of the patch, or of the config.
    """


class PatcherWarning(UserWarning):
    """Issued in place of `UnmatchedPatchError` and `PatchedWeightsError` with `strict=False`: better leave that out.

    >>> import warnings
    >>> from patcher import PatcherWarning
    >>> warnings.simplefilter("error", PatcherWarning)  # raise it
    """


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first.

    >>> nearest("LlamaMPL", ["LlamaMLP", "LlamaModel", "Linear"])[0]
    'LlamaMLP'
    """
    by_folded: dict[str, str] = {}
    for candidate in sorted(set(candidates)):
        by_folded.setdefault(candidate.casefold(), candidate)
    return [by_folded[match] for match in difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about a name that isn't one of those that are known, or what else it says."""
    close = nearest(name, known, 1) if len(name) < 100 else []
    return f"did you mean {close[0]!r}?" if close else otherwise


def no_such_name(module: str, name: str, known: Iterable[str]) -> NoSuchNameError:
    """What `__getattr__` of a module raises for a name that isn't known."""
    close = nearest(name, known, 1)
    hint = f"write {module}.{close[0]}" if close else f"dir({module}) lists what there is"
    return NoSuchNameError(f"module {module!r} has no attribute {name!r}; {hint}.")


def public_name(module: str, name: str) -> Any:
    """What a `__getattr__` gives from a module that is imported for it; raises where a library lacks something."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        # Of an attribute it is the module without it, of an import the name. What is not installed says so itself.
        owner = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        library = (owner or "").partition(".")[0]
        if isinstance(error, NoSuchNameError | ModuleNotFoundError) or library in ("", "patcher"):
            raise
        raise unknown_release(library, str(error)) from error


def unknown_release(library: str, what: str) -> PatcherError:
    """The error for a release of a library that lacks something, or does it otherwise."""
    release = importlib.import_module("importlib.metadata").version(library)  # late: it takes long to import
    return PatcherError(
        f"This release of patcher doesn't know {library} {release}: {what}. "
        f"Install a release of {library} that patcher's metadata lists, or a newer patcher."
    )


def warn(text: str) -> None:
    """Issue a `PatcherWarning` at the line of the user's code that called us, through transformers or not."""
    frame = calling_frame(("patcher.", "transformers.", "contextlib."))
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, PatcherWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )


def calling_frame(inside: tuple[str, ...]) -> FrameType:
    """The innermost frame that is not inside of some modules: prefixes of their names, each with a dot at its end."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        frame = frame.f_back
    return frame
