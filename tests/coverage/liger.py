"""Which classes of the installed transformers the preset LIGER replaces, model by model: `coverage_liger.md`.

python -m tests.coverage.liger
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from patcher.presets.kernels import rules

PAGE = Path(__file__).with_name("coverage_liger.md")
INTRODUCTION = """\
# What the preset LIGER replaces

Made by `python -m tests.coverage.liger` with transformers {transformers}, from the code of all modeling files. A norm
is a class whose name ends with `RMSNorm`, a gated MLP one whose forward reads a gate and `down_proj` and that is not a
stack of experts. What is replaced is told by `like`: it computes the same as an example that Liger's kernel was
verified for. `left alone` are near misses: another place of a cast, another default, a gate inside of the norm. An
activation that Liger lacks is computed by the module's own. Rotary embeddings are left alone everywhere: what Liger's
takes for granted of cos and sin isn't in the function that it would replace.

- norms: {norms}
- gated MLPs: {mlps}
- models that have either: {models}; of these {all} have all of theirs replaced
"""


def modules() -> Iterator[Any]:
    """All modeling files that can be imported."""
    root = Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        try:
            yield importlib.import_module(".".join(("transformers", *path.relative_to(root).with_suffix("").parts)))
        except ImportError:  # it needs a package that isn't installed
            continue


def kind_of(cls: type[nn.Module]) -> str:
    """`norm`, `mlp`, or nothing of the two."""
    forward = vars(cls).get("forward")
    names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    if cls.__name__.endswith("RMSNorm"):
        return "norm"
    gated = "down_proj" in names and ("gate_proj" in names or "gate_up_proj" in names)
    return "mlp" if gated and "num_experts" not in names and not cls.__name__.endswith("Experts") else ""


def page() -> str:
    """The document."""
    keys, found = rules(), dict[str, dict[str, list[str]]]()
    for module in modules():
        for cls in list(vars(module).values()):
            own = isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__
            if own and (kind := kind_of(cls)):
                covered = any(key.matches(cls) for key in keys)
                rows = found.setdefault(module.__name__.split(".")[2], {})
                rows.setdefault(kind if covered else f"left {kind}", []).append(f"`{cls.__name__}`")
    counts = {kind: sum(len(rows.get(kind, ())) for rows in found.values()) for kind in ("norm", "mlp")}
    every = {kind: counts[kind] + sum(len(rows.get(f"left {kind}", ())) for rows in found.values()) for kind in counts}
    lines = [
        INTRODUCTION.format(
            transformers=transformers.__version__,
            norms=f"{counts['norm']} of {every['norm']} classes",
            mlps=f"{counts['mlp']} of {every['mlp']} classes",
            models=len(found),
            all=sum(not any(kind.startswith("left") for kind in rows) for rows in found.values()),
        ),
        "| model | norms | gated MLPs | left alone |",
        "|---|---|---|---|",
    ]
    for model, rows in sorted(found.items()):
        left = [*rows.get("left norm", ()), *rows.get("left mlp", ())]
        cells = (", ".join(each) for each in (rows.get("norm", ()), rows.get("mlp", ()), left))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page(), encoding="utf-8") and 0)
