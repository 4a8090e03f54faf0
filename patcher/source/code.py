"""What a code object does: its operations, without where it is."""

from __future__ import annotations
import __future__

import dis
import functools
import inspect
import types
from typing import Any, NamedTuple

#: Code that reads one of these may depend on the name or the place of itself or its class.
_REFLECTIVE = frozenset(
    {
        *("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__code__", "__globals__"),
        "__file__",
        *("globals", "locals", "eval", "exec", "_getframe", "currentframe", "stack", "getsource", "signature"),
    }
)
_LOCAL = frozenset(dis.haslocal) | frozenset(dis.hasfree)
#: Flags for the place of a function and for its docstring; the last two are of Python 3.14.
_IGNORED_FLAGS = inspect.CO_NESTED | getattr(inspect, "CO_HAS_DOCSTRING", 0) | getattr(inspect, "CO_METHOD", 0)
#: Relative imports depend on the package of the module, and an assigned global is state of the module.
_MODULE_OPERATIONS = frozenset({"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


class Code(NamedTuple):
    """A summary of a code object and the functions in it.

    Attributes:
        operations: its operations without positions, docstrings and names of locals; global names are indices.
        global_names: the global names that it reads, by index.
        reflective: the names it reads whose values may depend on names and places.
        depends_on_module: whether it imports, or assigns a global.
    """

    operations: tuple[Any, ...]
    global_names: tuple[str, ...]
    reflective: frozenset[str]
    depends_on_module: bool


@functools.lru_cache(maxsize=8192)
def of_code(code: types.CodeType) -> Code:
    """Return the summary of a code object."""
    parameters = code.co_argcount + code.co_kwonlyargcount
    parameters += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # Free variables by position, as the enclosing function passes them.
    indices = {name: index for index, name in enumerate((*code.co_varnames[:parameters], *code.co_freevars))}
    instructions = list(dis.get_instructions(code))
    nested = [of_code(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own_names = [instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL"]
    global_names = tuple(dict.fromkeys([*own_names, *(name for function in nested for name in function.global_names)]))
    operations: list[Any] = []
    for instruction in instructions:
        value = instruction.argval
        if instruction.opcode in _LOCAL:
            names = value if isinstance(value, tuple) else (value,)
            value = tuple(indices.setdefault(name, len(indices)) for name in names)
        elif instruction.opname == "LOAD_GLOBAL":
            value = global_names.index(value), instruction.argrepr != value  # with a NULL in calls
        elif instruction.opcode in dis.hasname:
            value = instruction.argrepr
        elif instruction.opcode in dis.hasconst:
            value = _constant(value)
        else:
            value = instruction.arg
        operations.append((instruction.opcode, value))
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_IGNORED_FLAGS
    # A global name has different indices in a nested function and here.
    nested_indices = tuple(tuple(global_names.index(name) for name in function.global_names) for function in nested)
    return Code(
        (*shape, code.co_exceptiontable, code.co_varnames[:parameters], tuple(operations), nested_indices),
        global_names,
        _REFLECTIVE.intersection(code.co_names).union(*(function.reflective for function in nested)),
        not _MODULE_OPERATIONS.isdisjoint(instruction.opname for instruction in instructions)
        or any(function.depends_on_module for function in nested),
    )


def has_code(text: str, code: types.CodeType) -> bool:
    """Whether the text of a file has a code object, by its name and at its line: not after the file was edited."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    named = (other for other in _compiled(text, code.co_filename, flags) if other.co_qualname == code.co_qualname)
    return any(other.co_firstlineno == code.co_firstlineno and of_code(other) == of_code(code) for other in named)


@functools.lru_cache(maxsize=16)
def _compiled(text: str, file: str, flags: int) -> list[types.CodeType]:
    """Compile a file as a whole: the bytecode of a method call depends on the imports of the file."""
    codes = [compile(text, file, "exec", flags, dont_inherit=True)]
    for code in codes:  # grows
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return codes


def _constant(value: Any) -> Any:
    """Return a constant with the types of all its parts: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(value, types.CodeType):
        return of_code(value).operations
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(map(_constant, value))
    return type(value), repr(value)
