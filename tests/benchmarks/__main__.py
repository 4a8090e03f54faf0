"""All benchmarks, one after the other."""

from __future__ import annotations

from tests.benchmarks import bench_loading

bench_loading.main()
