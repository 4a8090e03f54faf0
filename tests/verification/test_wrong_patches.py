"""Deliberately wrong patches: `patcher.verify` sees each of them, at the stage where it shows."""

from __future__ import annotations

import pytest

from patcher import VerificationError, verify
from tests.support.sampling import sampled
from tests.verification.wrong_patches import WRONG


@pytest.mark.parametrize("name", sampled(WRONG, [*WRONG][::15]))
def test_a_wrong_patch_is_seen(name: str) -> None:
    wrong = WRONG[name]
    found = verify(wrong.config, wrong.patcher, **wrong.options)

    assert {stage.name for stage in found.stages if not stage.passed} & set(wrong.stages.split()), found
    with pytest.raises(VerificationError, match=wrong.says):
        found.raise_on_failure()
