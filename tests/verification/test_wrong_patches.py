"""Deliberately wrong patches: `patcher.verify` sees each of them, at the stage where it shows."""

from __future__ import annotations

import pytest

from tests.verification.wrong_patches import WRONG, check_wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WRONG)[::4])  # all of them: python -m tests.verification
def test_a_wrong_patch_is_seen(name: str) -> None:
    check_wrong(name)
