"""Every wrong and every right patch that `verify` is tried on: `python -m tests.verification`.

It takes five minutes on two cores. The tests take a quarter of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from tests.verification.right_patches import RIGHT, check_right
from tests.verification.wrong_patches import WRONG, check_wrong


def cases() -> Iterator[tuple[str, Any]]:
    for name in WRONG:
        yield f"wrong: {name}", partial(check_wrong, name)
    for name in RIGHT:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"right: {name} in {dtype}", partial(check_right, name, dtype)


def main() -> int:
    failed = 0
    # Models are so small here that threads would only wait for one another.
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = [(name, pool.submit(check)) for name, check in cases()]
        for name, result in running:
            error = result.exception()
            failed += error is not None
            print(f"{name}: {'as it should be' if error is None else error}", flush=True)
    print(f"{len(running)} patches, {failed} not as they should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
