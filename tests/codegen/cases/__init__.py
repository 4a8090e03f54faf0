"""Cases of the code generator, one file each: the source, `# config`, then `# output` or `# error`.

A first line `# flags: crlf bom` changes the source and the output on the disk. `# output` holds the generated file
without its header, and `# error` the whole message, where `{config}` stands for the path of the config.

    python -m tests.codegen.cases NAME...

writes what the generator says now into the cases; review that with `git diff`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from patcher.codegen import generate
from patcher.codegen.files.projects import load_configs
from patcher.codegen.spec import PatchSpec
from patcher.errors import CodegenError

FOLDER = Path(__file__).parent
PRELUDE = "from patcher.codegen import PatchConfig, create_patch_from_external\n\n"
_PART = re.compile(r"^# (config|output|error)\n", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One case, as its file has it."""

    name: str
    flags: tuple[str, ...]
    source: str
    config: str
    kind: str
    expected: str

    def on_disk(self, text: str) -> bytes:
        """A text as the flags want it."""
        text = text.rstrip("\n") if "no-newline" in self.flags else text
        text = text.replace("\n", "\r\n") if "crlf" in self.flags else text
        return text.encode("utf-8-sig" if "bom" in self.flags else "utf-8")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def read(name: str) -> Case:
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    flags: tuple[str, ...] = ()
    if text.startswith("# flags:"):
        line, _, text = text.partition("\n")
        flags = tuple(line.removeprefix("# flags:").split())
    parts = _PART.split(text)
    source, config = parts[0], parts[2]
    kind, expected = (parts[3], parts[4]) if len(parts) > 3 else ("output", "")
    return Case(name, flags, source, config, kind, expected)


def lay_out(case: Case, folder: Path) -> Path:
    """Write the package that is patched and the config. Returns the path of the config."""
    package = folder / f"package_of_{case.name}" / "models"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (package / "modeling_case.py").write_bytes(case.on_disk(case.source))
    config = folder / f"{case.name}_patch_gen_config.py"
    own = f'config = PatchConfig("package_of_{case.name}.models.modeling_case", "out.py")\n'
    config.write_text(PRELUDE + ("" if "PatchConfig(" in case.config else own) + case.config, "utf-8")
    return config


def load(config: Path) -> PatchSpec:
    sys.path.insert(0, str(config.parent))
    try:
        return load_configs(str(config), "config")[0]
    finally:
        sys.path.remove(str(config.parent))
        sys.modules.pop(config.stem, None)


def body(text: str) -> str:
    """A generated text without its header."""
    lines = re.split(r"(?<=\n)", text)
    rules = [number for number, line in enumerate(lines) if line.startswith("# -----")]
    return "".join([*lines[: rules[0]], *lines[rules[1] + 1 :]])


def run(case: Case, folder: Path) -> tuple[str, str]:
    """`output` and the text, or `error` and the message."""
    config = lay_out(case, folder)
    sys.path.insert(0, str(folder))
    try:
        return "output", generate(load(config))
    except CodegenError as error:
        return "error", str(error).replace(str(config), "{config}").replace(str(folder), "{folder}")
    finally:
        sys.path.remove(str(folder))


def accept(name: str, folder: Path) -> None:
    case = read(name)
    kind, result = run(case, folder)
    if kind == "output":
        result = body(result).replace("\r\n", "\n")
    result = result if result.endswith("\n") else result + "\n"
    flags = f"# flags: {' '.join(case.flags)}\n" if case.flags else ""
    text = f"{flags}{case.source}# config\n{case.config}# {kind}\n{result}"
    (FOLDER / f"{name}.txt").write_text(text, "utf-8")
