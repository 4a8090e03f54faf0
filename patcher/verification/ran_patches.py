"""Which patches of a generated file have run: what Python calls, by the lines of the file."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from patcher.codegen.generation.generator import Generated
from patcher.codegen.spec import External, Patch, PatchKind

_Place = tuple[str, int]


class RanPatches:
    """Which patches of a file have run: the code of each is known by its lines."""

    def __init__(self, generated: Generated, module: ModuleType) -> None:
        self.file = str(module.__file__)
        nodes = _definitions(ast.parse(generated.text.removeprefix("\ufeff")).body)
        self.left: dict[str, tuple[list[tuple[int, int]], set[_Place]]] = {}
        for patch in generated.patches:
            if isinstance(patch.replacement, External) and patch.replacement.module.startswith("patcher."):
                continue  # how the models of a file read and write, which isn't the author's
            label = f"{patch.kind.value} {patch.target}"
            lines = [
                (min([node.lineno, *(part.lineno for part in node.decorator_list)]), node.end_lineno or node.lineno)
                for node in nodes.get(_target(patch), ())
            ]
            codes = _codes(module, patch)
            if lines or codes:
                self.left[label] = lines, codes

    def missing(self) -> list[str]:
        """Those that haven't."""
        return list(self.left)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what runs."""
        seen: set[_Place] = set()

        def note(frame: Any, event: str, _: object) -> None:
            if event == "call":
                seen.add(_place(frame.f_code))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
            ran = {line for file, line in seen if file == self.file}
            for label, (lines, codes) in list(self.left.items()):
                if seen & codes or any(first <= line <= last for first, last in lines for line in ran):
                    del self.left[label]


def _target(patch: Patch) -> str:
    parts = patch.target.split(".")
    if parts[-1] in ("setter", "deleter", "getter") and len(parts) > 2:
        parts.pop()
    return ".".join([*parts, "__init__"] if patch.kind is PatchKind.MODIFY_INIT else parts)


def _definitions(body: list[ast.stmt], around: str = "") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{around}{node.name}"
            found.setdefault(name, []).append(node)
            inner = _definitions(node.body, f"{name}.") if isinstance(node, ast.ClassDef) else {}
        else:
            parts = (part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, ()))
            inner = _definitions([*parts, *(s for h in getattr(node, "handlers", ()) for s in h.body)], around)
        for name, nodes in inner.items():
            found.setdefault(name, []).extend(nodes)
    return found


def _codes(module: ModuleType, patch: Patch) -> set[_Place]:
    """The code of a replacement that the file imports."""
    if not isinstance(patch.replacement, External):
        return set()
    value: Any = importlib.import_module(patch.replacement.module)
    for part in patch.replacement.name.split("."):
        value = getattr(value, part)
    parts = list(vars(value).values()) if isinstance(value, type) else [value]
    functions = (getattr(part, "__func__", part) for part in parts)
    return {_place(part.__code__) for part in functions if isinstance(part, FunctionType)}


def _place(code: CodeType) -> _Place:
    """Where it is written: code objects of the same text are equal wherever they are."""
    return code.co_filename, code.co_firstlineno
