"""Fused layers as code: their classes, and the lines that construct them.

A fused class is written after the class that it replaces, with an `__init__` that creates its parameters, and the call
that constructs the original names the new class. The edits are based on the source of the module: the arguments of its
`nn.Linear(...)` and `nn.Parameter(...)` are the sizes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.spec import WIDTH
from patcher.compat import standing_alone
from patcher.compat.decorators import replaces_forward
from patcher.compat.modeling_code import unrebound
from patcher.errors import CodegenError
from patcher.fusions.experts.linear import DECLARED, LinearExperts
from patcher.fusions.experts.matrices import Matrices
from patcher.fusions.joined import Joined
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.fusions.rewrite import class_text
from patcher.patterns import inside, parents
from patcher.source.scopes import decorator_name, start_line, top_level
from patcher.source.texts import Edit, Text, applied, dedented, indent_of

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig

_EXPERTS_DOC = "Each expert as linear layers of its own, which are called one expert after the other."


class ModuleText:
    """The text of a modeling module, its classes and their methods."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.text = Text(inspect.getsource(module))
        self.classes = {node.name: node for node in top_level(self.text.tree.body) if isinstance(node, ast.ClassDef)}

    def defines(self, cls: type) -> bool:
        """Whether the module defines a class under its name."""
        return cls.__module__ == self.module.__name__ and vars(self.module).get(cls.__name__) is cls

    def own_classes(self) -> list[Any]:
        """Return the classes that the module defines under their names."""
        values = [vars(self.module).get(name) for name in self.classes]
        return [cls for cls in values if isinstance(cls, type) and self.defines(cls)]

    def model_classes(self) -> list[Any]:
        """Return the model classes that the module defines."""
        return [cls for cls in self.own_classes() if issubclass(cls, PreTrainedModel)]

    def method(self, cls: type, name: str) -> tuple[type, ast.FunctionDef] | None:
        """Return a method of a class of the module, with the class that defines it."""
        for base in cls.__mro__:
            if not self.defines(base):
                return None
            for node in self.classes[base.__name__].body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return base, node
        return None

    def code(self, node: Any, edits: Iterable[Edit] = ()) -> str:
        """Return the text of a definition with edits, without its indentation."""
        text = self.text
        start, end = text.start_of(start_line(node)), text.end_of(text.last_line(node))
        shifted = [Edit(max(edit.start, start) - start, edit.end - start, edit.text) for edit in edits]
        return dedented(applied(text.text[start:end], shifted) + "\n")

    def value(self, node: ast.expr) -> Any:
        """Return the value of a name of the module, dotted or not."""
        try:
            return unrebound(eval(ast.unparse(node), vars(self.module)))
        except Exception:
            return None

    def whole_lines(self, node: ast.stmt, replacement: str = "") -> Edit:
        """Return the edit that replaces or removes the lines of a statement."""
        return Edit(self.text.start_of(node.lineno), self.text.start_of((node.end_lineno or 0) + 1), replacement)


def assignments(function: ast.FunctionDef, name: str) -> Iterator[ast.Assign]:
    """Yield the statements of a method that assign to an attribute of that name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(getattr(target, "attr", "") == name for target in node.targets):
            yield node


def values_of(function: ast.FunctionDef, variables: Collection[str]) -> Iterator[ast.expr]:
    """Yield what a method assigns to some of its variables."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") in variables for target in node.targets):
            yield node.value


def wrapped(code: str, unchanged: str = "") -> str:
    """Return code whose long lines are wrapped at their last brackets, except those that another text contains."""
    return "\n".join(_wrapped_line(line, unchanged) for line in code.split("\n"))


def _wrapped_line(line: str, unchanged: str) -> str:
    # 4 more columns: the code of a class is indented later
    if len(line) + 4 <= WIDTH or not line.endswith((")", "]")) or line.strip() in unchanged:
        return line
    depth, opening = 0, len(line)
    while opening and (depth or opening == len(line)):
        opening -= 1
        depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(line[opening], 0)
    if depth:
        return line
    indent, inner = indent_of(line), line[opening + 1 : -1]
    lines = [f"{indent}    {inner}"]
    if len(lines[0]) + 4 > WIDTH:
        source = Text(f"f({inner})")
        call: Any = source.tree.body[0]
        arguments = [source.code(argument) for argument in (*call.value.args, *call.value.keywords)]
        lines = [f"{_wrapped_line(f'{indent}    {argument}', unchanged)}," for argument in arguments]
    return "\n".join([line[: opening + 1], *lines, indent + line[-1]])


@dataclass
class FusedLayers:
    """The classes of the fused layers of a model, and the lines that construct them.

    Attributes:
        described: the config that gets the patches.
        text: the module.
        modules: those of the skeleton that decides, by path.
        refused: path -> why a module isn't fused, for messages.
        define: adds a class or a function to the file.
    """

    described: PatchConfig
    text: ModuleText
    modules: Mapping[str, nn.Module]
    refused: Mapping[str, str]
    define: Callable[..., None]
    #: the names of the classes in the file
    names: set[str] = field(default_factory=set)
    #: method -> its edits, each once
    _edits: dict[tuple[type, str], dict[Edit, None]] = field(default_factory=dict)

    # -- constructions ----------------------------------------------------------------------------------------------

    def replace_constructions(self, fused: Mapping[str, Any], edits: Callable[[ast.expr, Any], list[Edit]]) -> None:
        """Edit the lines that construct some modules, or raise a CodegenError if they construct others as well.

        Args:
            fused: path -> what is constructed there instead.
            edits: returns the edits of a call, or of the name of a class that is called later, for a value of `fused`.
        """
        for path, replacement in fused.items():
            inner, cls = path.split("."), type(self.modules[path])
            parents = (".".join(inner[:depth]) for depth in range(len(inner) - 1, -1, -1))
            parent = next((parent for parent in parents if self.text.defines(type(self.modules[parent]))), None)
            if parent is None:
                raise self.described.refusal(f"nothing in {self.described.source_module} builds {path}")
            owner, name = type(self.modules[parent]), path.removeprefix(inside(parent)).partition(".")[0]
            init = self.text.method(owner, "__init__")
            calls = [] if init is None else list(self._constructions(init[1], name, cls))
            if init is None or not calls:
                raise self.described.refusal(
                    f"no line of {owner.__name__}.__init__ builds {path} by the name of its class, "
                    f"{cls.__name__}, which a file would change"
                )
            bases = [f"{inside(other)}{name}" for other, module in self.modules.items() if isinstance(module, init[0])]
            for other, module in self.modules.items():
                parent_path, _, last = other.rpartition(".")
                same_line = other in bases or (last.isdigit() and parent_path in bases)
                if same_line and type(module) is cls and fused.get(other) is not replacement:
                    raise self._not_separable(other, path)
            for edit in (edit for call in calls for edit in edits(call, replacement)):
                self._edit(init[0], "__init__", edit)

    def _constructions(self, function: ast.FunctionDef, name: str, cls: type) -> Iterator[ast.expr]:
        """Yield the calls of a class for an attribute, or the names of the class in the variables that are called."""
        values = [assignment.value for assignment in assignments(function, name)]
        calls = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Call)]
        direct = [call for call in calls if self.text.value(call.func) is cls]
        yield from direct
        variables = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        for value in values_of(function, variables) if not direct else ():
            names = (part for part in ast.walk(value) if isinstance(part, ast.Name))
            yield from (part for part in names if self.text.value(part) is cls)

    def _not_separable(self, other: str, path: str) -> CodegenError:
        name = type(self.modules[path]).__name__
        reason = f" ({self.refused[other]})" if other in self.refused else ""
        return self.described.refusal(
            f"{other} is not fused{reason}, and others of its class, {name}, are: no class of "
            f"{self.described.source_module} builds those that are, and no others"
        )

    def replace_embeddings(self, fused: Mapping[str, Any]) -> None:
        """Replace convolutions of patches by linear layers."""
        name = LinearPatchEmbedding.__name__
        self.names.add(name)
        self.define(standing_alone.LinearPatchEmbedding, f"from_patcher(), for {name}")

        def edits(call: ast.expr, _: Any) -> list[Edit]:
            assert isinstance(call, ast.Call)  # no variable of modeling code holds a class of torch
            end = max(self.text.text.span(argument)[1] for argument in (*call.args, *call.keywords))
            rank = [Edit(end, end, ", rank=3")] if self.text.value(call.func) is nn.Conv3d else []
            return [self._renamed(call, name), *rank]

        self.replace_constructions(fused, edits)

    def _renamed(self, call: ast.expr, name: str) -> Edit:
        """Return the edit that lets a call construct another class."""
        return Edit(*self.text.text.span(getattr(call, "func", call)), name)

    def _edit(self, owner: type, method: str, edit: Edit) -> None:
        self._edits.setdefault((owner, method), {})[edit] = None

    def construct_from_file(self, path: str, replaced: Collection[str]) -> None:
        """Let models around a module that an Auto class constructs be those of the file, or raise a CodegenError."""
        for parent, child in pairwise([*parents(path), path]):
            module, init = self.modules[child], self.text.method(type(self.modules[parent]), "__init__")
            if not isinstance(module, PreTrainedModel) or init is None:
                continue
            values = [assignment.value for assignment in assignments(init[1], child.rpartition(".")[2])]
            values += values_of(init[1], {value.id for value in values if isinstance(value, ast.Name)})
            for call in (node for value in values for node in ast.walk(value) if isinstance(node, ast.Call)):
                if not ast.unparse(call.func).endswith(".from_config"):
                    continue
                cls, arguments = type(module).__name__, [*call.args, *call.keywords]
                if not self.text.defines(type(module)) or len(arguments) != 1 or init[0].__name__ in replaced:
                    raise self.described.error(
                        f"{path} changes, and {child} around it is built by from_config() of an Auto class, "
                        f"which gives the {cls} of transformers, not that of the file. Call from_patcher() "
                        f"with {cls}, or load with the patcher itself."
                    )
                self._edit(init[0], "__init__", Edit(*self.text.text.span(call.func), f"{cls}._from_config"))

    # -- joined projections -----------------------------------------------------------------------------------------

    def join(self, original: type[nn.Module], fused: Mapping[str, Any]) -> None:
        """Add the classes of joined projections, for some instances of a class."""
        variants = list(dict.fromkeys(fused.values()))
        names = {cls: cls.__name__ + (str(number) if number > 1 else "") for number, cls in enumerate(variants, 1)}
        self.described.derived.append(original.__name__)
        self.replace_constructions(fused, lambda call, cls: [self._renamed(call, names[cls])])
        for cls in variants:
            self.names.add(names[cls])
            self.described.add_helper_after(original.__name__, self._joined_class(original, cls, names[cls]))

    def _joined_class(self, original: type[nn.Module], cls: Any, new_name: str) -> str:
        joined: Joined = cls._joined
        members = [self.joined_init(original, joined)]
        rewritten = [wrapped(code, self.text.text.text) for code in cls._rewritten.values()]
        compares_inputs = any("self.shared_input()" in code for code in rewritten)
        used = re.compile(rf"super\(\)\.|\.({'|'.join(joined.projections)})\b")
        if compares_inputs or any(map(used.search, rewritten)) or self._uses_parts(original, cls):
            self.define(standing_alone.JoinedPart)
            for index, name in enumerate(joined.projections):
                start = f"sum(self.{joined.sizes}[:{index}])" if index else "0"
                arguments = f"self.{joined.name}, {start}, self.{joined.sizes}[{index}]"
                arguments += f", self.{name}_bias" if name in joined.biased else ""
                members.append(wrapped(f"@property\ndef {name}(self):\n    return JoinedPart({arguments})\n"))
        if compares_inputs:
            self.define(standing_alone.SharedInput)
            names = ", ".join(f'"{name}"' for name in joined.projections)
            call = f'SharedInput(self, [{names}], "{joined.name}")'
            members.append(wrapped(f"def shared_input(self):\n    return {call}\n"))
        if any("self.are_values(" in code for code in rewritten):
            self.define(standing_alone.are_values)
            members.append("def are_values(self, *given):\n    return are_values(given)\n")
        docstring = str(cls.__doc__).split(". Rewritten")[0] + "."
        code = class_text(new_name, original.__name__, docstring, [*members, *rewritten])
        return self._inherited_decorators(original) + code

    def _inherited_decorators(self, original: type) -> str:
        """Return the decorators of a class that its subclass needs as well: those that don't replace the forward."""
        decorators = self.text.classes[original.__name__].decorator_list
        inherited = (part for part in decorators if not replaces_forward(decorator_name(part)))
        return "".join(f"@{self.text.text.code(decorator)}\n" for decorator in inherited)

    def joined_init(self, original: type, joined: Joined) -> str:
        """Return the `__init__` of joined projections, or raise a CodegenError if the original's can't be edited."""
        init = self.text.method(original, "__init__")
        if init is None:
            raise self._unreadable(original)
        owner, node = init
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call) == "super()"]
        edits = [Edit(*self.text.text.span(call), f"super({owner.__name__}, self)") for call in calls]
        return self.text.code(node, [*self._join_lines(original, node, joined), *edits])

    def _unreadable(self, original: type) -> CodegenError:
        return self.described.refusal(
            f"{original.__name__}.__init__ doesn't build each fused layer in a line of its own, such as self.<name> = "
            "nn.Linear(...), so a file can't build the fused layer in their place"
        )

    def _join_lines(self, original: type, init: ast.FunctionDef, joined: Joined) -> list[Edit]:
        """Return the edits that replace the projections of an `__init__` by one layer."""
        text, projections = self.text.text, joined.projections
        assigned = [list(assignments(init, name)) for name in projections]
        statements = [nodes[0] for nodes in assigned if len(nodes) == 1]
        calls: list[Any] = [statement.value for statement in statements]
        are_linear = all(isinstance(call, ast.Call) and self.text.value(call.func) is nn.Linear for call in calls)
        if len(statements) < len(projections) or not are_linear or not all(map(text.is_alone, statements)):
            raise self._unreadable(original)
        keywords = [{keyword.arg: keyword.value for keyword in call.keywords} for call in calls]
        linear = inspect.signature(nn.Linear)
        arguments = [linear.bind(*call.args, **named).arguments for call, named in zip(calls, keywords, strict=True)]
        biases = [ast.unparse(bound["bias"]) if "bias" in bound else "True" for bound in arguments]
        uses = [node for node in ast.walk(init) if isinstance(node, ast.Attribute) and node.attr in projections]
        differ = len(set(biases)) > 1 and not joined.biased
        if len(uses) > len(projections) or differ or any("dtype" in bound for bound in arguments):
            raise self._unreadable(original)
        linear_class, in_features = text.code(calls[0].func), ast.unparse(arguments[0]["in_features"])
        bias = "" if set(biases) == {"True"} else f", bias={'False' if joined.biased else biases[0]}"
        lines = [
            f"self.{joined.sizes} = [{', '.join(ast.unparse(bound['out_features']) for bound in arguments)}]",
            f"self.{joined.name} = {linear_class}({in_features}, sum(self.{joined.sizes}){bias})",
        ]
        for name in joined.biased:
            size = f"self.{joined.sizes}[{projections.index(name)}]"
            lines.append(f"self.{name}_bias = nn.Parameter(torch.zeros({size}))")
        ordered = sorted(statements, key=lambda node: node.lineno)
        if len({text.indent(statement.lineno) for statement in ordered}) > 1:
            raise self._unreadable(original)
        place = ordered[-1]  # the layer may need other code that is between them
        indent = text.indent(place.lineno)
        new = "".join(f"{wrapped(indent + line)}\n" for line in lines)
        return [self.text.whole_lines(node, new if node is place else "") for node in ordered]

    def _uses_parts(self, original: type[nn.Module], fused: Any) -> bool:
        """Whether other code of the module may access the joined projections."""
        known, lineage = {"__init__", *fused._rewritten}, {base.__name__ for base in original.__mro__}
        for owner in self.text.text.tree.body:
            is_own = isinstance(owner, ast.ClassDef) and owner.name in lineage
            for function in ast.walk(owner):
                if not isinstance(function, ast.FunctionDef) or not function.args.args:
                    continue
                if is_own and function.name in known:
                    continue
                this = function.args.args[0].arg
                attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
                values = [node.value for node in attributes if node.attr in fused._joined.projections]
                if any(is_own or not (isinstance(value, ast.Name) and value.id == this) for value in values):
                    return True
        return False

    # -- experts ----------------------------------------------------------------------------------------------------

    def replace_experts(self, original: type[nn.Module], cls: type[LinearExperts], fused: Mapping[str, Any]) -> None:
        """Replace a class of stacked experts by one of experts that are layers."""
        path = next(iter(fused))
        for other, unfused in self.modules.items():
            if type(unfused) is original and other not in fused:
                raise self._not_separable(other, path)
        module, init = self.modules[path], self.text.method(original, "__init__")
        if not self.text.defines(original) or init is None or init[0] is not original:
            raise self._unreadable(original)
        self.define(standing_alone.ExpertLayers)
        self.define(standing_alone.ListedExperts)
        node = self.text.classes[original.__name__]
        functions = [member for member in node.body if isinstance(member, ast.FunctionDef)]
        members, attributes = dict(cls._rewritten), []
        default = LinearExperts._rewritten
        if members.get("empty_output") == default["empty_output"]:
            del members["empty_output"]
            members["forward"] = members["forward"].replace(
                "self.empty_output(hidden_states, top_k_weights)", "torch.zeros_like(hidden_states)"
            )
        if "self.run_expert" not in members["forward"]:
            members.pop("run_expert", None)
        elif members["run_expert"] == default["run_expert"]:
            has_own_gate = any(function.name == "_apply_gate" for function in functions)
            members["run_expert"] = _run_expert(cls if hasattr(cls, "has_gate") else module, has_own_gate)
        for name in DECLARED:
            declared = members.pop(name, None)
            if any(f"self.{name}" in code for code in members.values()):
                attributes.append(declared or f"{name} = {getattr(module, name)!r}\n")
        edits = self._expert_lines(original, init[1], cls.stacks(module))
        kept = [function for function in functions if function.name not in members]
        methods = [self.text.code(function, edits if function is init[1] else ()) for function in kept]
        others = [ast.unparse(base) for base in node.bases if self.text.value(base) is not nn.Module]
        bases = ", ".join(["ListedExperts", *others])
        code = class_text(original.__name__, bases, _EXPERTS_DOC, [*attributes, *methods, *members.values()])
        self.described.replace_class(original.__name__, code)
        self.names.add(original.__name__)
        self._remove_initialization(original)

    def _expert_lines(self, original: type, init: ast.FunctionDef, layouts: Sequence[Matrices]) -> list[Edit]:
        """Return the edits that replace the stacks of an `__init__` by the layers of each expert."""
        shapes: dict[Matrices, tuple[str, str, str]] = {}  # of weights: number of experts, inputs, outputs
        statements = []
        for layout in layouts:
            assigned = list(assignments(init, layout.stock[0]))
            call: Any = assigned[0].value if len(assigned) == 1 else None
            empty: Any = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if not isinstance(empty, ast.Call) or self.text.value(call.func) is not nn.Parameter:
                raise self._unreadable(original)
            sizes = empty.args[0].elts if isinstance(empty.args[0], ast.Tuple | ast.List) else empty.args
            statements.append(assigned[0])
            if layout.layers[0].endswith("weight"):
                count, rows, columns = map(ast.unparse, sizes)
                shapes[layout] = (count, rows, columns) if layout.transposed else (count, columns, rows)
        biased = {layer for layout in layouts for layer in layout.layers if layer.endswith(".bias")}
        ordered = list(shapes.values())
        first, width = ordered[0], ordered[-1][1]
        lines = [f"for number in range({first[0]}):", "    expert = ExpertLayers()"]
        for layout, (count, inputs, outputs) in shapes.items():
            for layer in (name.removesuffix(".weight") for name in layout.layers):
                bias = "" if f"{layer}.bias" in biased else ", bias=False"
                line = f"expert.{layer} = nn.Linear({inputs}, {width if layout.parts > 1 else outputs}{bias})"
                lines += [f"    {line}"] if count == first[0] else [f"    if number < {count}:", f"        {line}"]
        lines.append("    self.add_module(str(number), expert)")
        if layouts[0].layers == ("weight",):  # an expert is a single layer
            lines[1:] = [f"    self.add_module(str(number), nn.Linear({first[1]}, {first[2]}, bias=False))"]
        last = max(statements, key=lambda node: node.lineno)
        indent = self.text.text.indent(last.lineno)
        new = "".join(f"{indent}{line}\n" for line in lines)
        return [self.text.whole_lines(node, new if node is last else "") for node in statements]

    def _remove_initialization(self, original: type) -> None:
        """Remove the initialization of stacks from `_init_weights`."""
        text = self.text.text
        for owner, method in filter(None, (self.text.method(cls, "_init_weights") for cls in self.text.own_classes())):
            for node in (node for node in ast.walk(method) if isinstance(node, ast.If)):
                test: Any = node.test
                is_check = isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"
                if is_check and self.text.value(test.args[1]) is original:
                    start, end = text.span(node.body[0])[0], text.span(node.body[-1])[1]
                    self._edit(owner, "_init_weights", Edit(start, end, "pass"))

    # -- methods ----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Override the edited methods in the config."""
        for (owner, name), edits in sorted(self._edits.items(), key=lambda item: (item[0][0].__name__, item[0][1])):
            method = self.text.method(owner, name)
            assert method is not None
            code = wrapped(self.text.code(method[1], edits), self.text.text.text)
            self.described.override_method(f"{owner.__name__}.{name}", code)


def _run_expert(module: Any, has_own_gate: bool) -> str:
    """Return the method that computes one expert, as its class declares it."""
    gate, up, down = (f"expert.{name}_proj(hidden_states)" for name in ("gate", "up", "down"))
    lines = [
        f"hidden_states = self.act_fn({gate}) * {up}" if module.has_gate else f"hidden_states = self.act_fn({up})"
    ]
    if module.has_gate and has_own_gate:
        is_concatenated = getattr(module, "is_concatenated", True)
        both = "torch.cat((gate, up), -1)" if is_concatenated else "torch.stack((gate, up), -1).flatten(-2)"
        lines = [f"gate, up = {gate}, {up}", f"hidden_states = self._apply_gate({both})"]
    has_norm = getattr(module, "has_post_expert_norm", False)
    lines.append(f"return self.post_expert_norm({down})" if has_norm else f"return {down}")
    return "".join(["def run_expert(self, expert, hidden_states):\n", *(f"    {line}\n" for line in lines)])
