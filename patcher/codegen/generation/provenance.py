"""Where each part of a generated file is from: the line of a config, and the fingerprint of what it replaces."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patcher.codegen.generation.header import DIFFERS, config_path
from patcher.codegen.spec import Patch, PatchSpec
from patcher.source.definitions import NOTHING, find, fingerprint
from patcher.source.reading import Location
from patcher.source.scopes import bound_names

#: how many characters of names and fingerprints a header has room for; of more patches they are beside the patches
_ROOM = 300
_ENTRY = re.compile(rf"([^\W\d][\w.]*) ([0-9a-f]{{8}}|{NOTHING})\b")
_AT_PATCH = re.compile(rf"^[ \t]*# (?:from .+:\d+, )?in place of {_ENTRY.pattern}[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True)
class Provenance:
    """What a generated file says about the origins of its patches.

    Attributes:
        originals: the name of each definition that is replaced, with the fingerprint of what it was.
        at_patches: those whose fingerprints are beside their patches, because the header has no room for them.
        unplaced: those whose code is from no line of a config: a Patcher says what it is.
    """

    originals: Mapping[str, str]
    at_patches: frozenset[str]
    unplaced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: PatchSpec, original: ast.Module) -> Provenance:
        """The origins of all that a config replaces in a module."""
        patched = [patch.definition for patch in config.patches if not (patch.new and patch in config.of_runtime)]
        patched += config.derived
        found = {name: fingerprint(find(original, name)) for name in sorted({*patched, *_rebound(config)})}
        crowded = sum(len(name) + 11 for name in found) > _ROOM
        unplaced = frozenset(patch.definition for patch in config.of_runtime)
        return cls(found, frozenset(patched if crowded else ()), unplaced)

    def comment(self, patch: Patch) -> list[str]:
        """The line above a patch: the place that its code is from."""
        place = config_line(patch.place) if patch.definition not in self.unplaced else ""
        parts = [f"from {place}"] if place else []
        if patch.definition in self.at_patches and patch.definition in self.originals:
            parts.append(f"in place of {patch.definition} {self.originals[patch.definition]}")
        return [", ".join(parts)] if parts else []

    def header(self) -> dict[str, str]:
        """The fingerprints that the header has room for."""
        return {name: mark for name, mark in self.originals.items() if name not in self.at_patches}


def recorded(text: str) -> dict[str, str]:
    """The fingerprints in a generated file, by the names of the definitions."""
    header = list(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    start = next((number for number, line in enumerate(header) if line.startswith(f"# {DIFFERS}")), len(header))
    lines = itertools.takewhile(lambda line: not line.startswith("# ---"), header[start:])
    paragraph = " ".join(line.removeprefix("#").strip() for line in lines).removeprefix(DIFFERS)
    return dict([*_ENTRY.findall(paragraph), *_AT_PATCH.findall(text)])


def _rebound(config: PatchSpec) -> set[str]:
    """What is left out and bound anew: a replacement in two steps."""
    bound = {helper.source.name for helper in config.helpers}
    bound |= {name for entry in config.imports for name in entry.bound()}
    bound |= {name for block in config.blocks for name in bound_names(ast.parse(block.code))}
    return bound & config.excluded.keys()


def config_line(place: Location) -> str:
    """A line as generated files name it; empty for a notebook's cell and other code that isn't in a file."""
    return f"{config_path(place.file)}:{place.line}" if Path(place.file).is_file() else ""
