"""Where each part of a generated file is from: the line of a config, and the fingerprint of what it replaces.

The fingerprint is of the syntax tree without docstrings, and without the annotations of functions, which nothing runs:
half of what one release changes in the methods of another is nothing but that.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patcher.codegen.generation.header import config_path
from patcher.codegen.spec import ACCESSORS, Patch, PatchSpec
from patcher.source.canonical import canonical
from patcher.source.reading import Definition, Location, first_line
from patcher.source.scopes import bound_names, top_level

#: the fingerprint of what wasn't there: a method that a patch adds
NOTHING = "none"
#: how many characters of names and fingerprints a header has room for; of more patches they stand at the patches
_ROOM = 800
_ENTRY = re.compile(rf"([^\W\d][\w.]*) ([0-9a-f]{{8}}|{NOTHING})\b")
_AT_PATCH = re.compile(rf"^[ \t]*# (?:from .+:\d+, )?in place of {_ENTRY.pattern}[ \t\r]*$", re.MULTILINE)
_BINDING = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
_LABEL = "Replaced originals:"
_FURTHER = "at the patches"


@dataclass(frozen=True)
class Provenance:
    """What stands in a generated file about the origins of its patches.

    Attributes:
        originals: the name of each definition that is replaced, with the fingerprint of what it was.
        at_patches: those whose fingerprints stand at their patches, because the header has no room for them.
    """

    originals: Mapping[str, str]
    at_patches: frozenset[str]

    @classmethod
    def of(cls, config: PatchSpec, original: ast.Module) -> Provenance:
        """The origins of all that a config replaces in a module."""
        patched = [patch.definition for patch in config.patches]
        found = {name: fingerprint(find(original, name)) for name in sorted({*patched, *_rebound(config)})}
        crowded = sum(len(name) + 11 for name in found) > _ROOM
        return cls(found, frozenset(patched if crowded else ()))

    def comment(self, patch: Patch) -> list[str]:
        """The line above a patch: the place that its code is from."""
        place = config_line(patch.place)
        parts = [f"from {place}"] if place else []
        if patch.definition in self.at_patches:
            parts.append(f"in place of {patch.definition} {self.originals[patch.definition]}")
        return [", ".join(parts)] if parts else []

    def header(self) -> str:
        """The fingerprints as the header has them."""
        listed = [f"{name} {mark}" for name, mark in self.originals.items() if name not in self.at_patches]
        listed += [_FURTHER] if self.at_patches else []
        return f"{_LABEL} {', '.join(listed)}" if listed else ""


def recorded(text: str) -> dict[str, str]:
    """The fingerprints that stand in a generated file, by the names of the definitions."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(f"# {_LABEL}")), None)
    found: dict[str, str] = {}
    if start is not None:
        end = next((n for n, line in enumerate(lines[start:], start) if not line.startswith("# ") or "---" in line), 0)
        paragraph = " ".join(line.removeprefix("# ").strip() for line in lines[start:end])
        found.update(_ENTRY.findall(paragraph.removeprefix(_LABEL)))
        if _FURTHER in paragraph:
            found.update(_AT_PATCH.findall(text))
    return found


def fingerprint(definitions: Iterable[ast.stmt]) -> str:
    """A short name of what definitions do: of all that have one name, as in the branches of an `if`."""
    trees = [canonical(node, annotations=False) for node in definitions]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8] if trees else NOTHING


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """What a module binds a dotted name to: classes, functions, assignments and imports, guarded ones included.

    >>> [node.lineno for node in find(ast.parse("class A:\\n    if x:\\n        def f(self): ..."), "A.f")]
    [3]
    """
    *path, last = name.split(".")
    body = _inside(tree.body, path)
    if body is not None:
        return _named(body, last)
    if last in ACCESSORS and len(path) > 1:
        body = _inside(tree.body, path[:-1])
        return _named(body or [], path[-1], last)
    return []


def _inside(body: Sequence[ast.stmt], path: Sequence[str]) -> list[ast.stmt] | None:
    """The bodies of the classes that a dotted name leads to, None where there is no such class."""
    for name in path:
        classes = [node for node in top_level(body) if isinstance(node, ast.ClassDef) and node.name == name]
        if not classes:
            return None
        body = [statement for node in classes for statement in node.body]
    return list(body)


def _named(body: Sequence[ast.stmt], name: str, accessor: str = "") -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in top_level(body):
        if isinstance(node, Definition):
            if node.name == name and _accessor(node) == accessor:
                found.append(node)
        elif isinstance(node, _BINDING) and not accessor and name in bound_names(ast.Module([node], [])):
            found.append(node)
    return found


def _accessor(node: Definition) -> str:
    words = [ast.unparse(decorator).rpartition(".") for decorator in node.decorator_list]
    return next((word for owner, _, word in words if owner == node.name and word in ACCESSORS), "")


def span(node: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a statement, its decorators included."""
    return first_line(node) if isinstance(node, Definition) else node.lineno, node.end_lineno or node.lineno


def _rebound(config: PatchSpec) -> set[str]:
    """What is left out and bound anew: a replacement in two steps."""
    bound = {helper.source.name for helper in config.helpers}
    bound |= {name for entry in config.imports for name in entry.bound()}
    bound |= {name for block in config.blocks for name in bound_names(ast.parse(block.code))}
    return bound & config.excluded.keys()


def config_line(place: Location) -> str:
    """A line as generated files name it; empty for a notebook's cell and other code that stands in no file."""
    return f"{config_path(place.file)}:{place.line}" if Path(place.file).is_file() else ""
