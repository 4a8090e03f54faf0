"""What the code of a function refers to, read from its bytecode: nothing is run, and no source is needed."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import CodeType


@dataclass(frozen=True)
class Reference:
    """A global name that code reads.

    Attributes:
        attributes: the attributes that are read of it at once: `nn`, `softmax` in `torch.nn.softmax(x)`.
        is_called: whether it is called where it is read.
    """

    name: str
    attributes: tuple[str, ...] = ()
    is_called: bool = False


@dataclass(frozen=True)
class References:
    """What a piece of code refers to, that of the functions defined in it included.

    Attributes:
        read: the global names that it reads.
        written: the global names that it binds or deletes.
        written_cells: the variables of functions around it that it binds or deletes.
        imported: (level, module, name) of what it imports by `from module import name`.
    """

    read: tuple[Reference, ...]
    written: frozenset[str]
    written_cells: frozenset[str]
    imported: tuple[tuple[int, str, str], ...]


@lru_cache(maxsize=8192)
def references_of(code: CodeType) -> References:
    """What a code object refers to."""
    read: dict[Reference, None] = {}
    written: set[str] = set()
    cells: set[str] = set()
    imported: dict[tuple[int, str, str], None] = {}
    instructions = list(dis.get_instructions(code))
    level, module = 0, ""
    for number, each in enumerate(instructions):
        match each.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                after = takewhile(lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), instructions[number + 1 :])
                is_called = each.opname == "LOAD_GLOBAL" and bool((each.arg or 0) & 1)
                read[Reference(each.argval, tuple(one.argval for one in after), is_called)] = None
            case "STORE_GLOBAL" | "DELETE_GLOBAL":
                written.add(each.argval)
            case "STORE_DEREF" | "DELETE_DEREF":
                cells.add(each.argval)
            case "IMPORT_NAME":
                level, module = int(instructions[number - 2].argval or 0), each.argval
            case "IMPORT_FROM":
                imported[level, module, each.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = references_of(inner)
            read |= dict.fromkeys(found.read)
            written |= found.written
            # What an inner function shares with this one is a variable of this one, or of one around both.
            cells |= found.written_cells
            imported |= dict.fromkeys(found.imported)
    return References(tuple(read), frozenset(written), frozenset(cells), tuple(imported))
