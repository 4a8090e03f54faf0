"""What users do to a model, in random sequences: is a patched model always what a stock one is after the same?

    python -m tests.lockstep                          # ten minutes of tiny models
    python -m tests.lockstep --seconds 60 --seed 7    # others
    python -m tests.lockstep --all --length 3         # any architecture of transformers
    python -m tests.lockstep --all --files            # by generated files instead of loads with a patcher
    python -m tests.lockstep --only pickled --only saved --subject t5

Both models compute in float64. After each operation their outputs, their weights in the original layout and what the
operation has read are compared. A `PatcherError` is a refusal, after which the patched model must be what it was.
Prints the shortest sequence of each failure, and how often each operation was done and refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from tests.coverage.models import architectures
from tests.lockstep.subjects import NoSubjectError
from tests.lockstep.trials import Trial, Trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first sequence")
    parser.add_argument("--length", type=int, default=5, help="operations in a sequence")
    parser.add_argument("--only", action="append", default=[], help="operations to choose from")
    parser.add_argument("--subject", action="append", default=[], help="models to choose from")
    parser.add_argument("--all", action="store_true", help="choose from all architectures")
    parser.add_argument("--files", action="store_true", help="load by generated files, without a patcher")
    parser.add_argument("--refusals", action="store_true", help="print each refusal with a sequence that has it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    subjects = options.subject or (sorted(architectures()) if options.all else [])
    end, seed, not_run, failures = time.monotonic() + options.seconds, options.seed, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        while time.monotonic() < end:
            trial = Trial.random(seed, options.length, subjects, options.only, in_file=options.files)
            try:
                if trials.failure_of(trial):
                    shortest = trials.shortest(trial)
                    print(f"--- seed {seed}: {shortest}\n{trials.failure_of(shortest)}", flush=True)
                    failures += 1
            except NoSubjectError as error:
                not_run += 1
                print(error)
            seed += 1
    for name, count in sorted(trials.counts.items()):
        print(f"{count:6} {name}")
    for refusal, trial in trials.refusals.items() if options.refusals else ():
        print(f"{trial}\n    {refusal}")
    print(
        f"{seed - options.seed - not_run} sequences, {not_run} of models that stock doesn't run, {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
