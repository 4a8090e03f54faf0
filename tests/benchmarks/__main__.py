"""All benchmarks, one after the other."""

from __future__ import annotations

from tests.benchmarks import bench_codegen, bench_loading

bench_loading.main()
bench_codegen.main()
