"""Classes of which methods and nested classes are patched, as edits of a file's text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from patcher.codegen.generation.patched_definitions import (
    Context,
    Piece,
    is_overload,
    marker,
    why,
)
from patcher.codegen.spec import External, Patch, PatchKind
from patcher.errors import CodegenError
from patcher.source.definitions import is_accessor
from patcher.source.edits import Edit, Place, Text, definitions
from patcher.source.reading import start_line
from patcher.source.renaming import renaming
from patcher.source.scopes import bound_by, looks_misspelt, nearest

#: the name that `modify_init` keeps an original `__init__` under
ORIGINAL = "_original_init"


def edit_class(place: Place, patches: Sequence[Patch], context: Context) -> None:
    """Patch the methods of a class."""
    edit = _ClassEdit(place, context)
    for patch in patches:
        if patch.kind is PatchKind.MODIFY_INIT:
            edit.wrap_init(patch)
        else:
            edit.override(patch, patch.target.partition(".")[2])
    edit.finish()


class _ClassEdit:
    """The edits of one class."""

    def __init__(self, place: Place, context: Context) -> None:
        assert isinstance(place.node, ast.ClassDef)
        self.place, self.node, self.context, self.path = place, place.node, context, place.node.name
        self.where = f"{self.path!r} in {context.source}"
        self.members = definitions(self.node.body, self.node)
        first, text = self.node.body[0], context.text
        #: whether the body is on the line of the head
        self.in_line = text.is_in_line(self.node)
        self.indent = context.indent(self.node) + "    " if self.in_line else text.indent(start_line(first))
        self.added: list[list[str]] = []
        #: position among the members, name and patch of each patched method
        self.patched: list[tuple[int, str, Patch]] = []

    def methods(self, name: str) -> list[Place]:
        """All that define a name, as the branches of an `if` do; no accessors of properties and no overloads."""
        found = [member for member in self.members if _name(member) == name]
        return [member for member in found if not is_accessor(member.node) and not is_overload(member.node)]

    def _note(self, patch: Patch, name: str, found: Sequence[Place]) -> None:
        """Note one patch; the header lists patches in the order of the members."""
        position = self.members.index(found[0]) if found else len(self.members)
        self.patched.append((position, name, patch))

    def override(self, patch: Patch, name: str) -> None:
        """Replace or add one method."""
        found = self.methods(name)
        if any(isinstance(member.node, ast.ClassDef) for member in found):
            raise patch.error(f"names a nested class. Use replace_class({self.path!r}) for all that is around.")
        known = {_name(member) for member in self.members}
        near_names = [other for other in known if patch.new is None and looks_misspelt(name, other)]
        if found and patch.new:
            raise patch.error(f"says new=True, and {self.where} has a method {name!r}. Leave new out to replace it.")
        if not found and near_names:
            raise patch.error(
                f"names no method of {self.where}, and one of nearly that name. {nearest(name, near_names)} "
                f"If {name!r} is to be a new method, write override_method(..., new=True)."
            )
        says = rf"\b{self.node.name}\b(?s:.*)\b{name}\b"
        source = patch.source if patch.source is not None and re.search(says, patch.source.text) else None
        for part in ast.walk(source.tree()) if source is not None else ():
            if isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part) == f"{self.path}.{name}":
                raise patch.error(
                    f"calls {self.path}.{name}, which it replaces: it would call itself for ever. Write the "
                    "original's code into the patch, or use replace_class with a class that inherits from it."
                )
        # of several, such as the branches of an `if`, the definition that stays bound is the last: replace each
        for member in found:
            self.context.put_above(member, ())
            self.context.replace(member, self._method(patch, name, member))
        if not found:
            self.added.append(self._method(patch, name))
        self._note(patch, name, found)

    def _method(self, patch: Patch, name: str, member: Place | None = None) -> list[str]:
        """The lines of a patched method, with the decorators, if they stay, of the one that it replaces."""
        context = self.context
        indent = self.indent if member is None else context.indent(member.node)
        origin = [f"{indent}# {line}" for line in context.provenance.comment(patch)]
        if isinstance(patch.replacement, External):
            return [*origin, f"{indent}{name} = {context.externals[patch.replacement]}"]
        piece = context.read(patch, indent, name=name)
        if member is not None and patch.keep_decorators:
            piece = _with_decorators(piece, member.node, context.text)
        return [*origin, *piece.lines]

    def wrap_init(self, patch: Patch) -> None:
        """`modify_init`: the original `__init__` stays under another name, and the patched one calls it.

        It is called as `Class._original_init(self, ...)`, through the class and not through `self`: a subclass whose
        `__init__` is modified too has an `_original_init` of its own, and would be called in its place.
        """
        assert patch.source is not None
        node: Any = patch.source.tree()
        params = [argument.arg for argument in node.args.args]
        if len(params) < 2:
            raise patch.error(
                "needs a function of (original_init, self, ...), and "
                f"{node.name!r} takes {len(params)} positional argument(s). Add original_init in front."
            )
        called = params[0]
        if any(called in bound_by(statement) for statement in node.body):
            raise patch.error(
                f"binds {called!r} anew, which calls the original __init__. Give the other variable another name."
            )
        found = self.methods("__init__")
        if not found:
            raise patch.error(
                f"wraps an __init__ that {self.path!r} inherits. Use override_method('{self.path}.__init__') with a "
                "super().__init__() in it."
            )
        found = [member for member in found if not getattr(member.node, "decorator_list", ())] or found

        def changed(text: Text, function: Any) -> Iterator[Edit]:
            first, second = function.args.args[:2]
            yield Edit(text.span(first)[0], text.span(second)[0], "")
            try:
                yield from renaming(text, {called: f"{self.path}.{ORIGINAL}"}, function)
            except CodegenError as error:
                raise patch.error(f"can't call the original __init__: {error}") from None

        context, names = self.context, dict(patch.name_map)
        if any(_name(member) == ORIGINAL for member in self.members):
            raise patch.error(
                f"would keep the original as {ORIGINAL!r}, and {self.path!r} has a method of that "
                "name. Use override_method for its __init__."
            )
        for member in found:
            indent = context.indent(member.node)
            origin = [f"{indent}# {line}" for line in context.provenance.comment(patch)]
            piece = context.read_source(patch.source, patch.replacement, names, indent, "__init__", changed)
            start = context.text.start_of(min([member.node.lineno, *_decorator_lines(member.node)]))
            note = f"{indent}# The __init__ of the original, called by the patched one below.{context.newline}"
            context.edits.append(Edit(start, start, note))
            context.edits.append(Edit(*context.text.name_of(member.node), ORIGINAL))  # type: ignore[arg-type]
            context.put_behind(member, ["", *origin, *piece.lines])
        self._note(patch, "__init__", found)

    def finish(self) -> None:
        """Write what is added to the class, and the box above it."""
        if self.added:
            self._add()
        if not self.patched:
            return
        self.patched.sort(key=lambda entry: entry[0])
        self.context.done.extend(patch for _, _, patch in self.patched)
        title = f"Methods patched: {', '.join(name for _, name, _ in self.patched)}"
        notes = [f"  {name}: {why(p.description)[5:]}" for _, name, p in self.patched if p.description.strip()]
        self.context.put_above(self.place, marker(f"[MODIFIED CLASS] {self.path}", title, *notes))

    def _add(self) -> None:
        """Write methods behind the other members; an empty body, `...` or `pass`, makes room for them."""
        context, text, body = self.context, self.context.text, self.node.body
        kept, comments = [node for node in body if not _says_nothing(node)], list[str]()
        if self.in_line:
            end = text.span(body[-1])[1]
            code = text.text[text.span(kept[0])[0] : text.span(kept[-1])[1]] if kept else ""
            start = text.text.rindex(":", 0, text.span(body[0])[0]) + 1
            context.edits.append(Edit(start, end, f"{context.newline}{self.indent}{code}" if kept else ""))
            at = text.end_of(body[-1].end_lineno or 0)
        else:
            for place in (Place(node, body, self.node) for node in body if node not in kept and text.is_alone(node)):
                above = place.comments(text)
                comment = [text.lines[number - 1].strip() for number in above]
                trailing = text.text[text.span(place.node)[1] : text.end_of(place.node.lineno)].strip()
                comments += [f"{self.indent}{line}" for line in (*comment, trailing) if line]
                first = next(iter(above), place.node.lineno)
                context.edits.append(Edit(text.end_of(first - 1), text.end_of(place.node.lineno), ""))
            head = Place(body[0], body, self.node).comments(text).start - 1
            at = text.end_of(text.last_line(kept[-1]) if kept else head)
        lines = []
        for number, method in enumerate(self.added):
            lines += ([""] if kept or number else []) + ([] if number else comments) + method
        context.edits.append(Edit(at, at, "".join(f"{context.newline}{line}" for line in lines)))


def _name(member: Place) -> str:
    return str(member.node.name)  # type: ignore[attr-defined]


def _decorator_lines(node: Any) -> list[int]:
    return [decorator.lineno for decorator in node.decorator_list]


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...
    )


def _with_decorators(piece: Piece, member: Any, text: Text) -> Piece:
    """A new method with the decorators of the one that it replaces in front of its own."""
    listed = member.decorator_list
    if not listed:
        return piece
    known = {ast.unparse(decorator) for decorator in listed}
    own = [(code, lines) for code, lines in piece.decorators if code not in known]
    # Comments between the decorators and the function stay where nothing comes between them.
    last = listed[-1].end_lineno if own else member.lineno - 1
    lines = [line.rstrip("\r\n") for line in text.lines[min(_decorator_lines(member)) - 1 : last]]
    return piece._replace(decorators=[("", lines), *own])
