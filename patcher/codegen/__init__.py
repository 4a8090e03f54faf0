"""Patched modeling files: readable, reviewed, diffed, and made by one description.

```python
from patcher.codegen import PatchConfig, generate

config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
config.replace_function("rotate_half", "def rotate_half(x):\\n    return x.roll(1, -1)\\n", description="shorter")
print(generate(config))
```

Nothing here imports torch or transformers: the original is read as text.
"""

from patcher.codegen.calls import CallMismatch
from patcher.codegen.checker import CheckResult, check
from patcher.codegen.config import PatchConfig
from patcher.codegen.generator import generate
from patcher.codegen.patches import Patch, PatchKind, create_patch_from_external
from patcher.codegen.writer import write

__all__ = [
    "CallMismatch",
    "CheckResult",
    "Patch",
    "PatchConfig",
    "PatchKind",
    "check",
    "create_patch_from_external",
    "generate",
    "write",
]
