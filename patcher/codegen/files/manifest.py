"""What a generated file was made of, for programs: `patched_modeling_llama.manifest.json` beside the file."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

from patcher.codegen.generation.generator import Generated
from patcher.codegen.generation.provenance import config_line
from patcher.source.definitions import find, span
from patcher.source.reading import Location


def manifest_path(path: Path) -> Path:
    """Where the manifest of a generated file is."""
    return path.with_suffix(".manifest.json")


def manifest(generated: Generated, text: str, data: bytes) -> str:
    """The manifest of a file. It holds no time and no path of a machine, so that equal input gives equal text.

    Args:
        generated: what the file was made from.
        text: the file as it is written, of which the lines are told.
        data: its bytes, of which the hash is.
    """
    config, source = generated.config, generated.source
    tree = ast.parse(text)

    def lines(name: str) -> list[list[int]]:
        return [list(span(node)) for node in find(tree, name)]

    patches = [
        {
            "kind": patch.kind.value,
            "target": patch.target,
            "description": patch.description,
            "from": _place(patch.place),
            "replacement": None if patch.source else f"{patch.replacement.module}.{patch.replacement.name}",
            "original": generated.provenance.originals[patch.definition],
            "lines": lines(patch.definition),
        }
        for patch in generated.patches
    ]
    helpers = [
        {
            "name": helper.source.name,
            "after": helper.after or None,
            "description": helper.description,
            "from": _place(helper.where),
            "lines": lines(helper.source.name),
        }
        for helper in sorted(config.helpers, key=lambda helper: helper.source.name)
    ]
    originals = generated.provenance.originals
    content: dict[str, Any] = {
        "format": 1,
        "source": {"module": source.name, "release": source.version or None, "file": source.relative_path},
        "file": config.target_file,
        "description": config.description,
        "config": _place(config.where),
        "patches": patches,
        "helpers": helpers,
        "code": [{"description": block.description, "from": _place(block.where)} for block in config.blocks],
        "imports": sorted({line for entry in config.imports for line in _statement(entry.lines())}),
        "dropped": sorted(config.dropped),
        "orphaned": list(generated.orphans),
        "excluded": [{"name": name, "original": originals.get(name)} for name in sorted(config.excluded)],
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _place(where: Location) -> str | None:
    return config_line(where) or None


def _statement(lines: list[str]) -> list[str]:
    """An import on one line."""
    return [ast.unparse(ast.parse("\n".join(lines)))]
