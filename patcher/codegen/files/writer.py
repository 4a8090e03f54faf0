"""Writing a generated file, and its diff, in one step that either happens or doesn't."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.spec import PatchSpec
from patcher.errors import CodegenError
from patcher.source.modules import load
from patcher.source.reading import Location
from patcher.source.texts import diff_of


def write(
    config: PatchSpec,
    output_dir: str | os.PathLike[str] | None = None,
    diff: bool = False,
    *,
    formatted: bool = False,
) -> Path:
    """Generate the file of a config and write it.

    >>> import tempfile
    >>> from patcher.codegen import PatchConfig
    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(config, folder, diff=True).name
    'patched_modeling_llama.py'

    Args:
        config: the description.
        output_dir: the folder, by default `generated/` beside the file of the config.
        diff: write a unified diff against the original beside it, with the suffix `.diff`. One that is there
            already is written anew in any case.
        formatted: run ruff over the text first.

    Returns:
        The path of the generated file.

    Raises:
        CodegenError: if it can't be generated; then no file is touched.
    """
    return write_generated(build(config), output_folder(config, output_dir), diff=diff, formatted=formatted)


class ModelingCodeGenerator:
    """`generate` and `write` under the names that programs of other generators call.

    >>> from patcher.codegen import PatchConfig
    >>> generator = ModelingCodeGenerator(PatchConfig("transformers.models.llama.modeling_llama"))
    >>> generator.load_source()
    >>> generator.generate().startswith(generator.source_code[:20])
    False

    Args:
        config: the description.
    """

    def __init__(self, config: PatchSpec) -> None:
        self.config = config
        self.source_code = ""

    def load_source(self) -> None:
        """Read the module that is patched into `source_code`; `generate` does so anyway."""
        self.source_code = load(self.config.source_module, self.config.where).text

    def generate(self, output_path: Path | None = None) -> str:
        """The text of the file, which is written to a path if one is given."""
        generated = build(self.config)
        if output_path is not None:
            replace_all({output_path: generated.text.encode()}, self.config.where)
        return generated.text


def write_generated(generated: Generated, folder: Path, *, formatted: bool, diff: bool = False) -> Path:
    """Write what was generated, all files or none."""
    path = folder / generated.config.target_file
    replace_all(files_of(generated, path, diff=diff, formatted=formatted), generated.config.where)
    return path


def files_of(generated: Generated, path: Path, *, formatted: bool, diff: bool = False) -> dict[Path, bytes]:
    """What is to be on the disk: the generated file, and its diff against the original.

    The diff if it is requested, and if there is one: beside another file it would be wrong.
    """
    text = final_text(generated, formatted=formatted)
    files = {path: text.encode()}
    if diff or diff_path(path).is_file():
        files[diff_path(path)] = unified_diff(generated, text).encode("utf-8")
    return files


def output_folder(config: PatchSpec, output_dir: str | os.PathLike[str] | None) -> Path:
    """The folder that a config's file goes to."""
    if output_dir is not None:
        return Path(output_dir)
    home = Path(config.config_file)
    if not home.is_file():
        raise config.error(
            "this config isn't in a file, so there is no folder beside it to write to. "
            "Give write(config, output_dir=...)."
        )
    return home.parent / "generated"


def diff_path(path: Path) -> Path:
    """Where the diff of a generated file is."""
    return path.with_suffix(".diff")


def final_text(generated: Generated, *, formatted: bool) -> str:
    """The text as it is written."""
    text, config = generated.text, generated.config
    return run_ruff(text, config.target_file, config.where) if formatted else text


def unified_diff(generated: Generated, text: str) -> str:
    """What a reviewer reads: the original against the generated text."""
    names = f"a/{generated.source.relative_path}", f"b/{generated.config.target_file}"
    return diff_of(generated.source.text, text, *names)


def run_ruff(text: str, name: str, where: Location) -> str:
    """The text as `ruff check --fix` and `ruff format` leave it, by the settings of the current folder."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        raise CodegenError(f"{where}: formatting needs ruff, which is not installed. Run `pip install ruff`.")
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [ruff, *command, "--stdin-filename", name, "-"], input=text.encode(), capture_output=True, check=False
        )
        if done.returncode != 0:
            raise CodegenError(f"{where}: ruff {command[0]} failed on {name}: {done.stderr.decode().strip()}")
        text = done.stdout.decode()
    return text


def replace_all(files: Mapping[Path, bytes], where: Location) -> None:
    """Write beside each file first, then rename: a reader sees the old text or the new, never a part."""
    staged: list[tuple[str, Path]] = []
    try:
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged.append((name, path))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            mask = os.umask(0)  # can't be read but by setting it
            os.umask(mask)
            Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask)
        for name, path in staged:
            Path(name).replace(path)
    except OSError as error:
        raise CodegenError(f"{where}: {error.filename or 'the file'} can't be written: {error.strerror}") from error
    finally:
        for name, _ in staged:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
