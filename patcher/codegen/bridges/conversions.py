"""How models of a generated file read and write checkpoints of the original: conversions that are registered for them.

transformers looks conversions up by the name of a class. So the models that have them get a name of their own in the
file, and those of transformers stay what they are. Conversions that transformers has for the original are kept; those
of the very parameters that are fused become one with the fusion.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from patcher.codegen.bridges.dependencies import Dependencies
from patcher.codegen.bridges.fused_layers import ModuleText, wrapped
from patcher.compat import standing_alone
from patcher.compat.conversions import (
    conversions_under,
    copy_transform,
    key_renamer,
    source_patterns,
    stock_key,
    target_patterns,
)
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.layouts import Flatten, Layout, Rows
from patcher.layouts.transforms import describe, identity, select_conversions
from patcher.patterns import inside
from patcher.source.texts import dedented

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.spec.patcher import Patcher

#: of the operation that turns stacks of experts where a checkpoint has them the other way round
CHECKED_TRANSPOSE = {"dim0": 1, "dim1": 2, "check_dims": True}
#: what files have of their own, without types: its text is for their readers
IN_FILES: Any = standing_alone
#: operations that make parameters of the original of tensors that a fused layer has as they are
UNDONE = ([Chunk], [MergeModulelist], [MergeModulelist, Concatenate])


@dataclass
class OwnConversions:
    """The conversions of the models of a file.

    Attributes:
        described: the config that gets them.
        text: the module that is patched.
        modules: those of the skeleton, by path.
        patcher: what the file does.
        dependencies: brings what conversions need.
    """

    described: PatchConfig
    text: ModuleText
    modules: Mapping[str, nn.Module]
    patcher: Patcher
    dependencies: Dependencies
    #: the keys of conversions that the whole model has as well: they change nothing where they run twice
    _shared: set[str] = field(default_factory=set)

    def write(self, layouts: Mapping[str, Sequence[Layout]], extra: Sequence[WeightTransform]) -> None:
        """Register what fused modules need, and what a patcher brings.

        Args:
            layouts: path -> which parameters become which.
            extra: further conversions.
        """
        if self.patcher.new_weights:
            raise self.described.refusal(
                f"from_patcher() can't write new_weights={list(self.patcher.new_weights)!r} into a file: there models "
                "are built without values, and what a checkpoint lacks is initialised by _init_weights"
            )
        owned: dict[str, dict[str, Sequence[Layout]]] = {}
        for path, listed in layouts.items():
            owned.setdefault(self._owner(path, listed), {})[path] = listed
        if not owned and (extra or self.patcher.filtered_weight_conversion_patterns):
            prefix = str(self.modules[""].base_model_prefix)
            owned[prefix if prefix in self.modules and self.text.own(type(self.modules[prefix])) else ""] = {}
        found = {at: self._conversions(at, inner, extra) for at, inner in owned.items()}
        own_name = self._own_name(found)
        registered: dict[str, list[str]] = {}
        for path, items in found.items():
            name = type(self.modules[path]).__name__
            if registered.setdefault(name, items) != items:
                raise self.described.refusal(
                    f"{name} would need other conversions at {path} than elsewhere in the model, and they go by its "
                    "name"
                )
        self._keep_stock(list(found))
        statements = []
        for name, items in registered.items():
            self.described.renamed[name] = own_name + name
            lines = "".join(f"{item},\n" for item in items)
            call = f'register_checkpoint_conversion_mapping(\n    "{own_name}{name}",\n    [\n{lines}    ],\n'
            statements.append(f"{call}    overwrite=True,\n)")
        self.described.add_import("transformers.conversion_mapping", names=["register_checkpoint_conversion_mapping"])
        if dropped := list(self.patcher.dropped_weights):
            statements += [f"{base}._keys_to_ignore_on_load_unexpected = {dropped!r}" for base in self._first_models()]
        self.described.endings.append("\n".join(statements))
        self._read_and_write(own_name)
        self._heads()

    # -- which classes --------------------------------------------------------------------------------------------

    def _models(self) -> dict[str, PreTrainedModel]:
        return {path: each for path, each in self.modules.items() if isinstance(each, PreTrainedModel)}

    def _owner(self, path: str, layouts: Sequence[Layout]) -> str:
        """The model that registers the conversions of a module: one inside of those that convert its parameters."""
        around = [
            at
            for at, each in self._models().items()
            if self.text.own(type(each)) and f"{path}.".startswith(inside(at))
        ]
        if not around:
            raise self.described.refusal(f"{path} is in no model that {self.described.source_module} defines")
        keys = [f"{path}.{name}" for layout in layouts for name in layout.stock]

        def converts(at: str) -> bool:
            model: Any = self.modules[at]
            own = [key.removeprefix(inside(at)) for key in keys]
            return any(_takes(each, own) for each in conversions_under(stock_key(model)))

        around.sort(key=len)
        converting = list(filter(converts, around))
        inner = [at for at in converting if at] or [at for at in around if at and converting]
        return inner[0] if inner else around[-1]

    def _first_models(self) -> list[str]:
        """The classes of the module that inherit from `PreTrainedModel` through none of its classes."""
        own = [cls for name in self.text.classes if isinstance(cls := vars(self.text.module).get(name), type)]
        models = [cls for cls in own if issubclass(cls, PreTrainedModel) and self.text.own(cls)]
        return [cls.__name__ for cls in models if not any(base in models for base in cls.__mro__[1:])]

    def _own_name(self, found: Mapping[str, list[str]]) -> str:
        """The prefix of the names of classes: files whose conversions differ have different ones."""
        names = [each if isinstance(each, str) else type(each).__name__ for each in self.patcher.fusions]
        words = "".join(word[:1].upper() + word[1:] for name in names for word in name.split("_"))
        if all(isinstance(each, str) for each in self.patcher.fusions) and words and not self.patcher.class_mapping:
            return words
        return f"{words or 'Patched'}{hashlib.sha256(repr(found).encode()).hexdigest()[:4].upper()}"

    def _keep_stock(self, owners: Sequence[str]) -> None:
        """Have the other models find the conversions that transformers has for them, or none."""
        keys = {path: stock_key(model) for path, model in self._models().items()}
        own = {type(self.modules[path]) for path in owners}
        taken = {keys[path] for path in owners} - {"", *(each.__name__ for each in own)} - self._shared
        self.described.converts_itself = bool(taken)
        for path, key in keys.items() if taken else ():
            cls = type(self.modules[path])
            if key and key not in taken and cls not in own and self.text.own(cls):
                raise self.described.refusal(
                    f"transformers converts checkpoints of {path or 'the model'}, a {cls.__name__}, by {key!r}, and "
                    f"those of a part of it by {sorted(taken)}: a file can't have both"
                )

    def _read_and_write(self, own_name: str) -> None:
        """Have all models of the file read and write checkpoints of the original, by one class that they inherit."""
        keys = tuple(dict.fromkeys(filter(None, map(stock_key, self._models().values()))))
        constants: dict[str, Any] = {"OWN_NAME": own_name} | ({"STOCK_CONVERSIONS": keys} if keys else {})
        self.dependencies.constants(
            constants, "the models here have names of their own, by which transformers finds their conversions"
        )
        base = IN_FILES.ConvertedCheckpoints if keys else IN_FILES.OriginalCheckpoints
        self.dependencies.define(base)
        replaced = {patch.target for patch in self.described.patches}
        for name in self._first_models():
            if name in replaced:
                raise self.described.refusal(f"{name} is replaced, by which the models of a file know checkpoints")
            self.described.bases[name] = base.__name__

    def _heads(self) -> None:
        """Heads with the `__init__` of a mixin, which has an Auto class build the model, build that of the file."""
        for name in self.text.classes:
            cls: Any = vars(self.text.module).get(name)
            if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel) or "__init__" in vars(cls):
                continue
            mixin: Any = next(base for base in cls.__mro__ if "__init__" in vars(base))
            code = inspect.getsource(mixin.__init__) if mixin.__module__ == "transformers.modeling_layers" else ""
            kind = cls.config_class
            base: Any = transformers.MODEL_MAPPING.get(kind, None) if isinstance(kind, type) else None
            built = "setattr(self, self.base_model_prefix, AutoModel.from_config(config))"
            if built not in code or base is None or base.__name__ not in self.text.classes:
                continue
            code = code.replace(built, f"self.{cls.base_model_prefix} = {base.__name__}(config)")
            code = code.replace("super()", f"super({mixin.__name__}, self)")
            code = re.sub(r"(?m)^ *# Similar to .*\n", "", code)
            self.described.override_method(f"{name}.__init__", dedented(code), new=True)

    # -- which conversions ----------------------------------------------------------------------------------------

    def _conversions(
        self, at: str, layouts: Mapping[str, Sequence[Layout]], extra: Sequence[WeightTransform]
    ) -> list[str]:
        """The items of the list that is registered for a model."""
        model: Any = self.modules[at]
        stock = conversions_under(stock_key(model))
        known = select_conversions(stock, [self.patcher]).kept
        kept, own = dict.fromkeys(known), list[WeightTransform]()
        for path, listed in layouts.items():
            own += self._of_layouts(path.removeprefix(inside(at)), listed, known, kept)
        self._check_namesakes(at, layouts, known, [each for each in own if isinstance(each, WeightConverter)])
        own += [self._unanchored(each, at) for each in extra]
        is_stock = list(map(identity, kept)) == list(map(identity, stock))
        otherwise, runs_twice = self._names_of_whole(at, known)
        if otherwise:
            if not is_stock or not runs_twice:
                raise self.described.refusal(
                    f"transformers has conversions for the whole model, by which {otherwise} has another name in a "
                    f"checkpoint, and a file has what is left of them for {at} only"
                )
            self._shared.add(stock_key(model))
        if stock and is_stock:
            self.described.add_import("transformers.conversion_mapping", names=["get_checkpoint_conversion_mapping"])
            items = [f'        *get_checkpoint_conversion_mapping("{stock_key(model)}")']
        else:
            items = [self._text(each) for each in kept]
        return [*items, *dict.fromkeys({identity(each): self._text(each) for each in own}.values())]

    def _check_namesakes(
        self, at: str, layouts: Mapping[str, Sequence[Layout]], known: Sequence[Any], own: Sequence[WeightConverter]
    ) -> None:
        """Raise where a conversion of what is fused would take something else of the model, by its name."""
        parts = {f"{path}.{name}" for path, listed in layouts.items() for each in listed for name in each.stock}
        back = [each.reverse_transform() for each in own]
        write = key_renamer([each.reverse_transform() for each in reversed(known)])
        for key in self.modules[at].state_dict().keys() - {each.removeprefix(inside(at)) for each in parts}:
            # A load gives up a name that it has changed to one which the model lacks, if a checkpoint has that name.
            is_read = any(each.compiled_sources.search(key) for each in own) and write(key)[0] != key
            if is_read or any(each.compiled_sources.search(key) for each in back):
                raise self.described.refusal(
                    f"{inside(at)}{key} has the name of what is fused elsewhere, and transformers tells conversions "
                    "apart by names"
                )

    def _names_of_whole(self, at: str, known: Sequence[WeightTransform]) -> tuple[str, bool]:
        """A name that conversions of the whole model change otherwise than in a part; whether they may run in both."""
        root, model = cast("Any", self.modules[""]), cast("Any", self.modules[at])
        if not at or stock_key(root) != stock_key(model):
            return "", True
        on = [each for each in known if isinstance(each, WeightRenaming)]
        ways = on, [each.reverse_transform() for each in reversed(on)]
        parts = [list(map(copy_transform, way)) for way in ways]
        for each in (*parts[0], *parts[1]):
            each.base_model_prefix = root.base_model_prefix
            each.scope_prefix = at.removeprefix(root.base_model_prefix).removeprefix(".")
        (read, write), (read_part, write_part) = ([key_renamer(each) for each in pair] for pair in (ways, parts))
        written = {key: write(key)[0] for key in root.state_dict()}
        runs_twice = all(
            write(write_part(key)[0])[0] == name and read_part(read(name)[0])[0] == read(name)[0]
            for key, name in written.items()
        )
        return next((key for key, name in written.items() if write_part(key)[0] != name), ""), runs_twice

    def _unanchored(self, transform: WeightTransform, at: str) -> WeightTransform:
        """A conversion without the group in front of its patterns, which only renamings write back."""
        sources, targets = source_patterns(transform), target_patterns(transform)
        if not isinstance(transform, WeightConverter) or not any("(" in each for each in sources):
            return transform
        group = re.match(r"\([^()]*\)", sources[0])
        start = group.group() if group is not None else "("
        ends = [each.removeprefix(start).removesuffix("$") for each in sources]
        keys = [key for key in self.modules[at].state_dict() if any(re.search(each, key) for each in ends)]
        same = all(any(re.search(each, key) for each in sources) for key in keys)
        if not same or any("(" in each for each in ends) or not all(each.startswith(r"\1") for each in targets):
            raise self.described.refusal(
                f"the conversion {describe(transform)} has a group in its patterns, which transformers "
                "can't write back"
            )
        ends = [each.replace("\\.", ".") for each in ends]
        return WeightConverter(ends, [each.removeprefix(r"\1") for each in targets], transform.operations)

    def _of_layouts(
        self, path: str, layouts: Sequence[Layout], known: Sequence[Any], kept: dict[Any, None]
    ) -> Iterable[WeightTransform]:
        """The conversions of a module; those of transformers that they take the place of are taken out of `kept`."""
        prefix = re.sub(r"^.*\b\d+(\.|$)", "", path)
        name = inside(prefix).__add__
        # Otherwise the patterns of weights take the biases as well.
        apart = any(isinstance(each, Rows) and len(each.stock) == 1 and "." not in each.fused[0] for each in layouts)
        for layout in layouts if apart else [each for each in layouts if not each.stock[0].endswith(".bias")]:
            keys = [
                f"{path}.{each.removesuffix('.weight')}{end}"
                for each in layout.stock
                for end in ("", ".weight", ".bias")
            ]
            taking = [each for each in known if _takes(each, keys)]
            either = [vars(op) for each in taking for op in each.operations] == [CHECKED_TRANSPOSE]
            if either and isinstance(layout, Matrices) and not layout.transposed:
                kept.pop(taking.pop(), None)
            own = self._of_layout(layout, name, apart=apart, either=either)
            yield from self._after(taking, own, layout, path, kept) if taking else [own]

    def _of_layout(self, layout: Layout, name: Any, *, apart: bool, either: bool) -> WeightTransform:
        stock = layout.stock[0]
        if type(layout) is Rows and len(layout.stock) == 1:
            return WeightRenaming(name(stock), name(layout.fused[0]))
        if type(layout) is Rows:
            end = "" if apart else ".weight"
            parts, joined = ([name(each.removesuffix(end)) for each in part] for part in (layout.stock, layout.fused))
            return WeightConverter(parts, joined, [IN_FILES.JoinRows()])
        if type(layout) is Flatten:
            return WeightConverter(name(stock), name(layout.fused[0]), [IN_FILES.FlattenKernel()])
        if isinstance(layout, Matrices):
            how = {"transposed": layout.transposed, "interleaved": layout.interleaved, "either": either}
            operation = IN_FILES.SplitExperts(**how)
            stack = name(stock) + ("" if stock.endswith("_bias") else "(?!_)")
            layers = [name(f"*.{each}") for each in layout.layers]
            made: WeightTransform = IN_FILES.ExpertsConverter(stack, layers, [operation])
            return made
        raise self.described.refusal(
            f"{name('')[:-1]} has the layout {layout}, and a file that needs no patcher has operations for joined "
            "rows, kernels and experts only"
        )

    def _after(
        self, taking: Sequence[Any], own: Any, layout: Layout, path: str, kept: dict[Any, None]
    ) -> Iterable[WeightTransform]:
        """What is left of a conversion by which transformers makes what is fused: the layer has what it is made of."""
        stock, sources, targets = taking[0], source_patterns(taking[0]), target_patterns(taking[0])
        made, parts = target_patterns(own), source_patterns(own)
        if all(each.endswith(".weight") for each in (*sources, *targets)) and not parts[0].endswith(".weight"):
            sources, targets = ([each.removesuffix(".weight") for each in side] for side in (sources, targets))
        fits = parts == [each.replace("\\", "").removeprefix("^") for each in targets]
        if isinstance(layout, Matrices):
            fits = len(targets) == 1 and not layout.transposed and not layout.interleaved
            made = [f"{targets[0].removesuffix(layout.stock[0])}*.{layer}" for layer in layout.layers]
        undone = list(map(type, stock.operations)) in UNDONE and len(sources) == len(made)
        if len(taking) > 1 or not fits or not undone:
            raise self.described.refusal(
                f"transformers has a conversion for parameters of {path}, {describe(stock)}, which a file can't write "
                "as one with the fusion"
            )
        kept.pop(stock, None)
        for source, new in zip(sources, made, strict=True):
            if source != new:
                yield WeightRenaming(source.replace("*", r"(\d+)"), new.replace("*", r"\1"))

    # -- as text --------------------------------------------------------------------------------------------------

    def _text(self, transform: WeightTransform) -> str:
        """A conversion as the text that makes it, checked by evaluating it again; the file imports what it names."""
        used: dict[str, Any] = {}

        def text(value: Any) -> str:
            if isinstance(value, WeightTransform | ConversionOps) or hasattr(value, "_asdict"):  # a named tuple
                cls = type(value)
                self.dependencies.define(cls, f"from_patcher(), for {describe(transform)}")
                used[cls.__name__] = cls
                arguments = [f"{name}{text(given)}" for name, given in _arguments(value)]
                return f"{cls.__name__}({', '.join(arguments)})"
            if type(value) in (tuple, list):
                items = ", ".join(map(text, value))
                return f"[{items}]" if type(value) is list else f"({items},)" if len(value) == 1 else f"({items})"
            return text_of(value) if isinstance(value, str) else repr(value)

        try:
            line = text(transform)
            reason = "its text would make another one" if identity(eval(line, used)) != identity(transform) else ""
        except (TypeError, ValueError, SyntaxError, NameError) as error:
            reason = str(error)
        if reason:
            raise self.described.error(
                f"the conversion {describe(transform)} can't be written into the file: {reason}. "
                "Load with the patcher itself, or give the conversion operations that keep their arguments."
            )
        return wrapped(" " * 8 + line)


def _arguments(value: Any) -> Iterable[tuple[str, Any]]:
    """The arguments that make an object, each behind its `name=`; the patterns and operations have none."""
    patterns = {"source_patterns": source_patterns, "target_patterns": target_patterns}
    for name, parameter in inspect.signature(type(value)).parameters.items():
        given: Any = patterns[name](value) if name in patterns else getattr(value, name, parameter.empty)
        if given is parameter.empty or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{type(value).__name__} doesn't keep its argument {name!r}")
        if name in patterns:
            yield "", given[0] if len(given) == 1 else given
        elif given != parameter.default:
            yield "" if name == "operations" else f"{name}=", given


def _takes(transform: Any, keys: Iterable[str]) -> bool:
    """Whether a conversion makes some of these parameters of others."""
    patterns = target_patterns(transform) if isinstance(transform, WeightConverter) else ()
    return any(re.search(rf"{pattern}(?!\w)", key) for pattern in patterns for key in keys)


def text_of(value: str) -> str:
    """A string as it would be written by hand: raw where it holds backslashes."""
    if "\\" in value and not value.endswith("\\") and '"' not in value and value.isprintable():
        return f'r"{value}"'
    return '"' + repr("'" + value)[2:-1].replace('"', '\\"') + '"' if "'" not in value else repr(value)
