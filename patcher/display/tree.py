"""The modules of a model as a tree, alike layers folded, with what became of each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import NamedTuple

from patcher.display.parts import Branch, Cell, Line, Tone
from patcher.patterns import compress, inside, is_number, without_numbers

_NUMBERS = re.compile(r"[{\d]")
#: More modules in a row of which nothing is shown are one line.
IN_A_ROW = 4
_ARROW = (" ", Cell("->", "arrow"), " ")


class Weights(NamedTuple):
    """Tensors of one module that aren't read as they are.

    Attributes:
        what: `converted`, `missing`, `new`, `left over`, `dropped` or `wrong shape`.
        keys: those of the checkpoint, by their names below the module.
        parameters: those of the module, in the same way.
        conversion: the conversion, or what is wrong.
    """

    what: str
    keys: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    conversion: str = ""

    def line(self) -> Line:
        """What is shown of it."""
        keys, parameters = ", ".join(self.keys), ", ".join(self.parameters)
        if self.what == "converted":
            operations = self.conversion.partition(" -> ")[2].partition(" [")[2].removesuffix("]")
            return Cell(keys, "code"), *_ARROW, Cell(parameters, "made"), Cell(f"  {operations}", "dim")
        how = f": {self.conversion}" if self.conversion else ""
        tone: Tone = "dim" if self.what in ("new", "dropped") else "bad"
        return Cell(f"{self.what}:", tone), " ", Cell(parameters or keys, "code"), how


def alike_as_one(weights: Iterable[Weights]) -> tuple[Weights, ...]:
    """Those that differ in numbers alone as one, whose names are folded."""
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for each in weights:
        alike = (", ".join(dict.fromkeys(map(without_numbers, names))) for names in (each.keys, each.parameters))
        keys, parameters = groups.setdefault((each.what, each.conversion, *alike), ([], []))
        keys += each.keys
        parameters += each.parameters
    return tuple(
        Weights(what, tuple(compress(keys)), tuple(compress(parameters)), text)
        for (what, text, *_), (keys, parameters) in groups.items()
    )


class ModuleNode(NamedTuple):
    """A module, or several that are alike in all that is below.

    Attributes:
        name: what it is called in the module that it is in, `{0..29}` or `layers.{0..29}` for several.
        was: its class, before anything was put in its place.
        becomes: the class that is put there; "" where none is.
        reason: why a fusion leaves it alone.
        functions: (function, what is called in its place) of the replaced functions that its class calls.
        weights: the tensors that aren't read as they are.
        children: the modules in it.
    """

    name: str
    was: str
    becomes: str = ""
    reason: str = ""
    functions: tuple[tuple[str, str], ...] = ()
    weights: tuple[Weights, ...] = ()
    children: tuple[ModuleNode, ...] = ()

    @property
    def stands_out(self) -> bool:
        """Whether anything is shown of the module itself."""
        return bool(self.becomes or self.reason or self.functions or self.weights)

    @property
    def is_open(self) -> bool:
        """Whether anything is shown of a module in it."""
        return any(child.stands_out or child.is_open for child in self.children)

    def walk(self) -> Iterator[ModuleNode]:
        """It and all that is below."""
        yield self
        for child in self.children:
            yield from child.walk()

    def branch(self, path: str = "") -> Branch:
        """What is shown of it, in a module at a path; many modules in a row of which nothing is shown are one line."""
        path = f"{inside(path)}{self.name}"
        below: list[Branch] = []
        for is_loud, run in groupby(self.children, lambda each: each.stands_out or each.is_open):
            row = list(run)
            found = [each.branch(path) for each in row]
            if not is_loud and len(row) > IN_A_ROW:
                found = [Branch((Cell(", ".join(each.name for each in row), "dim"),), below=found)]
            below += found
        name = Cell(self.name, "name" if self.stands_out else "code" if self.is_open else "dim")
        label: list[str | Cell] = [*([name, "  "] if self.name else ()), Cell(self.was, "dim")]
        label += [*_ARROW, Cell(self.becomes, "changed")] if self.becomes else ()
        notes: list[Line] = [("calls ", Cell(old, "code"), *_ARROW, Cell(new, "made")) for old, new in self.functions]
        notes += [weights.line() for weights in self.weights]
        notes += [(Cell("not fused:", "warning"), f" {self.reason}")] if self.reason else ()
        return Branch(label, notes, below, self.is_open, path)


def module_tree(
    model: str,
    modules: Iterable[tuple[str, str]],
    *,
    changed: Iterable[tuple[str, str, str]] = (),
    refused: Iterable[tuple[str, str]] = (),
    functions: Iterable[tuple[str, str, tuple[str, ...]]] = (),
    weights: Iterable[Weights] = (),
) -> ModuleNode:
    """The tree of a model.

    >>> modules = [(f"layers.{number}.{name}", "Linear") for number in range(3) for name in ("up", "down")]
    >>> changed = [("layers.0.up", "Linear", "Mine"), ("layers.2.up", "Linear", "Mine")]
    >>> [node.name for node in module_tree("Model", modules, changed=changed).walk()]
    ['', 'layers', '{0,2}', 'up', 'down', '1', 'up', 'down']

    Args:
        model: the class of the model.
        modules: (path, class) of every module, in their order.
        changed: (path, class, replacement).
        refused: (path, reason) of what fusions leave alone.
        functions: (function, what is called in its place, the classes that call it).
        weights: those that aren't read as they are, by their whole names. `kept` ones are conversions of stock, which
            are shown at replaced modules only. What belongs to no module is shown at the model.
    """
    classes = {"": model} | dict(modules)
    becomes: dict[str, str] = {}
    for path, was, new in changed:
        classes[path], becomes[path] = was, new
    reasons, calls = dict(refused), tuple(functions)
    below: dict[str, dict[str, None]] = {}
    for path in (*classes, *reasons):
        while path:
            path, _, name = path.rpartition(".")
            if name in below.setdefault(path, {}):
                break
            below[path][name] = None
            classes.setdefault(path, "")
    noted: dict[str, list[Weights]] = {}
    for each in weights:
        at = _owner((each.parameters or each.keys)[0], classes, becomes)
        if each.what != "kept" or at in becomes:
            what = "converted" if each.what == "kept" else each.what
            keys, parameters = (tuple(_below(name, at) for name in names) for names in (each.keys, each.parameters))
            noted.setdefault(at, []).append(Weights(what, keys, parameters, each.conversion))

    def folded(name: str, path: str) -> ModuleNode:
        was = classes.get(path, "")
        called = tuple((old, new) for old, new, callers in calls if was in callers)
        found = alike_as_one(noted.get(path, ()))
        node = ModuleNode(name, was, becomes.get(path, ""), reasons.get(path, ""), called, found)
        alike: dict[tuple[str, ModuleNode], list[str]] = {}
        for child in below.get(path, ()):
            inner = folded(child, inside(path) + child)
            alike.setdefault(("" if is_number(child) else child, inner._replace(name="")), []).append(inner.name)
        children = tuple(
            child._replace(name=compress(names)[0] if len(names) > 1 else names[0])  # most: of one nothing is folded
            for (_, child), names in alike.items()
        )
        is_plain = name and not is_number(name) and not node.stands_out
        if is_plain and len(children) == 1 and _NUMBERS.match(children[0].name):  # a list that isn't marked itself
            return children[0]._replace(name=f"{name}.{children[0].name}")
        return node._replace(children=children)

    return folded("", "")


def _owner(name: str, classes: Mapping[str, str], becomes: Mapping[str, str]) -> str:
    """The innermost module with a tensor that is another one now, else the innermost that there is."""
    owner = ""
    for path in accumulate(name.split(".")[:-1], "{}.{}".format):
        if path not in classes:
            break
        if path in becomes or owner not in becomes:
            owner = path
    return owner


def _below(name: str, path: str) -> str:
    """A name as it is in the module; one that is elsewhere has `*` for the numbers of the module, to be alike."""
    end = path
    while end and not name.startswith(inside(end)):  # a checkpoint of the base model has fewer names in front
        end = end.partition(".")[2]
    if end:
        return name.removeprefix(inside(end))
    numbers = [segment for segment in path.split(".") if is_number(segment)]
    segments = name.split(".")
    for place, segment in enumerate(segments):
        if numbers and segment == numbers[0]:
            segments[place] = "*"
            del numbers[0]
    return ".".join(segments)
