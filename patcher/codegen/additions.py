"""What a config adds to a file and leaves out of it: records of imports, helpers and blocks, and the lists of them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex, TypeVar

from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, caller, read_source

T = TypeVar("T")
#: How many columns a line of a file may have that the original doesn't.
WIDTH = 119


def import_by_line(module: str, words: Iterable[str]) -> list[str]:
    """The lines of an import with a name in each."""
    return [f"from {module} import (", *(f"    {word}," for word in words), ")"]


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
        return [line] if len(line) <= WIDTH else import_by_line(self.module, words)

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

    @property
    def __name__(self) -> str:
        """The name that it has in the file, as the class or function itself would say."""
        return self.source.name

    @classmethod
    def of(cls, given: Any, after: str = "", site: Location | None = None) -> Helper:
        """A helper made of a class or function, of the text of one, or of the helper of another config."""
        if isinstance(given, Helper):
            return given
        call, where = f"add_helper_after({after!r})" if after else "add_helper", caller()
        return cls(read_source(given, call, where, site), given, "", (), after, where)


@dataclass(frozen=True)
class Block:
    """Statements behind the imports."""

    code: str
    description: str
    where: Location

    @classmethod
    def of(cls, given: Block | str) -> Block:
        """A block made of its text, or the block of another config."""
        if isinstance(given, Block):
            return given
        where = caller()
        code = textwrap.dedent(given.replace("\r\n", "\n")).strip("\n")
        try:
            empty = not ast.parse(code).body
        except SyntaxError as error:
            raise CodegenError(
                f"{where}: the text given to add_post_import_block does not parse: {error.msg}, on line "
                f"{error.lineno} of it."
            ) from error
        if empty:
            raise CodegenError(f"{where}: the text given to add_post_import_block holds no statement.")
        return cls(code, "", where)


class _Records(list[T]):
    """Records, made of whatever is put in: a function is as good as a helper, a text as a block."""

    made: Callable[[Any], T]

    def append(self, given: Any) -> None:
        super().append(self.made(given))

    def extend(self, given: Iterable[Any]) -> None:
        super().extend([self.made(each) for each in given])

    def insert(self, index: SupportsIndex, given: Any) -> None:
        super().insert(index, self.made(given))

    def __iadd__(self, given: Iterable[Any]) -> Self:  # type: ignore[override,misc]
        self.extend(given)
        return self


class Helpers(_Records[Helper]):
    """The helpers of a config.

    What is put in from those of another config is what is at the top of its file: a helper behind a definition
    of that file goes behind one of this file by `add_helper_after`.
    """

    made = staticmethod(Helper.of)

    def extend(self, given: Iterable[Any]) -> None:
        super().extend(each for each in given if not (isinstance(each, Helper) and each.after))

    def add(self, helper: Helper) -> None:
        """Add one that may be put behind a definition."""
        list.append(self, helper)


class Blocks(_Records[Block]):
    """The statements that a config adds behind the imports."""

    made = staticmethod(Block.of)


class Names(dict[str, Location]):
    """Names, each with the line that gave it first; filled as a set is."""

    def add(self, name: str) -> None:
        """Add one name."""
        self.update((name,))

    def update(self, *names: Iterable[str]) -> None:  # type: ignore[override]
        """Add many; those of another config keep their lines."""
        where = caller()
        for given in names:
            for name in given:
                self.setdefault(name, given[name] if isinstance(given, Names) else where)

    def __ior__(self, names: Iterable[str]) -> Self:  # type: ignore[override,misc]
        self.update(names)
        return self
