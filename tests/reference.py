"""The API reference: a page for each module of public names, one of the README's recipes, one of errors.

    python -m tests.reference           # in build/reference, which git ignores
    python -m tests.reference FOLDER

pdoc makes the pages of the docstrings. Here is what it can't know: names that are imported late, the recipes, and
which references lead nowhere. Those are printed, and the command exits with 1.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, get_type_hints

from patcher import Patcher, errors, presets

if TYPE_CHECKING:
    from pdoc import doc

ROOT = Path(__file__).parents[1]
#: page -> the names on it besides those in `__all__`
PAGES: dict[str, tuple[str, ...]] = {
    "patcher": (),
    "patcher.codegen": (),
    "patcher.errors": ("NoSuchNameError",),
    "patcher.fusions": (),
    "patcher.monkey_patching": (),
    "patcher.presets": ("best", "describe", "for_model"),
}
#: What looks like a name of ours and is a file.
FILES = {"patcher.json"}


def build(folder: Path) -> list[str]:
    """Write the reference into a folder; the references in it that lead nowhere, each with its page."""
    from pdoc import render  # here, so that tests that look at this file need no such package

    render.configure(docformat="google", show_source=False)
    recipes = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    pages = {name: _page(name, names) for name, names in PAGES.items()}
    pages["recipes"] = _module("recipes", re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", recipes), {})
    written = {f"{name.replace('.', '/')}.html": render.html_module(page, pages) for name, page in pages.items()}
    for name, text in [
        *written.items(),
        ("index.html", render.html_index(pages)),
        ("search.js", render.search_index(pages)),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [*_broken(written)]


def _page(name: str, more: tuple[str, ...]) -> doc.Module:
    """What pdoc makes a page of: the module, with all its names there already, and each on one page only."""
    from pdoc import doc

    module = importlib.import_module(name)
    elsewhere = errors.__all__ if name == "patcher" else presets.__all__ if module is presets else []
    names = [each for each in (*module.__all__, *more) if each not in elsewhere and not each.startswith("__")]
    page = _module(name, module.__doc__ or "", {each: getattr(module, each) for each in names})
    for cls in page.classes:
        if is_dataclass(cls.obj):  # what it inherits is annotated with names of another module
            with suppress(NameError):  # of names that are only there for type checkers, which pdoc imports itself
                hints = get_type_hints(cls.obj)
                given = cls.obj.__init__.__annotations__
                given.update({each: hints[each] for each in given.keys() & hints.keys()})
        for member in cls.members.values():  # of a base class that isn't public: these are the class's own
            if member.taken_from[1].partition(".")[0] not in names and member.taken_from[0].startswith("patcher."):
                member.taken_from = (name, member.qualname)
    if module is presets:  # some can be made only where there is a GPU
        for each in presets.__all__:
            page.members[each] = doc.Variable(
                name, each, taken_from=(name, each), docstring=presets.describe(each), annotation=Patcher
            )
    return page


def _module(name: str, text: str, members: dict[str, object]) -> doc.Module:
    from pdoc import doc

    module = ModuleType(name, text)
    vars(module).update(members, __all__=sorted(members))
    return doc.Module(module)


def _broken(pages: dict[str, str]) -> Iterator[str]:
    """Links to places that there aren't, and names of ours in docstrings that no page has."""
    places = {path: {"", *re.findall(r'id="([^"]+)"', text)} for path, text in pages.items()}
    known = {f"{path[:-5].replace('/', '.')}.{place}".strip(".") for path in places for place in places[path]}
    public = {"patcher", *(each.rpartition(".")[2] for each in known if not each.rpartition(".")[2].islower())}
    for path, text in pages.items():
        for link in re.findall(r'href="(?!https?:|[^"]*\$)([^"#]*)#?([^"]*)"', text):
            target = os.path.normpath(Path(path).parent / link[0]) if link[0] else path
            if target != "index.html" and link[1] not in places.get(target, ()):
                yield f"{path}: a link to {'#'.join(link)}"
        for code in re.findall(r"<code>(.*?)</code>", text):
            name = re.match(r"(\w+)(\.\w+)+", unescape(re.sub("<[^>]+>", "", code)))
            if name and name[1] in public and name[0] not in FILES:
                ends = (f".{name[0]}", f".Patcher.{name[0].removeprefix('patcher.')}")
                if not any(f".{each}".endswith(ends) for each in known):
                    yield f"{path}: {name[0]}"


if __name__ == "__main__":
    found = build(Path(*sys.argv[1:] or [ROOT / "build" / "reference"]))
    print("\n".join(found))
    raise SystemExit(bool(found))
