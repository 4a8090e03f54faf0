"""Generated forwards: wherever one is accepted, does the fused module compute what it did, and train so?

    python -m tests.fuzz                          # 2000 programs
    python -m tests.fuzz --count 10000 --seed 7   # others
    python -m tests.fuzz --seed 4711 --count 1 --show

Prints how many were accepted, refused and invalid (stock itself fails on them), and the source of each that is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz.compare import compared
from tests.fuzz.generator import forward_of, program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first")
    parser.add_argument("--show", action="store_true", help="print each program, and what became of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.count):
            source = program(seed)
            result = compared(source, Path(folder) / f"generated_{seed}.py")
            counts[result.status] += 1
            if options.show or result.status == "wrong":
                print(f"--- seed {seed}: {result.status} {result.reason}\n{forward_of(source)}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
