"""The calls that fill a spec. What can be judged without the modeling file is judged on the line that makes them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

from patcher.codegen.spec import (
    METHODS,
    Block,
    Helper,
    Import,
    Patch,
    PatchKind,
    PatchSpec,
    check_conflicts,
    check_target,
)
from patcher.errors import CodegenError
from patcher.source.reading import Location, caller, note_decorator, read_source, stands_as_decorator

__all__ = ["PatchRegistration"]

T = TypeVar("T")


class PatchRegistration(PatchSpec):
    """A spec with the calls that add to it."""

    # -- patches of definitions ---------------------------------------------------------------------------------

    @overload
    def replace_class(
        self, target: str, replacement: None = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Callable[[T], T]: ...
    @overload
    def replace_class(
        self, target: str, replacement: T, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> T: ...
    def replace_class(
        self, target: str, replacement: Any = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Any:
        """Put a class in the place of the class `target`, under its name. The original's decorators go with it.

        A replacement that inherits from the class it replaces keeps that one in the file, as `OriginalTarget`.
        """
        return self._register(PatchKind.REPLACE_CLASS, target, replacement, description, name_map)

    @overload
    def replace_function(
        self, target: str, replacement: None = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Callable[[T], T]: ...
    @overload
    def replace_function(
        self, target: str, replacement: T, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> T: ...
    def replace_function(
        self, target: str, replacement: Any = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Any:
        """Put a function in the place of the function `target` of the module, under its name.

        A replacement that calls the function it replaces keeps that one in the file, as `original_target`.
        """
        return self._register(PatchKind.REPLACE_FUNCTION, target, replacement, description, name_map)

    @overload
    def override_method(
        self,
        target: str,
        replacement: None = None,
        description: str = "",
        name_map: Mapping[str, str] | None = None,
        *,
        keep_decorators: bool = True,
        new: bool | None = None,
    ) -> Callable[[T], T]: ...
    @overload
    def override_method(
        self,
        target: str,
        replacement: T,
        description: str = "",
        name_map: Mapping[str, str] | None = None,
        *,
        keep_decorators: bool = True,
        new: bool | None = None,
    ) -> T: ...
    def override_method(
        self,
        target: str,
        replacement: Any = None,
        description: str = "",
        name_map: Mapping[str, str] | None = None,
        *,
        keep_decorators: bool = True,
        new: bool | None = None,
    ) -> Any:
        """Put a function in the place of the method `target`, `"Class.method"`; the rest of the class stays.

        A class without such a method gets it. The accessors of a property are `"Class.name"` and
        `"Class.name.setter"`.

        Args:
            target: the method.
            replacement: the function, or its text; without it, the call is a decorator.
            description: why.
            name_map: names to write differently, `{"OldMLP": "NewMLP"}`.
            keep_decorators: keep those of the original in front of the replacement's own.
            new: True if the class has no such method. Needed only when it has one of nearly that name.
        """
        return self._register(
            PatchKind.OVERRIDE_METHOD, target, replacement, description, name_map, keep_decorators, new
        )

    @overload
    def modify_init(
        self, target: str, replacement: None = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Callable[[T], T]: ...
    @overload
    def modify_init(
        self, target: str, replacement: T, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> T: ...
    def modify_init(
        self, target: str, replacement: Any = None, description: str = "", name_map: Mapping[str, str] | None = None
    ) -> Any:
        """Wrap the `__init__` of the class `target` with a function `(original_init, self, ...)`."""
        return self._register(PatchKind.MODIFY_INIT, target, replacement, description, name_map)

    # -- what patches need --------------------------------------------------------------------------------------

    def add_import(
        self,
        module: str,
        names: str | Iterable[str] | None = None,
        alias: str | None = None,
        is_from_import: bool = True,
    ) -> None:
        """Add `from module import names`, or `import module as alias`, behind the imports of the file.

        Args:
            module: the dotted, absolute name.
            names: what to import from it, each `"name"` or `"name as other"`; without names the module is imported.
            alias: the name to bind instead, for a module or a single name.
            is_from_import: False imports the module, and takes no names.
        """
        where = caller()
        pairs = [(name, bound) for name, _, bound in (word.partition(" as ") for word in _words(names))]
        pairs = [(name.strip(), bound.strip() or name.strip()) for name, bound in pairs]
        if pairs and not is_from_import:
            raise CodegenError(
                f"{where}: add_import({module!r}) was given names and is_from_import=False. Leave one of them out."
            )
        if alias and len(pairs) > 1:
            raise CodegenError(
                f"{where}: add_import({module!r}) was given one alias for {len(pairs)} names. "
                "Write names=['name as other', ...]."
            )
        if alias and pairs:
            pairs, alias = [(pairs[0][0], alias)], None
        wrong = [w for w in (*module.split("."), *(w for p in pairs for w in p), alias or "x") if not w.isidentifier()]
        if wrong:
            raise CodegenError(
                f"{where}: add_import({module!r}) can't be written: {wrong[0]!r} is no name. "
                "A generated file imports by absolute names, such as 'torch.nn.functional'."
            )
        self.imports.append(Import(module, tuple(pairs), alias or "", where))

    def add_post_import_block(self, code: str, description: str = "") -> None:
        """Add statements behind the imports: constants, guarded imports, registrations."""
        where = caller()
        code = textwrap.dedent(code.replace("\r\n", "\n")).strip("\n")
        try:
            empty = not ast.parse(code).body
        except SyntaxError as error:
            raise CodegenError(
                f"{where}: the text given to add_post_import_block does not parse: {error.msg}, on line "
                f"{error.lineno} of it."
            ) from error
        if empty:
            raise CodegenError(f"{where}: the text given to add_post_import_block holds no statement.")
        self.blocks.append(Block(code, description, where))

    def drop_import_names(self, *names: str) -> None:
        """Leave these names out of the imports of the file, usually because something else is to bind them."""
        self.dropped.extend((name, caller()) for name in names)

    def exclude_from_output(self, *names: str) -> None:
        """Leave these classes, functions and constants out of the file, and out of its `__all__`."""
        self.excluded.extend((name, caller()) for name in names)

    def add_helper(
        self,
        helper: Any = None,
        description: str = "",
        name_map: Mapping[str, str] | None = None,
    ) -> Any:
        """Add a class or function that patches use, behind the imports. A decorator, with or without a call."""
        return self._help("", helper, description, name_map)

    def add_helper_after(
        self,
        anchor: str,
        helper: Any = None,
        description: str = "",
        name_map: Mapping[str, str] | None = None,
    ) -> Any:
        """Like `add_helper`, right after the definition `anchor` of the file, because it builds on that one."""
        return self._help(anchor, helper, description, name_map)

    def include(self, other: PatchSpec, without: Iterable[str] = ()) -> None:
        """Take over all that another config says, but for the patches, helpers and exclusions of some targets.

        Raises:
            CodegenError: for a target in `without` that the other config doesn't have.
        """
        where, left_out = caller(), set(without)
        known = {p.target for p in other.patches} | {h.source.name for h in other.helpers}
        known |= {name for name, _ in (*other.excluded, *other.dropped)}
        for name in sorted(left_out - known):
            raise CodegenError(
                f"{where}: include(without=...) names {name!r}, which {other!r} does not have. "
                f"It has {', '.join(sorted(known)) or 'nothing'}."
            )
        for patch in other.patches:
            if patch.target not in left_out:
                check_conflicts(patch, self.patches)
                self.patches.append(patch)
        self.helpers.extend(helper for helper in other.helpers if helper.source.name not in left_out)
        self.excluded.extend(entry for entry in other.excluded if entry[0] not in left_out)
        self.dropped.extend(entry for entry in other.dropped if entry[0] not in left_out)
        self.imports.extend(other.imports)
        self.blocks.extend(other.blocks)

    # -- how it is kept -----------------------------------------------------------------------------------------

    def _register(
        self,
        kind: PatchKind,
        target: str,
        replacement: Any,
        description: str,
        name_map: Mapping[str, str] | None,
        keep_decorators: bool = False,
        new: bool | None = None,
    ) -> Any:
        where = caller()

        def register(obj: Any, site: Location | None) -> Any:
            asked = f"{METHODS[kind]}({target!r})"
            source = read_source(obj, asked, where, site)
            if source.is_class != (kind is PatchKind.REPLACE_CLASS):
                wanted = "a class" if kind is PatchKind.REPLACE_CLASS else "a function"
                raise CodegenError(f"{where}: {asked} needs {wanted}, and {source.name!r} is none.")
            names = _name_map(name_map, asked, where)
            patch = Patch(kind, target, obj, source, description, names, keep_decorators, new, where)
            check_target(patch)
            check_conflicts(patch, self.patches)
            self.patches.append(patch)
            return obj

        return register(replacement, None) if replacement is not None else _decorator(register)

    def _help(self, after: str, helper: Any, description: str, name_map: Mapping[str, str] | None) -> Any:
        where, asked = caller(), f"add_helper_after({after!r})" if after else "add_helper"

        def register(obj: Any, site: Location | None) -> Any:
            source = read_source(obj, asked, where, site)
            known = [known for known in self.helpers if known.source.name == source.name]
            if known:
                raise CodegenError(
                    f"{where}: {asked} adds {source.name!r}, which is already a helper, added at {known[0].where}. "
                    "Rename one."
                )
            names = _name_map(name_map, asked, where)
            self.helpers.append(Helper(source, obj, description, names, after, where))
            return obj

        if helper is None:
            return _decorator(register)
        return register(helper, None) if isinstance(helper, str) else _decorator(register)(helper)


def _decorator(register: Callable[[Any, Location | None], Any]) -> Callable[[Any], Any]:
    def decorate(obj: Any) -> Any:
        site = caller()
        if not stands_as_decorator(site):  # written as a call, config.replace_class("X")(MyX)
            return register(obj, None)
        register(obj, site)
        note_decorator(obj, site)
        return obj

    return decorate


def _words(names: str | Iterable[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _name_map(name_map: Mapping[str, str] | None, asked: str, where: Location) -> tuple[tuple[str, str], ...]:
    pairs = tuple(sorted((name_map or {}).items()))
    for name in (name for pair in pairs for name in pair):
        if not name.isidentifier():
            raise CodegenError(f"{where}: the name_map of {asked} maps whole names, and {name!r} is none.")
    return pairs
