"""What a config is made of: frozen records of patches, imports, helpers and blocks, and what they may not say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, caller, caller_module


class PatchKind(Enum):
    """What a patch does to its target. The values are the words that the header of a generated file uses."""

    REPLACE_CLASS = "replace class"
    REPLACE_FUNCTION = "replace function"
    OVERRIDE_METHOD = "override method"
    MODIFY_INIT = "modify init"
    EXTERNAL = "external"

    @property
    def method(self) -> str:
        """The call that makes such a patch."""
        return "create_patch_from_external" if self is PatchKind.EXTERNAL else self.name.lower()


@dataclass(frozen=True)
class External:
    """An object that the generated file imports instead of holding its source."""

    module: str
    name: str


@dataclass(frozen=True)
class Patch:
    """One change of one definition. Made by the methods of `PatchConfig` and by `create_patch_from_external`.

    Attributes:
        kind: what is done.
        target: `"Class"`, `"function"` or `"Class.method"`, dotted further for nested classes.
        replacement: the class or function, its text, or an `External`.
        source: the text of the replacement, None for an `External`.
        description: why, in the words of the author.
        name_map: names of the replacement, each with the name that the generated file uses instead.
        where: the line of the config.
        keep_decorators: whether decorators of the original stay.
        new: whether an overridden method may be missing; None decides by how close the known names are.
    """

    kind: PatchKind
    target: str
    replacement: Any
    source: Source | None
    description: str
    name_map: tuple[tuple[str, str], ...]
    where: Location
    keep_decorators: bool = False
    new: bool | None = None

    @property
    def asked(self) -> str:
        """The call that made this patch, for messages and the header."""
        return f"{self.kind.method}({self.target!r})"

    @property
    def definition(self) -> str:
        """The dotted name of what it changes: of `modify_init`, the `__init__`."""
        return f"{self.target}.__init__" if self.kind is PatchKind.MODIFY_INIT else self.target

    @property
    def place(self) -> Location:
        """Where its code stands: the line of the `def` or `class`, or of the config that gives it as text."""
        if self.source is None or not self.source.file:
            return self.where
        return Location(self.source.file, self.source.line + self.source.tree().lineno - 1)

    def error(self, text: str) -> CodegenError:
        """What is wrong with the patch, with the line and the call that made it."""
        return CodegenError(f"{self.where}: {self.asked} {text}")


@dataclass(frozen=True)
class Import:
    """An import statement that the generated file has on top of the original's."""

    module: str
    names: tuple[tuple[str, str], ...]
    alias: str
    where: Location

    def lines(self) -> list[str]:
        """The statement; one name a line when it would be long."""
        if not self.names:
            return [f"import {self.module}" + (f" as {self.alias}" if self.alias else "")]
        words = [name if name == bound else f"{name} as {bound}" for name, bound in self.names]
        line = f"from {self.module} import {', '.join(words)}"
        if len(line) <= 119:
            return [line]
        return [f"from {self.module} import (", *(f"    {word}," for word in words), ")"]

    def bound(self) -> dict[str, tuple[str, str]]:
        """Each name that the statement binds, with the module and the name in it."""
        if self.names:
            return {bound: (self.module, name) for name, bound in self.names}
        top = self.module.split(".")[0]
        return {self.alias: (self.module, "")} if self.alias else {top: (top, "")}


@dataclass(frozen=True)
class Helper:
    """A class or function that patches use, at the top of the file or right after a definition of it."""

    source: Source
    helper: Any
    description: str
    name_map: tuple[tuple[str, str], ...]
    after: str
    where: Location


@dataclass(frozen=True)
class Block:
    """Statements behind the imports."""

    code: str
    description: str
    where: Location


ACCESSORS = ("setter", "deleter", "getter")  # of a property, the last part of "Class.name.setter"


class PatchSpec:
    """What to change in one modeling module, and the file to write it to. The generator reads this and nothing else.

    Attributes:
        where: the line that made it.
        config_module, config_file: the module that the line is in.
    """

    def __init__(self, source_module: str, target_file: str, description: str = "") -> None:
        self.where = caller()
        self.config_module, self.config_file = caller_module()
        if not all(part.isidentifier() for part in source_module.split(".")):
            raise CodegenError(
                f"{self.where}: source_module={source_module!r} is no module name. "
                "Give a dotted name, such as 'transformers.models.llama.modeling_llama'."
            )
        path = PurePath(target_file)
        if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
            raise CodegenError(
                f"{self.where}: target_file={target_file!r} is no name of a Python file below the output folder. "
                "Give one such as 'patched_modeling_llama.py', and the folder to write(output_dir=...)."
            )
        self.source_module = source_module
        self.target_file = target_file
        self.description = description
        self.patches: list[Patch] = []
        self.imports: list[Import] = []
        self.helpers: list[Helper] = []
        self.blocks: list[Block] = []
        self.dropped: dict[str, Location] = {}
        self.excluded: dict[str, Location] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source_module!r}, {self.target_file!r}, {len(self.patches)} patches)"

    def error(self, text: str) -> CodegenError:
        """What is wrong with the config, with its line."""
        return CodegenError(f"{self.where}: {text}")

    @property
    def changes(self) -> bool:
        """Whether the file is anything but the original below a header."""
        return any((self.patches, self.imports, self.helpers, self.blocks, self.dropped, self.excluded))


def create_patch_from_external(
    target: str, replacement_module: str, replacement_name: str, description: str = ""
) -> Patch:
    """A patch that binds `target` to an imported object, instead of copying its source into the file.

    >>> from patcher.codegen import PatchConfig, generate
    >>> config = PatchConfig("transformers.models.qwen3.modeling_qwen3", "patched_modeling_qwen3.py")
    >>> config.patches.append(create_patch_from_external("Qwen3RMSNorm", "torch.nn", "RMSNorm"))
    >>> "from torch.nn import RMSNorm" in generate(config)
    True

    Raises:
        CodegenError: for names that can't be imported.
    """
    where = caller()
    for dotted in (replacement_module, replacement_name):
        if not all(part.isidentifier() for part in dotted.split(".")):
            raise CodegenError(
                f"{where}: create_patch_from_external({target!r}) can't import {dotted!r}, which is no dotted name."
            )
    external = External(replacement_module, replacement_name)
    patch = Patch(PatchKind.EXTERNAL, target, external, None, description, (), where)
    check_target(patch)
    return patch


def check_target(patch: Patch) -> None:
    """Raise a CodegenError for a target that no definition can have."""
    parts = patch.target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise patch.error(f"names no definition: {patch.target!r} is no dotted name.")
    if patch.kind is PatchKind.OVERRIDE_METHOD and len(parts) < 2:
        raise patch.error(
            "names no method. Write override_method('Class.method'), or use replace_function for a function."
        )
    if patch.kind is PatchKind.REPLACE_FUNCTION and len(parts) > 1:
        raise patch.error("names no function of the module. For a method, use override_method.")


def check_conflicts(patch: Patch, others: Iterable[Patch]) -> None:
    """Raise a CodegenError if another patch changes the same definition."""
    mine = patch.definition
    for other in others:
        theirs = other.definition
        if mine == theirs:
            raise patch.error(f"is given twice: {other.asked} at {other.where} already changes it. Remove one.")
        inner, outer = (mine, theirs) if mine.startswith(theirs + ".") else (theirs, mine)
        is_accessor = inner.removeprefix(outer + ".") in ACCESSORS
        if inner.startswith(outer + ".") and not is_accessor:
            raise patch.error(
                f"and {other.asked} at {other.where} change one definition: "
                f"{outer!r} is replaced as a whole, {inner!r} would be lost. Write it into the replacement."
            )
