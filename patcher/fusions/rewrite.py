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
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from torch import nn

from patcher.fusions.joined import Joined
from patcher.fusions.tracing import Assumptions, Cluster, NotUnderstoodError, names_in, self_of
from patcher.source.indentation import dedented, indented
from patcher.source.reading import definition_of
from patcher.source.synthetic import module_of_text

__all__ = [
    "Method",
    "class_text",
    "compile_subclass",
    "known_of_class",
    "method_of",
    "methods_with",
    "read_method",
    "rewritten",
]

#: Modules of rewritten code live below this name, in `sys.modules` and in tracebacks.
HOME = "patcher.fusions.rewritten"


@dataclass(frozen=True)
class Method:
    """A method of a model's class, with its source."""

    name: str
    owner: type
    function: FunctionType
    source: str
    node: ast.FunctionDef
    file: str
    first_line: int

    def at(self, line: int | None) -> str:
        """Where a line of the source lies: `modeling_llama.py:243`."""
        return f"{Path(self.file).name}:{self.first_line + (line or 1) - 1}"


def read_method(name: str, owner: type, function: FunctionType) -> Method:
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
    return Method(name, owner, function, source, node, inspect.getfile(function), first_line)


def method_of(cls: type[nn.Module], name: str) -> Method:
    """A method with its source.

    Raises:
        NotUnderstoodError: there is no source, or it isn't the code that runs.
    """
    owner = next(base for base in cls.__mro__ if name in base.__dict__)
    found = owner.__dict__[name]
    function = inspect.unwrap(found)
    if not isinstance(function, FunctionType):
        raise NotUnderstoodError(f"{name} is no plain method ({type(found).__name__})")
    method = read_method(name, owner, function)
    free = [variable for variable in function.__code__.co_freevars if variable != "__class__"]
    if free:
        raise NotUnderstoodError(f"{name} uses {', '.join(free)} of the function around it", 1)
    if (found is not function) != bool(method.node.decorator_list):
        raise NotUnderstoodError(f"{name} is wrapped by something that its source doesn't show", 1)
    if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(method.node)):
        raise NotUnderstoodError(f"{name} is a generator", 1)
    return method


# --- editing -------------------------------------------------------------------------------------------------------


def rewritten(method: Method, joined: Joined, clusters: Sequence[Cluster], assumptions: Assumptions) -> str:
    """The source of the method with the calls of each cluster joined.

    Raises:
        NotUnderstoodError: it can't be written down safely.
    """
    taken = set(names_in(method.node))
    outputs = {name: _free(f"{name}_output", taken) for name in joined.projections}
    this = self_of(method.node, "self")
    before: dict[int, list[str]] = {}
    for cluster in clusters:
        line = f"{', '.join(outputs.values())} = {this}.{joined.name}({ast.unparse(cluster.argument)})"
        lines = [f"{line}.split({this}.{joined.sizes}, dim=-1)"]
        lines += [f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias" for name in joined.biased]
        # Pieces of a split must not be written into; a projection of its own may be.
        own = _written_into(method.node, cluster) - set(joined.biased)
        lines += [f"{outputs[name]} = {outputs[name]}.clone()" for name in joined.projections if name in own]
        before[cluster.anchor.lineno] = lines
    replaced = {
        (site.line, _characters(method.source, site.line, site.column)): outputs[site.name]
        for cluster in clusters
        for site in cluster.sites
    }
    wrapper = MetadataWrapper(cst.parse_module(method.source))
    edit = _Edit(before, replaced, method)
    module = wrapper.visit(edit)
    if edit.inserted != len(before) or edit.replaced != len(replaced):
        raise NotUnderstoodError("two statements share a line", clusters[0].anchor.lineno)
    (function,) = module.body
    assert isinstance(function, cst.FunctionDef)
    guards = _guards(method, assumptions, this)
    if guards:
        function = _with_guards(function, guards)
    return module.with_changes(body=[function]).code


def _written_into(function: ast.FunctionDef, cluster: Cluster) -> set[str]:
    """The projections whose results the method changes in place, as far as names tell."""
    changed = set()
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if not node.func.attr.endswith("_") or node.func.attr.startswith("_"):
                continue
            target = node.func.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
        else:
            continue
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            changed.add(target.id)
    sites = {(site.line, site.column): site.name for site in cluster.sites}
    written = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {child.id for one in targets for child in ast.walk(one) if isinstance(child, ast.Name)}
            if names & changed:
                places = {(c.lineno, c.col_offset) for c in ast.walk(node.value) if isinstance(c, ast.Call)}
                written |= {name for place, name in sites.items() if place in places}
    return written


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

    def __init__(self, before: dict[int, list[str]], replaced: dict[tuple[int, int], str], method: Method) -> None:
        super().__init__()
        self._before = before
        self._calls = replaced
        self._method = method
        self.inserted = 0
        self.replaced = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        start = self.get_metadata(PositionProvider, original_node).start
        name = self._calls.get((start.line, start.column))
        # A chain of calls starts where its first call starts: the one that is meant has nothing but a name inside.
        if name is None or not isinstance(original_node.func, cst.Attribute):
            return updated_node
        if not isinstance(original_node.func.value, cst.Name):
            return updated_node
        self.replaced += 1
        return cst.Name(name, lpar=updated_node.lpar, rpar=updated_node.rpar)

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        lines = self._before.get(self.get_metadata(PositionProvider, original_node).start.line)
        if lines is None:
            return updated_node
        if len(original_node.body) != 1:
            raise NotUnderstoodError(
                "two statements share a line", self.get_metadata(PositionProvider, original_node).start.line
            )
        self.inserted += 1
        statements = [cst.parse_statement(line) for line in lines]
        first = statements[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel([first, *statements[1:], updated_node.with_changes(leading_lines=[])])


def _guards(method: Method, assumptions: Assumptions, this: str) -> list[str]:
    """What leaves a call that isn't as assumed to the method as it was; the joined projection gives the parts."""
    conditions = [f"{name} is not None" for name in assumptions.none]
    conditions += [f"{name} is not {assumptions.same[0]}" for name in assumptions.same[1:]]
    conditions += [
        f"{this}.{name} is not {value}" if value is None or isinstance(value, bool) else f"{this}.{name} != {value!r}"
        for name, value in assumptions.attributes
    ]
    conditions += [f'type({this}.{name}).__name__ != "Identity"' for name in assumptions.identities]
    if not conditions:
        return []
    arguments = method.node.args
    passed = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args][1:]]
    if arguments.vararg is not None:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        passed.append(f"**{arguments.kwarg.arg}")
    return [f"if {' or '.join(conditions)}:\n    return super().{method.name}({', '.join(passed)})\n"]


def _with_guards(function: cst.FunctionDef, guards: Iterable[str]) -> cst.FunctionDef:
    body = function.body
    if not isinstance(body, cst.IndentedBlock):
        raise NotUnderstoodError("the body is on the line of its head", 1)
    statements = list(body.body)
    at = 1 if function.get_docstring() is not None else 0
    statements[at:at] = [cst.parse_statement(guard) for guard in guards]
    return function.with_changes(body=body.with_changes(body=statements))


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
        NotUnderstoodError: one of them can't be read.
    """
    return [method_of(cls, name) for name, tree in _trees(cls).items() if wanted(tree)]


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
def _trees(cls: type[nn.Module]) -> dict[str, ast.FunctionDef]:
    """The trees of the methods that its objects have."""
    trees: dict[str, ast.FunctionDef] = {}
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            if name in seen or not callable(value) or isinstance(value, type):
                continue
            seen.add(name)
            # What builds and initialises the module meets the parts, or runs before they are joined.
            if name.startswith("__") or name == "_init_weights":
                continue
            tree = _tree_of(value)
            if tree is not None:
                trees[name] = tree
    return trees


def _tree_of(value: Any) -> ast.FunctionDef | None:
    function = inspect.unwrap(value)
    if not isinstance(function, FunctionType):
        return None
    try:
        node = definition_of(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None
