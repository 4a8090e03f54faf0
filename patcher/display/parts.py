"""The parts of a shown value: tables, notes, trees and diffs, for any renderer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

#: The meaning of a text, for its colour. A text must be understood without its colour.
Tone = Literal["", "good", "bad", "warning", "changed", "dim", "name", "code", "made", "arrow"]
#: Characters that move the cursor, colour or reorder text, all but the newline and the tab.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: The length of a bar of the share 1.
_BAR = 20


def visible(text: str) -> str:
    r"""Return an untrusted text (names of classes, keys, files) with its control characters escaped.

    >>> visible("weight\x1b[2K\u202e")
    'weight\\x1b[2K\\u202e'
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Cell(NamedTuple):
    """A text with a tone."""

    text: str
    tone: Tone = ""


def bar(share: float, tone: Tone) -> Cell:
    """Return a bar of a share of the whole, at most half as long again as the whole.

    >>> bar(0.25, "good")
    Cell(text='█████', tone='good')
    """
    return Cell("█" * round(_BAR * min(share, 1.5)), tone)


#: A line of plain and toned texts.
Line = Sequence[str | Cell]
_ARROW = (" ", Cell("->", "arrow"), " ")


class Table(NamedTuple):
    """A table with a title, the heads of its columns, and rows; a page folds it if it is long."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str | Cell, ...]]
    is_long: bool = False


class Notes(NamedTuple):
    """Texts of one or more lines under a title."""

    title: str
    rows: Sequence[str]
    tone: Tone


class Code(NamedTuple):
    """A unified diff, with comments above it."""

    text: str


class Weights(NamedTuple):
    """Tensors of a module that aren't read unchanged.

    Attributes:
        what: `converted`, `missing`, `new`, `left over`, `dropped` or `wrong shape`.
        keys: the checkpoint keys, relative to the module.
        parameters: the parameters, relative to the module.
        conversion: the conversion, or what is wrong.
    """

    what: str
    keys: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    conversion: str = ""

    def line(self) -> Line:
        """Return the line of a tree for these tensors."""
        keys, parameters = ", ".join(self.keys), ", ".join(self.parameters)
        if self.what == "converted":
            operations = self.conversion.partition(" -> ")[2].partition(" [")[2].removesuffix("]")
            return Cell(keys, "code"), *_ARROW, Cell(parameters, "made"), Cell(f"  {operations}", "dim")
        how = f": {self.conversion}" if self.conversion else ""
        tone: Tone = "dim" if self.what in ("new", "dropped") else "bad"
        return Cell(f"{self.what}:", tone), " ", Cell(parameters or keys, "code"), how


class ModuleNode(NamedTuple):
    """A module, or several modules with identical subtrees.

    Attributes:
        name: the name in the parent module, `{0..29}` or `layers.{0..29}` for several modules.
        was: the original class.
        becomes: the class that replaces it; "" if none does.
        reason: why a fusion leaves it unchanged.
        functions: (function, replacement) of the replaced functions that it calls.
        weights: the tensors that aren't read unchanged.
        children: the child modules.
    """

    name: str
    was: str
    becomes: str = ""
    reason: str = ""
    functions: tuple[tuple[str, str], ...] = ()
    weights: tuple[Weights, ...] = ()
    children: tuple[ModuleNode, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether the module itself has anything to show."""
        return bool(self.becomes or self.reason or self.functions or self.weights)

    @property
    def is_open(self) -> bool:
        """Whether a module in it has anything to show."""
        return any(child.is_changed or child.is_open for child in self.children)

    def walk(self) -> Iterator[ModuleNode]:
        """Yield the module and everything below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def label(self) -> Line:
        """The line of a tree for the module."""
        name = Cell(self.name, "name" if self.is_changed else "code" if self.is_open else "dim")
        label: list[str | Cell] = [*([name, "  "] if self.name else ()), Cell(self.was, "dim")]
        return [*label, *_ARROW, Cell(self.becomes, "changed")] if self.becomes else label

    @property
    def notes(self) -> list[Line]:
        """The lines below it."""
        notes: list[Line] = [("calls ", Cell(old, "code"), *_ARROW, Cell(new, "made")) for old, new in self.functions]
        notes += [weights.line() for weights in self.weights]
        return [*notes, (Cell("not fused:", "warning"), f" {self.reason}")] if self.reason else notes


Part = Table | Notes | Code | ModuleNode


def is_filled(part: Part) -> bool:
    """Whether a part has anything to show."""
    return bool(getattr(part, "rows", True))
