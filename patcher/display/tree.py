"""The modules of a model and their changes as a tree, with identical layers folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate

from patcher.display.parts import ModuleNode, Weights
from patcher.patterns import compress, inside, is_number, without_numbers

_NUMBERS = re.compile(r"[{\d]")


def alike_as_one(weights: Iterable[Weights]) -> tuple[Weights, ...]:
    """Merge weights that differ only in numbers, and fold their names."""
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for entry in weights:
        patterns = (", ".join(dict.fromkeys(map(without_numbers, names))) for names in (entry.keys, entry.parameters))
        keys, parameters = groups.setdefault((entry.what, entry.conversion, *patterns), ([], []))
        keys += entry.keys
        parameters += entry.parameters
    return tuple(
        Weights(what, tuple(compress(keys)), tuple(compress(parameters)), text)
        for (what, text, *_), (keys, parameters) in groups.items()
    )


def module_tree(
    model: str,
    modules: Iterable[tuple[str, str]],
    *,
    changed: Iterable[tuple[str, str, str]] = (),
    refused: Iterable[tuple[str, str]] = (),
    functions: Mapping[str, tuple[tuple[str, str], ...]] | None = None,
    weights: Iterable[Weights] = (),
) -> ModuleNode:
    """Return the tree of a model.

    >>> modules = [(f"layers.{index}.{name}", "Linear") for index in range(3) for name in ("up", "down")]
    >>> changed = [("layers.0.up", "Linear", "Mine"), ("layers.2.up", "Linear", "Mine")]
    >>> [node.name for node in module_tree("Model", modules, changed=changed).walk()]
    ['', 'layers', '{0,2}', 'up', 'down', '1', 'up', 'down']

    Args:
        model: the class of the model.
        modules: (path, class) of every module, in order.
        changed: (path, class, replacement) of the modules that are replaced or fused.
        refused: (path, reason) of the modules that fusions leave unchanged.
        functions: path -> (function, replacement) of the replaced functions that the module calls.
        weights: the tensors that aren't read unchanged, by their full names. `kept` ones are stock conversions, shown
            at replaced modules only. Tensors that belong to no module are shown at the model.
    """
    classes = {"": model} | dict(modules)
    becomes: dict[str, str] = {}
    for path, was, new in changed:
        classes[path], becomes[path] = was, new
    reasons, calls = dict(refused), functions or {}
    below: dict[str, dict[str, None]] = {}
    for path in (*classes, *reasons):
        while path:
            path, _, name = path.rpartition(".")
            if name in below.setdefault(path, {}):
                break
            below[path][name] = None
            classes.setdefault(path, "")
    weights_of: dict[str, list[Weights]] = {}
    for entry in weights:
        owner = _owner((entry.parameters or entry.keys)[0], classes, becomes)
        if entry.what != "kept" or owner in becomes:
            what = "converted" if entry.what == "kept" else entry.what
            keys = tuple(_below(key, owner) for key in entry.keys)
            parameters = tuple(_below(name, owner) for name in entry.parameters)
            weights_of.setdefault(owner, []).append(Weights(what, keys, parameters, entry.conversion))

    def folded(name: str, path: str) -> ModuleNode:
        was = classes.get(path, "")
        converted = alike_as_one(weights_of.get(path, ()))
        node = ModuleNode(name, was, becomes.get(path, ""), reasons.get(path, ""), calls.get(path, ()), converted)
        identical: dict[tuple[str, ModuleNode], list[str]] = {}
        for child in below.get(path, ()):
            inner = folded(child, inside(path) + child)
            identical.setdefault(("" if is_number(child) else child, inner._replace(name="")), []).append(inner.name)
        children = tuple(
            child._replace(name=compress(names)[0] if len(names) > 1 else names[0])  # most have no identical sibling
            for (_, child), names in identical.items()
        )
        is_unchanged = name and not is_number(name) and not node.is_changed
        if is_unchanged and len(children) == 1 and _NUMBERS.match(children[0].name):  # a list and its items: one line
            return children[0]._replace(name=f"{name}.{children[0].name}")
        return node._replace(children=children)

    return folded("", "")


def _owner(name: str, classes: Mapping[str, str], becomes: Mapping[str, str]) -> str:
    """Return the innermost replaced module that has a tensor, or the innermost module if none is replaced."""
    owner = ""
    for path in accumulate(name.split(".")[:-1], "{}.{}".format):
        if path not in classes:
            break
        if path in becomes or owner not in becomes:
            owner = path
    return owner


def _below(name: str, path: str) -> str:
    """Return a name relative to a module; in a name elsewhere, `*` replaces the module's numbers, so layers fold."""
    end = path
    while end and not name.startswith(inside(end)):  # a checkpoint of the base model lacks the prefix
        end = end.partition(".")[2]
    if end:
        return name.removeprefix(inside(end))
    numbers = [segment for segment in path.split(".") if is_number(segment)]
    segments = name.split(".")
    for position, segment in enumerate(segments):
        if numbers and segment == numbers[0]:
            segments[position] = "*"
            del numbers[0]
    return ".".join(segments)
