"""Which patches of a generated file have run: the code of what has their names in the file, and what Python calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from patcher.codegen.generation.generator import Generated
from patcher.codegen.spec import Patch, PatchKind

#: The file and the line of a function: code objects of the same text are equal wherever they are.
_Place = tuple[str, int]


class RanPatches:
    """Which patches of a file have run."""

    def __init__(self, generated: Generated, module: ModuleType) -> None:
        self.left: dict[str, set[_Place]] = {}
        for patch in generated.patches:
            if patch.new and patch in generated.config.of_runtime:
                continue  # how the models of a file read and write, and heads that they may not have
            if places := _places(module, patch):
                self.left[f"{patch.kind.value} {patch.target}"] = places

    def missing(self) -> list[str]:
        """Those that haven't."""
        return list(self.left)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what runs."""
        seen: set[_Place] = set()

        def note(frame: Any, event: str, _: object) -> None:
            if event == "call":
                seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.left = {label: places for label, places in self.left.items() if not places & seen}


def _places(module: ModuleType, patch: Patch) -> set[_Place]:
    """Those of the functions that a patch has written or imported; none of what isn't run, an import for one."""
    parts = patch.target.split(".")
    if parts[-1] in ("setter", "deleter", "getter") and len(parts) > 2:
        parts.pop()
    value: Any = module
    for part in [*parts, "__init__"] if patch.kind is PatchKind.MODIFY_INIT else parts:
        value = vars(value).get(part) if isinstance(value, type | ModuleType) else None
    found = list(vars(value).values()) if isinstance(value, type) else [value]
    accessors = [(each.fget, each.fset, each.fdel) if isinstance(each, property) else (each,) for each in found]
    functions = (inspect.unwrap(getattr(each, "__func__", each)) for several in accessors for each in several if each)
    codes = (each.__code__ for each in functions if isinstance(each, FunctionType))
    return {(code.co_filename, code.co_firstlineno) for code in codes}
