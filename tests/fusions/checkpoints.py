"""Checkpoints compared as files."""

from __future__ import annotations

from pathlib import Path


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether two folders hold the same safetensors files, byte for byte, and there are some."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    same_names = names == sorted(path.name for path in other.glob("*.safetensors"))
    return bool(names) and same_names and all((one / n).read_bytes() == (other / n).read_bytes() for n in names)
