"""The comment at the top of a generated file: its source, its config, and the differences with fingerprints."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from patcher.codegen.spec import Patch, PatchSpec
from patcher.source.modules import SourceModule
from patcher.source.scopes import NOTHING, find, fingerprint

_RULE = "# " + "-" * 88
_WIDTH = 90
_LINES = 12
#: The banner at the top of a file that transformers' modular converter has generated.
_BANNER = re.compile(
    r"\A((?:#.*\n)*?)#[ \t]*\U0001f6a8+[ \t]*\r?\n"
    r"#[ \t]*This file was automatically generated from (\S+?)\.?[ \t]*(\r?\n)"
    r"(?:#.*\n)*?#[ \t]*\U0001f6a8+[ \t]*\r?\n"
)
#: The maximal number of characters of names and fingerprints; if there are more, they are next to the patches.
ROOM = 300
_ENTRY = re.compile(rf"([^\W\d][\w.]*) ([0-9a-f]{{8}}|{NOTHING})\b")
_AT_PATCH = re.compile(rf"^[ \t]*# (?:from .+:\d+, )?in place of {_ENTRY.pattern}[ \t\r]*$", re.MULTILINE)


def render_header(config: PatchSpec, source: SourceModule, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of the header, without times and paths of a machine, so that equal input gives equal text.

    Each change is named once; its reason is given at its place. If there are too many to name, kinds of changes are
    counted: those without fingerprints first, then the longest.
    """
    version = f" ({source.version})" if source.version else ""
    about = textwrap.shorten(config.description, 2 * (_WIDTH - 9))
    origin = "patcher" if config.made_by else "config"
    lines = [f"GENERATED FILE: change the {origin} that it is made from, not this file."]
    for label, text in (("Source:", f"{source.name}{version}"), ("About:", about), ("Made by:", made_by(config))):
        lines += _wrapped(label, text)

    def importance(verb: str) -> tuple[bool, int]:
        return any("~" in name for name in changes[verb]), -len(", ".join(changes[verb]))

    verbs = sorted(changes, key=importance)
    for counted in (verbs[:count] for count in range(len(verbs) + 1)):
        listed = {
            verb: f"({len(names)} times)" if verb in counted and len(names) > 1 else ", ".join(names)
            for verb, names in changes.items()
        }
        parts = [f"{verb} {names}".rstrip() for verb, names in listed.items()]
        differences = _wrapped("Differs:", "; ".join(parts) or "imports are absolute, nothing else")
        if len(lines) + len(differences) + 2 <= _LINES:
            break
    # A tilde is a space at which no line ends.
    return [_RULE, *(f"# {line.replace('~', ' ')}".rstrip() for line in (*lines, *differences)), _RULE]


def changes_of(
    config: PatchSpec,
    patches: Sequence[Patch],
    fingerprints: Mapping[str, str],
    orphans: Sequence[str],
    methods: Sequence[str],
) -> dict[str, list[str]]:
    """Return kind of change -> the changed names, with the fingerprints of originals that the header contains.

    Orphans are imports that nothing uses any more, methods those by which models get transformers' conversions.
    """

    def marked(name: str) -> str:
        return f"{name}~{fingerprints[name]}" if name in fingerprints else name

    changes = {"fuse": list(map(marked, config.derived))}
    for patch in patches:
        changes.setdefault(patch.kind.value, []).append(marked(patch.definition))
    others: dict[str, Iterable[str]] = {
        "add method": methods,
        "add helper": sorted(helper.__name__ for helper in config.helpers),
        "add code behind the imports": [""] * bool(config.blocks),
        "add import": sorted({item.binds for item in config.imports}),
        "rename": sorted(config.renamed),
        "add base": [f"{base} of {name}" for name, base in config.bases.items()],
        "drop import": sorted({*config.dropped, *orphans}),
        "drop decorator": [f"{name} of {target}" for target, name in sorted(config.undecorated)],
        "leave out": map(marked, sorted(config.excluded)),
    }
    return {verb: listed for verb, names in (changes | others).items() if (listed := list(names))}


def _wrapped(label: str, text: str) -> list[str]:
    # long words, such as paths, stay whole so that they can be copied
    wrapper = textwrap.TextWrapper(_WIDTH, f"{label:9}", " " * 9, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(text.split()))


def without_banner(text: str) -> str:
    """Return a text without the banner that it was generated from another file: this one was generated from it."""
    return _BANNER.sub(r"\1# The source was itself generated, from \2.\3", text)


def made_by(config: PatchSpec) -> str:
    """Return the command that generates the file, as run from the root of the config's project, or the call."""
    if config.made_by:
        return config.made_by
    if not config.config_module or (config.config_module == "__main__" and not Path(config.config_file).is_file()):
        return "patcher.codegen.write(config)"
    return f"patcher codegen {config_path(config.config_file)}"


def config_path(file: str) -> str:
    """Return the path of a config below its project, the nearest folder with a pyproject.toml; else its file name."""
    path = Path(file)
    for parent in path.resolve().parents:
        if (parent / "pyproject.toml").is_file():
            return path.resolve().relative_to(parent).as_posix()
    return path.name


def fingerprints_of(config: PatchSpec, original: ast.Module) -> dict[str, str]:
    """Return the definitions that a config replaces, or drops and binds anew, with their fingerprints."""
    names = {patch.definition for patch in config.patches if not (patch.new and patch in config.of_runtime)}
    names |= {*config.derived, *(config.added_names() & config.excluded.keys())}
    return {name: fingerprint(find(original, name)) for name in sorted(names)}


def recorded(text: str) -> dict[str, str]:
    """Return the fingerprints in a generated file, by the names of the definitions."""
    header = text.partition(_RULE)[2].partition(_RULE)[0]
    return dict([*_ENTRY.findall(header), *_AT_PATCH.findall(text)])
