r"""Patched modeling files, generated from a description: readable, and reviewed as diffs.

>>> from patcher.codegen import PatchConfig, generate
>>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
>>> rotate = "def rotate_half(x):\n    return x.roll(x.shape[-1] // 2, -1)\n"
>>> _ = config.replace_function("rotate_half", rotate, description="one kernel less")
>>> print("\n".join(line for line in generate(config).splitlines() if "rotate_half" in line))
# Differs: replace function rotate_half 50375658
# [PATCHED FUNCTION] rotate_half
def rotate_half(x):
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)

Generation imports neither torch nor transformers: the original is read as text. Only `PatchConfig.to_patcher()` and
`from_patcher()` use classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patcher.codegen.config import PatchConfig
from patcher.codegen.files.output import CheckResult, ModelingCodeGenerator, OriginalChange, check, write
from patcher.codegen.generation.generator import generate
from patcher.codegen.spec import Patch, PatchKind, PatchType, create_patch_from_external
from patcher.errors import no_such_name, public_name

if TYPE_CHECKING:
    from patcher.verification.generated_files import FileVerification, verify

__all__ = [
    "CheckResult",
    "FileVerification",
    "ModelingCodeGenerator",
    "OriginalChange",
    "Patch",
    "PatchConfig",
    "PatchKind",
    "PatchType",
    "check",
    "create_patch_from_external",
    "generate",
    "verify",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in ("FileVerification", "verify"):  # of a later room, which runs models
        raise no_such_name("patcher.codegen", name, __all__)
    value = public_name("patcher.verification.generated_files", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
