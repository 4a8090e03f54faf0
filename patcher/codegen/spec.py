"""What a config says: frozen records of patches, what they may not say, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from patcher.codegen.additions import Blocks, Helpers, Import, Names
from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, caller, caller_module


class PatchKind(Enum):
    """What a patch does to its target. The values are the words that the header of a generated file uses."""

    REPLACE_CLASS = "replace class"
    REPLACE_FUNCTION = "replace function"
    OVERRIDE_METHOD = "override method"
    MODIFY_INIT = "modify init"
    EXTERNAL = "external"

    # The names that configs of other generators have for them.
    CLASS_REPLACEMENT = REPLACE_CLASS
    FUNCTION_REPLACEMENT = REPLACE_FUNCTION
    METHOD_OVERRIDE = OVERRIDE_METHOD
    INIT_MODIFICATION = MODIFY_INIT

    @property
    def method(self) -> str:
        """The call that makes such a patch."""
        return "create_patch_from_external" if self is PatchKind.EXTERNAL else self.name.lower()


@dataclass(frozen=True)
class External:
    """An object that the generated file imports instead of holding its source.

    Attributes:
        module: the module to import from.
        name: the object in it, dotted for an attribute.
        patch_type: what it may replace; None for anything.
    """

    module: str
    name: str
    patch_type: PatchKind | None = None

    def statement(self, target: str) -> str:
        """The import that binds the object to a name."""
        return f"from {self.module} import {self.name}" + (f" as {target}" if target != self.name else "")


@dataclass(frozen=True)
class Patch:
    """One change of one definition. Made by the methods of `PatchConfig` and by `create_patch_from_external`.

    Attributes:
        kind: what is done.
        target: `"Class"`, `"function"` or `"Class.method"`.
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
    def wanted(self) -> PatchKind | None:
        """The kind of patch that the target must fit; None for an external that takes any."""
        return self.replacement.patch_type if isinstance(self.replacement, External) else self.kind

    @property
    def is_import(self) -> bool:
        """Whether an import in the place of the target does it: nothing else binds an attribute, or a member."""
        return isinstance(self.replacement, External) and "." not in f"{self.target}{self.replacement.name}"

    @property
    def call(self) -> str:
        """The call that made this patch, for messages and the header."""
        return f"{self.kind.method}({self.target!r})"

    @property
    def definition(self) -> str:
        """The dotted name of what it changes: of `modify_init`, the `__init__`."""
        return f"{self.target}.__init__" if self.kind is PatchKind.MODIFY_INIT else self.target

    @property
    def place(self) -> Location:
        """Where its code is: the line of the `def` or `class`, or of the config that gives it as text."""
        if self.source is None or not self.source.file:
            return self.where
        return Location(self.source.file, self.source.line + self.source.tree().lineno - 1)

    def error(self, text: str) -> CodegenError:
        """What is wrong with the patch, with the line and the call that made it."""
        return CodegenError(f"{self.where}: {self.call} {text}")


#: what other generators call it
PatchType = PatchKind


class PatchSpec:
    """What to change in one modeling module, and the file to write it to. The generator reads this and nothing else.

    Attributes:
        where: the line that made it.
        config_module, config_file: the module that the line is in.
    """

    def __init__(self, source_module: str, target_file: str = "patched_modeling.py", description: str = "") -> None:
        self.where = caller()
        self.config_module, self.config_file = caller_module()
        if not all(part.isidentifier() for part in source_module.split(".")):
            raise CodegenError(
                f"{self.where}: source_module={source_module!r} isn't a module name. "
                "Give a dotted name, such as 'transformers.models.llama.modeling_llama'."
            )
        self.source_module = source_module
        self.target_file = target_file
        self.description = description
        self.patches: list[Patch] = []
        self.imports: list[Import] = []
        self.helpers = Helpers()
        self.blocks = Blocks()
        self.dropped = Names()
        self.excluded = Names()
        self.undecorated: dict[tuple[str, str], Location] = {}  # of (definition, decorator)
        #: class -> the name that it gets; the one that it has stays another name for it
        self.renamed: dict[str, str] = {}
        #: class -> a helper that it inherits from as well
        self.bases: dict[str, str] = {}
        #: the originals of classes that were written anew, beside them
        self.derived: list[str] = []
        #: statements behind the definitions
        self.endings = Blocks()
        #: the Patcher that it was made from, and the patches that do what that does
        self.runtime: Any = None
        self.of_runtime: tuple[Patch, ...] = ()
        #: whether checkpoints of the file's models are converted by what it registers alone
        self.converts_itself = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source_module!r}, {self.target_file!r}, {len(self.patches)} patches)"

    @property
    def target_file(self) -> str:
        """The name of the generated file, below the output folder."""
        return self._target_file

    @target_file.setter
    def target_file(self, name: str) -> None:
        path = PurePath(name)
        if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
            raise CodegenError(
                f"{caller()}: target_file={name!r} isn't the name of a Python file below the output folder. "
                "Give one such as 'patched_modeling_llama.py', and the folder to write(output_dir=...)."
            )
        self._target_file = name

    # What other generators call the same.
    additional_imports = property(lambda self: self.imports, lambda self, given: _fill(self.imports, given))
    post_import_blocks = property(lambda self: self.blocks, lambda self, given: _fill(self.blocks, given))
    drop_imported_names = property(lambda self: self.dropped, lambda self, given: _fill(self.dropped, given))

    def error(self, text: str) -> CodegenError:
        """What is wrong with the config, with its line."""
        return CodegenError(f"{self.where}: {text}")

    def refusal(self, text: str) -> CodegenError:
        """What no file can do, which a Patcher does."""
        return self.error(f"{text}. Load with the patcher itself.")

    @property
    def changes(self) -> bool:
        """Whether the file is anything but the original below a header."""
        parts = (self.patches, self.imports, self.helpers, self.blocks, self.dropped, self.excluded, self.undecorated)
        return any((*parts, self.renamed, self.bases, self.endings))


def _fill(mine: Any, given: Any) -> None:
    """What `config.additional_imports = given` does, and `+=`, which has changed the very list already."""
    if given is not mine:
        given = list(given)
        mine.clear()
        mine.update(given) if isinstance(mine, Names) else mine.extend(given)


def create_patch_from_external(
    target: str,
    replacement_module: str,
    replacement_name: str,
    description: str = "",
    *,
    patch_type: PatchKind | None = None,
) -> Patch:
    """A patch that binds `target` to an imported object, instead of copying its source into the file.

    >>> from patcher.codegen import PatchConfig, generate
    >>> config = PatchConfig("transformers.models.qwen3.modeling_qwen3", "patched_modeling_qwen3.py")
    >>> config.patches.append(create_patch_from_external("Qwen3RMSNorm", "torch.nn", "RMSNorm"))
    >>> "from torch.nn import RMSNorm" in generate(config)
    True

    Args:
        target: the class, function or method.
        replacement_module: the module to import from.
        replacement_name: the object in it.
        description: why.
        patch_type: the kind of a target that must be nothing else, `PatchKind.REPLACE_FUNCTION` for example.

    Raises:
        CodegenError: for names that can't be imported.
    """
    where = caller()
    check_description(description, f"create_patch_from_external({target!r})", where)
    if patch_type in (PatchKind.MODIFY_INIT, PatchKind.EXTERNAL):
        raise CodegenError(
            f"{where}: create_patch_from_external({target!r}) can't do patch_type={patch_type.name}. Give the kind of "
            "the target: REPLACE_CLASS, REPLACE_FUNCTION or OVERRIDE_METHOD."
        )
    for dotted in (replacement_module, replacement_name):
        if not all(part.isidentifier() for part in dotted.split(".")):
            raise CodegenError(
                f"{where}: create_patch_from_external({target!r}) can't import {dotted!r}, which isn't a dotted name."
            )
    external = External(replacement_module, replacement_name, patch_type)
    patch = Patch(PatchKind.EXTERNAL, target, external, None, description, (), where)
    check_target(patch)
    return patch


def check_description(description: Any, call: str, where: Location) -> None:
    """Raise a CodegenError for arguments in the order of another generator."""
    if not isinstance(description, str | None):
        raise CodegenError(
            f"{where}: {call} was given description={description!r}, which isn't a text. Other arguments than the "
            "first ones have names here: write name_map=... or patch_type=..."
        )


def check_target(patch: Patch) -> None:
    """Raise a CodegenError for a target that no definition can have."""
    parts = patch.target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise patch.error(f"names no definition: {patch.target!r} isn't a dotted name.")
    if patch.wanted is PatchKind.OVERRIDE_METHOD and len(parts) < 2:
        raise patch.error(
            "names no method. Write override_method('Class.method'), or use replace_function for a function."
        )
    if patch.wanted is PatchKind.REPLACE_FUNCTION and len(parts) > 1:
        raise patch.error("names no function of the module. For a method, use override_method.")
    if len(parts) > 2 or (len(parts) > 1 and patch.wanted in (PatchKind.REPLACE_CLASS, PatchKind.MODIFY_INIT)):
        raise patch.error(
            f"names a part of a method or of a nested class. Use replace_class({parts[0]!r}) for all that is around."
        )


def check_conflicts(patch: Patch, others: Iterable[Patch]) -> None:
    """Raise a CodegenError if another patch changes the same definition."""
    mine = patch.definition
    for other in others:
        theirs = other.definition
        if mine == theirs:
            raise patch.error(f"is given twice: {other.call} at {other.where} already changes it. Remove one.")
        inner, outer = (mine, theirs) if mine.startswith(theirs + ".") else (theirs, mine)
        if inner.startswith(outer + "."):
            raise patch.error(
                f"and {other.call} at {other.where} change one definition: "
                f"{outer!r} is replaced as a whole, {inner!r} would be lost. Write it into the replacement."
            )
