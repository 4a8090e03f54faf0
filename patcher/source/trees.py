"""Small operations on the concrete syntax tree: find definitions, replace statements, rename, read patch code."""

from __future__ import annotations

import itertools
import re
import symtable
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import libcst as cst
from libcst.metadata import BuiltinScope, ClassScope, FunctionScope, GlobalScope, MetadataWrapper, ScopeProvider

from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, read_source

Definition = cst.ClassDef | cst.FunctionDef
RULE = "# " + "=" * 70

_BLOCKS = (cst.If, cst.Try, cst.TryStar, cst.With, cst.For, cst.While, cst.Match)
_PARTS = (*_BLOCKS, cst.Else, cst.Finally, cst.ExceptHandler, cst.ExceptStarHandler, cst.MatchCase, cst.BaseSuite)


def statements(body: Sequence[Any]) -> Iterator[Any]:
    """The statements of a body and of the `if`, `try`, `with` and loops in it, but not of definitions."""
    return (node for node, _ in _statements(body, 0))


def _statements(body: Sequence[Any], depth: int) -> Iterator[tuple[Any, int]]:
    for node in body:
        yield node, depth
        for part in node.children if isinstance(node, _BLOCKS) else ():
            if isinstance(part, cst.If):  # an elif
                yield from _statements([part], depth)
            elif isinstance(part, _PARTS):
                for suite in (part, *part.children):
                    if isinstance(suite, cst.BaseSuite):
                        yield from _statements(suite.body, depth + 1)


def definitions(body: Sequence[Any]) -> list[Definition]:
    """The classes and functions of a body, guarded ones included, in the order of the text."""
    return [node for node in statements(body) if isinstance(node, (cst.ClassDef, cst.FunctionDef))]


def depth_of(node: Definition, body: Sequence[Any]) -> int:
    """How many guards of a body a definition stands in."""
    return next(depth for other, depth in _statements(body, 0) if other is node)


class Rewriter(cst.CSTTransformer):
    """Puts other statements in the place of some, inside one module or one class body.

    Args:
        edits: statements, by identity, with what stands there instead.
        root: the node that is visited; other definitions are not entered.
    """

    def __init__(self, edits: Mapping[cst.CSTNode, Sequence[Any]], root: cst.CSTNode) -> None:
        super().__init__()
        self.edits = edits
        self.root = root

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node is self.root or (isinstance(node, _PARTS) and node not in self.edits)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node not in self.edits:
            return updated_node
        replaced = self.edits[original_node]
        return cst.FlattenSentinel(replaced) if replaced else cst.RemoveFromParent()


def renamed(node: Any, names: Mapping[str, str], *, parameters: bool = False) -> Any:
    """A piece of code with other names for what it takes from its module, as scopes have it.

    A local variable, a parameter or a comprehension that has such a name keeps it, and so do attributes and keywords
    of calls. Quoted annotations are renamed in, `-> "LlamaMLP"`; other strings keep every character.

    Args:
        node: a definition or an expression.
        names: name -> what to write instead, a name or a dotted one.
        parameters: rename what a function calls its parameters, in its body, instead of names of the module.

    Raises:
        CodegenError: a local variable has the new name where the code would use it for the one of the module.
    """
    words = {*names, *(new.partition(".")[0] for new in names.values())}
    scopes: Mapping[Any, Any] | None = None
    # Where nothing in it binds such a name, each is the module's. To resolve scopes takes most of the time.
    if parameters or _may_bind(code_of(node), words):
        is_statement = isinstance(node, cst.BaseStatement)
        module = cst.Module([node if is_statement else cst.SimpleStatementLine([cst.Expr(node)])])
        scopes = MetadataWrapper(module, unsafe_skip_copy=True).resolve(ScopeProvider)
    return node.visit(_Rename(names, scopes, node if parameters else None))


def _may_bind(code: str, words: Collection[str]) -> bool:
    """Whether some scope of a piece of code has one of these names for itself. True where that can't be told."""
    try:
        return _binds(symtable.symtable(code, "<patch>", "exec"), words)
    except SyntaxError:  # such as a `nonlocal` of what a folded statement binds
        return True


def _binds(table: symtable.SymbolTable, words: Collection[str]) -> bool:
    """Whether a scope below that of the module may have one of these names for itself."""
    if table.get_type() != "module":
        for symbol in table.get_symbols():
            is_meant = symbol.get_name() in words or symbol.get_name().startswith("_")  # may be a mangled one
            if is_meant and (symbol.is_local() or symbol.is_declared_global() or symbol.is_nonlocal()):
                return True
    return any(_binds(each, words) for each in table.get_children())


#: Where a name stands that is looked up in no scope, or is that of a parameter, which keeps it.
_NO_VARIABLE: dict[type, str] = {
    cst.Param: "name",
    cst.Attribute: "attr",
    cst.Arg: "keyword",
    cst.MatchKeywordElement: "key",
}


class _Rename(cst.CSTTransformer):
    def __init__(
        self, names: Mapping[str, str], scopes: Mapping[Any, Any] | None, function: cst.CSTNode | None
    ) -> None:
        super().__init__()
        self.names, self.scopes, self.function = names, scopes, function
        self._annotations = 0  # how many annotations what is visited stands in

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._annotations += isinstance(node, cst.Annotation)
        return not isinstance(node, (cst.Import, cst.ImportFrom))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.Name) and original_node.value in self.names and self._is_meant(original_node):
            new = self.names[original_node.value]
            owner = new.partition(".")[0]
            found = self.scopes[original_node][owner] if self.scopes is not None else ()
            if not all(_is_outermost(each.scope) for each in found):
                raise CodegenError(
                    f"{original_node.value!r} has to be written {new!r} in a place where a variable of the patch is "
                    f"called {owner!r}. Give that variable another name."
                )
            return cst.parse_expression(new) if "." in new else updated_node.with_changes(value=new)
        if field := _NO_VARIABLE.get(type(original_node)):
            return updated_node.with_changes(**{field: getattr(original_node, field)})
        if isinstance(original_node, cst.Global) and self.function is None:
            for name in {item.name.value for item in original_node.names} & self.names.keys():
                raise CodegenError(f"{name!r} is assigned by a `global` statement. Only what is read can be renamed.")
        if isinstance(original_node, cst.SimpleString) and self._annotations:
            value = re.sub(r"[^\W\d]\w*", lambda m: self.names.get(m.group(), m.group()), original_node.value)
            return updated_node.with_changes(value=value)
        self._annotations -= isinstance(original_node, cst.Annotation)
        return updated_node

    def _is_meant(self, name: cst.Name) -> bool:
        if self.scopes is None:
            return True
        scope = self.scopes.get(name)  # None of attributes and keywords
        if scope is None:
            return False
        found = scope[name.value]
        owners = {assignment.scope for assignment in found}
        if isinstance(scope, ClassScope) and scope in owners:
            bindings = [getattr(assignment, "node", None) for assignment in found]
            if any(name is node or name is getattr(node, "name", None) for node in bindings):
                return False
            raise CodegenError(
                f"{name.value!r} in the body of a class that binds it may be the one of the module or of the class. "
                "Give one of them another name."
            )
        if self.function is None:
            return all(map(_is_outermost, owners))
        return all(isinstance(owner, FunctionScope) and owner.node is self.function for owner in owners)


def _is_outermost(scope: Any) -> bool:
    return isinstance(scope, (GlobalScope, BuiltinScope))


#: how a string begins, or goes on, that may have several lines
_GOES_OVER_LINES = re.compile(r"\"\"\"|'''|\\\n")


class _Reindent(cst.CSTTransformer):
    """Moves docstrings along with the code that they stand in. Other strings keep every character."""

    def __init__(self, old: tuple[str, str], new: tuple[str, str], newline: str) -> None:
        super().__init__()
        (self.old, self.old_unit), (self.new, self.new_unit) = old, new
        self.newline = newline

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if not isinstance(original_node, cst.IndentedBlock) or not updated_node.body:
            return updated_node
        first = updated_node.body[0]
        if not isinstance(first, cst.SimpleStatementLine) or not isinstance(first.body[0], cst.Expr):
            return updated_node
        string = first.body[0].value
        if not isinstance(string, cst.SimpleString):
            return updated_node
        head, *rest = string.value.split(self.newline)
        if not all(line.startswith(self.old) for line in rest if line.strip()):
            return updated_node
        moved = [self._moved(line) if line.strip() else line for line in rest]
        return updated_node.with_deep_changes(string, value=self.newline.join([head, *moved]))

    def _moved(self, line: str) -> str:
        line, steps = line.removeprefix(self.old), 0
        while line.startswith(self.old_unit):
            line, steps = line.removeprefix(self.old_unit), steps + 1
        return self.new + self.new_unit * steps + line


def read_definition(
    source: Source, own_decorators: Collection[int], names: Mapping[str, str], newline: str, indent: str, unit: str
) -> Definition:
    """The syntax tree of patch code, ready to stand in another file.

    Args:
        source: the text.
        own_decorators: indices of the decorators to leave out.
        names: what to rename.
        newline: the newline of the other file.
        indent: the indentation of the place it goes to.
        unit: one step of indentation there.
    """
    wrapped = ("if True:\n" if source.indent else "pass\n") + source.text
    module = cst.parse_module(wrapped.replace("\n", newline))
    last: Any = module.body[-1]
    node: Definition = last.body.body[0] if source.indent else last
    kept, pending = [], list[cst.EmptyLine]()
    for index, decorator in enumerate(node.decorators):
        if index in own_decorators:
            pending += decorator.leading_lines
        else:
            kept.append(decorator.with_changes(leading_lines=[*pending, *decorator.leading_lines]))
            pending = []
    after = [*pending, *node.lines_after_decorators]
    if not kept:
        after = [line for line in after if line.comment is not None]
    node = node.with_changes(decorators=kept, lines_after_decorators=after)
    if names:
        try:
            node = cast(Definition, renamed(node, names))
        except CodegenError as error:
            raise CodegenError(f"{Location(source.file or source.name, source.line)}: {error}") from None
    old = (source.indent, "    " if source.indent else module.default_indent)
    if old != (indent, unit) and _GOES_OVER_LINES.search(source.text):
        node = cast(Definition, node.visit(_Reindent(old, (indent, unit), newline)))
    return node


def bound_by(statement: Any) -> str:
    """What a statement of one part binds, as it is written: a name, `a, b`, `x.y`; empty if it binds nothing."""
    if isinstance(statement, (cst.ClassDef, cst.FunctionDef)):
        return statement.name.value
    part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
    if isinstance(part, cst.Assign):
        return ", ".join(code_of(target.target) for target in part.targets)
    return code_of(part.target) if isinstance(part, (cst.AnnAssign, cst.AugAssign)) else ""


def read_class(cls: type) -> cst.ClassDef:
    """The syntax tree of a class, with the comments above it, from the left.

    Raises:
        CodegenError: its source can't be found.
    """
    source = read_source(cls, cls.__qualname__, Location("", 0))
    return cast(cst.ClassDef, read_definition(source, (), {}, "\n", "", "    "))


def class_members(node: cst.ClassDef) -> tuple[list[Any], list[cst.EmptyLine]]:
    """The statements in the body of a class, and the comments of those that say nothing, `...` and `pass`."""
    body, members, comments = node.body, list[Any](), list[cst.EmptyLine]()
    if isinstance(body, cst.SimpleStatementSuite):  # on the line of the head
        kept = [part for part in body.body if not _says_nothing(part)]
        if kept:
            kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            members.append(cst.SimpleStatementLine(kept))
        return members, comments
    for statement in body.body:
        if isinstance(statement, cst.SimpleStatementLine) and all(map(_says_nothing, statement.body)):
            comments += [line for line in statement.leading_lines if line.comment is not None]
            if statement.trailing_whitespace.comment is not None:
                comments.append(cst.EmptyLine(comment=statement.trailing_whitespace.comment))
        else:
            members.append(statement)
    return members, comments


def _says_nothing(part: cst.CSTNode) -> bool:
    return isinstance(part, cst.Pass) or (isinstance(part, cst.Expr) and isinstance(part.value, cst.Ellipsis))


def with_members(node: cst.ClassDef, members: Sequence[Any]) -> cst.ClassDef:
    """A class with other statements in its body."""
    body = node.body
    if isinstance(body, cst.SimpleStatementSuite):
        body = cst.IndentedBlock([], header=body.trailing_whitespace)
    return node.with_changes(body=body.with_changes(body=members))


def comment_lines(lines: Sequence[str], blank_before: int = 0) -> list[cst.EmptyLine]:
    """Empty lines, then one comment a line. An empty string is a bare `#`."""
    blanks = [cst.EmptyLine(indent=False)] * blank_before
    comments = [line if line.startswith("#") else f"# {line}" for line in lines]
    return blanks + [cst.EmptyLine(comment=cst.Comment(comment)) for comment in comments]


def marker(title: str, *notes: str) -> list[cst.EmptyLine]:
    """The comment box above a patched definition."""
    return comment_lines([RULE, title, *(note for note in notes if note), RULE])


def why(description: str) -> str:
    """A description as one comment line."""
    text = " ".join(description.split())
    return f"Why: {text}" if text else ""


def without_blank(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Leading lines from the first comment on."""
    return list(itertools.dropwhile(lambda line: line.comment is None, lines))


def without_copied_from(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Leading lines without the `# Copied from` that is no longer true of a patched definition."""
    return [line for line in lines if line.comment is None or not line.comment.value.startswith("# Copied from")]


def code_of(node: cst.CSTNode) -> str:
    """The text of a node, on its own."""
    return cst.Module([]).code_for_node(node)


def without(elements: Sequence[Any], removed: Sequence[Any]) -> list[Any]:
    """A comma-separated list with some elements gone: what is behind the last comma stays behind the last one."""
    kept = [element for element in elements if element not in removed]
    if kept and kept[-1] is not elements[-1]:
        kept[-1] = kept[-1].with_changes(comma=_closing(kept[-1].comma, elements[-1].comma))
    return kept


def _closing(own: Any, last: Any) -> Any:
    """The comma of an element that becomes the last one; a comment behind it stays."""
    if not isinstance(own, cst.Comma) or not isinstance(last, cst.Comma):
        return last
    mine, theirs = own.whitespace_after, last.whitespace_after
    if not isinstance(mine, cst.ParenthesizedWhitespace) or not isinstance(theirs, cst.ParenthesizedWhitespace):
        return last
    space = mine.with_changes(empty_lines=(), indent=theirs.indent, last_line=theirs.last_line)
    return own.with_changes(whitespace_after=space)
