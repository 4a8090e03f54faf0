"""The weight conversions of a generated file: how its models load and save checkpoints of the original.

transformers looks up conversions by the name of a class. So models with conversions get new names in the file, and the
classes of transformers are unaffected. Conversions that transformers has for the original are kept; those of fused
parameters are merged with the fusion.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

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
    reversed_copies,
    source_patterns,
    stock_key,
    target_patterns,
)
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.layouts import Flatten, Layout, Rows
from patcher.layouts.transforms import describe, identity, select_conversions
from patcher.patterns import inside
from patcher.source.reading import signature_of

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.spec.patcher import Patcher

_MAPPING = "transformers.conversion_mapping"
#: The arguments of the operation that transposes stacked experts if a checkpoint has them transposed.
_CHECKED_TRANSPOSE = {"dim0": 1, "dim1": 2, "check_dims": True}
#: The definitions that are copied into files. They are untyped, as their text is for the readers of those files.
_IN_FILES: Any = standing_alone
#: Operations that fuse tensors which a fused layer has separately.
_UNDONE = ([Chunk], [MergeModulelist], [MergeModulelist, Concatenate])


@dataclass
class OwnConversions:
    """The conversions of the models of a file.

    Attributes:
        described: the config of the file.
        text: the patched module.
        modules: those of the skeleton, by path.
        patcher: the patcher whose effect the file has.
        dependencies: adds what conversions use.
        converted: the names of the classes in the file whose parameters are converted.
    """

    described: PatchConfig
    text: ModuleText
    modules: Mapping[str, nn.Module]
    patcher: Patcher
    dependencies: Dependencies
    converted: Sequence[str]
    #: the keys of conversions that the whole model has as well, and that have no effect if applied twice
    _shared: set[str] = field(default_factory=set)
    #: pattern -> the identity of the conversion that has it
    _converting: dict[str, Any] = field(default_factory=dict)

    def write(self, layouts: Mapping[str, Sequence[Layout]], extra: Sequence[WeightTransform]) -> None:
        """Register the conversions of fused modules, by path, and further ones."""
        if self.patcher.new_weights:
            raise self.described.refusal(
                f"from_patcher() can't write new_weights={list(self.patcher.new_weights)!r} into a file: there models "
                "are built without values, and what a checkpoint lacks is initialised by _init_weights"
            )
        owned: dict[str, dict[str, Sequence[Layout]]] = {}
        for path, of_module in layouts.items():
            owned.setdefault(self._owner(path, of_module), {})[path] = of_module
        if not owned and (extra or self.patcher.filtered_weight_conversion_patterns):
            prefix = str(self.modules[""].base_model_prefix)
            has_base = prefix in self.modules and self.text.defines(type(self.modules[prefix]))
            owned[prefix if has_base else ""] = {}
        items = {owner: self._conversions(owner, of_owner, extra) for owner, of_owner in owned.items()}
        prefix, registered = self._name_prefix(items), dict[str, list[str]]()
        for owner, conversions in items.items():
            name = type(self.modules[owner]).__name__
            if registered.setdefault(name, conversions) != conversions:
                raise self.described.refusal(
                    f"{name} would need other conversions at {owner} than elsewhere in the model, and they go by its "
                    "name"
                )
        self._check_stock_keys(list(items))
        statements = []
        for name, conversions in registered.items():
            self.described.renamed[name] = prefix + name
            lines = "".join(f"{conversion},\n" for conversion in conversions)
            call = f'register_checkpoint_conversion_mapping(\n    "{prefix}{name}",\n    [\n{lines}    ],\n'
            statements.append(f"{call}    overwrite=True,\n)")
        self.described.add_import(_MAPPING, names=["register_checkpoint_conversion_mapping"])
        if dropped := list(self.patcher.dropped_weights):
            names = [cls.__name__ for cls in self._base_classes()]
            statements += [f"{name}._keys_to_ignore_on_load_unexpected = {dropped!r}" for name in names]
        self.described.endings.append("\n".join(statements))
        self._add_checkpoint_base(prefix)

    # -- classes ----------------------------------------------------------------------------------------------------

    def _models(self) -> dict[str, PreTrainedModel]:
        return {path: module for path, module in self.modules.items() if isinstance(module, PreTrainedModel)}

    def _base_classes(self) -> list[type]:
        """Return the model classes that inherit from no other model class of the module."""
        models = self.text.model_classes()
        return [cls for cls in models if not any(base in models for base in cls.__mro__[1:])]

    def _owner(self, path: str, layouts: Sequence[Layout]) -> str:
        """Return the model that registers conversions of a module, inside of those that convert its parameters."""
        around = [owner for owner in self._models() if f"{path}.".startswith(inside(owner))]
        around = sorted((owner for owner in around if self.text.defines(type(self.modules[owner]))), key=len)
        if not around:
            raise self.described.refusal(f"{path} is in no model that {self.described.source_module} defines")
        keys = [f"{path}.{name}" for layout in layouts for name in layout.stock]

        def converts(owner: str) -> bool:
            model: Any = self.modules[owner]
            relative = [key.removeprefix(inside(owner)) for key in keys]
            return any(_creates(transform, relative) for transform in conversions_under(stock_key(model)))

        converting = list(filter(converts, around))
        return min(converting, key=lambda owner: (not owner, len(owner)), default=around[-1])

    def _name_prefix(self, items: Mapping[str, list[str]]) -> str:
        """Return the prefix of class names, which differs for files whose conversions differ.

        They may for one patcher and one class: by its config DeepSeek-V3 has an MLP in each layer, or shared experts.
        """
        names = [fusion if isinstance(fusion, str) else type(fusion).__name__ for fusion in self.patcher.fusions]
        words = "".join(word[:1].upper() + word[1:] for name in names for word in name.split("_"))
        return f"{words or 'Patched'}{hashlib.sha256(repr(items).encode()).hexdigest()[:4].upper()}"

    def _check_stock_keys(self, owners: Sequence[str]) -> None:
        """Raise a CodegenError if other models need conversions of transformers that those of the owners replace."""
        keys = {path: stock_key(model) for path, model in self._models().items()}
        owner_classes = {type(self.modules[path]) for path in owners}
        replaced = {keys[path] for path in owners} - {"", *(cls.__name__ for cls in owner_classes)} - self._shared
        self.described.converts_itself = bool(replaced)
        for path, key in keys.items() if replaced else ():
            cls = type(self.modules[path])
            if key and key not in replaced and cls not in owner_classes and self.text.defines(cls):
                raise self.described.refusal(
                    f"transformers converts checkpoints of {path or 'the model'}, a {cls.__name__}, by {key!r}, and "
                    f"those of a part of it by {sorted(replaced)}: a file can't have both"
                )

    def _add_checkpoint_base(self, prefix: str) -> None:
        """Let all models of the file inherit from the class that loads and saves checkpoints of the original."""
        keys = tuple(dict.fromkeys(filter(None, map(stock_key, self._models().values()))))
        constants: dict[str, Any] = {"OWN_NAME": prefix, "CONVERTED": tuple(self.converted)}
        constants |= {"STOCK_CONVERSIONS": keys} if keys else {}
        why = "the models here have names of their own, by which transformers finds their conversions"
        self.dependencies.add_constants(constants, why)
        base = _IN_FILES.ConvertedCheckpoints if keys else _IN_FILES.OriginalCheckpoints
        self.dependencies.define(base)
        replaced = {patch.target for patch in self.described.patches}
        for name in (cls.__name__ for cls in self._base_classes()):
            if name in replaced:
                raise self.described.refusal(f"{name} is replaced, by which the models of a file know checkpoints")
            self.described.bases[name] = base.__name__

    # -- conversions ------------------------------------------------------------------------------------------------

    def _conversions(
        self, owner: str, layouts: Mapping[str, Sequence[Layout]], extra: Sequence[WeightTransform]
    ) -> list[str]:
        """Return the items of the list that is registered for a model."""
        key = stock_key(cast("Any", self.modules[owner]))
        stock = conversions_under(key)
        selected = select_conversions(stock, [self.patcher]).kept
        kept, added, read = dict.fromkeys(selected), list[WeightTransform](), dict[Any, set[str]]()
        for path, of_module in layouts.items():
            relative = path.removeprefix(inside(owner))
            of_path = list(self._of_layouts(relative, of_module, selected, kept))
            for transform in of_path:
                names = (f"{relative}.{name}" for layout in of_module for name in layout.stock)
                read.setdefault(identity(transform), set()).update(names)
            added += of_path
        self._check_namesakes(owner, read, selected, added)
        for transform in (transform for transform in extra if isinstance(transform, WeightConverter)):
            if any("(" in pattern for pattern in source_patterns(transform)):
                raise self.described.error(
                    f"the conversion {describe(transform)} has a group in its patterns, which transformers can't "
                    "write back. Write names without groups, such as mlp.gate_proj.weight, or load with the patcher "
                    "itself."
                )
        added += extra
        is_stock = list(map(identity, kept)) == list(map(identity, stock))
        conflict, is_idempotent = self._conflict_with_root(owner, selected)
        if conflict and not (is_stock and is_idempotent):
            raise self.described.refusal(
                f"transformers has conversions for the whole model, by which {conflict} has another name in a "
                f"checkpoint, and a file has what is left of them for {owner} only"
            )
        self._shared |= {key} if conflict else set()
        if stock and is_stock:
            self.described.add_import(_MAPPING, names=["get_checkpoint_conversion_mapping"])
            items = [f'        *get_checkpoint_conversion_mapping("{key}")']
        else:
            items = [self._text(transform) for transform in kept]
        texts = {identity(transform): self._text(transform) for transform in added}
        return [*items, *dict.fromkeys(texts.values())]

    def _check_namesakes(
        self, owner: str, read: Mapping[Any, set[str]], stock: Sequence[Any], added: Sequence[Any]
    ) -> None:
        """Raise a CodegenError if a conversion matches other parameters by name than `read`, those that it is for."""
        fused = set().union(*read.values())
        converters = {identity(transform): transform for transform in added if isinstance(transform, WeightConverter)}
        for name, converter in converters.items():
            for pattern in (*source_patterns(converter), *target_patterns(converter)):
                if self._converting.setdefault(pattern, name) != name:
                    raise self.described.refusal(
                        f"{type(self.modules[owner]).__name__} and another model of the file would convert {pattern} "
                        "in different ways, and transformers tells conversions apart by names"
                    )
        reverse, rename_on_save = reversed_copies(converters.values()), key_renamer(reversed_copies(stock))
        for key in self.modules[owner].state_dict():
            others = [converter for name, converter in converters.items() if key not in read[name]]
            is_read, is_written = (any(t.compiled_sources.search(key) for t in way) for way in (others, reverse))
            # A load drops a key that it has renamed to one that the model lacks.
            if (is_read and (key in fused or rename_on_save(key)[0] != key)) or (is_written and key not in fused):
                raise self.described.refusal(
                    f"{inside(owner)}{key} has the name of what is fused elsewhere, and transformers tells "
                    "conversions apart by names"
                )

    def _conflict_with_root(self, owner: str, stock: Sequence[WeightTransform]) -> tuple[str, bool]:
        """Return a key that conversions of the root and of a part rename differently, and if both may be applied."""
        root, model = cast("Any", self.modules[""]), cast("Any", self.modules[owner])
        if not owner or stock_key(root) != stock_key(model):
            return "", True
        renamings = [transform for transform in stock if isinstance(transform, WeightRenaming)]
        ways = renamings, reversed_copies(renamings)
        scoped = [list(map(copy_transform, way)) for way in ways]
        for transform in (*scoped[0], *scoped[1]):
            transform.base_model_prefix = root.base_model_prefix
            transform.scope_prefix = owner.removeprefix(root.base_model_prefix).removeprefix(".")
        (load, save), (load_part, save_part) = ([key_renamer(way) for way in pair] for pair in (ways, scoped))
        saved = {key: save(key)[0] for key in root.state_dict()}
        is_idempotent = all(
            save(save_part(key)[0])[0] == name and load_part(load(name)[0])[0] == load(name)[0]
            for key, name in saved.items()
        )
        return next((key for key, name in saved.items() if save_part(key)[0] != name), ""), is_idempotent

    def _of_layouts(
        self, path: str, layouts: Sequence[Layout], stock: Sequence[Any], kept: dict[Any, None]
    ) -> Iterator[WeightTransform]:
        """Yield the conversions of a module, and remove those of transformers that they replace from `kept`."""
        prefix = inside(re.sub(r"^.*\b\d+(\.|$)", "", path))
        # Separate patterns for biases, as those of weights would match them as well.
        renamed = [layout for layout in layouts if isinstance(layout, Rows) and len(layout.stock) == 1]
        separate = any("." not in layout.fused[0] for layout in renamed)
        for layout in (layout for layout in layouts if separate or not layout.stock[0].endswith(".bias")):
            parts = [f"{path}.{name.removesuffix('.weight')}" for name in layout.stock]
            keys = [f"{part}{end}" for part in parts for end in ("", ".weight", ".bias")]
            creating = [transform for transform in stock if _creates(transform, keys)]
            operations = [vars(operation) for transform in creating for operation in transform.operations]
            either = operations == [_CHECKED_TRANSPOSE]
            if either and isinstance(layout, Matrices) and not layout.transposed:
                kept.pop(creating.pop(), None)
            transform = self._of_layout(layout, prefix, separate=separate, either=either)
            yield from self._merged(creating, transform, layout, path, kept) if creating else [transform]

    def _of_layout(self, layout: Layout, prefix: str, *, separate: bool, either: bool) -> WeightTransform:
        stock, fused = ([f"{prefix}{name}" for name in names] for names in (layout.stock, layout.fused))
        if type(layout) is Rows and len(stock) == 1:
            return WeightRenaming(stock[0], fused[0])
        if type(layout) is Rows:
            end = "" if separate else ".weight"
            parts, joined = ([name.removesuffix(end) for name in names] for names in (stock, fused))
            return WeightConverter(parts, joined, [_IN_FILES.JoinRows()])
        if type(layout) is Flatten:
            return WeightConverter(stock[0], fused[0], [_IN_FILES.FlattenKernel()])
        if isinstance(layout, Matrices):
            operation = _IN_FILES.SplitExperts(layout.transposed, layout.interleaved, either)
            stack = stock[0] + ("" if stock[0].endswith("_bias") else "(?!_)")
            layers = [f"{prefix}*.{name}" for name in layout.layers]
            converter: WeightTransform = _IN_FILES.ExpertsConverter(stack, layers, [operation])
            return converter
        raise self.described.refusal(
            f"{prefix[:-1]} has the layout {layout}, and a file that needs no patcher has operations for joined "
            "rows, kernels and experts only"
        )

    def _merged(
        self, creating: Sequence[Any], added: Any, layout: Layout, path: str, kept: dict[Any, None]
    ) -> Iterator[WeightTransform]:
        """Yield what remains of a conversion that creates fused parameters from those that the fused layer has."""
        stock, sources, targets = creating[0], source_patterns(creating[0]), target_patterns(creating[0])
        fused, parts = target_patterns(added), source_patterns(added)
        if all(name.endswith(".weight") for name in (*sources, *targets)) and not parts[0].endswith(".weight"):
            sources, targets = ([name.removesuffix(".weight") for name in side] for side in (sources, targets))
        fits = parts == [target.replace("\\", "").removeprefix("^") for target in targets]
        if isinstance(layout, Matrices):
            fits = len(targets) == 1 and not layout.transposed and not layout.interleaved
            fused = [f"{targets[0].removesuffix(layout.stock[0])}*.{layer}" for layer in layout.layers]
        is_undone = list(map(type, stock.operations)) in _UNDONE and len(sources) == len(fused)
        if len(creating) > 1 or not fits or not is_undone:
            raise self.described.refusal(
                f"transformers has a conversion for parameters of {path}, {describe(stock)}, which a file can't write "
                "as one with the fusion"
            )
        kept.pop(stock, None)
        for source, target in zip(sources, fused, strict=True):
            if source != target:
                yield WeightRenaming(source.replace("*", r"(\d+)"), target.replace("*", r"\1"))

    # -- texts ------------------------------------------------------------------------------------------------------

    def _text(self, transform: WeightTransform) -> str:
        """Return the expression of a conversion, checked by evaluating it, and add what it uses to the file."""
        used: dict[str, Any] = {}

        def text(value: Any) -> str:
            if isinstance(value, WeightTransform | ConversionOps) or hasattr(value, "_asdict"):  # a named tuple
                cls = type(value)
                self.dependencies.define(cls, f"from_patcher(), for {describe(transform)}")
                used[cls.__name__] = cls
                arguments = [f"{keyword}{text(argument)}" for keyword, argument in _arguments(value)]
                return f"{cls.__name__}({', '.join(arguments)})"
            if type(value) in (tuple, list):
                items = ", ".join(map(text, value))
                return f"[{items}]" if type(value) is list else f"({items},)" if len(value) == 1 else f"({items})"
            return _literal(value) if isinstance(value, str) else repr(value)

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


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the constructor arguments of an object with their keywords `name=`, "" for patterns and operations."""
    patterns = {"source_patterns": source_patterns, "target_patterns": target_patterns}
    for name, parameter in signature_of(type(value)).parameters.items():
        argument: Any = patterns[name](value) if name in patterns else getattr(value, name, parameter.empty)
        is_keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if argument is parameter.empty or not is_keyword:
            raise TypeError(f"{type(value).__name__} doesn't keep its argument {name!r}")
        if name in patterns:
            yield "", argument[0] if len(argument) == 1 else argument
        elif argument != parameter.default:
            yield "" if name == "operations" else f"{name}=", argument


def _creates(transform: Any, keys: Sequence[str]) -> bool:
    """Whether a conversion creates some of these parameters from others."""
    patterns = target_patterns(transform) if isinstance(transform, WeightConverter) else ()
    return any(re.search(rf"{pattern}(?!\w)", key) for pattern in patterns for key in keys)


def _literal(value: str) -> str:
    """Return a string literal as written by hand: raw if it contains backslashes."""
    if "\\" in value and not value.endswith("\\") and '"' not in value and value.isprintable():
        return f'r"{value}"'
    return json.dumps(value, ensure_ascii=False)
