"""All benchmarks, one after the other, each in a process of its own: some leave traces, as stock itself does."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "bench_loading",
    "bench_peers",
    "bench_patch_embeddings",
    "bench_projections",
    "bench_siblings",
    "bench_streaming",
    "bench_cross_attention",
    "bench_codegen",
)

if __name__ == "__main__":
    outcomes = [subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"]).returncode for name in BENCHMARKS]
    raise SystemExit(max(outcomes))
