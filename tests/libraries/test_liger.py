"""The preset LIGER with Liger's kernels, which Triton's interpreter runs on a CPU."""

from __future__ import annotations

import pytest

from tests.support import fresh


@pytest.mark.process
def test_kernels_compute_what_stock_does_on_a_cpu() -> None:
    fresh.run_pytest_alone("tests/libraries/liger_on_cpu.py", TRITON_INTERPRET="1")
