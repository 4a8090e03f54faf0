"""Rewriting the source of methods with some calls joined, and compiling it into a subclass.

```text
query_states = self.q_proj(hidden_states).view(shape)
```

becomes, before the statement of the first call and in place of the calls,

```text
q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)
query_states = q_proj_output.view(shape)
```

or, where the inputs of the calls are compared at run time,

```text
shared = self.shared_input()
query_states = shared("q_proj", hidden_states).view(shape)
```

Comments and formatting are kept. The code runs in the namespace of the module that it comes from, so it uses the same
globals, also after they change.
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
from patcher.source.texts import Edit, Text, applied, indented, module_of_text

#: The package of the modules of rewritten code, in `sys.modules` and in tracebacks.
PACKAGE = "patcher.fusions.rewritten"


def rewritten(method: Method, joined: Joined, form: Form) -> str:
    """Return the source of a method with the calls of its projections joined.

    Raises:
        NotUnderstoodError: two statements share a line.
    """
    names, this = names_in(method.node), self_of(method.node, "self")
    text = Text(method.source, ast.Module([method.node], []))
    all_calls = called_parts(method.node, joined.projections)
    calls: list[Any] = [all_calls[index] for index in form.calls]
    if form.is_split:
        outputs = {name: _unused(f"{name}_output", names) for name in joined.projections}
        joined_call = f"{this}.{joined.name}({ast.unparse(calls[0].args[0])})"
        lines = [f"{', '.join(outputs.values())} = {joined_call}.split({this}.{joined.sizes}, dim=-1)"]
        for name in joined.biased:  # under autocast the product has another dtype than the bias
            lines.append(f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias.to({outputs[name]}.dtype)")
        statement = _statement_of(method.node, calls[0])
        start, indent = text.span(statement)[0], _indent_of(text, statement)
        edits = [Edit(start, start, "".join(f"{line}\n{indent}" for line in lines))]
    else:
        shared = _unused("shared", names)
        outputs = {name: f'{shared}("{name}", {{}})' for name in joined.projections}
        edits = [_insert_first(text, method.node, [f"{shared} = {this}.shared_input()"])]
    for call in calls:
        result = outputs[call.func.attr].format(ast.unparse(call.args[0])) + (".clone()" if form.is_copied else "")
        edits.append(Edit(*text.span(call), result))
    if form.checked:
        edits.append(_insert_first(text, method.node, _guard(form, method, this)))
    return applied(text.text, edits)


def _statement_of(function: ast.FunctionDef, call: ast.Call) -> ast.stmt:
    """Return the innermost statement that contains a call."""
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and call in ast.walk(node)]
    return max(statements, key=lambda node: (node.lineno, node.col_offset))


def _unused(name: str, names: set[str]) -> str:
    while name in names:
        name += "_"
    names.add(name)
    return name


def _indent_of(text: Text, statement: ast.stmt) -> str:
    indent = text.text[text.start_of(statement.lineno) : text.span(statement)[0]]
    if indent.strip():
        raise NotUnderstoodError("two statements share a line", statement.lineno)
    return indent


def _insert_first(text: Text, function: ast.FunctionDef, lines: Iterable[str]) -> Edit:
    """Return the edit that inserts lines after the docstring and before comments above the first statement."""
    first = function.body[0]
    line, indent = first.lineno, _indent_of(text, first)
    if ast.get_docstring(function) is not None:
        line = (first.end_lineno or line) + 1
    else:
        while not text.lines[line - 2].split("#")[0].strip():
            line -= 1
    return Edit(text.start_of(line), text.start_of(line), "".join(f"{indent}{code}\n" for code in lines))


def _guard(form: Form, method: Method, this: str) -> list[str]:
    """Return the lines that call the original method unless the conditions of a form hold."""
    arguments = method.node.args
    forwarded = [argument.arg for argument in positional_parameters(method.node)[1:]]
    if arguments.vararg is not None:
        forwarded.append(f"*{arguments.vararg.arg}")
    forwarded += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        forwarded.append(f"**{arguments.kwarg.arg}")
    conditions = form.checked[0] if len(form.checked) == 1 else " and ".join(map("({})".format, form.checked))
    return [f"if not ({conditions}):", f"    return super().{method.name}({', '.join(forwarded)})"]


def compile_subclass(
    name: str, docstring: str, bases: tuple[type, ...], methods: Sequence[tuple[Method, str]]
) -> type[Any]:
    """Create a subclass of `bases` with rewritten methods, whose source `inspect.getsource` and tracebacks show.

    Raises:
        NotUnderstoodError: the methods come from different files, or can't be compiled outside of their class.
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

    _remove_freed()
    module_name, number = f"{PACKAGE}.{bases[-1].__module__}.{name}", 2
    while module_name in sys.modules:
        module_name, number = f"{PACKAGE}.{bases[-1].__module__}.{name}_{number}", number + 1
    module = module_of_text(module_name, text, f"<{module_name}>")
    local_namespace: dict[str, Any] = {base.__name__: base for base in bases}
    # Annotations are evaluated, or not, as in the module of the methods.
    flags = methods[0][0].function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(text, module.__file__ or "", "exec", flags, dont_inherit=True)
    try:
        exec(code, namespace, local_namespace)
    except Exception as error:  # of a decorator: `auto_docstring` looks at the path of the file
        _remove(module_name, module.__file__ or "")
        reason = f"can't be defined in another file ({type(error).__name__}: {error})"
        raise NotUnderstoodError(f"{', '.join(sources)} {reason}", 1) from error
    cls: type[Any] = local_namespace[name]
    for method, _ in methods:
        member = vars(cls)[method.node.name]
        if method.node.name != method.name:  # another tool has assigned a function of another name
            delattr(cls, method.node.name)
            setattr(cls, method.name, member)
        function = inspect.unwrap(member)  # with the current defaults, which may differ from the source
        function.__defaults__, function.__kwdefaults__ = method.function.__defaults__, method.function.__kwdefaults__
    line = vars(cls).get("__firstlineno__")  # Python 3.13 deletes it when `__module__` is set
    cls.__module__ = module.__name__
    if line is not None:
        cls.__firstlineno__ = line
    cls._rewritten = MappingProxyType(sources)
    cls._made_from = {method.name: (method.attribute, method.function.__code__) for method, _ in methods}
    # The new module has the globals of the original one. It refers to the class weakly, so that both can be freed.
    module.__getattr__ = partial(_module_attribute, namespace, weakref.ref(cls), module_name)  # type: ignore[method-assign]
    _created.append((weakref.ref(cls), module_name, module.__file__ or ""))
    return cls


#: the created classes, and the names and files of their modules
_created: list[tuple[weakref.ref[type[Any]], str, str]] = []


def _remove_freed() -> None:
    """Remove the modules of freed classes. Not in a weakref callback: `sys.modules` may be iterated over then."""
    for freed in [entry for entry in _created if entry[0]() is None]:
        _created.remove(freed)
        _remove(*freed[1:])


def _remove(module: str, file: str) -> None:
    sys.modules.pop(module, None)
    linecache.cache.pop(file, None)


def _module_attribute(namespace: Mapping[str, Any], reference: weakref.ref[type[Any]], module: str, name: str) -> Any:
    cls = reference()
    if cls is not None and name == cls.__name__:
        return cls
    if name.startswith("__") or name not in namespace:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return namespace[name]


def class_text(name: str, bases: str, docstring: str, members: Iterable[str]) -> str:
    """Return the source of a class whose members are functions."""
    head = f'class {name}({bases}):\n    """{docstring}"""\n'
    return "".join([head, *(f"\n{indented(member)}" for member in members)])
