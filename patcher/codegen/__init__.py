r"""Patched modeling files: readable, reviewed, diffed, and made by one description.

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

Generating imports neither torch nor transformers: the original is read as text. Only `PatchConfig.to_patcher()` and
`from_patcher()` work on classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patcher.errors import no_such_name, public_name

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.codegen.files.checker import CheckResult, OriginalChange, check
    from patcher.codegen.files.writer import ModelingCodeGenerator, write
    from patcher.codegen.generation.generator import generate
    from patcher.codegen.spec import Patch, PatchKind, PatchType, create_patch_from_external
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

_HOMES = {
    "CheckResult": "files.checker",
    "FileVerification": "patcher.verification.generated_files",
    "OriginalChange": "files.checker",
    "ModelingCodeGenerator": "files.writer",
    "Patch": "spec",
    "PatchConfig": "config",
    "PatchKind": "spec",
    "PatchType": "spec",
    "check": "files.checker",
    "create_patch_from_external": "spec",
    "generate": "generation.generator",
    "verify": "patcher.verification.generated_files",
    "write": "files.writer",
}


def __getattr__(name: str) -> Any:
    # Late, because the parser of the generator takes a third of a second, and `patcher --help` doesn't need it.
    if name not in _HOMES:
        raise no_such_name("patcher.codegen", name, __all__, "dir(patcher.codegen)")
    home = _HOMES[name]  # one of a later room has its full name
    value = public_name(home if home.startswith("patcher.") else f"patcher.codegen.{home}", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
