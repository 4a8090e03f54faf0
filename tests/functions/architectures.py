"""Every function that the modeling code of an architecture calls, replaced by one that counts and calls it.

    python -m tests.functions.architectures [NAME ...] [--out FILE]

For each function: the outputs are stock's, bit for bit, and it is called as often as stock calls it; or it is refused,
with the reason. Without names all architectures of transformers are examined, which takes half an hour.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patcher.errors import PatcherError
from patcher.functions.models import find_functions, swap_functions
from patcher.verification.inputs import Pass, chosen_passes
from patcher.verification.passes import floating_tensors
from tests.coverage.models import architectures, class_named, randomize
from tests.support.small_configs import small_configs

LARGEST = 60_000_000


def examine(name: str) -> dict[str, Any]:
    """What becomes of each function, or why nothing is known of the architecture."""
    try:
        model, passes = tiny(class_named(name))
    except Exception as error:  # whatever stock raises for a config that doesn't fit
        return {"name": name, "status": "not examined", "reason": f"{type(error).__name__}: {str(error)[:150]}"}
    # What transformers' own plumbing calls as well is no matter of the modeling code: `is_torchdynamo_compiling`.
    named = find_functions(model, ((("no_such_function", print),),)).known
    known = sorted(key for key in named if not key.startswith("is_"))
    rows = {}
    for key in known:
        try:
            replaced = find_functions(model, (((key, anything),),)).replaced
        except PatcherError as error:
            rows[key] = f"refused: {error}"
            continue
        # What transformers' own plumbing calls as well is no matter of the modeling code.
        for each in (each for each in replaced if not each.name.startswith("transformers.utils.")):
            rows[each.name] = outcome(model, passes, key, each.original)
    return {"name": name, "status": "examined", "reason": "", "functions": rows}


def anything(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError


def outcome(model: Any, passes: list[Pass], key: str, original: Any) -> str:
    """`works`, `not called` by stock, or what is wrong."""
    counted = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return original(*args, **kwargs)

    exact = f"{original.__module__}:{original.__name__}"
    named = vars(sys.modules[original.__module__]).get(original.__name__) is original
    patched = copy.deepcopy(model)
    try:
        swap_functions(patched, find_functions(patched, (((exact if named else key, counting),),)))
    except PatcherError as error:
        return f"refused: {error}"
    expected, calls = counting_calls(original, lambda: outputs(model, passes))
    found = outputs(patched, passes)
    same = len(found) == len(expected) and all(
        torch.equal(a, b) or (a.isnan().any() and a.nan_to_num().equal(b.nan_to_num()))
        for a, b in zip(found, expected, strict=True)
    )
    if not same:
        return "WRONG outputs"
    if calls != counted:
        return f"WRONG count: {counted}, and stock calls it {calls} times"
    return "works" if calls else "not called"


def counting_calls(function: Any, run: Any) -> tuple[Any, int]:
    """What a call gives, and how often a function is called meanwhile by its module's code."""
    code, count = getattr(inspect.unwrap(function), "__code__", None), 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code is code:
            count += 1

    sys.setprofile(look)
    try:
        return run(), count
    finally:
        sys.setprofile(None)


def outputs(model: nn.Module, passes: list[Pass]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [tensor for one in passes for tensor in floating_tensors(one.of(model))]


def tiny(model_class: Any) -> tuple[Any, list[Pass]]:
    """A small model with random weights and eager attention, and how it can be run."""
    first: Exception | None = None
    for config in small_configs(model_class.config_class):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                raise ValueError(f"{size / 1e6:.0f} M parameters, even when shrunk")
            torch.manual_seed(0)
            config._attn_implementation = "eager"
            model = model_class(config).eval()
            randomize(model)
            return model, chosen_passes(model)
        except Exception as error:
            first = first or error
    raise first or ValueError("no config")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    totals: Counter[str] = Counter()
    for name in given.names or architectures():
        started = time.time()
        result = examine(name)
        rows = result.get("functions", {})
        totals.update([result["status"], *(text.split(":")[0] for text in rows.values())])
        print(f"{name} {time.time() - started:.1f} s {result['status']} {result['reason']}", flush=True)
        for key, text in rows.items():
            if text not in ("works", "not called"):
                print(f"    {key}: {text}", flush=True)
        if given.out:
            with given.out.open("a") as file:
                print(json.dumps(result), file=file)
    print(dict(totals))


if __name__ == "__main__":
    main()
