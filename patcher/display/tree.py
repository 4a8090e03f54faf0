"""The modules of a model as a tree, alike layers folded, with what became of each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from patcher.patterns import compress, inside, is_number, without_numbers


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

    @property
    def operations(self) -> str:
        """What the conversion does, without the names."""
        return self.conversion.partition(" -> ")[2].partition(" [")[2].removesuffix("]")


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


_NUMBERS = re.compile(r"[{\d]")
#: More modules in a row of which nothing is shown are one line.
IN_A_ROW = 4


def in_rows(children: Iterable[ModuleNode]) -> Iterator[list[ModuleNode]]:
    """Each module alone, but for long rows of which nothing is shown."""
    row: list[ModuleNode] = []
    for child in children:
        if child.stands_out or child.is_open:
            yield from _cut(row)
            row = []
            yield [child]
        else:
            row.append(child)
    yield from _cut(row)


def _cut(row: list[ModuleNode]) -> Iterable[list[ModuleNode]]:
    return [row] if len(row) > IN_A_ROW else [[each] for each in row]


@dataclass(slots=True)
class _Place:
    """A module while the tree is built."""

    was: str = ""
    becomes: str = ""
    reason: str = ""
    functions: tuple[tuple[str, str], ...] = ()
    weights: dict[tuple[object, ...], tuple[list[str], list[str]]] = field(default_factory=dict)
    children: dict[str, _Place] = field(default_factory=dict)

    def at(self, path: str) -> _Place:
        place = self
        for name in path.split(".") if path else ():
            found = place.children.get(name)
            if found is None:
                found = place.children[name] = _Place()
            place = found
        return place

    def owner(self, name: str) -> tuple[str, _Place]:
        """The innermost module with this tensor that is marked already, else the innermost there is."""
        place, path, owned = self, [], ("", self)
        for segment in name.split(".")[:-1]:
            found = place.children.get(segment)
            if found is None:
                break
            place = found
            path.append(segment)
            if place.becomes or not owned[1].becomes:
                owned = ".".join(path), place
        return owned


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
    root = _Place(model)
    for path, name in modules:
        root.at(path).was = name
    for path, was, becomes in changed:
        place = root.at(path)
        place.was, place.becomes = was, becomes
    for path, reason in refused:
        root.at(path).reason = reason
    _note_functions(root, list(functions))
    for each in weights:
        _note_weights(root, each)
    return _folded("", root)


def _note_functions(root: _Place, functions: list[tuple[str, str, tuple[str, ...]]]) -> None:
    waiting = [root] if functions else []
    while waiting:
        place = waiting.pop()
        place.functions = tuple((name, new) for name, new, callers in functions if place.was in callers)
        waiting += place.children.values()


def _note_weights(root: _Place, weights: Weights) -> None:
    path, owner = root.owner((weights.parameters or weights.keys)[0])
    if weights.what == "kept" and not owner.becomes:
        return
    keys, parameters = ([_below(name, path) for name in names] for names in weights[1:3])
    what = "converted" if weights.what == "kept" else weights.what
    alike = (tuple(dict.fromkeys(map(without_numbers, names))) for names in (keys, parameters))
    found = owner.weights.setdefault((what, weights.conversion, *alike), ([], []))
    found[0].extend(keys)
    found[1].extend(parameters)


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


def _folded(name: str, place: _Place) -> ModuleNode:
    node = ModuleNode(
        name,
        place.was,
        place.becomes,
        place.reason,
        place.functions,
        tuple(
            Weights(str(what), tuple(compress(keys)), tuple(compress(parameters)), str(text))
            for (what, text, *_), (keys, parameters) in place.weights.items()
        ),
    )
    alike: dict[tuple[str, ModuleNode], list[str]] = {}
    for called, child in place.children.items():
        found = _folded(called, child)
        numbered = is_number(called)
        alike.setdefault(("" if numbered else called, found._replace(name="")), []).append(found.name)
    children = tuple(
        child._replace(name=compress(names)[0] if len(names) > 1 else names[0])  # most: of one name nothing is folded
        for (_, child), names in alike.items()
    )
    is_plain = name and not is_number(name) and not node.stands_out
    if is_plain and len(children) == 1 and _NUMBERS.match(children[0].name):  # a list that isn't marked itself
        return children[0]._replace(name=f"{name}.{children[0].name}")
    return node._replace(children=children)
