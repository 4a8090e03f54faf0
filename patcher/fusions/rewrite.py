"""A method's own source with some calls joined, compiled into a subclass whose source can be read.

```text
query_states = self.q_proj(hidden_states).view(shape)
```

becomes, before the statement of the first of the calls and in their places,

```text
q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)
query_states = q_proj_output.view(shape)
```

or, where the inputs of the calls are compared one by one,

```text
shared = self.shared_input()
query_states = shared("q_proj", hidden_states).view(shape)
```

Comments and formatting stay. The code runs in the namespace of the module that it comes from, so it sees what that
module's own code sees, now and later.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from patcher.fusions.joined import Joined
from patcher.fusions.methods import Method, NotUnderstoodError, names_in, self_of
from patcher.fusions.sharing import Form, called_parts
from patcher.source.call_sites import positional_parameters
from patcher.source.indentation import indented
from patcher.source.synthetic import module_of_text

#: Modules of rewritten code live below this name, in `sys.modules` and in tracebacks.
HOME = "patcher.fusions.rewritten"


def rewritten(method: Method, joined: Joined, form: Form) -> str:
    """The source of the method with the calls of its projections joined.

    Raises:
        NotUnderstoodError: it can't be written down safely.
    """
    taken, this = names_in(method.node), self_of(method.node, "self")
    source = method.source.encode().split(b"\n")  # ast counts columns in bytes
    every = called_parts(method.node, joined.projections)
    calls = [every[number] for number in form.calls]
    if form.is_split:
        outputs = {name: _free(f"{name}_output", taken) for name in joined.projections}
        statement = _statement_of(method.node, calls[0])
        line, column = statement.lineno, statement.col_offset
        given = ast.unparse(calls[0].args[0])
        lines = [f"{', '.join(outputs.values())} = {this}.{joined.name}({given}).split({this}.{joined.sizes}, dim=-1)"]
        for name in joined.biased:  # the type is that of the product: under autocast it isn't that of the bias
            lines.append(f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias.to({outputs[name]}.dtype)")
        indent = source[line - 1][:column].decode()
        if indent.strip():
            raise NotUnderstoodError("two statements share a line", line)
        edits = [(line, column, line, column, "".join(f"{each}\n{indent}" for each in lines))]
    else:
        shared = _free("shared", taken)
        outputs = {name: f'{shared}("{name}", {{}})' for name in joined.projections}
        edits = [_first_line(method, source, f"{shared} = {this}.shared_input()\n")]
    for call in calls:
        name = call.func.attr  # type: ignore[attr-defined]
        result = outputs[name].format(ast.unparse(call.args[0])) + (".clone()" if form.is_copied else "")
        edits.append((call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0, result))
    if form.checked:
        edits.append(_first_line(method, source, _check_of(form, method, this, _indent_of(method, source))))
    edits.sort(key=lambda edit: edit[:2])  # stable, so that what comes in front of one line keeps its order
    for first, column, last, end_column, text in reversed(edits):
        source[first - 1 : last] = [source[first - 1][:column] + text.encode() + source[last - 1][end_column:]]
    return b"\n".join(source).decode()


def _statement_of(function: ast.FunctionDef, call: ast.Call) -> ast.stmt:
    """The innermost statement that has a call in it."""
    holding = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and call in ast.walk(node)]
    return max(holding, key=lambda node: (node.lineno, node.col_offset))


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _indent_of(method: Method, source: list[bytes]) -> str:
    first = method.node.body[0]
    indent = source[first.lineno - 1][: first.col_offset].decode()
    if indent.strip():
        raise NotUnderstoodError("two statements share a line", first.lineno)
    return indent


def _first_line(method: Method, source: list[bytes], text: str) -> tuple[int, int, int, int, str]:
    """The edit that puts lines behind the docstring, before the comments above the first statement."""
    indent, first = _indent_of(method, source), method.node.body[0]
    if ast.get_docstring(method.node) is not None:
        line = (first.end_lineno or first.lineno) + 1
    else:
        line = first.lineno
        while not source[line - 2].split(b"#")[0].strip():
            line -= 1
    return line, 0, line, 0, "".join(f"{indent}{each}" for each in text.splitlines(keepends=True))


def _check_of(form: Form, method: Method, this: str, indent: str) -> str:
    """The lines that leave a call whose arguments aren't what they are annotated with to the original."""
    arguments = method.node.args
    passed = [argument.arg for argument in positional_parameters(method.node)[1:]]
    if arguments.vararg is not None:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        passed.append(f"**{arguments.kwarg.arg}")
    conditions = form.checked[0] if len(form.checked) == 1 else " and ".join(f"({each})" for each in form.checked)
    return f"if not ({conditions}):\n{indent}return super().{method.name}({', '.join(passed)})\n"


def compile_subclass(
    name: str, docstring: str, bases: tuple[type, ...], methods: Sequence[tuple[Method, str]]
) -> type[Any]:
    """A subclass of `bases` with rewritten methods, whose source `inspect.getsource` and tracebacks show.

    Raises:
        NotUnderstoodError: the methods come from different files, or the source isn't complete.
    """
    namespaces = {id(method.function.__globals__): method.function.__globals__ for method, _ in methods}
    if len(namespaces) != 1:
        raise NotUnderstoodError("its methods come from different files")
    (namespace,) = namespaces.values()
    if len({method.node.name for method, _ in methods}) < len(methods):
        raise NotUnderstoodError("two of its methods are functions of one name")
    for method, source in methods:
        if "__class__" in method.function.__code__.co_freevars and "super()" in method.source:
            raise NotUnderstoodError(f"{method.name} calls super()", 1)
        if any(part.startswith("__") and not part.endswith("__") for part in names_in(ast.parse(source))):
            raise NotUnderstoodError(f"{method.name} uses private names", 1)
    sources = {method.name: source for method, source in methods}
    text = class_text(name, ", ".join(base.__name__ for base in bases), docstring, sources.values())

    _forget_freed()
    full, number = f"{HOME}.{bases[-1].__module__}.{name}", 2
    while full in sys.modules:
        full, number = f"{HOME}.{bases[-1].__module__}.{name}_{number}", number + 1
    module = module_of_text(full, text, f"<{full}>")
    scope: dict[str, Any] = {base.__name__: base for base in bases}
    # Annotations are evaluated, or not, as where the methods come from.
    flags = methods[0][0].function.__code__.co_flags & __future__.annotations.compiler_flag
    exec(compile(text, module.__file__ or "", "exec", flags, dont_inherit=True), namespace, scope)
    cls: type[Any] = scope[name]
    for method, _ in methods:
        made = vars(cls)[method.node.name]
        if method.node.name != method.name:  # another tool has put a function of another name there
            delattr(cls, method.node.name)
            setattr(cls, method.name, made)
        function = inspect.unwrap(made)  # with the defaults in force: the source that was read may have others
        function.__defaults__, function.__kwdefaults__ = method.function.__defaults__, method.function.__kwdefaults__
    line = vars(cls).get("__firstlineno__")  # of Python 3.13, which forgets it with a new `__module__`
    cls.__module__ = module.__name__
    if line is not None:
        cls.__firstlineno__ = line
    cls._rewritten = MappingProxyType(sources)
    cls._made_from = {each.name: (each.function, each.function.__code__) for each, _ in methods}
    # `sys.modules[cls.__module__]` has what it has for the class that the methods come from; it keeps neither alive.
    module.__getattr__ = partial(_name_of, namespace, weakref.ref(cls), full)  # type: ignore[method-assign]
    _made.append((weakref.ref(cls), full, module.__file__ or ""))
    return cls


#: the classes that were made, and their modules
_made: list[tuple[weakref.ref[type[Any]], str, str]] = []


def _forget_freed() -> None:
    """Take out the modules of classes that are gone: not when they go, for others may be iterating then."""
    for made in [each for each in _made if each[0]() is None]:
        _made.remove(made)
        sys.modules.pop(made[1], None)
        linecache.cache.pop(made[2], None)


def _name_of(namespace: Mapping[str, Any], made: weakref.ref[type[Any]], module: str, name: str) -> Any:
    cls = made()
    if cls is not None and name == cls.__name__:
        return cls
    if name.startswith("__") or name not in namespace:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return namespace[name]


def class_text(name: str, bases: str, docstring: str, members: Iterable[str]) -> str:
    """The text of a class whose members are functions."""
    head = f'class {name}({bases}):\n    """{docstring}"""\n'
    return "".join([head, *(f"\n{indented(member)}" for member in members)])
