"""The records of a config: patches, added imports, helpers and blocks, and what is left out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Self, SupportsIndex, TypeVar

from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, caller, caller_module, given_code, read_source
from patcher.source.scopes import bound_names

T = TypeVar("T")
#: The maximal length of a line that the original doesn't have.
WIDTH = 119


# --- patches --------------------------------------------------------------------------------------------------------


class PatchKind(Enum):
    """What a patch does to its target. The values are the words that the header of a generated file uses."""

    REPLACE_CLASS = "replace class"
    REPLACE_FUNCTION = "replace function"
    OVERRIDE_METHOD = "override method"
    MODIFY_INIT = "modify init"
    EXTERNAL = "external"

    # Aliases for configs of other generators.
    CLASS_REPLACEMENT = REPLACE_CLASS
    FUNCTION_REPLACEMENT = REPLACE_FUNCTION
    METHOD_OVERRIDE = OVERRIDE_METHOD
    INIT_MODIFICATION = MODIFY_INIT

    @property
    def method(self) -> str:
        """The call that creates such a patch."""
        return "create_patch_from_external" if self is PatchKind.EXTERNAL else self.name.lower()


#: An alias for configs of other generators.
PatchType = PatchKind


@dataclass(frozen=True)
class External:
    """An object that the generated file imports instead of containing its source.

    Attributes:
        module: the module to import from.
        name: the object in it.
        patch_type: what it may replace; None for anything.
    """

    module: str
    name: str
    patch_type: PatchKind | None = None

    def import_as(self, bound: str) -> str:
        """Return the import that binds it to a name, in the place of what it replaces; a class body may have one."""
        return f"from {self.module} import {self.name}" + (f" as {bound}" if bound != self.name else "")


@dataclass(frozen=True)
class Patch:
    """One change of one definition, created by the methods of `PatchConfig` and by `create_patch_from_external`.

    Attributes:
        kind: what is done.
        target: `"Class"`, `"function"` or `"Class.method"`.
        replacement: the class or function, its text, or an `External`.
        source: the text of the replacement, None for an `External`.
        description: the reason, in the author's words.
        name_map: names of the replacement, each with the name that the generated file uses instead.
        where: the line of the config.
        keep_decorators: whether the decorators of the original are kept.
        new: whether an overridden method may be missing; None decides by the similarity of existing names.
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
    def target_kind(self) -> PatchKind | None:
        """The kind of patch that the target must fit; None for an external object that may replace anything."""
        return self.replacement.patch_type if isinstance(self.replacement, External) else self.kind

    @property
    def call(self) -> str:
        """The call that created the patch, for messages and the header."""
        return f"{self.kind.method}({self.target!r})"

    @property
    def definition(self) -> str:
        """The dotted name of what it changes: of `modify_init`, the `__init__`."""
        return f"{self.target}.__init__" if self.kind is PatchKind.MODIFY_INIT else self.target

    @property
    def place(self) -> Location:
        """The line of the `def` or `class` of its code, or of the config that gives it as text."""
        if self.source is None or not self.source.file:
            return self.where
        return Location(self.source.file, self.source.line + self.source.tree().lineno - 1)

    @property
    def code(self) -> str:
        """The text of the replacement, "" for an `External`."""
        return "" if self.source is None else self.source.text

    def error(self, text: str) -> CodegenError:
        """Return an error with the line and the call that created the patch."""
        return CodegenError(f"{self.where}: {self.call} {text}")

    def check(self, others: Iterable[Patch]) -> None:
        """Raise a CodegenError for a target that no definition can have, or that another patch changes."""
        parts, kind = self.target.split("."), self.target_kind
        if not all(part.isidentifier() for part in parts):
            raise self.error(f"names no definition: {self.target!r} isn't a dotted name.")
        if kind is PatchKind.OVERRIDE_METHOD and len(parts) < 2:
            raise self.error(
                "names no method. Write override_method('Class.method'), or use replace_function for a function."
            )
        if kind is PatchKind.REPLACE_FUNCTION and len(parts) > 1:
            raise self.error("names no function of the module. For a method, use override_method.")
        if len(parts) > 2 or (len(parts) > 1 and kind in (PatchKind.REPLACE_CLASS, PatchKind.MODIFY_INIT)):
            raise self.error(
                f"names a part of a method or of a nested class. Use replace_class({parts[0]!r}) for all that is "
                "around."
            )
        for other in others:
            outer, inner = sorted((self.definition, other.definition), key=len)
            if inner == outer:
                raise self.error(f"is given twice: {other.call} at {other.where} already changes it. Remove one.")
            if inner.startswith(outer + "."):
                raise self.error(
                    f"and {other.call} at {other.where} change one definition: "
                    f"{outer!r} is replaced as a whole, {inner!r} would be lost. Write it into the replacement."
                )


def create_patch_from_external(
    target: str,
    replacement_module: str,
    replacement_name: str,
    description: str = "",
    *,
    patch_type: PatchKind | None = None,
) -> Patch:
    """Create a patch that binds `target` to an imported object, instead of copying its source into the file.

    >>> from patcher.codegen import PatchConfig, generate
    >>> config = PatchConfig("transformers.models.qwen3.modeling_qwen3", "patched_modeling_qwen3.py")
    >>> config.patches.append(create_patch_from_external("Qwen3RMSNorm", "torch.nn", "RMSNorm"))
    >>> "from torch.nn import RMSNorm" in generate(config)
    True

    Args:
        target: the class, function or method.
        replacement_module: the module to import from.
        replacement_name: the object in it.
        description: the reason.
        patch_type: the kind of patch that the target must fit, `PatchKind.REPLACE_FUNCTION` for example.

    Raises:
        CodegenError: for names that can't be imported.
    """
    where, call = caller(), f"create_patch_from_external({target!r})"
    check_description(description, call, where)
    if patch_type in (PatchKind.MODIFY_INIT, PatchKind.EXTERNAL):
        raise CodegenError(
            f"{where}: create_patch_from_external({target!r}) can't do patch_type={patch_type.name}. Give the kind of "
            "the target: REPLACE_CLASS, REPLACE_FUNCTION or OVERRIDE_METHOD."
        )
    if not all(part.isidentifier() for part in replacement_module.split(".")):
        raise CodegenError(f"{where}: {call} can't import {replacement_module!r}, which isn't a dotted name.")
    if not replacement_name.isidentifier():
        raise CodegenError(
            f"{where}: {call} can't import {replacement_name!r}, which isn't a name that a module has. For a "
            "method of a class write override_method, with a function that calls it."
        )
    external = External(replacement_module, replacement_name, patch_type)
    patch = Patch(PatchKind.EXTERNAL, target, external, None, description, (), where)
    patch.check(())
    return patch


def check_description(description: Any, call: str, where: Location) -> None:
    """Raise a CodegenError for arguments in the order of another generator."""
    if not isinstance(description, str | None):
        raise CodegenError(
            f"{where}: {call} was given description={description!r}, which isn't a text. Other arguments than the "
            "first ones have names here: write name_map=... or patch_type=..."
        )


# --- additions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """A name that the generated file imports in addition to the original's.

    Attributes:
        module: the module.
        name: what is imported from the module, "" if the module itself is.
        alias: the name to bind instead, "" for none.
        where: the line of the config.
    """

    module: str
    name: str
    alias: str
    where: Location

    @property
    def call(self) -> str:
        """What messages call it."""
        return f"add_import({self.module!r})"

    @property
    def binds(self) -> str:
        """The name that it binds."""
        return self.alias or self.name or self.module.partition(".")[0]

    def bound(self) -> Collection[str]:
        """Return the name that it binds, as helpers and blocks do."""
        return [self.binds]


def import_from(module: str, names: Sequence[str], width: int = WIDTH) -> list[str]:
    """Return the lines of an import: one, or one for each name if it is longer than `width`."""
    line = f"from {module} import {', '.join(names)}"
    return [line] if len(line) <= width else [f"from {module} import (", *(f"    {name}," for name in names), ")"]


@dataclass(frozen=True)
class Helper:
    """A class or function that patches use, at the top of the file or right after one of its definitions."""

    source: Source
    description: str
    name_map: tuple[tuple[str, str], ...]
    after: str
    where: Location

    @property
    def __name__(self) -> str:
        """The name in the file, like that of the class or function itself."""
        return self.source.name

    @property
    def call(self) -> str:
        """What messages call it."""
        return f"the helper {self.__name__!r}"

    @property
    def code(self) -> str:
        """Its text."""
        return self.source.text

    def bound(self) -> Collection[str]:
        """Return the name that it binds."""
        return [self.__name__]

    @classmethod
    def of(cls, obj: Any, after: str = "") -> Helper:
        """Return the helper for a class or function, for the text of one, or of another config."""
        if isinstance(obj, Helper):
            return obj
        call, where = f"add_helper_after({after!r})" if after else "add_helper", caller()
        return cls(read_source(obj, call, where), "", (), after, where)


@dataclass(frozen=True)
class Block:
    """Statements after the imports."""

    code: str
    description: str
    where: Location
    # What patches and helpers have.
    call = "the text given to add_post_import_block"
    source = None
    name_map = ()

    def bound(self) -> Collection[str]:
        """Return the names that it binds."""
        return bound_names(ast.parse(self.code))

    @classmethod
    def of(cls, block: Block | str) -> Block:
        """Return the block for a text, or of another config."""
        if isinstance(block, Block):
            return block
        where = caller()
        code, tree = given_code(block, "add_post_import_block", where)
        if not tree.body:
            raise CodegenError(f"{where}: {cls.call} holds no statement.")
        return cls(code, "", where)


class _Records(list[T]):
    """A list that converts its items to records: functions to helpers, texts to blocks."""

    convert: Callable[[Any], T]

    def append(self, item: Any) -> None:
        super().append(self.convert(item))

    def extend(self, items: Iterable[Any]) -> None:
        super().extend([self.convert(item) for item in items])

    def insert(self, index: SupportsIndex, item: Any) -> None:
        super().insert(index, self.convert(item))

    def __iadd__(self, items: Iterable[Any]) -> Self:  # type: ignore[override,misc]
        self.extend(items)
        return self


class Helpers(_Records[Helper]):
    """The helpers of a config.

    Extending it by those of another config takes the helpers at the top of that file only: one after a definition is
    added by `add_helper_after`.
    """

    convert = staticmethod(Helper.of)

    def extend(self, items: Iterable[Any]) -> None:
        super().extend(item for item in items if not (isinstance(item, Helper) and item.after))

    def add(self, helper: Helper) -> None:
        """Append a helper that may be placed after a definition."""
        list.append(self, helper)


class Blocks(_Records[Block]):
    """The blocks of a config."""

    convert = staticmethod(Block.of)


class Names(dict[str, Location]):
    """A set of names, each with the line that first added it."""

    def add(self, name: str) -> None:
        """Add one name."""
        self.update((name,))

    def update(self, *names: Iterable[str]) -> None:  # type: ignore[override]
        """Add several names; those of another config keep their lines."""
        where = caller()
        for added in names:
            for name in added:
                self.setdefault(name, added[name] if isinstance(added, Names) else where)

    def __ior__(self, names: Iterable[str]) -> Self:  # type: ignore[override,misc]
        self.update(names)
        return self


# --- the config as the generator reads it ---------------------------------------------------------------------------


class PatchSpec:
    """What to change in one modeling module, and the file to write it to. The generator reads nothing else.

    Attributes:
        where: the line that created it.
        config_module, config_file: the module of that line.
    """

    def __init__(self, source_module: str, target_file: str = "patched_modeling.py", description: str = "") -> None:
        self.where = caller()
        self.config_module, self.config_file = caller_module(), self.where.file
        if not all(part.isidentifier() for part in source_module.split(".")):
            raise self.error(
                f"source_module={source_module!r} isn't a module name. "
                "Give a dotted name, such as 'transformers.models.llama.modeling_llama'."
            )
        self.source_module = source_module
        self.target_file = target_file
        self.description = description
        self.patches: list[Patch] = []
        self.imports: list[Import] = []
        self.helpers = Helpers()
        self.blocks = Blocks()
        self.dropped = Names()  # imported names
        self.excluded = Names()  # definitions
        self.undecorated: dict[tuple[str, str], Location] = {}  # of (definition, decorator)
        #: class -> its new name; the old one stays an alias
        self.renamed: dict[str, str] = {}
        #: class -> a helper that it inherits from as well
        self.bases: dict[str, str] = {}
        #: classes that have a fused subclass in the file
        self.derived: list[str] = []
        #: statements after the definitions
        self.endings = Blocks()
        #: the Patcher that it was created from, and the patches and helpers that have its effect
        self.runtime: Any = None
        self.of_runtime: tuple[Patch | Helper, ...] = ()
        #: the call that generates the file, if no file has the config
        self.made_by = ""
        #: whether checkpoints of the file's models are converted by what it registers alone
        self.converts_itself = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source_module!r}, {self.target_file!r}, {self.number_of_patches})"

    @property
    def number_of_patches(self) -> str:
        """`1 patch`, `2 patches`."""
        return "1 patch" if len(self.patches) == 1 else f"{len(self.patches)} patches"

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

    # Aliases for configs of other generators.
    additional_imports = property(lambda self: self.imports, lambda self, items: _assign(self.imports, items))
    post_import_blocks = property(lambda self: self.blocks, lambda self, items: _assign(self.blocks, items))
    drop_imported_names = property(lambda self: self.dropped, lambda self, items: _assign(self.dropped, items))

    def error(self, text: str) -> CodegenError:
        """Return an error with the line of the config."""
        return CodegenError(f"{self.where}: {text}")

    def refusal(self, text: str) -> CodegenError:
        """Return the error for what a Patcher does and no file can do."""
        return self.error(f"{text}. Load with the patcher itself.")

    def added_names(self) -> set[str]:
        """Return the names that helpers, imports and blocks bind."""
        return {name for item in (*self.helpers, *self.imports, *self.blocks) for name in item.bound()}


def _assign(records: Any, items: Any) -> None:
    """Assign to an alias; after `+=`, the items are the list itself."""
    if items is not records:
        items = list(items)
        records.clear()
        records.update(items) if isinstance(records, Names) else records.extend(items)
