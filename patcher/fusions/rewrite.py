"""A method's own source with some calls joined, compiled into a subclass whose source can be read.

```python
query_states = self.q_proj(hidden_states).view(shape)
```

becomes, before the statement of the first of the calls and in their places,

```python
q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)
query_states = q_proj_output.view(shape)
```

Comments and formatting stay. The code runs in the namespace of the module that it comes from, so it sees what that
module's own code sees, now and later.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from torch import nn

from patcher.fusions.joined import Joined
from patcher.fusions.tracing import Guards, NotUnderstoodError, SharedInput, names_in, self_of
from patcher.source.call_sites import positional_parameters
from patcher.source.indentation import dedented, indented
from patcher.source.synthetic import module_of_text

#: Modules of rewritten code live below this name, in `sys.modules` and in tracebacks.
HOME = "patcher.fusions.rewritten"


@dataclass(frozen=True)
class Method:
    """A method of a model's class, with its source."""

    name: str
    function: FunctionType
    source: str
    node: ast.FunctionDef
    file: str
    first_line: int

    def at(self, line: int | None) -> str:
        """Where a line of the source lies: `modeling_llama.py:243`."""
        return f"{Path(self.file).name}:{self.first_line + (line or 1) - 1}"


def read_method(name: str, function: FunctionType) -> Method:
    """A function of a class with its source.

    Raises:
        NotUnderstoodError: there is none.
    """
    try:
        lines, first_line = inspect.getsourcelines(function)
        source = dedented("".join(lines))
        (node,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise NotUnderstoodError(f"the source of {name} can't be read ({error})") from error
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise NotUnderstoodError(f"the source of {name} is no method")
    return Method(name, function, source, node, inspect.getfile(function), first_line)


# --- editing -------------------------------------------------------------------------------------------------------


def rewritten(method: Method, joined: Joined, shared_inputs: Sequence[SharedInput], guards: Guards) -> str:
    """The source of the method with the calls of each shared input joined.

    Raises:
        NotUnderstoodError: it can't be written down safely.
    """
    taken = names_in(method.node)
    outputs = {name: _free(f"{name}_output", taken) for name in joined.projections}
    this = self_of(method.node, "self")
    before: dict[int, list[str]] = {}
    for shared in shared_inputs:
        line = f"{', '.join(outputs.values())} = {this}.{joined.name}({ast.unparse(shared.argument)})"
        lines = [f"{line}.split({this}.{joined.sizes}, dim=-1)"]
        lines += [f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias" for name in joined.biased]
        # Pieces of a split must not be written into; a projection of its own may be.
        own = _written_into(method.node, shared) - set(joined.biased)
        lines += [f"{outputs[name]} = {outputs[name]}.clone()" for name in joined.projections if name in own]
        before[shared.anchor.lineno] = lines
    replaced = {
        (site.line, _characters(method.source, site.line, site.column)): outputs[site.name]
        for shared in shared_inputs
        for site in shared.sites
    }
    edit = _Edit(before, replaced)
    module = MetadataWrapper(cst.parse_module(method.source)).visit(edit)
    if edit.inserted != len(before) or edit.replaced != len(replaced):
        raise NotUnderstoodError("two statements share a line", shared_inputs[0].anchor.lineno)
    (function,) = module.body
    assert isinstance(function, cst.FunctionDef)
    return module.with_changes(body=[_guarded(function, method, guards, this) if guards else function]).code


def _written_into(function: ast.FunctionDef, shared: SharedInput) -> set[str]:
    """The projections whose results the method changes in place, as far as names tell."""
    changed = set()
    for node in ast.walk(function):
        match node:
            case ast.AugAssign(target=target) | ast.Assign(targets=[ast.Subscript() as target, *_]):
                changed.add(_variable_of(target))
            case ast.Call(func=ast.Attribute(value=target, attr=name)) if name.endswith("_") and name[0] != "_":
                changed.add(_variable_of(target))
    written = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(child, ast.Name) and child.id in changed for one in targets for child in ast.walk(one)):
                places = {(c.lineno, c.col_offset) for c in ast.walk(node.value) if isinstance(c, ast.Call)}
                written |= {site.name for site in shared.sites if (site.line, site.column) in places}
    return written


def _variable_of(target: ast.expr) -> str:
    """The variable of which an expression is a part, `x` of `x.data[0]`; empty if it is none."""
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _characters(source: str, line: int, column: int) -> int:
    """ast counts a column in bytes, libcst in characters."""
    return len(source.splitlines()[line - 1].encode()[:column].decode())


class _Edit(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, before: dict[int, list[str]], replaced: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self._before = before
        self._calls = replaced
        self.inserted = 0
        self.replaced = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        start = self.get_metadata(PositionProvider, original_node).start
        name, function = self._calls.get((start.line, start.column)), original_node.func
        # A chain of calls starts where its first call starts: the one that is meant has nothing but a name inside.
        if name is None or not isinstance(function, cst.Attribute) or not isinstance(function.value, cst.Name):
            return updated_node
        self.replaced += 1
        return cst.Name(name, lpar=updated_node.lpar, rpar=updated_node.rpar)

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        line = self.get_metadata(PositionProvider, original_node).start.line
        lines = self._before.get(line)
        if lines is None:
            return updated_node
        if len(original_node.body) != 1:
            raise NotUnderstoodError("two statements share a line", line)
        self.inserted += 1
        statements = [cst.parse_statement(line) for line in lines]
        first = statements[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel([first, *statements[1:], updated_node.with_changes(leading_lines=[])])


def _guarded(function: cst.FunctionDef, method: Method, guards: Guards, this: str) -> cst.FunctionDef:
    """Leave a call that isn't as assumed to the method as it was; the joined projection gives the parts."""
    if not isinstance(function.body, cst.IndentedBlock):
        raise NotUnderstoodError("the body is on the line of its head", 1)
    conditions = [f"{name} is not None" for name in guards.none]
    conditions += [f"{name} is not {guards.same[0]}" for name in guards.same[1:]]
    conditions += [
        f"{this}.{name} is not {value}" if value is None or isinstance(value, bool) else f"{this}.{name} != {value!r}"
        for name, value in guards.attributes
    ]
    conditions += [f'type({this}.{name}).__name__ != "Identity"' for name in guards.identities]
    arguments = method.node.args
    passed = [argument.arg for argument in positional_parameters(method.node)[1:]]
    if arguments.vararg is not None:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        passed.append(f"**{arguments.kwarg.arg}")
    check = f"if {' or '.join(conditions)}:\n    return super().{method.name}({', '.join(passed)})\n"
    statements = list(function.body.body)
    statements.insert(1 if function.get_docstring() is not None else 0, cst.parse_statement(check))
    return function.with_changes(body=function.body.with_changes(body=statements))


# --- compiling -----------------------------------------------------------------------------------------------------


def compile_subclass(
    name: str, docstring: str, bases: tuple[type, ...], methods: Sequence[tuple[Method, str]]
) -> type[Any]:
    """A subclass of `bases` with rewritten methods, whose source `inspect.getsource` and tracebacks show.

    Raises:
        NotUnderstoodError: the methods come from different files, or the source doesn't stand by itself.
    """
    namespaces = {id(method.function.__globals__): method.function.__globals__ for method, _ in methods}
    if len(namespaces) != 1:
        raise NotUnderstoodError("its methods come from different files")
    (namespace,) = namespaces.values()
    for method, source in methods:
        if "__class__" in method.function.__code__.co_freevars and "super()" in method.source:
            raise NotUnderstoodError(f"{method.name} calls super()", 1)
        if any(part.startswith("__") and not part.endswith("__") for part in names_in(ast.parse(source))):
            raise NotUnderstoodError(f"{method.name} uses private names", 1)
    sources = {method.name: source for method, source in methods}
    text = class_text(name, ", ".join(base.__name__ for base in bases), docstring, sources.values())

    full, number = f"{HOME}.{bases[-1].__module__}.{name}", 2
    while full in sys.modules:
        full, number = f"{HOME}.{bases[-1].__module__}.{name}_{number}", number + 1
    module = module_of_text(full, text, f"<{full}>")
    scope: dict[str, Any] = {base.__name__: base for base in bases}
    # Annotations are evaluated, or not, as where the methods come from.
    flags = methods[0][0].function.__code__.co_flags & __future__.annotations.compiler_flag
    exec(compile(text, module.__file__ or "", "exec", flags, dont_inherit=True), namespace, scope)
    cls: type[Any] = scope[name]
    cls.__module__ = module.__name__
    cls._rewritten = MappingProxyType(sources)
    setattr(module, name, cls)
    return cls


def class_text(name: str, bases: str, docstring: str, members: Iterable[str]) -> str:
    """The text of a class whose members are functions."""
    head = f'class {name}({bases}):\n    """{docstring}"""\n'
    return "".join([head, *(f"\n{indented(member)}" for member in members)])


def methods_with(cls: type[nn.Module], wanted: Callable[[ast.FunctionDef], bool]) -> list[Method]:
    """The methods of a class, as its objects have them, whose source `wanted` asks for.

    Raises:
        NotUnderstoodError: the source of one of them isn't the code that runs.
    """
    found = []
    for name in (name for name, tree in trees_of(cls).items() if wanted(tree)):
        member = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        function = inspect.unwrap(member)
        method = read_method(name, function)
        free = [variable for variable in function.__code__.co_freevars if variable != "__class__"]
        if free:
            raise NotUnderstoodError(f"{name} uses {', '.join(free)} of the function around it", 1)
        if (member is not function) != bool(method.node.decorator_list):
            raise NotUnderstoodError(f"{name} is wrapped by something that its source doesn't show", 1)
        if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(method.node)):
            raise NotUnderstoodError(f"{name} is a generator", 1)
        found.append(method)
    return found


_Answer = TypeVar("_Answer")


def known_of_class(function: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Remember what a function says of a class, as long as the class lives: a model has many modules of one class."""
    known: weakref.WeakKeyDictionary[type[nn.Module], dict[Any, _Answer]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def answer(cls: type[nn.Module], *arguments: Any) -> _Answer:
        answers = known.setdefault(cls, {})
        if arguments not in answers:
            answers[arguments] = function(cls, *arguments)
        return answers[arguments]

    return answer


@known_of_class
def trees_of(cls: type[nn.Module]) -> dict[str, ast.FunctionDef]:
    """The trees of the methods that its objects have, those whose source can be read."""
    trees: dict[str, ast.FunctionDef] = {}
    members: dict[str, Any] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            members.setdefault(name, value)
    for name, member in members.items():
        # What builds and initialises the module meets the parts, or runs before they are joined.
        if name.startswith("__") or name == "_init_weights" or not callable(member):
            continue
        function = inspect.unwrap(member)
        if isinstance(function, FunctionType):
            with suppress(NotUnderstoodError):
                trees[name] = read_method(name, function).node
    return trees
