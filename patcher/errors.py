"""The exceptions of patcher: when they are raised, an example, and what to write instead.

>>> from patcher import Patcher, PatcherError
>>> try:
...     Patcher(fusions="qkw")
... except PatcherError as error:
...     print(f"{type(error).__name__}: {error}")
InvalidPatcherError: fusions: 'qkw' isn't a fusion; did you mean 'qkv'? Known names: ...

None derives from `OSError`, `ValueError`, `TypeError` or `RuntimeError`: `transformers.pipeline` catches those and
tries the next model class, so the user would get a list of unrelated errors. The registry of `patcher.monkey_patching`
raises built-in errors, as transformers' own does.
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
    """The base class. A message says what was requested, what was found, and what to write instead."""


class InvalidPatcherError(PatcherError):
    """An argument is invalid, or a combination isn't supported: raised by the call, before a load.

    >>> from patcher import Patcher
    >>> Patcher({"LlamaMLP": "MyMLP"})
    Traceback (most recent call last):
        ...
    patcher.errors.InvalidPatcherError: class_mapping['LlamaMLP'] must be a class, found 'MyMLP' (str); write the class
    itself, derived from the class that it replaces: not an object, its name, or a function that makes one.

    For an unsupported combination the message says what to do instead.
    """


class NoSuchNameError(InvalidPatcherError, AttributeError):
    """A module or a Patcher has no such name, or not on this machine, or it can't be set: do what the message says.

    >>> import patcher
    >>> hasattr(patcher, "Pacher")
    False
    """


class PatchConflictError(PatcherError):
    """Two patches contradict each other for a class, module or tensor: remove one before combining patchers.

    >>> from torch import nn
    >>> from patcher import Patcher
    >>> Patcher({"LlamaMLP": nn.Identity}) | Patcher({"LlamaMLP": nn.Linear})
    Traceback (most recent call last):
        ...
    patcher.errors.PatchConflictError: Both patchers replace 'LlamaMLP', by Identity and by Linear. Combine after
    taking one away: patcher.replace(class_mapping={...}).
    """


class UnmatchedPatchError(PatcherError):
    """A key, filter, conversion or fusion had no effect: raised by a load before it reads, or at the end of a block.

    >>> from torch import nn
    >>> from patcher import Patcher
    >>> with Patcher({"LlamaMPL": nn.Identity}).applied():
    ...     pass  # models are built here
    Traceback (most recent call last):
        ...
    patcher.errors.UnmatchedPatchError: These parts of the patcher have no effect:
      class_mapping: 'LlamaMPL'; no model was built in the block...

    Put a key that only some models have into `alternatives=`. `patcher.plan(model, patcher)` lists all problems.
    """


class PatchConstructionError(PatcherError):
    """A replacement could not be built; `__cause__` is its own exception.

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
    """The installed code isn't the code that a patcher is pinned to by `fingerprints=`.

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
    """A modeling file could not be generated, or doesn't match its config.

    >>> from patcher.codegen import PatchConfig, generate
    >>> generate(PatchConfig("transformers.models.llama.modeling_lama", target_file="patched_modeling_llama.py"))
    Traceback (most recent call last):
        ...
    patcher.errors.CodegenError: ...the source module 'transformers.models.llama.modeling_lama' can't be found: there
    is no 'modeling_lama' in transformers.models.llama (nearest: modeling_llama). Correct the name, or ...

    The message begins with the file and the line of the patch, or of the config.
    """


class PatcherWarning(UserWarning):
    """Issued with `strict=False` instead of `UnmatchedPatchError` and `PatchedWeightsError`; prefer `strict=True`.

    >>> import warnings
    >>> from patcher import PatcherWarning
    >>> warnings.simplefilter("error", PatcherWarning)  # raise it
    """


def nearest(name: str, candidates: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the candidates most like `name`, best first.

    >>> nearest("LlamaMPL", ["LlamaMLP", "LlamaModel", "Linear"])[0]
    'LlamaMLP'
    """
    by_folded: dict[str, str] = {}
    for candidate in sorted(set(candidates)):
        by_folded.setdefault(candidate.casefold(), candidate)
    return [
        by_folded[match] for match in difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=cutoff)
    ]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the nearest name, or `otherwise`."""
    close = nearest(name, known, 1) if len(name) < 100 else []
    return f"did you mean {close[0]!r}?" if close else otherwise


def no_such_name(module: str, name: str, known: Iterable[str]) -> NoSuchNameError:
    """Return the error for the `__getattr__` of a module."""
    close = nearest(name, known, 1, cutoff=0.6)
    hint = f"write {module}.{close[0]}" if close else f"dir({module}) lists what there is"
    return NoSuchNameError(f"module {module!r} has no attribute {name!r}; {hint}.")


def public_name(module: str, name: str) -> Any:
    """Import a module for a `__getattr__` and return its name; explain errors of unsupported library releases."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        # The library that lacks something. An error of one that isn't installed is clear.
        owner = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        library = (owner or "").partition(".")[0]
        if isinstance(error, NoSuchNameError | ModuleNotFoundError) or library in ("", "patcher"):
            raise
        raise unknown_release(library, str(error)) from error


def unknown_release(library: str, what: str) -> PatcherError:
    """Return the error for a release of a library that lacks something or does it differently."""
    release = importlib.import_module("importlib.metadata").version(library)  # slow to import
    return PatcherError(
        f"This release of patcher doesn't know {library} {release}: {what}. "
        f"Install a release of {library} that patcher's metadata lists, or a newer patcher."
    )


def warn(text: str) -> None:
    """Issue a `PatcherWarning` at the line of the user's code, below frames of transformers and this package."""
    frame = calling_frame(("patcher.", "transformers.", "contextlib."))
    names = frame.f_globals
    place = frame.f_code.co_filename, frame.f_lineno, names.get("__name__")
    warnings.warn_explicit(text, PatcherWarning, *place, names.setdefault("__warningregistry__", {}))


def calling_frame(inside: tuple[str, ...]) -> FrameType:
    """Return the innermost frame outside of modules with some prefixes, each with a dot at its end."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        frame = frame.f_back
    return frame
