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
from patcher.source.edits import Edit, Text, applied
from patcher.source.texts import indented, module_of_text

#: Modules of rewritten code live below this name, in `sys.modules` and in tracebacks.
HOME = "patcher.fusions.rewritten"


def rewritten(method: Method, joined: Joined, form: Form) -> str:
    """The source of the method with the calls of its projections joined.

    Raises:
        NotUnderstoodError: it can't be written down safely.
    """
    taken, this = names_in(method.node), self_of(method.node, "self")
    text = Text(method.source, ast.Module([method.node], []))
    every = called_parts(method.node, joined.projections)
    calls: list[Any] = [every[number] for number in form.calls]
    if form.is_split:
        outputs = {name: _free(f"{name}_output", taken) for name in joined.projections}
        given = ast.unparse(calls[0].args[0])
        lines = [f"{', '.join(outputs.values())} = {this}.{joined.name}({given}).split({this}.{joined.sizes}, dim=-1)"]
        for name in joined.biased:  # the type is that of the product: under autocast it isn't that of the bias
            lines.append(f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias.to({outputs[name]}.dtype)")
        statement = _statement_of(method.node, calls[0])
        start, indent = text.span(statement)[0], _indent_of(text, statement)
        edits = [Edit(start, start, "".join(f"{each}\n{indent}" for each in lines))]
    else:
        shared = _free("shared", taken)
        outputs = {name: f'{shared}("{name}", {{}})' for name in joined.projections}
        edits = [_first_lines(text, method.node, [f"{shared} = {this}.shared_input()"])]
    for call in calls:
        result = outputs[call.func.attr].format(ast.unparse(call.args[0])) + (".clone()" if form.is_copied else "")
        edits.append(Edit(*text.span(call), result))
    if form.checked:
        edits.append(_first_lines(text, method.node, _check_of(form, method, this)))
    return applied(text.text, edits)


def _statement_of(function: ast.FunctionDef, call: ast.Call) -> ast.stmt:
    """The innermost statement that has a call in it."""
    holding = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and call in ast.walk(node)]
    return max(holding, key=lambda node: (node.lineno, node.col_offset))


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _indent_of(text: Text, statement: ast.stmt) -> str:
    indent = text.text[text.start_of(statement.lineno) : text.span(statement)[0]]
    if indent.strip():
        raise NotUnderstoodError("two statements share a line", statement.lineno)
    return indent


def _first_lines(text: Text, function: ast.FunctionDef, lines: Iterable[str]) -> Edit:
    """The edit that puts lines behind the docstring, before the comments above the first statement."""
    first = function.body[0]
    line, indent = first.lineno, _indent_of(text, first)
    if ast.get_docstring(function) is not None:
        line = (first.end_lineno or line) + 1
    else:
        while not text.lines[line - 2].split("#")[0].strip():
            line -= 1
    return Edit(text.start_of(line), text.start_of(line), "".join(f"{indent}{each}\n" for each in lines))


def _check_of(form: Form, method: Method, this: str) -> list[str]:
    """The lines that leave a call whose arguments aren't what they are annotated with to the original."""
    arguments = method.node.args
    passed = [argument.arg for argument in positional_parameters(method.node)[1:]]
    if arguments.vararg is not None:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        passed.append(f"**{arguments.kwarg.arg}")
    conditions = form.checked[0] if len(form.checked) == 1 else " and ".join(f"({each})" for each in form.checked)
    return [f"if not ({conditions}):", f"    return super().{method.name}({', '.join(passed)})"]


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
