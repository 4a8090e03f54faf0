"""The page that shows what `python -m tests.coverage` has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import transformers

__all__ = ["page", "summary"]

INTRODUCTION = """\
# What the fusions do to the architectures of transformers

Made by `python -m tests.coverage` with transformers {transformers} and torch {torch}, in float32 on the CPU,
on small models with random weights. What can be fused is told by a forward pass of the stock model, not by the
fusions: projections that received the very same tensor object (`qkv`, `gate_up`; `kv`: keys and values, and queries
another one; `siblings`: any linear layers of one module), convolutions that compute each patch by itself
(`patch_embeddings`), parameters of which the matrix of one expert is multiplied (`sequential_experts`), linear layers
with the name of a packed one (`split`), of which the model as it runs then tells whether the parts are what they are
called: what attention gives is linear in the values alone, and a query changes its own token alone.

An architecture passes where all of that is fused, and beside stock its outputs are equal (max abs 1e-5, with eager
attention and with sdpa), the gradients of all parameters are equal, the saved files are equal byte for byte, and a
save in the fused layout loads again with the same bits.
"""


def summary(results: list[dict[str, Any]], families: Sequence[str]) -> list[str]:
    """A line for each family, and one for what wasn't examined."""
    lines = []
    for family in families:
        rows = [row for result in results if (row := result["families"].get(family))]
        fusable = [row for row in rows if row["fusable"]]
        passed = [row for row in fusable if row["status"] == "passed"]
        share = 100 * len(passed) / len(fusable) if fusable else 0.0
        wrong = sum(row["status"] in ("WRONG", "FAILED") for row in rows)
        told = sum(row.get("roles", {}).get("confirmed", 0) for row in passed)
        lines.append(
            f"`{family}`: {len(passed)} of {len(fusable)} architectures with fusable modules pass ({share:.1f} %), "
            f"{sum(row['fused'] for row in passed)} modules; {wrong} come out wrong"
            + (f"; the names of parts confirmed for {told} kinds of layers" if told else "")
        )
    left = sum(result["status"] != "examined" for result in results)
    lines.append(f"{len(results)} architectures: {len(results) - left} examined, {left} not examined")
    return lines


def page(results: list[dict[str, Any]], families: Sequence[str]) -> str:
    """The document."""
    results = sorted(results, key=lambda result: (result["kind"], result["name"]))
    torch_version = torch.__version__.partition("+")[0]
    lines = [INTRODUCTION.format(transformers=transformers.__version__, torch=torch_version)]
    lines += [f"- {line}" for line in summary(results, families)]
    lines += ["", "## What did not pass", ""]
    lines += _table(
        ["architecture", "kind", "family", "fused", "status", "reason"],
        [
            [result["name"], result["kind"], family, _counts(row), row["status"], row["reason"]]
            for result, family, row in _rows(results, families)
            if row["status"] not in ("passed", "left alone")
        ],
    )
    lines += ["", "## What was fused", ""]
    lines += [
        "`fused` counts modules, of those that stock shows to be fusable; `+ n` are modules that no pass reached.",
        "Where rounding exceeds 1e-5, the difference in float64 follows, in relation to the size of the outputs.",
        "`gradients` are compared in relation to their size where that is above 1; none where stock has none.",
        "",
    ]
    lines += _table(
        ["architecture", "kind", "family", "fused", "modules", "max abs", "gradients", "status"],
        [
            [
                result["name"],
                result["kind"],
                family,
                _counts(row),
                ", ".join(row["modules"]),
                _distance(row),
                "none" if row.get("gradients") is None else f"{row['gradients']:.0e}",
                row["status"],
            ]
            for result, family, row in _rows(results, families)
            if row["status"] == "passed"
        ],
    )
    lines += ["", "## What is left alone, and why", "", "Modules that stock doesn't show to be fusable.", ""]
    left = Counter(
        (family, _general(reason)) for _, family, row in _rows(results, families) for reason in row.get("left", {})
    )
    lines += _table(
        ["family", "reason", "architectures"],
        [[family, reason, str(-count)] for count, family, reason in sorted((-n, *key) for key, n in left.items())],
    )
    lines += ["", "## What was not examined", ""]
    lines += _table(
        ["architecture", "kind", "reason"],
        [[result["name"], result["kind"], result["reason"]] for result in results if result["status"] != "examined"],
    )
    return "\n".join(lines) + "\n"


def _rows(results: list[dict[str, Any]], families: Sequence[str]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    return [
        (result, family, result["families"][family])
        for result in results
        for family in families
        if family in result["families"]
    ]


def _counts(row: dict[str, Any]) -> str:
    reached = row["fused"] - row.get("unreached", 0)
    return f"{reached} of {row['fusable']}" + (f" + {row['unreached']}" if row.get("unreached") else "")


def _distance(row: dict[str, Any]) -> str:
    more = [f"{value:.0e} in {name.removeprefix('relative_')}" for name, value in row.items() if "relative_" in name]
    return " ".join([f"{row['max_abs']:.0e}", *(f"({text})" for text in more)])


def _general(reason: str) -> str:
    """A reason without the line of the file."""
    return reason.rpartition(" (modeling_")[0] or reason


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return ["Nothing."]
    cells = [[" ".join(cell.replace("|", "\\|").replace("<", "&lt;").split()) for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]
