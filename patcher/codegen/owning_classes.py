"""Where parts of a model are converted: at the end of the `__init__` of the class that builds them.

A file has one class for a name, but a fusion decides module by module: `self.self_attn` of a decoder layer is fused,
`self.encoder_attn`, an object of the same class, isn't. The class of the layer tells the two apart.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.registration import PatchRegistration
from patcher.compat.modeling_code import module_subclasses
from patcher.source.reading import definition_of

__all__ = ["Owners", "becomes_one_class", "built_by_config"]


def built_by_config(modules: Mapping[str, nn.Module], path: str) -> str:
    """The path of a part around a module that is built by `AutoModel.from_config()`, or "".

    That gives the class of transformers, whatever the file of its name holds.
    """
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        builder = type(modules[".".join(parts[: depth - 1])])
        if isinstance(modules[".".join(parts[:depth])], PreTrainedModel) and _asks_auto(builder, parts[depth - 1]):
            return ".".join(parts[:depth])
    return ""


def _asks_auto(builder: type, name: str) -> bool:
    """Whether the `__init__` of a class assigns what an Auto class builds to `self.<name>`."""
    init = builder.__dict__.get("__init__")
    if init is None:
        return False
    for node in ast.walk(definition_of(inspect.unwrap(init))):
        if not isinstance(node, ast.Assign):
            continue
        if any(isinstance(target, ast.Attribute) and target.attr == name for target in node.targets):
            calls = [part.func for part in ast.walk(node.value) if isinstance(part, ast.Call)]
            if any(isinstance(called, ast.Attribute) and called.attr == "from_config" for called in calls):
                return True
    return False


class Owners:
    """The statements that the classes of a file run when they have built their parts.

    Args:
        described: the config that gets the patches.
        model: the skeleton of the model that decides.
        own: the classes of the file, by name.
    """

    def __init__(self, described: PatchRegistration, model: nn.Module, own: Mapping[str, type[nn.Module]]) -> None:
        self.described = described
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.own = own
        self._statements: dict[str, list[str]] = {}
        self._reasons: dict[str, list[str]] = {}

    def instances(self, cls: type[nn.Module]) -> list[str]:
        """The paths of the objects of exactly this class."""
        return [path for path, module in self.modules.items() if type(module) is cls]

    def add(self, name: str, statement: str, reason: str) -> None:
        """Have the class `name` run a statement when it is built."""
        statements = self._statements.setdefault(name, [])
        if statement not in statements:
            statements.append(statement)
            if reason not in self._reasons.setdefault(name, []):
                self._reasons[name].append(reason)

    def part(self, path: str, chosen: Mapping[str, Any], refused: Mapping[str, str]) -> tuple[str, str]:
        """The class that builds a module, and the expression by which it knows it.

        Args:
            path: the module.
            chosen: path -> what is to become of it, of all modules that are converted.
            refused: path -> why a module is left alone, for the message.

        Raises:
            CodegenError: no class of the file tells the module from others that stay as they are.
        """
        inner = path.split(".")
        others: list[str] = []
        for depth in range(len(inner) - 1, -1, -1):
            start, rest = ".".join(inner[:depth]), inner[depth:]
            cls = type(self.modules[start])
            expression = self._expression(start, rest)
            if self.own.get(cls.__name__) is not cls or not expression:
                continue
            places = [
                f"{at}.{'.'.join(rest)}" if at else ".".join(rest)
                for at, module in self.modules.items()
                if isinstance(module, cls)
            ]
            others = [place for place in places if chosen.get(place) is not chosen[path]]
            if not others:
                return cls.__name__, expression
        name = type(self.modules[path]).__name__
        if others:
            reason = f" ({refused[others[0]]})" if others[0] in refused else ""
            problem = f"{others[0]} is not fused{reason}, and others of its class, {name}, are"
        else:
            problem = f"{path}, a {name}, is one of a list"
        raise self.described.error(
            f"{problem}: no class of {self.described.source_module} builds those that are, "
            "and no others. Load with the patcher itself."
        )

    def make_subclasses(
        self,
        name: str,
        fused: Mapping[str, Any],
        refused: Mapping[str, str],
        write: Callable[[Any, str], tuple[str, str]],
        change: Callable[[Any, str], tuple[str, str]],
    ) -> None:
        """Have whoever builds objects of a class make some of them of classes that inherit from it.

        Args:
            name: the class.
            fused: path -> the class that an object is to be of.
            refused: as in `part`.
            write: the text of such a class under a name, and why.
            change: what else is done to an object, by the expression that knows it, and why.
        """
        variants = list(dict.fromkeys(fused.values()))
        for number, cls in enumerate(variants, 1):
            new = cls.__name__ if len(variants) == 1 else f"{cls.__name__}{number}"
            self.described.add_helper_after(name, *write(cls, new))
            for path in (path for path, found in fused.items() if found is cls):
                owner, part = self.part(path, fused, refused)
                statement, why = change(cls, part)
                self.add(owner, f"{part}.__class__ = {new}\n{statement}", why)

    def _expression(self, start: str, parts: list[str]) -> str:
        """How the module at `start` knows a part of it; empty for one of a list, whose length a config decides."""
        text, at = "self", start
        for part in parts:
            if not part.isdigit():
                text += f".{part}"
            elif isinstance(self.modules[at], nn.Sequential):
                text += f"[{part}]"
            else:
                return ""
            at = f"{at}.{part}" if at else part
        return text

    def write(self) -> None:
        """Add the patches."""
        for name, statements in sorted(self._statements.items()):
            lines = [
                "def with_fused(original_init, self, *args, **kwargs):",
                "    original_init(self, *args, **kwargs)",
                *(f"    {line}" for statement in statements for line in statement.splitlines()),
            ]
            self.described.modify_init(name, "\n".join(lines), "; ".join(self._reasons[name]))


def becomes_one_class(owners: Owners, original: type[nn.Module], fused: Mapping[str, Any]) -> bool:
    """Whether all objects of a class become those of one other, and no class of its module inherits from it."""
    inherited = any(
        other is not original and issubclass(other, original) and other.__module__ == original.__module__
        for other in module_subclasses()
    )
    return len(set(fused.values())) == 1 and set(fused) == set(owners.instances(original)) and not inherited
