"""A method's own source with some calls joined, compiled into a subclass whose source can be read.

```text
query_states = self.q_proj(hidden_states).view(shape)
```

becomes, before the statement of the first of the calls and in their places,

```text
q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)
query_states = q_proj_output.view(shape)
```

Comments and formatting stay. The code runs in the namespace of the module that it comes from, so it sees what that
module's own code sees, now and later.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from patcher.fusions.joined import Joined
from patcher.fusions.methods import Method, NotUnderstoodError, names_in, self_of
from patcher.fusions.proof.tracing import Guards, Proof
from patcher.source.call_sites import positional_parameters
from patcher.source.indentation import indented
from patcher.source.synthetic import module_of_text

#: Modules of rewritten code live below this name, in `sys.modules` and in tracebacks.
HOME = "patcher.fusions.rewritten"


def rewritten(method: Method, joined: Joined, proof: Proof, guards: Guards) -> str:
    """The source of the method with the calls of each shared input joined.

    Raises:
        NotUnderstoodError: it can't be written down safely.
    """
    taken = names_in(method.node)
    outputs = {name: _free(f"{name}_output", taken) for name in joined.projections}
    this = self_of(method.node, "self")
    source = method.source.encode().split(b"\n")  # ast counts columns in bytes
    #: (line, column) of the start, the same of the end, and what stands between them afterwards
    edits: list[tuple[int, int, int, int, str]] = []
    shared_inputs = sorted(proof.inputs, key=lambda shared: shared.anchor.lineno)
    for one, other in pairwise(shared_inputs):  # their outputs go by the same names
        if any(call.lineno >= other.anchor.lineno for call in one.calls):
            raise NotUnderstoodError("the calls of two inputs alternate", other.anchor.lineno)
    for shared in shared_inputs:
        line = f"{', '.join(outputs.values())} = {this}.{joined.name}({ast.unparse(shared.argument)})"
        lines = [f"{line}.split({this}.{joined.sizes}, dim=-1)"]
        for name in joined.biased:  # the type is that of the product: under autocast it isn't that of the bias
            lines.append(f"{outputs[name]} = {outputs[name]} + {this}.{name}_bias.to({outputs[name]}.dtype)")
        start, column = shared.anchor.lineno, shared.anchor.col_offset
        indent = source[start - 1][:column].decode()
        covered = range(start, (shared.anchor.end_lineno or start) + 1)
        others = (node for node in ast.walk(method.node) if isinstance(node, ast.stmt) and node is not shared.anchor)
        if indent.strip() or any(node.lineno in covered for node in others):
            raise NotUnderstoodError("two statements share a line", start)
        edits.append((start, column, start, column, "".join(f"{line}\n{indent}" for line in lines)))
        for call, name in shared.calls.items():
            end = call.end_lineno or call.lineno, call.end_col_offset or call.col_offset
            # Pieces of a split must not be written into, a projection's result may be: each call gives a new one.
            result = f"{outputs[name]}.clone()" if name in proof.written else outputs[name]
            edits.append((call.lineno, call.col_offset, *end, result))
    if guards:
        edits.append(_check_of(guards, method, source, this))
    for first, column, last, end_column, text in sorted(edits, reverse=True):  # so that places before stay right
        source[first - 1 : last] = [source[first - 1][:column] + text.encode() + source[last - 1][end_column:]]
    return b"\n".join(source).decode()


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _check_of(guards: Guards, method: Method, source: list[bytes], this: str) -> tuple[int, int, int, int, str]:
    """The edit that leaves a call that isn't as assumed to the original; the joined projection gives the parts.

    It comes behind the docstring, before the comments above the first statement.
    """
    first = method.node.body[0]
    indent = source[first.lineno - 1][: first.col_offset].decode()
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
    original = f"{indent}{indent}return super().{method.name}({', '.join(passed)})\n"
    if ast.get_docstring(method.node) is not None:
        line = (first.end_lineno or first.lineno) + 1
    else:
        line = first.lineno
        while not source[line - 2].split(b"#")[0].strip():
            line -= 1
    return line, 0, line, 0, f"{indent}if {' or '.join(conditions)}:\n{original}"


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
    # `sys.modules[cls.__module__]` has what it has for the class that the methods come from.
    module.__getattr__ = partial(_name_of, namespace, full)  # type: ignore[method-assign]
    return cls


def _name_of(namespace: Mapping[str, Any], module: str, name: str) -> Any:
    if name.startswith("__") or name not in namespace:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return namespace[name]


def class_text(name: str, bases: str, docstring: str, members: Iterable[str]) -> str:
    """The text of a class whose members are functions."""
    head = f'class {name}({bases}):\n    """{docstring}"""\n'
    return "".join([head, *(f"\n{indented(member)}" for member in members)])
