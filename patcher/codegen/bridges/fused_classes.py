"""Fused classes as code, and where parts of a model become theirs: at the end of the `__init__` that builds them.

A class itself is changed where all its objects are fused. But a fusion decides module by module: `self.self_attn` of a
decoder layer is fused, `self.encoder_attn`, an object of the same class, isn't. The class of the layer tells the two
apart. There, and where a rewritten forward decides call by call, the fused forward stands in a class that inherits
from the original, and whoever builds the objects makes them of that class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.bridges.dependencies import RUNTIME
from patcher.compat.modeling_code import module_subclasses, unrebound
from patcher.fusions.joined import Joined
from patcher.fusions.methods import trees_of
from patcher.fusions.old_names import OldNames
from patcher.fusions.rewrite import class_text
from patcher.layouts.layouts import Layout
from patcher.source.edits import Edit, Text, applied, start_line
from patcher.source.indentation import dedented, indented, moved
from patcher.source.reading import Location, definition_of, read_source

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig


#: Why a model of the file builds its parts itself.
BUILT = "parts that are models of this file are built here: an Auto class would give those of transformers"


def built_by_config(modules: Mapping[str, nn.Module], path: str) -> list[str]:
    """The paths of the parts around a module that are built by `AutoModel.from_config()`, the outermost first.

    That gives the class of transformers, whatever the file of its name holds.
    """
    around = ["", *accumulate(path.split("."), "{}.{}".format)] if path else []
    return [
        part
        for parent, part in pairwise(around)
        if isinstance(modules[part], PreTrainedModel)
        and _asking_auto(type(modules[parent]), part.rpartition(".")[2]) is not None
    ]


def _asking_auto(builder: type, name: str) -> ast.Call | None:
    """The call of an Auto class in the `__init__` of a class whose result becomes `self.<name>`."""
    init = builder.__dict__.get("__init__")
    if init is None:
        return None
    assignments = [node for node in ast.walk(definition_of(inspect.unwrap(init))) if isinstance(node, ast.Assign)]
    values = [each.value for each in assignments if name in {getattr(to, "attr", "") for to in each.targets}]
    calls = [part for value in values for part in ast.walk(value) if isinstance(part, ast.Call)]
    return next((each for each in calls if ast.unparse(each.func).endswith(".from_config")), None)


def building_own(builder: type, parts: Mapping[str, str]) -> str:
    """The `__init__` of a class, which builds these parts as classes of the file where their config is of those.

    Args:
        builder: the class.
        parts: name of a part -> name of its class. An Auto class builds it now.

    Returns:
        The text; empty where a call says more than the config.
    """
    text = dedented(inspect.getsource(inspect.unwrap(builder.__dict__["__init__"])))
    for name, own in parts.items():
        call = _asking_auto(builder, name)
        if call is None or len(call.args) + len(call.keywords) != 1:
            return ""
        config, asked = ast.unparse([*call.args, *(each.value for each in call.keywords)][0]), ast.unparse(call.func)
        lines = text.splitlines(keepends=True)
        found = next(
            each
            for each in ast.walk(ast.parse(text))
            if isinstance(each, ast.Call) and ast.dump(each) == ast.dump(call) and _assigns(text, each, name)
        )
        if found.lineno != found.end_lineno:
            return ""
        line = lines[found.lineno - 1].encode()
        indent = " " * (len(line) - len(line.lstrip()))
        chosen = f"{own}._from_config", f"if type({config}) is {own}.config_class", f"else {asked}"
        new = "".join(["(\n", *(f"{indent}    {part}\n" for part in chosen), f"{indent})({config})"])
        changed = line[: found.col_offset] + new.encode() + line[found.end_col_offset :]
        lines[found.lineno - 1] = changed.decode()
        text = "".join(lines)
    return text


def _assigns(text: str, call: ast.Call, name: str) -> bool:
    """Whether the statement of a call assigns to an attribute of this name."""
    return any(
        node.lineno <= call.lineno <= (node.end_lineno or 0)
        and name in {getattr(to, "attr", "") for to in node.targets}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
    )


@dataclass
class Owners:
    """The statements that the classes of a file run when they have built their parts.

    Attributes:
        described: the config that gets the patches.
        modules: those of the skeleton that decides, by path.
        own: the classes of the file, by name.
        refused: path -> why a module is left alone, for messages.
    """

    described: PatchConfig
    modules: Mapping[str, nn.Module]
    own: Mapping[str, type[nn.Module]]
    refused: Mapping[str, str]
    #: class -> the text of its `__init__`, where that is to be another one
    inits: dict[str, str] = field(default_factory=dict)
    #: class -> statement -> why
    _statements: dict[str, dict[str, str]] = field(default_factory=dict)

    def only_class(self, original: type[nn.Module], fused: Mapping[str, Any]) -> Any:
        """The class that all objects of one become, None if there are others or its module has subclasses of it."""
        inherited = any(
            other is not original and issubclass(other, original) and other.__module__ == original.__module__
            for other in module_subclasses()
        )
        objects = {path for path, module in self.modules.items() if type(module) is original}
        first, *others = set(fused.values())
        return first if not others and set(fused) == objects and not inherited else None

    def add(self, name: str, statement: str, reason: str) -> None:
        """Have the class `name` run a statement when it is built."""
        self._statements.setdefault(name, {}).setdefault(statement, reason)

    def part(self, path: str, chosen: Mapping[str, Any]) -> tuple[str, str]:
        """The class that builds a module, and the expression by which it knows it.

        Args:
            path: the module.
            chosen: path -> what is to become of it, of all modules that are converted.

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
            builders = [at for at, module in self.modules.items() if isinstance(module, cls)]
            places = [".".join([at, *rest]) if at else ".".join(rest) for at in builders]
            others = [place for place in places if chosen.get(place) is not chosen[path]]
            if not others:
                return cls.__name__, expression
        name = type(self.modules[path]).__name__
        if others:
            reason = f" ({self.refused[others[0]]})" if others[0] in self.refused else ""
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
        write: Callable[[Any, str], tuple[str, str]],
        change: Callable[[str, str], tuple[str, str]],
    ) -> None:
        """Have whoever builds objects of a class make some of them of classes that inherit from it.

        Args:
            name: the class.
            fused: path -> the class that an object is to be of.
            write: the text of such a class under a name, and why.
            change: what else is done to the object at a path, by the expression that knows it, and why.
        """
        variants = list(dict.fromkeys(fused.values()))
        for number, cls in enumerate(variants, 1):
            new = cls.__name__ if len(variants) == 1 else f"{cls.__name__}{number}"
            self.described.add_helper_after(name, *write(cls, new))
            for path in (path for path, found in fused.items() if found is cls):
                owner, part = self.part(path, fused)
                statement, why = change(path, part)
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
        for name, text in sorted(self.inits.items()):
            more = [line for statement in self._statements.get(name, ()) for line in statement.splitlines()]
            indented = "".join(f"    {line}\n" for line in more)
            self.described.override_method(f"{name}.__init__", text.rstrip() + f"\n{indented}", BUILT)
        for name, statements in sorted(self._statements.items()):
            if name in self.inits:
                continue
            lines = [
                "def with_fused(original_init, self, *args, **kwargs):",
                "    original_init(self, *args, **kwargs)",
                *(f"    {line}" for statement in statements for line in statement.splitlines()),
            ]
            self.described.modify_init(name, "\n".join(lines), "; ".join(dict.fromkeys(statements.values())))


def write_rewritten(
    owners: Owners,
    original: type[nn.Module],
    fused: Mapping[str, Any],
    fusing: Mapping[str, str],
    bring: Callable[[type], None],
) -> None:
    """The code of a class with other parameters and other methods.

    Args:
        owners: the classes that build its objects.
        original: the class.
        fused: path -> rewritten class, of the objects that are fused.
        fusing: path -> what gives an object the other parameters, with {} for the expression that knows it.
        bring: has the file know a class.
    """
    described, name = owners.described, original.__name__
    only, of_all = owners.only_class(original, fused), fusing[next(iter(fused))].format("self")
    mixins = {cls: _mixins(original, cls) for cls in fused.values()}
    for mixin in dict.fromkeys(each for listed in mixins.values() for each in listed):
        bring(mixin)
    if only is not None and not mixins[only] and not _leaves_calls(only):
        why = _reason(only)
        if not _is_wrapped_by_class(original, only):
            for method, code in only._rewritten.items():
                described.override_method(f"{name}.{method}", code, why)
            for part, code in _parts(described, only).items() if _is_used(original, only) else ():
                described.override_method(f"{name}.{part}", code, "for others", new=True)
            owners.add(name, of_all, why)
            return
        # A decorator of the class chooses among forwards: the class is replaced as a whole.
        if text := _replacement(original, only, of_all):
            described.replace_class(name, text, why)
            return

    def write(cls: Any, new: str) -> tuple[str, str]:
        used = _leaves_calls(cls) or _is_used(original, cls)
        extra = list(_parts(described, cls).values()) if used else []
        bases = ", ".join([*(each.__name__ for each in mixins[cls]), name])
        return class_text(new, bases, str(cls.__doc__), [*extra, *cls._rewritten.values()]), _reason(cls)

    def change(path: str, part: str) -> tuple[str, str]:
        return fusing[path].format(part), f"{part.removeprefix('self.')}: {_reason(fused[path])}"

    owners.make_subclasses(name, fused, write, change)


def _is_wrapped_by_class(original: type[nn.Module], fused: Any) -> bool:
    """Whether something around a class wraps methods that are rewritten, which have no decorator themselves."""
    own = trees_of(original)
    return any(
        hasattr(getattr(original, name), "__wrapped__") and not own[name].decorator_list for name in fused._rewritten
    )


def layout_text(layout: Layout, bring: Callable[[type], None]) -> str:
    """The call that makes a layout, without the shapes of one module."""
    bring(type(layout))
    arguments = []
    for number, each in enumerate(dataclasses.fields(layout)):
        value = getattr(layout, each.name)
        if each.name == "stock_shapes" or (each.default is not dataclasses.MISSING and value == each.default):
            continue
        text = _names(value) if each.name in ("stock", "fused") else _text(value)
        arguments.append(text if number < 2 else f"{each.name}={text}")
    return f"{type(layout).__name__}({', '.join(arguments)})"


def _names(names: Sequence[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(item, str) for item in value):
        quoted = [f'"{item}"' for item in value]
        return f"({', '.join(quoted)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _leaves_calls(fused: Any) -> bool:
    """Whether a rewritten method leaves some calls to the original, or to a projection alone."""
    return any(
        f"super().{method}(" in code or "self.shared_input()" in code for method, code in fused._rewritten.items()
    )


def _reason(fused: Any) -> str:
    """The first sentence of what a rewritten class says of itself, without its name."""
    return str(fused.__doc__).split(". Rewritten")[0].partition(" with ")[2].removesuffix(".")


def _parts(described: PatchConfig, fused: Any) -> dict[str, str]:
    """The properties by which other code finds what was joined."""
    joined: Joined | None = getattr(fused, "_joined", None)
    if joined is None:
        return {}
    described.add_import(RUNTIME, names=["joined_part"])
    listed = f'{_names(joined.projections)}, "{joined.name}"'
    parts = {
        name: f'@property\ndef {name}(self):\n    return joined_part(self, "{name}", {listed})\n'
        for name in joined.projections
    }
    if any("self.shared_input()" in code for code in fused._rewritten.values()):
        described.add_import(RUNTIME, names=["shared_input"])
        parts["shared_input"] = f"def shared_input(self):\n    return shared_input(self, {listed})\n"
    if any("self.are_values(" in code for code in fused._rewritten.values()):
        described.add_import(RUNTIME, names=["are_values"])
        parts["are_values"] = "def are_values(self, *given):\n    return are_values(given)\n"
    return parts


def _is_used(original: type[nn.Module], fused: Any) -> bool:
    """Whether other code of the module may look for what is joined: other methods of the class, or other classes."""
    if getattr(fused, "_joined", None) is None:
        return False
    known = {"__init__", *fused._rewritten}
    lineage = {base.__name__ for base in original.__mro__}
    for owner in ast.parse(inspect.getsource(sys.modules[original.__module__])).body:
        mine = isinstance(owner, ast.ClassDef) and owner.name in lineage
        functions = [part for part in ast.walk(owner) if isinstance(part, ast.FunctionDef) and part.args.args]
        for function in (function for function in functions if not mine or function.name not in known):
            this = function.args.args[0].arg
            attributes = [part for part in ast.walk(function) if isinstance(part, ast.Attribute)]
            owners = [part.value for part in attributes if part.attr in fused._joined.projections]
            if any(mine or not (isinstance(value, ast.Name) and value.id == this) for value in owners):
                return True
    return False


def _mixins(original: type[nn.Module], fused: type[nn.Module]) -> list[type]:
    """The classes whose methods the rewritten ones use: those that a fused class inherits from besides."""
    bases = [base for base in fused.__mro__ if unrebound(base) is base]
    besides = [base for base in bases if not issubclass(base, OldNames) and base not in original.__mro__]
    return [base for base in besides if not any(issubclass(other, base) for other in besides if other is not base)]


def _replacement(original: type[nn.Module], fused: Any, fusing: str) -> str:
    """The class, with another forward and more in its `__init__`; empty where it doesn't have these two itself."""
    source = read_source(original, original.__qualname__, Location("", 0))
    text = Text(moved(source.text, source.indent, "", "    "))
    node: Any = text.tree.body[0]
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if len(fused._rewritten) != 1 or not own.keys() >= {"__init__", *fused._rewritten}:
        return ""
    ((name, code),) = fused._rewritten.items()
    start, end = text.start_of(start_line(own[name])), text.end_of(text.last_line(own[name]))
    behind = text.end_of(text.last_line(own["__init__"]))
    more = "".join(f"\n        {line}" for line in fusing.splitlines())
    edits = [Edit(start, end, indented(code).rstrip()), Edit(behind, behind, more)]
    return applied(text.text, [*edits, Edit(0, text.start_of(node.lineno), "")])
