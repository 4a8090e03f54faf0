"""Change the module classes of a Hugging Face model for one load, and save the original checkpoint back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patcher.diffing import Diff, diff
    from patcher.errors import (
        CodegenError,
        InvalidPatcherError,
        PatchConflictError,
        PatchConstructionError,
        PatchedWeightsError,
        PatcherError,
        PatcherWarning,
        PresetDriftError,
        UnmatchedPatchError,
        VerificationError,
    )
    from patcher.loading.hooks import install
    from patcher.patcher import Patcher
    from patcher.planning import Plan, plan
    from patcher.reporting import Report, report
    from patcher.resolution.resolution import Resolution
    from patcher.verification import Verification, verify

__all__ = [
    "CodegenError",
    "Diff",
    "InvalidPatcherError",
    "PatchConflictError",
    "PatchConstructionError",
    "PatchedWeightsError",
    "Patcher",
    "PatcherError",
    "PatcherWarning",
    "Plan",
    "PresetDriftError",
    "Report",
    "Resolution",
    "UnmatchedPatchError",
    "Verification",
    "VerificationError",
    "diff",
    "install",
    "plan",
    "report",
    "verify",
]

_HOMES = {
    "Diff": "patcher.diffing",
    "Patcher": "patcher.patcher",
    "Plan": "patcher.planning",
    "Report": "patcher.reporting",
    "Resolution": "patcher.resolution.resolution",
    "Verification": "patcher.verification",
    "diff": "patcher.diffing",
    "install": "patcher.loading.hooks",
    "plan": "patcher.planning",
    "report": "patcher.reporting",
    "verify": "patcher.verification",
}
_MODULES = ("codegen", "errors", "fusions", "monkey_patching", "presets")


def __getattr__(name: str) -> Any:
    # Late, so that `import patcher` costs nothing, and using any of it teaches `from_pretrained` the argument.
    if name in _MODULES:
        return importlib.import_module(f"patcher.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'patcher' has no attribute {name!r}")
    if name not in _HOMES:
        value = getattr(importlib.import_module("patcher.errors"), name)
    else:
        importlib.import_module("patcher.loading.hooks").install()
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
