"""The comment at the top of a generated file: what it was made from, how, and what differs."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
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
_TOO_LONG = 40  # lines
#: what transformers writes on top of a file that its modular converter has made
_BANNER = re.compile(
    r"\A((?:#.*\n)*?)#[ \t]*\U0001f6a8+[ \t]*\r?\n"
    r"#[ \t]*This file was automatically generated from (\S+?)\.?[ \t]*(\r?\n)"
    r"(?:#.*\n)*?#[ \t]*\U0001f6a8+[ \t]*\r?\n"
)
#: what is done, to what, and why
_Item = tuple[str, str, str]


def render_header(
    config: PatchSpec,
    source: SourceModule,
    patches: Sequence[Patch],
    originals: str,
    orphans: Sequence[str],
    methods: Sequence[str],
) -> list[str]:
    """The lines of the header. They hold no time and no path of a machine, so that equal input gives equal text.

    Args:
        config: the description.
        source: the module that was patched.
        patches: the patches in the order of the text.
        originals: the fingerprints of what they replace.
        orphans: the imports that nothing uses any more.
        methods: those by which models get the conversions of transformers.
    """
    version = f" ({source.version})" if source.version else ""
    items: list[_Item] = []
    for patch in patches:
        origin = f" with {patch.replacement.module}.{patch.replacement.name}" if patch.source is None else ""
        items.append((patch.kind.value, f"{patch.target}{origin}", patch.description))
    items += [("add method", name, _CONVERTED) for name in methods]
    helpers = sorted(config.helpers, key=lambda helper: helper.source.name)
    items += [("add helper", helper.source.name, helper.description) for helper in helpers]
    items += [("add code behind the imports", "", block.description) for block in config.blocks]
    imported = sorted({name for entry in config.imports for name in entry.bound()})
    items += [("add import", name, "") for name in imported]
    items += [("drop import", name, "") for name in sorted(config.dropped)]
    items += [("drop import", name, "nothing uses it any more") for name in orphans]
    items += [("drop decorator", f"{name} of {target}", "") for target, name in sorted(config.undecorated)]
    items += [("leave out", name, "") for name in sorted(config.excluded)]
    for render in (_described, _named, _grouped, _counted):
        about = config.description if render is not _counted else textwrap.shorten(config.description, 2 * _WIDTH)
        lines = ["GENERATED FILE: change the config that it is made from, not this file.", ""]
        for label, text in (("Source:", f"{source.name}{version}"), ("About:", about), ("Made by:", made_by(config))):
            lines += _wrapped(text, f"{label:9}", " " * 9)
        lines += ["", _DIFFERS if config.changes or methods else _SAME, *render(items)]
        lines += ["", *(line.replace("~", " ") for line in _wrapped(originals, "", "  "))] if originals else []
        if len(lines) + 2 < _TOO_LONG:
            break
    return [_RULE, *(f"# {line}".rstrip() for line in lines), _RULE]


def made_by(config: PatchSpec) -> str:
    """The command that makes the file, as seen from the root of the project that the config is part of."""
    if not config.config_module or (config.config_module == "__main__" and not Path(config.config_file).is_file()):
        return "patcher.codegen.write(config)"
    return f"patcher codegen {config_path(config.config_file)}"


def _described(items: Sequence[_Item]) -> list[str]:
    """One change after the other, with why."""
    lines = []
    for verb, name, description in items:
        text = f"{verb} {name}".rstrip()
        lines += _wrapped(f"{text}: {description}" if description.strip() else text, "- ", "  ")
    return lines


def _named(items: Sequence[_Item]) -> list[str]:
    """One change a line; why, stands at each place."""
    return [line for verb, name, _ in items for line in _wrapped(f"{verb} {name}", "- ", "  ")]


def _grouped(items: Sequence[_Item]) -> list[str]:
    """The names by what is done to them."""
    groups: dict[str, list[str]] = {}
    for verb, name, _ in items:
        groups.setdefault(verb, []).append(name)
    listed = ((verb, ", ".join(filter(None, names))) for verb, names in groups.items())
    return [line for verb, names in listed for line in _wrapped(f"{verb}: {names}" if names else verb, "- ", "  ")]


def _counted(items: Sequence[_Item]) -> list[str]:
    """How much is done; what it is stands at each place, and in the manifest."""
    counts = Counter(verb for verb, _, _ in items)
    return [f"- {verb}: {count} times" if count > 1 else f"- {verb}" for verb, count in counts.items()]


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


def without_banner(text: str) -> str:
    """A text that doesn't say any more that it was generated, and from what: this one was generated from it."""
    return _BANNER.sub(r"\1# The source was itself generated, from \2.\3", text)


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
