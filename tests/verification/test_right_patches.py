"""Patches that compute the same in another way: `patcher.verify` passes them.

All of them, in both types: `python -m tests.verification`.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.verification.right_patches import RIGHT, check_right

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), list(zip(list(RIGHT)[::2], cycle(DTYPES), strict=False)))
def test_a_right_patch_passes(name: str, dtype: torch.dtype) -> None:
    check_right(name, dtype)
