"""The comment at the top of a generated file: what it was made from, how, and what differs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from patcher.codegen.spec import Patch, PatchSpec
from patcher.source.modules import SourceModule

_RULE = "# " + "-" * 88
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*[-\w.]+")
_WIDTH = 90
_DIFFERS = "What differs from the source:"
_CONVERTED = "checkpoints are converted as for the original"
_SAME = "Nothing differs from the source but imports."


def render_header(
    config: PatchSpec, source: SourceModule, patches: Sequence[Patch], methods: Sequence[str] = ()
) -> list[str]:
    """The lines of the header. They hold no time and no path of a machine, so that equal input gives equal text.

    Args:
        methods: those by which models get the conversions of transformers.
    """
    version = f" ({source.version})" if source.version else ""
    # The command as seen from the root of the project that the config is part of.
    made_by = f"patcher codegen {config_path(config.config_file)}"
    if not config.config_module or (config.config_module == "__main__" and not Path(config.config_file).is_file()):
        made_by = "patcher.codegen.write(config)"
    lines = ["GENERATED FILE: change the config that it is made from, not this file.", ""]
    for label, text in (("Source:", f"{source.name}{version}"), ("About:", config.description), ("Made by:", made_by)):
        lines += _wrapped(text, f"{label:9}", " " * 9)
    lines += ["", _DIFFERS if config.changes or methods else _SAME]
    imported = sorted({name for entry in config.imports for name in entry.bound()})
    helpers = sorted(config.helpers, key=lambda helper: helper.source.name)
    items: list[tuple[str, str]] = []
    for patch in patches:
        origin = f" with {patch.replacement.module}.{patch.replacement.name}" if patch.source is None else ""
        items.append((f"{patch.kind.value} {patch.target}{origin}", patch.description))
    items += [(f"add method {name}", _CONVERTED) for name in methods]
    items += [(f"add helper {helper.source.name}", helper.description) for helper in helpers]
    items += [("add code behind the imports", block.description) for block in config.blocks]
    items += [(f"add import {name}", "") for name in imported]
    items += [(f"drop import {name}", "") for name in sorted(config.dropped)]
    items += [(f"drop decorator {name} of {target}", "") for target, name in sorted(config.undecorated)]
    items += [(f"leave out {name}", "") for name in sorted(config.excluded)]
    for text, description in items:
        lines += _wrapped(f"{text}: {description}" if description.strip() else text, "- ", "  ")
    return [_RULE, *(f"# {line}".rstrip() for line in lines), _RULE]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    # a long word, such as a path, stays whole: it is there to be copied
    wrapper = textwrap.TextWrapper(_WIDTH, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(text.split()))


def config_path(file: str) -> str:
    """The path of a config below its project, the nearest folder with a pyproject.toml; else the name of the file."""
    path = Path(file)
    for parent in path.resolve().parents:
        if (parent / "pyproject.toml").is_file():
            return path.resolve().relative_to(parent).as_posix()
    return path.name


def with_header(text: str, header: Sequence[str], source: SourceModule) -> str:
    """The text below the header. A `#!` line and an encoding stay first, because Python reads them only there."""
    newline = source.newline
    lines = text.split(newline, 2)
    first = 1 if lines[0].startswith("#!") else 0
    if len(lines) > first + 1 and _CODING.match(lines[first]):
        first += 1
    elif first == 0 and len(lines) > 2 and _CODING.match(lines[1]) and lines[0].startswith("#"):
        first = 2
    head, rest = lines[:first], newline.join(lines[first:])
    mark = "\ufeff" if source.encoding == "utf-8-sig" else ""
    return mark + newline.join([*head, *header, rest])
