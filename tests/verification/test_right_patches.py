"""Patches that compute the same in another order pass at every stage, and leave nothing unchecked that can be."""

from __future__ import annotations

import pytest
import torch

from patcher import verify
from tests.support.sampling import sampled
from tests.verification.right_patches import RIGHT


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sampled(RIGHT, [*RIGHT][::11]))
def test_a_right_patch_passes(name: str, dtype: torch.dtype) -> None:
    found = verify(*RIGHT[name], dtype=dtype)

    assert found.failures == ()
    assert {stage.name for stage in found.stages if not stage.checked} <= {"windows", "generation"}
    (precision,) = [dict(stage.figures) for stage in found.stages if stage.name == "precision"]
    assert precision["modules compared with float64"] == precision["of"]
