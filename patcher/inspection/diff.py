"""The changes of a patcher to modeling code: `patcher.diff(model, patcher)`."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import indent
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.checkpoints.model_classes import config_of, model_class_of
from patcher.codegen.bridges.fused_layers import FusedLayers, ModuleText
from patcher.codegen.config import PatchConfig
from patcher.compat import standing_alone
from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import stock_class
from patcher.display.parts import Code, Notes, Part, visible
from patcher.display.shown import Displayable, pluralize
from patcher.errors import CodegenError, InvalidPatcherError
from patcher.functions.models import full_name, replaced_now
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.inspection.plan import planned_load
from patcher.integrations import install
from patcher.layouts.carried import RECIPE
from patcher.loading.load import Constructed
from patcher.loading.record import PatchedModule, patched_now
from patcher.patterns import compress
from patcher.source.reading import Location, read_source, unwrap
from patcher.source.texts import indented
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher

#: Packages whose base classes weren't written for the patched model.
_LIBRARIES = frozenset({"torch", "transformers", "patcher", *sys.stdlib_module_names}) - {"__main__"}


class _Empty(nn.Module):
    """Has the attributes of every class."""


class ClassDiff(NamedTuple):
    """The diff of a class and its replacement.

    Attributes:
        modules: the paths of its modules, with layers folded.
        was: the class, as `module.name`.
        becomes: the replacement, or the class with the name of the fusion that rewrites it.
        text: the unified diff, empty if the code is the same.
    """

    modules: tuple[str, ...]
    was: str
    becomes: str
    text: str


class FunctionDiff(NamedTuple):
    """The diff of a function and its replacement.

    Attributes:
        callers: the names of the classes that call it, directly or through other functions.
        was: the function, as `module.name`.
        becomes: the replacement.
        text: the unified diff, empty if the code is the same.
    """

    callers: tuple[str, ...]
    was: str
    becomes: str
    text: str


@dataclass(frozen=True, repr=False)
class Diff(Displayable):
    """The differences between the code of a patched model and that of the stock model.

    `str` is a unified diff; `show()` prints it, in colours in a terminal, and Jupyter shows it in colours as well.

    Attributes:
        model: the class of the model.
        classes: the classes that are replaced or fused, in the order of their paths.
        functions: the functions that are replaced.
        problems: the reasons for which a load would fail, and its warnings, such as a key that matches nothing.
    """

    model: str
    classes: tuple[ClassDiff, ...] = ()
    functions: tuple[FunctionDiff, ...] = ()
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether any code differs."""
        return any(entry.text for entry in self.classes) or any(entry.text for entry in self.functions)

    def __str__(self) -> str:
        comments = [indent(text, "# ") for text in self.problems]
        return visible("\n\n".join([*comments, *(part.text for part in self._codes())])) or f"# {self._headline()}"

    def _headline(self) -> str:
        kinds = ((len(self.classes), "class"), (len(self.functions), "function"))
        parts = [pluralize(count, kind) for count, kind in kinds if count]
        return f"{self.model}: {' and '.join(parts) or 'no class is'} replaced"

    def _parts(self) -> Iterator[Part]:
        yield Notes("Problems", self.problems, "bad")
        yield from self._codes()

    def _codes(self) -> Iterator[Code]:
        rows = [(", ".join(path or "(the model)" for path in entry.modules), *entry[1:]) for entry in self.classes]
        rows += [(f"called by {', '.join(entry.callers)}", *entry[1:]) for entry in self.functions]
        for where, was, becomes, text in rows:
            yield Code(f"# {where}\n{text or f'# {was} -> {becomes}: the same code'}")


def diff(
    model: PreTrainedModel | type[PreTrainedModel] | PretrainedConfig | str | os.PathLike[str],
    patcher: Patcher | None = None,
    *,
    model_class: Any = None,
    **options: Any,
) -> Diff:
    """Return the differences between the code of a patched model and that of the stock model.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> class Doubled(LlamaMLP):
    ...     def forward(self, x):
    ...         return super().forward(x) * 2
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    >>> print(diff(config, Patcher({"LlamaMLP": Doubled})))
    # model.layers.{0..1}.mlp
    --- transformers.models.llama.modeling_llama.LlamaMLP
    +++ patcher.inspection.diff.Doubled
    @@ ... @@
    +class Doubled(LlamaMLP):
    +    def forward(self, x):
    +        return super().forward(x) * 2

    A replacement that inherits from the class that it replaces is compared with the methods that it overrides and
    doesn't call. No weight is read.

    Args:
        model: a loaded model, a model class, a repo, a folder or a config.
        patcher: the patcher; by default what a loaded model was patched with.
        model_class: the class or the Auto class to load, if not the one that the config names as its architecture.
        options: arguments of `AutoConfig.from_pretrained`: `revision`, `token`, `trust_remote_code`, ...

    Raises:
        InvalidPatcherError: if there is no patcher, or `model` isn't a model and doesn't name one.
        PatchConflictError: if two patches would change one module in different ways.
        PatchConstructionError: if a replacement can't be built.
    """
    if patcher is not None and not isinstance(patcher, Patcher):
        raise not_a_patcher("diff(model, {})", patcher)
    install()
    if patcher is None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidPatcherError(
                f"diff needs a patcher for {reprlib.repr(model)}, which isn't loaded; write diff(model, Patcher(...))."
            )
        record = patched_now(model)
        return _diff(model, () if record is None else record.modules)
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        if model.config_class is None:
            raise InvalidPatcherError(f"{model.__name__} has no config class; write diff(config, patcher).")
        cls, config = model, model.config_class()
    elif isinstance(model, PreTrainedModel):
        cls, config = stock_class(model), model.config  # type: ignore[assignment]
    else:
        config = config_of(model, options)
        cls = model_class_of(config, model_class, model, options)
    planned, load, error = planned_load(config, patcher, cls, None, {})
    if not isinstance(load, Constructed):  # a preset has drifted, or nothing can be constructed
        _, load, error = planned_load(config, patcher.replace(fingerprints={}, transformers=""), cls, None, {})
    if not isinstance(load, Constructed):
        assert error is not None
        raise error
    result = _diff(load.model, load.record.modules)
    return replace(result, problems=(*planned.problems, *planned.warnings))


def _diff(model: PreTrainedModel, modules: Iterable[PatchedModule]) -> Diff:
    """Return the diff of a constructed model with these patched modules."""
    return Diff(stock_class(model).__name__, tuple(_classes(modules)), tuple(_functions(model)))


def _classes(modules: Iterable[PatchedModule]) -> Iterator[ClassDiff]:
    grouped: dict[tuple[type[nn.Module], type[nn.Module], str], list[str]] = {}
    for item in sorted(modules, key=lambda item: dot_natural_key(item.path)):
        grouped.setdefault((item.original, item.replacement, str(item.fusion or "")), []).append(item.path)
    for (original, replacement, fusion), paths in grouped.items():
        was = _dotted_name(original)
        becomes = f"{was}, fused by {fusion!r}" if fusion else _dotted_name(replacement)
        text = _unified_diff(was, becomes, *_composed(original, replacement))
        yield ClassDiff(tuple(compress(paths)), was, becomes, text)


def _functions(model: PreTrainedModel) -> Iterator[FunctionDiff]:
    for function in replaced_now(model):
        was, becomes = _dotted_name(function.original), _dotted_name(function.replacement)
        text = _unified_diff(was, becomes, _source_of(function.original), _source_of(function.replacement))
        yield FunctionDiff(function.callers, was, becomes, text)


def _unified_diff(was: str, becomes: str, before: str, after: str) -> str:
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), was, becomes, lineterm=""))


def _source_of(function: Any) -> str:
    try:
        return read_source(function, full_name(function), Location("", 0)).text
    except CodegenError:
        return f"# the source of {full_name(function)} can't be read"


def _dotted_name(code: Any) -> str:
    return full_name(code).replace(":", ".")


# --- the texts of classes


def _composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """Return the methods of a class that a replacement overrides without calling them, and the replacement.

    Of a replacement that doesn't inherit from the class, all methods of the class are returned. A fused class consists
    of its methods. Both texts are empty if the replacement defines nothing.
    """
    if replacement is LinearPatchEmbedding:
        replacement = standing_alone.LinearPatchEmbedding
    if hasattr(replacement, "_rewritten") or RECIPE in vars(replacement):
        made = _methods_made(original, replacement)
        return _methods(original, made), "\n".join(made.values())
    classes = [cls for cls in reversed(replacement.__mro__) if cls not in original.__mro__]
    classes = [cls for cls in classes if cls is replacement or _package(cls) not in _LIBRARIES]
    after = "\n\n".join(map(_class_text, classes))
    if not issubclass(replacement, original):
        return _methods(original, vars(original)), after
    names = dict.fromkeys(name for cls in classes for name in _defined(cls))
    replaced = [name for name in names if not re.search(rf"\bsuper\(\)\.{name}\b", after)]
    return (_methods(original, replaced), after) if names else ("", "")


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _defined(cls: type) -> list[str]:
    return [name for name in vars(cls) if name not in vars(_Empty)]


def _methods_made(original: type[nn.Module], made: Any) -> dict[str, str]:
    """Return the methods of a class that this package has made; of a fused class as a generated file has them."""
    if not hasattr(made, "_rewritten"):  # by forward_of
        return {"forward": _member("forward", made.forward)}
    texts: dict[str, str] = {}
    if hasattr(made, "_joined"):
        # Only its patches are used. The folder of remote code, a hash, may have a name that a config can't have.
        config, module = PatchConfig("of_one_class", "of_one_class.py"), sys.modules[original.__module__]
        with suppress(CodegenError):
            layers = FusedLayers(config, ModuleText(module), {}, {}, lambda *_: None)
            text = layers.joined_init(original, made._joined)
            texts["__init__"] = re.sub(r"super\(\w+, self\)", "super()", text)
    return {name: indented(text) for name, text in (texts | made._rewritten).items()}


def _methods(cls: type, names: Iterable[str]) -> str:
    """Return those methods of a class that it has, as a class body; inherited ones unless they are of torch."""
    texts = []
    for name in names:
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        value = vars(owner).get(name)
        if isinstance(unwrap(value), FunctionType) and (owner is cls or _package(owner) not in ("torch", "builtins")):
            texts.append(_member(name, value))
    return "\n".join(texts)


def _class_text(cls: type) -> str:
    try:
        return read_source(cls, cls.__qualname__, Location("", 0)).text
    except CodegenError:  # of a notebook cell without methods, or made by a call
        bases = ", ".join(base.__name__ for base in cls.__bases__)
        return f"class {cls.__name__}({bases}):\n" + "".join(_member(name, vars(cls)[name]) for name in _defined(cls))


def _member(name: str, value: Any) -> str:
    """Return the lines of a class body that define an attribute."""
    if value is None or isinstance(value, str | int | float):
        return f"    {name} = {value!r}\n"
    with suppress(CodegenError):
        if isinstance(unwrap(value), FunctionType):
            return indented(read_source(value, name, Location("", 0)).text)
    return f"    # {name}: a {type(value).__name__} whose source can't be read\n"
