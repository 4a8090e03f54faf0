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
_SAME = "Nothing differs from the source but imports."


def render_header(config: PatchSpec, source: SourceModule, patches: Sequence[Patch]) -> list[str]:
    """The lines of the header. They hold no time and no path of a machine, so that equal input gives equal text."""
    version = f" ({source.version})" if source.version else ""
    lines = ["GENERATED FILE: change the config that it is made from, not this file.", ""]
    lines += _entry("Source:", f"{source.name}{version}")
    if config.description.strip():
        lines += _entry("About:", config.description)
    lines += _entry("Made by:", regenerate_command(config))
    lines += ["", _DIFFERS if config.changes else _SAME]
    for patch in patches:
        lines += _item(_words(patch), patch.description)
    for helper in sorted(config.helpers, key=lambda helper: helper.source.name):
        lines += _item(f"add helper {helper.source.name}", helper.description)
    for block in config.blocks:
        lines += _item("add code behind the imports", block.description)
    for name in sorted({name for entry in config.imports for name in entry.bound()}):
        lines += _item(f"add import {name}", "")
    for name in sorted({name for name, _ in config.dropped}):
        lines += _item(f"drop import {name}", "")
    for name in sorted({name for name, _ in config.excluded}):
        lines += _item(f"leave out {name}", "")
    return [_RULE, *(f"# {line}".rstrip() for line in lines), _RULE]


def _words(patch: Patch) -> str:
    words = f"{patch.kind.value} {patch.target}"
    if patch.source is None:
        words += f" with {patch.replacement.module}.{patch.replacement.name}"
    return words


def _entry(label: str, text: str) -> list[str]:
    return _wrapped(text, f"{label:9}", " " * 9)


def _item(text: str, description: str) -> list[str]:
    return _wrapped(f"{text}: {description}" if description.strip() else text, "- ", "  ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    # a long word, such as a path, stays whole: it is there to be copied
    wrapper = textwrap.TextWrapper(_WIDTH, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(text.split()))


def regenerate_command(config: PatchSpec) -> str:
    """The command that makes the file again, as seen from the root of the project that the config is part of."""
    if not config.config_module or (config.config_module == "__main__" and not Path(config.config_file).is_file()):
        return "patcher.codegen.write(config)"
    return f"patcher codegen {config_path(config.config_file)}"


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
