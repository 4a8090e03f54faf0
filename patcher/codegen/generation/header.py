"""The comment at the top of a generated file: what it was made from, how, and what differs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from patcher.codegen.spec import Patch, PatchSpec
from patcher.source.modules import SourceModule

_RULE = "# " + "-" * 88
_WIDTH = 90
_LINES = 12
#: what the paragraph about the differences begins with
DIFFERS = "Differs:"
#: what transformers writes on top of a file that its modular converter has made
_BANNER = re.compile(
    r"\A((?:#.*\n)*?)#[ \t]*\U0001f6a8+[ \t]*\r?\n"
    r"#[ \t]*This file was automatically generated from (\S+?)\.?[ \t]*(\r?\n)"
    r"(?:#.*\n)*?#[ \t]*\U0001f6a8+[ \t]*\r?\n"
)


def render_header(
    config: PatchSpec,
    source: SourceModule,
    patches: Sequence[Patch],
    originals: Mapping[str, str],
    orphans: Sequence[str],
    methods: Sequence[str],
) -> list[str]:
    """The lines of the header. They hold no time and no path of a machine, so that equal input gives equal text.

    It names each change once: why it is made is said at its place. Where there are too many to name,
    they are counted.

    Args:
        config: the description.
        source: the module that was patched.
        patches: the patches in the order of the text.
        originals: the fingerprints of what they replace, but for those beside the patches.
        orphans: the imports that nothing uses any more.
        methods: those by which models get the conversions of transformers.
    """
    version = f" ({source.version})" if source.version else ""
    about = textwrap.shorten(config.description, 2 * (_WIDTH - 9))
    lines = ["GENERATED FILE: change the config that it is made from, not this file."]
    for label, text in (("Source:", f"{source.name}{version}"), ("About:", about), ("Made by:", made_by(config))):
        lines += _wrapped(text, f"{label:9}", " " * 9)
    changes = _changes(config, patches, originals, orphans, methods)
    for counted in (set[str](), {verb for verb, names in changes.items() if not _marked(names)}, set(changes)):
        parts = [f"{verb} {_listed(names, counted=verb in counted)}".rstrip() for verb, names in changes.items()]
        differing = _wrapped("; ".join(parts) or "imports are absolute, nothing else", f"{DIFFERS:9}", " " * 9)
        if len(lines) + len(differing) + 2 <= _LINES:
            break
    # A space at which no line ends is written as a tilde.
    return [_RULE, *(f"# {line.replace('~', ' ')}".rstrip() for line in (*lines, *differing)), _RULE]


def _changes(
    config: PatchSpec,
    patches: Sequence[Patch],
    originals: Mapping[str, str],
    orphans: Sequence[str],
    methods: Sequence[str],
) -> dict[str, list[str]]:
    """What is done -> the names of what it is done to, with the fingerprints of what they were."""

    def marked(name: str) -> str:
        return f"{name}~{originals[name]}" if name in originals else name

    changes: dict[str, list[str]] = {"fuse": list(map(marked, config.derived))} if config.derived else {}
    for patch in patches:
        changes.setdefault(patch.kind.value, []).append(marked(patch.definition))
    others: list[tuple[str, Iterable[str]]] = [
        ("add method", methods),
        ("add helper", sorted(helper.source.name for helper in config.helpers)),
        ("add code behind the imports", [""] * bool(config.blocks)),
        ("add import", sorted({name for entry in config.imports for name in entry.bound()})),
        ("rename", sorted(config.renamed)),
        ("add base", [f"{base} of {name}" for name, base in config.bases.items()]),
        ("drop import", sorted({*config.dropped, *orphans})),
        ("drop decorator", [f"{name} of {target}" for target, name in sorted(config.undecorated)]),
        ("leave out", map(marked, sorted(config.excluded))),
    ]
    return changes | {verb: list(names) for verb, given in others if (names := list(given))}


def _marked(names: Sequence[str]) -> bool:
    return any("~" in name for name in names)


def _listed(names: Sequence[str], *, counted: bool) -> str:
    return ", ".join(names) if not counted or len(names) == 1 else f"({len(names)} times)"


def made_by(config: PatchSpec) -> str:
    """The command that makes the file, as seen from the root of the project that the config is part of."""
    if not config.config_module or (config.config_module == "__main__" and not Path(config.config_file).is_file()):
        return "patcher.codegen.write(config)"
    return f"patcher codegen {config_path(config.config_file)}"


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
