"""What a process may not have any more of at the end than it had at the beginning."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from patcher.construction.gates import Cover, bound
from patcher.construction.in_force import entered, registered_patcher
from tests.support.snapshot import Snapshot, changes, snapshot


def threads() -> Counter[str]:
    natives = len([*Path("/proc/self/task").iterdir()]) - threading.active_count()
    return Counter(thread.name for thread in threading.enumerate()) + Counter({"not Python's": natives})


def descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found[str(file.readlink()).partition(":[")[0]] += 1  # `pipe:[1234]`
    return found


def mappings() -> Counter[str]:
    """Files of weights that are mapped into memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split(maxsplit=5)[5] for line in lines if ".safetensors" in line)


def imported() -> Counter[str]:
    """Imported modules, but for those that a library has imported late from files of its own."""
    return Counter(
        name
        for name, module in list(sys.modules.items())
        if "site-packages" not in (getattr(module, "__file__", None) or "") and name not in sys.stdlib_module_names
    )


def gates() -> Counter[str]:
    """What this package has in place while a patcher is in force somewhere."""
    found = Counter(f"gate or stand-in: {each.key} of {each.container}" for each in bound.values())
    found += Counter(f"cover of {cover.rules.entries}" for cover in Cover.active)
    found += Counter(f"in force: {entry}" for entry in entered())
    return found + Counter(f"registered: {key}" for key in registered_patcher().class_mapping)


def module_classes() -> Counter[str]:
    """Classes of modules: those that are made at run time pile up if something holds them."""
    return Counter(f"{cls.__module__}.{cls.__qualname__}" for cls in _subclasses(nn.Module))


def _subclasses(cls: type) -> set[type]:
    found, waiting = set(), [cls]
    while waiting:
        new = set(type.__subclasses__(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def modules() -> Counter[str]:
    """Objects of `nn.Module` that are alive."""
    return Counter(type(each).__name__ for each in gc.get_objects() if issubclass(type(each), nn.Module))


def children() -> Counter[str]:
    return Counter(
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    )


def environment() -> Counter[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    found = Counter(f"{key}={value}" for key, value in variables.items()) + Counter({f"in {Path.cwd()}": 1})
    found += Counter(f"warning filter {each}" for each in warnings.filters)
    return found + Counter({f"profiled by {sys.getprofile()}": 1, f"recursion limit {sys.getrecursionlimit()}": 1})


#: what there is of something, by name
KINDS: dict[str, Callable[[], Counter[str]]] = {
    "thread": threads,
    "descriptor": descriptors,
    "mapped file": mappings,
    "imported module": imported,
    "gate": gates,
    "class": module_classes,
    "object": modules,
    "child process": children,
    "environment": environment,
}


@dataclass(frozen=True)
class Before:
    """What there is now."""

    attributes: Snapshot
    counts: dict[str, Counter[str]]

    @classmethod
    def now(cls) -> Before:
        gc.collect()
        return cls(snapshot(), {kind: count() for kind, count in KINDS.items()})

    def left(self) -> Iterator[str]:
        """What has come to be since, or is another object than it was."""
        gc.collect()
        yield from (f"attribute: {'.'.join(key)}" for key in changes(self.attributes))
        for kind, count in KINDS.items():
            for name, number in (count() - self.counts[kind]).items():
                yield f"{kind}: {name}" + (f" ({number} times)" if number > 1 else "")
