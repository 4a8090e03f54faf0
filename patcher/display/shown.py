"""The base class of `Report`, `Plan`, `Verification` and `Diff`: shown in a terminal, in Jupyter and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, ClassVar

from patcher.display.parts import Cell, Part
from patcher.patterns import compress

if TYPE_CHECKING:
    from rich.console import RenderableType


class Displayable:
    """A frozen dataclass of tuples that is shown in a terminal, in Jupyter and as JSON.

    Subclasses have no `repr` of their own. They return a headline, a verdict if they have one, and parts; empty parts
    are left out.
    """

    #: The properties that JSON has in addition to the fields.
    _also: ClassVar[tuple[str, ...]] = ()

    def _headline(self) -> str:
        raise NotImplementedError

    def _verdict(self) -> Cell | None:
        return None

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and some properties as dicts, lists, strings and numbers, for JSON."""
        fields = vars(self) | {name: getattr(self, name) for name in self._also}
        return {name: _plain(value) for name, value in fields.items()}

    def show(self, file: IO[str] | None = None) -> None:
        """Print it: in colours and at full width in a terminal, as `str` elsewhere."""
        from patcher.display import terminal

        terminal.show(self, file)

    def __rich__(self) -> RenderableType:
        from patcher.display import terminal

        return terminal.rendered(self._headline(), self._verdict(), self._parts())

    def __str__(self) -> str:
        from patcher.display import terminal

        return terminal.text(self)

    def __repr__(self) -> str:  # in a terminal without print(), and in the text of a notebook's output
        return str(self)

    def _repr_html_(self) -> str:
        from patcher.display import page

        return page.rendered(self._headline(), self._verdict(), self._parts())


def pluralize(count: int, noun: str) -> str:
    """Return `1 module`, `2 classes`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def folded(rows: Iterable[tuple[Any, ...]], root: str = "(the model)") -> list[tuple[Any, ...]]:
    """Return rows that begin with a path, with those of several layers that are equal otherwise as one."""
    by_rest: dict[tuple[Any, ...], list[str]] = {}
    for path, *rest in rows:
        by_rest.setdefault(tuple(rest), []).append(path)
    return [(path or root, *rest) for rest, paths in by_rest.items() for path in compress(paths)]


def _plain(value: Any) -> Any:
    for method in ("to_dict", "_asdict"):
        if hasattr(value, method):
            return _plain(getattr(value, method)())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
