"""Fused layers as code: their classes, and the lines that build them.

A fused class is written behind the one that it takes the place of, with an `__init__` that builds what it has, and the
call that builds it names the new class. What changes is read from the text of the module: its own `nn.Linear(...)` and
`nn.Parameter(...)` say the sizes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.spec import WIDTH
from patcher.compat import standing_alone
from patcher.compat.modeling_code import unrebound
from patcher.errors import CodegenError
from patcher.fusions.experts.linear import DECLARED, LinearExperts
from patcher.fusions.experts.matrices import Matrices
from patcher.fusions.joined import Joined
from patcher.fusions.patch_embeddings import LinearPatchEmbedding
from patcher.fusions.rewrite import class_text
from patcher.source.definitions import replaced_methods
from patcher.source.edits import Edit, Text, applied
from patcher.source.reading import start_line
from patcher.source.scopes import top_level
from patcher.source.texts import dedented, indent_of

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig


class ModuleText:
    """The text of a modeling module, its classes, and edits of their methods."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.text = Text(inspect.getsource(module))
        self.classes = {node.name: node for node in top_level(self.text.tree.body) if isinstance(node, ast.ClassDef)}

    def own(self, cls: type) -> bool:
        """Whether the module defines a class under its name."""
        return cls.__module__ == self.module.__name__ and vars(self.module).get(cls.__name__) is cls

    def method(self, cls: type, name: str) -> tuple[type, ast.FunctionDef] | None:
        """A method of a class of the module, and which of its classes has it."""
        for base in cls.__mro__:
            if not self.own(base):
                return None
            for node in self.classes[base.__name__].body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return base, node
        return None

    def code(self, node: Any, edits: Iterable[Edit] = ()) -> str:
        """The text of a definition with edits, moved to the left."""
        text = self.text
        start, end = text.start_of(start_line(node)), text.end_of(text.last_line(node))
        changes = [Edit(max(first, start) - start, last - start, new) for first, last, new in edits]
        return dedented(applied(text.text[start:end], changes) + "\n")

    def value(self, node: ast.expr) -> Any:
        """The value of a name of the module, dotted or not."""
        try:
            return unrebound(eval(ast.unparse(node), vars(self.module)))
        except Exception:
            return None

    def whole_lines(self, node: ast.stmt) -> Edit:
        """The edit that removes a statement with its lines."""
        return Edit(self.text.start_of(node.lineno), self.text.start_of((node.end_lineno or 0) + 1), "")


def assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.Assign]:
    """The statements of a method that assign to an attribute of that name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(getattr(target, "attr", "") == name for target in node.targets):
            yield node


def wrapped(code: str, known: str = "") -> str:
    """Code of which no line is too long inside of a class: the last brackets of such a line are opened.

    Args:
        known: a text whose lines stay as they are.
    """
    lines = []
    for line in code.split("\n"):
        if len(line) + 4 <= WIDTH or not line.endswith((")", "]")) or line.strip() in known:
            lines.append(line)
            continue
        indent, depth, at = indent_of(line), 0, len(line)
        while at:
            at -= 1
            depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(line[at], 0)
            if depth == 0:
                break
        if depth:
            lines.append(line)
            continue
        inner = line[at + 1 : -1]
        parts = [f"{indent}    {inner}"]
        if len(parts[0]) + 4 > WIDTH:
            parts = [f"{wrapped(f'{indent}    {part}', known)}," for part in _arguments(inner)]
        lines += [line[: at + 1], *parts, indent + line[-1]]
    return "\n".join(lines)


def _arguments(text: str) -> list[str]:
    source = Text(f"f({text})")
    call: Any = source.tree.body[0]
    return [source.code(each) for each in (*call.value.args, *call.value.keywords)]


@dataclass
class FusedLayers:
    """What is written for the fused layers of a model.

    Attributes:
        described: the config that gets the patches.
        text: the module.
        modules: those of the skeleton that decides, by path.
        refused: path -> why a module is left alone, for messages.
        bring: has the file know a class or a function.
    """

    described: PatchConfig
    text: ModuleText
    modules: Mapping[str, nn.Module]
    refused: Mapping[str, str]
    bring: Callable[..., None]
    #: method -> its edits, each once
    _edits: dict[tuple[type, str], dict[Edit, None]] = field(default_factory=dict)

    # -- the lines that build them --------------------------------------------------------------------------------

    def builds(self, fused: Mapping[str, Any], change: Callable[[ast.expr, Any], list[Edit]]) -> None:
        """Have the lines that build some modules build others.

        Args:
            fused: path -> what is to be built there; equal ones are built alike.
            change: the edits of a call, or of the name of a class that is called later, for what it is to build.

        Raises:
            CodegenError: no line builds those and no others.
        """
        for path in fused:
            start, rest = self._builder(path)
            owner = type(self.modules[start])
            found = self.text.method(owner, "__init__")
            calls = [] if found is None else list(self._calls(found[1], rest[0], type(self.modules[path])))
            if not calls:
                raise self.described.refusal(
                    f"no line of {owner.__name__}.__init__ builds {path} by the name of its class, "
                    f"{type(self.modules[path]).__name__}, which a file would change"
                )
            assert found is not None
            for at, module in self.modules.items():
                if not isinstance(module, found[0]):
                    continue
                base = f"{at}.{rest[0]}" if at else rest[0]
                for place, other in self.modules.items():
                    inner = place == base or (place.startswith(base + ".") and place[len(base) + 1 :].isdigit())
                    if inner and type(other) is type(self.modules[path]) and fused.get(place) is not fused[path]:
                        raise self._not_apart(place, path)
            for call in calls:
                for edit in change(call, fused[path]):
                    self.edit(found[0], "__init__", edit)

    def _builder(self, path: str) -> tuple[str, list[str]]:
        """The path of the module that builds another one, and how it knows that one."""
        inner = path.split(".")
        for depth in range(len(inner) - 1, -1, -1):
            start = ".".join(inner[:depth])
            if self.text.own(type(self.modules[start])):
                return start, inner[depth:]
        raise self.described.refusal(f"nothing in {self.described.source_module} builds {path}")

    def _calls(self, function: ast.FunctionDef, name: str, cls: type) -> Iterator[ast.expr]:
        statements = list(assigned(function, name))
        calls = [node for each in statements for node in ast.walk(each.value) if isinstance(node, ast.Call)]
        named = [node for node in calls if self.text.value(node.func) is cls]
        called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
        yield from named
        for each in ast.walk(function) if not named else ():  # a variable that holds the class
            if isinstance(each, ast.Assign) and called & {getattr(target, "id", "") for target in each.targets}:
                names = (node for node in ast.walk(each.value) if isinstance(node, ast.Name))
                yield from (node for node in names if self.text.value(node) is cls)

    def _not_apart(self, place: str, path: str) -> CodegenError:
        name = type(self.modules[path]).__name__
        reason = f" ({self.refused[place]})" if place in self.refused else ""
        return self.described.refusal(
            f"{place} is not fused{reason}, and others of its class, {name}, are: no class of "
            f"{self.described.source_module} builds those that are, and no others"
        )

    def replace(self, cls: Any, fused: Mapping[str, Any]) -> None:
        """Have modules of a class with a `from_module` be built in the place of others."""
        name = cls.__name__
        used = standing_alone.LinearPatchEmbedding if cls is LinearPatchEmbedding else cls
        self.bring(used, f"from_patcher(), for {name}")

        def change(call: ast.expr, chosen: Any) -> list[Edit]:
            assert isinstance(call, ast.Call)  # no variable of modeling code holds a class of torch
            start, end = self.text.text.span(call)
            if cls is not LinearPatchEmbedding:
                return [Edit(start, start, f"{name}.from_module("), Edit(end, end, ")")]
            more = [Edit(end - 1, end - 1, ", rank=3")] if self.text.value(call.func) is nn.Conv3d else []
            return [*self.renamed_call(call, name), *more]

        self.builds(fused, change)

    def renamed_call(self, call: ast.expr, name: str) -> list[Edit]:
        """The edit that has a call build another class."""
        return [Edit(*self.text.text.span(getattr(call, "func", call)), name)]

    def edit(self, owner: type, method: str, edit: Edit) -> None:
        """Change a method of a class."""
        self._edits.setdefault((owner, method), {})[edit] = None

    def builds_own(self, path: str, names: Collection[str]) -> None:
        """Have models around a module, which an Auto class builds, be built as classes of the file.

        Raises:
            CodegenError: they can't be.
        """
        around = ["", *accumulate(path.split("."), "{}.{}".format)] if path else []
        for parent, part in pairwise(around):
            module, name = self.modules[part], part.rpartition(".")[2]
            found = self.text.method(type(self.modules[parent]), "__init__")
            if not isinstance(module, PreTrainedModel) or found is None:
                continue
            for call in (each for node in assigned(found[1], name) for each in ast.walk(node.value)):
                if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".from_config"):
                    continue
                cls, arguments = type(module).__name__, [*call.args, *call.keywords]
                if not self.text.own(type(module)) or len(arguments) != 1 or found[0].__name__ in names:
                    raise self.described.error(
                        f"{path} changes, and {part} around it is built by from_config() of an Auto class, "
                        f"which gives the {cls} of transformers, not that of the file. Call from_patcher() "
                        f"with {cls}, or load with the patcher itself."
                    )
                self.edit(found[0], "__init__", Edit(*self.text.text.span(call.func), f"{cls}._from_config"))

    # -- their classes --------------------------------------------------------------------------------------------

    def join(self, original: type[nn.Module], fused: Mapping[str, Any]) -> None:
        """Write the classes of joined projections, for some objects of one class."""
        variants = list(dict.fromkeys(fused.values()))
        names = {cls: cls.__name__ + (str(number) if number > 1 else "") for number, cls in enumerate(variants, 1)}
        self.described.derived.append(original.__name__)
        try:
            self.builds(fused, lambda call, cls: self.renamed_call(call, names[cls]))
        except CodegenError:
            others = any(type(each) is original and at not in fused for at, each in self.modules.items())
            known = [vars(self.text.module).get(each) for each in self.text.classes]
            derived = [each for each in known if isinstance(each, type) and issubclass(each, original)]
            if len(variants) > 1 or others or len(derived) > 1:
                raise
            # What builds them doesn't name the class: the new one has its name.
            name = original.__name__
            code = self._joined_class(original, variants[0], name)
            self.described.derived.remove(name)
            self.described.replace_class(name, code.replace(f"super({name}, self)", f"super(Original{name}, self)"))
            return
        for cls in variants:
            self.described.add_helper_after(original.__name__, self._joined_class(original, cls, names[cls]))

    def _joined_class(self, original: type[nn.Module], cls: Any, new: str) -> str:
        joined: Joined = cls._joined
        members = [self.joined_init(original, joined)]
        rewritten = [wrapped(code, self.text.text.text) for code in cls._rewritten.values()]
        compares_inputs = any("self.shared_input()" in code for code in rewritten)
        if compares_inputs or any("super()." in code for code in rewritten) or self._is_used(original, cls):
            self.bring(standing_alone.JoinedPart)
            for number, name in enumerate(joined.projections):
                start = f"sum(self.{joined.sizes}[:{number}])" if number else "0"
                arguments = f"self.{joined.name}, {start}, self.{joined.sizes}[{number}]"
                arguments += f", self.{name}_bias" if name in joined.biased else ""
                members.append(wrapped(f"@property\ndef {name}(self):\n    return JoinedPart({arguments})\n"))
        if compares_inputs:
            self.bring(standing_alone.SharedInput)
            listed = ", ".join(f'"{name}"' for name in joined.projections)
            call = f'SharedInput(self, [{listed}], "{joined.name}")'
            members.append(wrapped(f"def shared_input(self):\n    return {call}\n"))
        if any("self.are_values(" in code for code in rewritten):
            self.bring(standing_alone.are_values)
            members.append("def are_values(self, *given):\n    return are_values(given)\n")
        doc = str(cls.__doc__).split(". Rewritten")[0] + "."
        return self._decorators(original) + class_text(new, original.__name__, doc, [*members, *rewritten])

    def _decorators(self, original: type) -> str:
        """Those of a class which its subclass needs as well: not what puts other code in the place of a forward."""
        text, tree = self.text.text, self.text.text.tree
        listed = self.text.classes[original.__name__].decorator_list
        package = self.text.module.__package__ or ""
        names = {each: ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in listed}
        kept = [each for each, name in names.items() if "forward" not in replaced_methods(name, tree, package)]
        return "".join(f"@{text.code(each)}\n" for each in kept if "kernel_forward" not in names[each])

    def joined_init(self, original: type, joined: Joined) -> str:
        """The `__init__` of a class of joined projections, which takes the place of the original's.

        Raises:
            CodegenError: that one doesn't build the projections line by line.
        """
        found = self.text.method(original, "__init__")
        if found is None:
            raise self._unread(original)
        owner, node = found
        supers = [part for part in ast.walk(node) if isinstance(part, ast.Call) and ast.unparse(part) == "super()"]
        edits = [Edit(*self.text.text.span(part), f"super({owner.__name__}, self)") for part in supers]
        return self.text.code(node, [*self._join_lines(original, node, joined), *edits])

    def _unread(self, original: type) -> CodegenError:
        return self.described.refusal(
            f"{original.__name__}.__init__ doesn't build what is fused line by line, by self.<name> = nn.Linear(...) "
            "and the like, so that a file can't build something else"
        )

    def _join_lines(self, original: type, init: ast.FunctionDef, joined: Joined) -> list[Edit]:
        text = self.text.text
        found = [list(assigned(init, name)) for name in joined.projections]
        statements = [each[0] for each in found if len(each) == 1]
        calls: list[Any] = [each.value for each in statements]
        plain = [isinstance(each, ast.Call) and self.text.value(each.func) is nn.Linear for each in calls]
        if len(statements) < len(found) or not all(plain) or not all(map(text.is_alone, statements)):
            raise self._unread(original)
        given = [
            inspect.signature(nn.Linear).bind(*each.args, **{k.arg: k.value for k in each.keywords}).arguments
            for each in calls
        ]
        biases = [ast.unparse(each["bias"]) if "bias" in each else "True" for each in given]
        uses = [part for part in ast.walk(init) if isinstance(part, ast.Attribute) and part.attr in joined.projections]
        if len(uses) > len(found) or (len(set(biases)) > 1 and not joined.biased) or any("dtype" in e for e in given):
            raise self._unread(original)
        linear, size = text.code(calls[0].func), ast.unparse(given[0]["in_features"])
        bias = "" if biases == ["True"] * len(biases) else f", bias={'False' if joined.biased else biases[0]}"
        lines = [
            f"self.{joined.sizes} = [{', '.join(ast.unparse(each['out_features']) for each in given)}]",
            f"self.{joined.name} = {linear}({size}, sum(self.{joined.sizes}){bias})",
        ]
        for name in joined.biased:
            number = joined.projections.index(name)
            lines.append(f"self.{name}_bias = nn.Parameter(torch.zeros(self.{joined.sizes}[{number}]))")
        ordered = sorted(statements, key=lambda node: node.lineno)
        if len({text.indent(each.lineno) for each in ordered}) > 1:
            raise self._unread(original)
        # Where they all are known: behind what comes between them.
        between = text.text[text.span(ordered[0])[1] : text.span(ordered[-1])[0]]
        for each in ordered[1:-1]:
            between = between.replace(text.code(each), "")
        at = ordered[0] if not between.strip() else ordered[-1]
        indent = text.indent(at.lineno)
        new = "".join(f"{wrapped(indent + line)}\n" for line in lines)
        start = text.start_of(at.lineno)
        edits = [self.text.whole_lines(each) for each in ordered if each is not at]
        return [*edits, Edit(start, text.start_of((at.end_lineno or 0) + 1), new)]

    def _is_used(self, original: type[nn.Module], fused: Any) -> bool:
        """Whether other code of the module may look for what is joined."""
        known = {"__init__", *fused._rewritten}
        lineage = {base.__name__ for base in original.__mro__}
        for owner in self.text.text.tree.body:
            mine = isinstance(owner, ast.ClassDef) and owner.name in lineage
            functions = [part for part in ast.walk(owner) if isinstance(part, ast.FunctionDef) and part.args.args]
            for function in (function for function in functions if not mine or function.name not in known):
                this = function.args.args[0].arg
                attributes = [part for part in ast.walk(function) if isinstance(part, ast.Attribute)]
                owners = [part.value for part in attributes if part.attr in fused._joined.projections]
                if any(mine or not (isinstance(value, ast.Name) and value.id == this) for value in owners):
                    return True
        return False

    def experts(self, original: type[nn.Module], cls: type[LinearExperts], fused: Mapping[str, Any]) -> None:
        """Write a class of experts that are layers, in the place of one of stacks."""
        for place, other in self.modules.items():
            if type(other) is original and place not in fused:
                raise self._not_apart(place, next(iter(fused)))
        module = self.modules[next(iter(fused))]
        found = self.text.method(original, "__init__")
        if not self.text.own(original) or found is None or found[0] is not original:
            raise self._unread(original)
        self.bring(standing_alone.ListedExperts)
        node, init = self.text.classes[original.__name__], found[1]
        layouts = cls.stacks(module)
        members, attributes = dict(cls._rewritten), []
        own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        plain = LinearExperts._rewritten
        if members.get("empty_output") == plain["empty_output"]:
            del members["empty_output"]
            members["forward"] = members["forward"].replace(
                "self.empty_output(hidden_states, top_k_weights)", "torch.zeros_like(hidden_states)"
            )
        if "self.run_expert(" not in members["forward"]:
            members.pop("run_expert", None)
        elif members["run_expert"] == plain["run_expert"]:
            members["run_expert"] = _run_expert(module, "_apply_gate" in own)
        for name in DECLARED:
            declared = members.pop(name, None)
            if any(f"self.{name}" in code for code in members.values()):
                attributes.append(declared or f"{name} = {getattr(module, name)!r}\n")
        edits = self._expert_lines(original, init, layouts)
        kept = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name not in members]
        methods = [self.text.code(each, edits if each is init else ()) for each in kept]
        doc = "Each expert as linear layers of its own, which are called one expert after the other."
        others = [ast.unparse(base) for base in node.bases if self.text.value(base) is not nn.Module]
        code = class_text(
            original.__name__, ", ".join(["ListedExperts", *others]), doc, [*attributes, *methods, *members.values()]
        )
        self.described.replace_class(original.__name__, code)
        self._uninitialised(original)

    def _expert_lines(self, original: type, init: ast.FunctionDef, layouts: Sequence[Matrices]) -> list[Edit]:
        shapes: dict[Matrices, tuple[str, str, str]] = {}  # of weights: how many experts, inputs, outputs
        statements = []
        for layout in layouts:
            found = list(assigned(init, layout.stock[0]))
            call: Any = found[0].value if len(found) == 1 else None
            empty: Any = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if not isinstance(empty, ast.Call) or self.text.value(call.func) is not nn.Parameter:
                raise self._unread(original)
            listed = empty.args[0].elts if isinstance(empty.args[0], ast.Tuple | ast.List) else empty.args
            statements.append(found[0])
            if layout.layers[0].endswith("weight"):
                count, rows, columns = map(ast.unparse, listed)
                shapes[layout] = (count, rows, columns) if layout.transposed else (count, columns, rows)
        biased = {layer for layout in layouts for layer in layout.layers if layer.endswith(".bias")}
        ordered = list(shapes.values())
        first, width = ordered[0], ordered[-1][1]
        lines = [f"for number in range({first[0]}):", "    expert = nn.Module()"]
        for layout, (count, inputs, outputs) in shapes.items():
            for layer in (each.removesuffix(".weight") for each in layout.layers):
                bias = "" if f"{layer}.bias" in biased else ", bias=False"
                line = f"expert.{layer} = nn.Linear({inputs}, {width if layout.parts > 1 else outputs}{bias})"
                lines += [f"    {line}"] if count == first[0] else [f"    if number < {count}:", f"        {line}"]
        lines.append("    self.add_module(str(number), expert)")
        if layouts[0].layers == ("weight",):  # an expert is a layer
            lines[1:] = [f"    self.add_module(str(number), nn.Linear({first[1]}, {first[2]}, bias=False))"]
        last = max(statements, key=lambda node: node.lineno)
        indent = self.text.text.indent(last.lineno)
        edits = [self.text.whole_lines(each) for each in statements if each is not last]
        return [*edits, self.text.whole_lines(last)._replace(text="".join(f"{indent}{line}\n" for line in lines))]

    def _uninitialised(self, original: type) -> None:
        """Have `_init_weights` leave out what initialises stacks, of which there are none."""
        for cls in map(vars(self.text.module).get, self.text.classes):
            found = self.text.method(cls, "_init_weights") if isinstance(cls, type) and self.text.own(cls) else None
            for node in ast.walk(found[1]) if found is not None else ():
                test: Any = node.test if isinstance(node, ast.If) else None
                asks = isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"
                if found is not None and asks and self.text.value(test.args[1]) is original:
                    body: Any = node
                    start, end = self.text.text.span(body.body[0])[0], self.text.text.span(body.body[-1])[1]
                    self.edit(found[0], "_init_weights", Edit(start, end, "pass"))

    # -- written --------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Add the methods that change."""
        for (owner, method), edits in sorted(self._edits.items(), key=lambda item: (item[0][0].__name__, item[0][1])):
            found = self.text.method(owner, method)
            assert found is not None
            code = wrapped(self.text.code(found[1], edits), self.text.text.text)
            self.described.override_method(f"{owner.__name__}.{method}", code)


def _run_expert(module: Any, has_gate_of_its_own: bool) -> str:
    """What one expert computes, as its class declares it."""
    gate, up, down = (f"expert.{name}_proj(hidden_states)" for name in ("gate", "up", "down"))
    lines = [
        f"hidden_states = self.act_fn({gate}) * {up}" if module.has_gate else f"hidden_states = self.act_fn({up})"
    ]
    if module.has_gate and has_gate_of_its_own:
        both = "torch.cat((gate, up), -1)"
        both = both if getattr(module, "is_concatenated", True) else "torch.stack((gate, up), -1).flatten(-2)"
        lines = [f"gate, up = {gate}, {up}", f"hidden_states = self._apply_gate({both})"]
    lines.append(
        f"return self.post_expert_norm({down})" if getattr(module, "has_post_expert_norm", False) else f"return {down}"
    )
    return "".join(
        f"{line}\n" for line in ["def run_expert(self, expert, hidden_states):", *(f"    {each}" for each in lines)]
    )
