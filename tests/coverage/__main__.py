"""What every fusion does to every architecture of the installed transformers that can be built small.

    python -m tests.coverage                                  # all; goes on where it was interrupted
    python -m tests.coverage --only LlamaForCausalLM --again  # one, whatever was found before
    python -m tests.coverage --family qkv --kind causal-lm    # some
    python -m tests.coverage --failed                         # again what did not pass
    python -m tests.coverage --table                          # only writes the page from what was found

Two architectures at a time, each in a process of its own with a limit of time and memory. What is found is appended to
`.results.jsonl` beside this file, and in the end summed up in `coverage_fusions.md` and `coverage_split.md`. A result
counts as long as the release of transformers and the code of fusions and layouts are those that it was found with.
What is compared is in `tests/coverage/checks.py`. Some architectures need a package of their own:
`pip install -e ".[coverage]"`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

import patcher
from tests.coverage.checks import FAMILIES, FUSIONS, examine
from tests.coverage.models import KINDS, Architecture, architectures
from tests.coverage.table import page, summary

RESULTS = Path(__file__).with_name(".results.jsonl")
#: page -> the families that it shows
PAGES = {
    Path(__file__).with_name("coverage_fusions.md"): FUSIONS,
    Path(__file__).with_name("coverage_split.md"): ("split",),
}
WORKERS = 2
#: of computing, and of waiting: other work may be going on
SECONDS, PATIENCE = 150, 900
BYTES = 12 * 2**30
FINE = ("passed", "left alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a class name or model type")
    parser.add_argument("--kind", action="append", default=[], choices=[*KINDS, "other"])
    parser.add_argument("--family", action="append", default=[], choices=FAMILIES)
    parser.add_argument("--failed", action="store_true", help="again what did not pass")
    parser.add_argument("--again", action="store_true", help="again, whatever was found before")
    parser.add_argument("--table", action="store_true", help="only write the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--page", type=Path, help="one page of what is examined, in place of those that ship")
    options = parser.parse_args()
    families = tuple(options.family) or FAMILIES
    done, now = read_results(options.results), versions()
    if not options.table:
        wanted = [one for one in architectures().values() if _is_wanted(one, options)]
        left = [one for one in wanted if options.again or _is_open(done.get(one.name), families, options)]
        started = time.time()
        for number, result in enumerate(examined(left, families), 1):
            result |= now  # the code that was imported, whatever is edited meanwhile
            done[result["name"]] = result = _with_other_families(result, done.get(result["name"]))
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            told = {family: (row["status"], row["reason"]) for family, row in result["families"].items()}
            told = told or (result["status"], result["reason"])
            minutes = (time.time() - started) / 60
            rest = minutes / number * (len(left) - number)
            at = f"{minutes:.0f} min, about {rest:.0f} left, {number}/{len(left)}"
            print(f"{at} {result['name']}: {told}", flush=True)
    for path, shown in {options.page: families}.items() if options.page else PAGES.items():
        if not set(shown).isdisjoint(families):
            path.write_text(page(list(done.values()), shown))
            print("\n".join(summary(list(done.values()), shown)))


def _with_other_families(result: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """A result, and what was found before of families that weren't asked now."""
    if before is None:
        return result
    others = {family: row for family, row in before["families"].items() if family not in result["asked"]}
    asked = tuple(dict.fromkeys([*before["asked"], *result["asked"]]))
    return result | {"families": others | result["families"], "asked": asked}


def _is_wanted(one: Architecture, options: argparse.Namespace) -> bool:
    if options.only and not {one.name, one.model_type}.intersection(options.only):
        return False
    return not options.kind or one.kind in options.kind


def _is_open(before: dict[str, Any] | None, families: tuple[str, ...], options: argparse.Namespace) -> bool:
    if before is None or not set(families) <= set(before["asked"]):
        return True
    rows = [row for family, row in before["families"].items() if family in families]
    return options.failed and (before["status"] != "examined" or any(row["status"] not in FINE for row in rows))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """What was found before with this transformers and this code: name -> the last result."""
    if not path.exists():
        return {}
    rows, now = [json.loads(line) for line in path.read_text().splitlines()], versions()
    return {row["name"]: row for row in rows if now.items() <= row.items()}


def versions() -> dict[str, str]:
    """The release of transformers, and a hash of the code that decides what is fused, and how."""
    package = Path(patcher.__file__).parent
    files = sorted(file for room in ("fusions", "layouts") for file in (package / room).rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return {"transformers": transformers.__version__, "code": code}


# --- processes -----------------------------------------------------------------------------------------------------


def examined(wanted: list[Architecture], families: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Each architecture's result, as they come, from processes of their own."""
    # Before the forks, so that no process has to do it again.
    for module in (*(f"patcher.fusions.{family}" for family in FAMILIES), "patcher.loading", "tests.support.tiny"):
        import_module(module)

    torch.set_num_threads(1)
    fork = get_context("fork")
    waiting = list(reversed(wanted))
    running: dict[Connection, tuple[Architecture, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < WORKERS:
            one = waiting.pop()
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(one.name, families, there))
            process.start()
            there.close()
            running[here] = (one, process, time.monotonic())
        for here in wait(list(running), timeout=1):  # type: ignore[assignment]
            yield _result(running.pop(here), families, here)
        for here, (_, process, started) in list(running.items()):
            if time.monotonic() - started > PATIENCE:
                process.kill()
                yield _result(running.pop(here), families, here)


def _result(run: tuple[Architecture, Any, float], families: tuple[str, ...], pipe: Connection) -> dict[str, Any]:
    one, process, started = run
    try:
        found = pipe.recv()
    except EOFError:
        process.join()
        too_long = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        reason = f"takes more than {SECONDS} s" if too_long else f"its process ended with {process.exitcode}"
        found = {"name": one.name, "status": "not examined", "reason": reason, "families": {}}
    process.join()
    pipe.close()
    return {
        **found,
        "kind": one.kind,
        "seconds": round(time.monotonic() - started, 1),
        "asked": families,
    }


def _work(name: str, families: tuple[str, ...], pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        result = examine(name, families)
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]
        result = {"name": name, "status": "not examined", "reason": reason, "families": {}}
    pipe.send(result)


if __name__ == "__main__":
    sys.exit(main())
