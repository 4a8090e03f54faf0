"""Calls in a generated file that no longer fit the signature of what was patched.

The check reads the file, it doesn't run it. A call that it can't follow is not reported, and neither is one that
didn't fit the original either (decorators take arguments out of calls).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from patcher.codegen.generator import Generated
from patcher.codegen.spec import PatchKind
from patcher.source.call_sites import CallSites, shortened, why_unfit


@dataclass(frozen=True)
class CallMismatch:
    """One call that doesn't fit.

    Attributes:
        line: where it is in the generated file.
        call: its text, shortened.
        target: the patched function or method.
        problem: why it doesn't fit.
    """

    line: int
    call: str
    target: str
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.call} does not fit the patched {self.target}: {self.problem}"


def check_calls(generated: Generated) -> tuple[CallMismatch, ...]:
    """The calls in a generated file that fitted the original, and do not fit the patch."""
    module = CallSites(ast.parse(generated.text.removeprefix("\ufeff")))
    original = CallSites(ast.parse(generated.source.text))
    targets = _patched(generated, module)
    found = []
    for call, target, bound in module.calls():
        if target in targets:
            problem = why_unfit(call, original.function(target), module.function(target), bound)
            if problem:
                found.append(CallMismatch(call.lineno, shortened(call), target, problem))
    return tuple(sorted(found, key=lambda mismatch: (mismatch.line, mismatch.target)))


def _patched(generated: Generated, module: CallSites) -> set[str]:
    targets: set[str] = set()
    for patch in generated.patches:
        if patch.kind is PatchKind.MODIFY_INIT:
            targets.add(f"{patch.target}.__init__")
        elif patch.kind is PatchKind.REPLACE_CLASS and patch.target in module.classes:
            targets.update(f"{patch.target}.{name}" for name in module.methods(patch.target))
        else:
            targets.add(patch.target)
    return targets
