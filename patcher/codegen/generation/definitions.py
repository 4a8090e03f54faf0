"""Patches of definitions as edits of a file: replaced classes and functions, and classes with patched methods."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from patcher.codegen.generation.draft import Draft, comments, marker, why
from patcher.codegen.spec import External, Patch, PatchKind
from patcher.errors import CodegenError
from patcher.source.reading import is_of_config
from patcher.source.renaming import renaming
from patcher.source.scopes import free_names, is_accessor, looks_misspelt, nearest, start_line
from patcher.source.texts import Edit, Place, Text, definitions

#: The name under which `modify_init` keeps the original `__init__`.
ORIGINAL_INIT = "_original_init"


# --- whole definitions ----------------------------------------------------------------------------------------------


def replace_definition(patch: Patch, place: Place, draft: Draft) -> None:
    """Replace a class or a function by a patch."""
    node: Any = place.node
    is_class = isinstance(node, ast.ClassDef)
    kind, wrong, fix = "function", PatchKind.REPLACE_CLASS, "Use replace_function."
    if is_class:
        kind, wrong = "class", PatchKind.REPLACE_FUNCTION
        fix = "Use replace_class, or override_method for one of its methods."
    if patch.target_kind is wrong:
        raise patch.error(f"does not fit: {patch.target!r} is a {kind} in {draft.source.name}. {fix}")
    box = marker(f"[PATCHED {kind.upper()}] {patch.target}", why(patch.description), *draft.origin(patch))
    name, indent = node.name, draft.indent(node)
    original = ""
    if not isinstance(patch.replacement, External):
        original = _name_of_original(patch, name, is_class, draft)
        lines = _replacement(patch, name, original, indent, draft)
    else:
        lines = [f"{indent}{patch.replacement.import_as(name)}"]
    if not original:
        draft.put_above(place, box)
        draft.replace(node, lines)
        return
    draft.put_above(place, [f"# The original, used by the patched {name} below."])
    draft.rename(node, original)
    draft.edits += renaming(draft.text, {name: original}, within=node)
    draft.put_behind(place, ["", "", *(f"{indent}{line}" for line in box), *lines])


def _replacement(patch: Patch, name: str, original: str, indent: str, draft: Draft) -> list[str]:
    """Return the lines of a replacement, which may use the original under another name."""
    assert patch.source is not None
    own_name, names = patch.source.name, dict(patch.name_map)
    of_original = {old: original for old, new in (*patch.name_map, (name, name)) if original and new == name}
    if own_name != name or not original or not patch.source.is_class:
        if own_name == name:  # by which a function calls itself
            of_original.pop(name, None)
        names |= of_original | ({own_name: name} if own_name != name else {})
        return draft.code(patch, indent, names, name)

    def rename_bases(text: Text, node: Any) -> list[Edit]:
        used = [part for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)]
        return [Edit(*text.span(part), of_original[part.id]) for part in used if part.id in of_original]

    # The name is that of the new class, except in its own bases, which are evaluated before it is bound.
    names = {old: new for old, new in names.items() if old not in of_original}
    return draft.code(patch, indent, names, "", rename_bases)


def _name_of_original(patch: Patch, name: str, is_class: bool, draft: Draft) -> str:
    """Return the name under which the original is kept because the replacement uses it, "" if it doesn't."""
    assert patch.source is not None
    node: Any = patch.source.tree()
    bases = [*node.bases, *(keyword.value for keyword in node.keywords)] if is_class else []
    used = free_names("\n".join(map(ast.unparse, bases)) if is_class else patch.source.text)
    renamed = {dict(patch.name_map).get(word, word) for word in used}
    if name not in renamed:
        return ""
    original = f"Original{name}" if is_class else f"original_{name}"
    if original in draft.bound:
        raise patch.error(
            f"builds on what it replaces, and {draft.source.name} already has a "
            f"{original!r}, the name that the original would get. Write the original's code into the replacement."
        )
    return original


# --- classes with patched methods -----------------------------------------------------------------------------------


class ClassEdit:
    """The edits of a class whose methods are patched."""

    def __init__(self, place: Place, draft: Draft) -> None:
        assert isinstance(place.node, ast.ClassDef)
        self.place, self.node, self.draft = place, place.node, draft
        self.name, self.members = place.name, definitions(self.node)
        #: whether the body is on the line of the `class` statement
        self.in_line = draft.text.is_in_line(self.node)
        indent = draft.text.indent(start_line(self.node.body[0]))
        self.indent = draft.indent(self.node) + "    " if self.in_line else indent
        self.added: list[Sequence[str]] = []

    def apply(self, patches: Sequence[Patch]) -> None:
        """Patch the methods, and list them in a comment above the class."""
        named = [(patch.definition.rpartition(".")[2], patch) for patch in patches]
        for name, patch in named:
            # All definitions of the name, as in the branches of an `if`, without accessors.
            methods = [member for member in self.members if member.name == name and not is_accessor(member.node)]
            edit = self._wrap_init if patch.kind is PatchKind.MODIFY_INIT else self._override
            edit(patch, name, methods)
        self.add(*self.added)
        title = f"Methods patched: {', '.join(name for name, _ in named)}"
        described = [(name, " ".join(patch.description.split())) for name, patch in named]
        notes = [f"  {name}: {description}" for name, description in described if description]
        self.draft.put_above(self.place, marker(f"[MODIFIED CLASS] {self.name}", title, *notes))

    def _override(self, patch: Patch, name: str, methods: Sequence[Place]) -> None:
        """Replace or add a method."""
        where = f"{self.name!r} in {self.draft.source.name}"
        if any(isinstance(method.node, ast.ClassDef) for method in methods):
            raise patch.error(f"names a nested class. Use replace_class({self.name!r}) for all that is around.")
        if methods and patch.new:
            raise patch.error(f"says new=True, and {where} has a method {name!r}. Leave new out to replace it.")
        if not methods and patch.new is None:
            similar = {member.name for member in self.members if looks_misspelt(name, member.name)}
            if similar:
                raise patch.error(
                    f"names no method of {where}, and one of nearly that name. {nearest(name, similar)} "
                    f"If {name!r} is to be a new method, write override_method(..., new=True)."
                )
        itself = f"{self.name}.{name}"
        for part in ast.walk(patch.source.tree()) if patch.source is not None else ():
            if isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part) == itself:
                raise patch.error(
                    f"calls {itself}, which it replaces: it would call itself for ever. Write the "
                    "original's code into the patch, or use replace_class with a class that inherits from it."
                )
        for method in methods:  # the last one stays bound, and which one is the last depends on the branches
            self.draft.put_above(method, ())
            self.draft.replace(method.node, self._method(patch, name, method.node))
        if not methods:
            self.added.append(self._method(patch, name))

    def _method(self, patch: Patch, name: str, original: Any = None) -> list[str]:
        """Return the lines of a patched method, with the decorators of the original if they are kept."""
        indent = self.indent if original is None else self.draft.indent(original)
        origin = [f"{indent}{line}" for line in comments(*self.draft.origin(patch))]
        if isinstance(patch.replacement, External):
            return [*origin, f"{indent}{patch.replacement.import_as(name)}"]

        def edit(text: Text, node: Any) -> Iterable[Edit]:
            is_decorated = original is not None and patch.keep_decorators and original.decorator_list
            return _kept_decorators(text, node, original, self.draft.text) if is_decorated else ()

        return [*origin, *self.draft.code(patch, indent, name=name, edit=edit)]

    def _wrap_init(self, patch: Patch, name: str, methods: Sequence[Place]) -> None:
        """Keep the original `__init__` under another name, which the patched one calls, for `modify_init`.

        It is called as `Class._original_init(self, ...)`, not through `self`: a subclass whose `__init__` is modified
        as well has an `_original_init` of its own.
        """
        assert patch.source is not None
        draft, node = self.draft, patch.source.tree()
        assert not isinstance(node, ast.ClassDef)
        if len(node.args.args) < 2:
            raise patch.error(
                "needs a function of (original_init, self, ...), and "
                f"{node.name!r} takes {len(node.args.args)} positional argument(s). Add original_init in front."
            )
        if not methods:
            raise patch.error(
                f"wraps an __init__ that {self.name!r} inherits. Use override_method('{self.name}.__init__') with a "
                "super().__init__() in it."
            )
        if any(member.name == ORIGINAL_INIT for member in self.members):
            raise patch.error(
                f"would keep the original as {ORIGINAL_INIT!r}, and {self.name!r} has a method of that "
                "name. Use override_method for its __init__."
            )

        def edit(text: Text, function: Any) -> Iterator[Edit]:
            init, this = function.args.args[:2]
            yield Edit(text.span(init)[0], text.span(this)[0], "")
            try:
                yield from renaming(text, {init.arg: f"{self.name}.{ORIGINAL_INIT}"}, parameter=init)
            except CodegenError as error:
                raise patch.error(f"can't call the original __init__: {error}") from None

        for method in methods:
            indent, start = draft.indent(method.node), draft.text.start_of(start_line(method.node))
            note = f"{indent}# The __init__ of the original, called by the patched one below.\n"
            draft.insert(start, note)
            draft.rename(method.node, ORIGINAL_INIT)
            origin = [f"{indent}{line}" for line in comments(*draft.origin(patch))]
            draft.put_behind(method, ["", *origin, *draft.code(patch, indent, None, name, edit)])

    def add(self, *methods: Sequence[str]) -> None:
        """Insert methods after the other members; `...` or `pass` at the end of the body is removed."""
        if not methods:
            return
        draft, text = self.draft, self.draft.text
        first, last = self.node.body[0], self.node.body[-1]
        line, is_empty = text.last_line(last), isinstance(last, ast.Pass) or ast.unparse(last) == "..."
        if self.in_line:  # `class A(B): ...`
            is_empty, (start, _), end = is_empty and first is last, text.span(first), text.span(last)[1]
            before = len(text.text[:start].rstrip())
            draft.edits.append(Edit(before, end, "") if is_empty else Edit(before, start, f"\n{self.indent}"))
        elif is_empty := is_empty and text.is_alone(last):
            line = last.lineno - 1
            draft.edits.append(Edit(text.end_of(line), text.end_of(last.lineno), ""))
        lines = [new_line for method in methods for new_line in ("", *method)]
        is_first = is_empty and (first is last or not text.lines[line - 1].strip())
        draft.insert_lines_after(line, lines[1:] if is_first else lines)


def _kept_decorators(text: Text, node: Any, original: Any, source: Text) -> Iterator[Edit]:
    """Yield the edits that put the decorators of an original method in front of a patch's own, each once."""
    kept = {ast.unparse(decorator) for decorator in original.decorator_list}
    own = [decorator for decorator in node.decorator_list if not is_of_config(decorator)]
    start = first = own[0].lineno if own else node.lineno
    for decorator in own:
        if ast.unparse(decorator) in kept:
            yield Edit(text.start_of(first), text.start_of(decorator.end_lineno + 1), "")
        first = decorator.end_lineno + 1
    indent, above = source.indent(original.lineno), source.lines[start_line(original) - 1 : original.lineno - 1]
    lines = [line.removeprefix(indent).rstrip("\r\n") for line in above]
    position = text.start_of(start)
    yield Edit(position, position, "".join(f"{line}\n" for line in lines))
