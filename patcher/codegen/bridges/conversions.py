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
from typing import TYPE_CHECKING, Any

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
from patcher.codegen.bridges.fused_layers import ModuleText
from patcher.compat import standing_alone
from patcher.compat.conversions import conversions_under, source_patterns, stock_key, target_patterns
from patcher.errors import CodegenError
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.layouts import Flatten, Layout, Rows
from patcher.layouts.selection import select_conversions
from patcher.layouts.transforms import describe, identity
from patcher.patterns import inside
from patcher.source.indentation import dedented

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.spec.patcher import Patcher

#: of the operation that turns stacks of experts where a checkpoint has them the other way round
CHECKED_TRANSPOSE = {"dim0": 1, "dim1": 2, "check_dims": True}
#: methods that the models of a file have in addition
METHODS = ("load_state_dict", "_load_from_state_dict", "save_pretrained", "prepare_distribute_model")


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
    #: path of a model -> path of a module in it -> its layouts
    _layouts: dict[str, dict[str, Sequence[Layout]]] = field(default_factory=dict)

    def write(self, layouts: Mapping[str, Sequence[Layout]], extra: Sequence[WeightTransform]) -> None:
        """Register what fused modules need, and what a patcher brings.

        Args:
            layouts: path -> which parameters become which.
            extra: further conversions.
        """
        for path, listed in layouts.items():
            self._layouts.setdefault(self._owner(path, listed), {})[path] = listed
        if not self._layouts and (extra or self.patcher.filtered_weight_conversion_patterns):
            self._layouts[self._outermost()] = {}
        found = {path: self._conversions(path, layouts, extra) for path, layouts in self._layouts.items()}
        own_name = self._own_name(found)
        registered: dict[str, list[str]] = {}
        for path, lines in found.items():
            name = type(self.modules[path]).__name__
            if registered.setdefault(name, lines) != lines:
                raise self.described.refusal(
                    f"{name} would need other conversions at {path} than elsewhere in the model, and they go by its "
                    "name"
                )
        self._keep_stock(list(found))
        statements = []
        for name, lines in registered.items():
            self.described.renamed[name] = own_name + name
            statements.append(
                "\n".join(
                    [
                        f'register_checkpoint_conversion_mapping(\n    "{own_name}{name}",\n    [',
                        *lines,
                        "    ],\n    overwrite=True,\n)",
                    ]
                )
            )
        keys = dict.fromkeys(filter(None, map(stock_key, self._models().values())))
        self._methods(own_name, tuple(keys))
        self.described.add_import("transformers.conversion_mapping", names=["register_checkpoint_conversion_mapping"])
        for name, value in self._declared():
            statements += [f"{base}.{name} = {value!r}" for base in self._first_models()]
        self.described.endings.append("\n".join(statements))
        self._heads(registered)

    # -- which classes --------------------------------------------------------------------------------------------

    def _models(self) -> dict[str, PreTrainedModel]:
        return {path: each for path, each in self.modules.items() if isinstance(each, PreTrainedModel)}

    def _around(self, path: str) -> list[str]:
        """The models of the file around a module, the innermost first."""
        found = [
            at
            for at, each in self._models().items()
            if self.text.own(type(each)) and f"{path}.".startswith(inside(at))
        ]
        if not found:
            raise self.described.refusal(f"{path} is in no model that {self.described.source_module} defines")
        return sorted(found, key=len, reverse=True)

    def _owner(self, path: str, layouts: Sequence[Layout]) -> str:
        """The model that registers the conversions of a module: one inside of those that convert its parameters."""
        around = self._around(path)
        keys = [f"{path}.{name}" for layout in layouts for name in layout.stock]
        converting = [at for at in around if any(_taken(self.modules[at], at, key) for key in keys)]
        inner = [at for at in converting if at] or [at for at in around if at][-1:] if "" in converting else []
        return inner[-1] if inner else around[0]

    def _outermost(self) -> str:
        """The model in a model with a head, or that model."""
        root: Any = self.modules[""]
        prefix = root.base_model_prefix
        inner = self.modules.get(prefix) if prefix else None
        return prefix if inner is not None and self.text.own(type(inner)) else ""

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
        models = self._models()
        keys = {path: stock_key(model) for path, model in models.items()}
        own = {type(models[path]) for path in owners}
        taken = {keys[path] for path in owners} - {"", *(each.__name__ for each in own)}
        self.described.converts_as_stock = not taken
        for path, model in models.items():
            others = keys[path] and keys[path] not in taken and type(model) not in own
            if taken and others and self.text.own(type(model)):
                raise self.described.refusal(
                    f"transformers converts checkpoints of {path or 'the model'}, a {type(model).__name__}, by "
                    f"{keys[path]!r}, and those of a part of it by {sorted(taken)}: a file can't have both"
                )

    def _methods(self, own_name: str, keys: tuple[str, ...]) -> None:
        constants: dict[str, Any] = {"OWN_NAME": own_name} | ({"STOCK_CONVERSIONS": keys} if keys else {})
        self.dependencies.constants(
            constants, "the models here have names of their own, by which transformers finds their conversions"
        )
        for base in self._first_models():
            for method in METHODS:
                if method in vars(vars(self.text.module)[base]):
                    raise self.described.refusal(
                        f"{base} has a {method} of its own, which the file would have to replace"
                    )
                function = getattr(standing_alone, method)
                code = inspect.getsource(function)
                if not keys:
                    code = code.replace("in_original_order(", "in_natural_order(")
                self.dependencies.bring(function, "from_patcher()", code)
                code = f"@classmethod\n{code}" if method.startswith("prepare") else code
                self.described.override_method(f"{base}.{method}", code, new=True)

    def _declared(self) -> Iterable[tuple[str, list[str]]]:
        if self.patcher.new_weights:
            raise self.described.refusal(
                f"from_patcher() can't write new_weights={list(self.patcher.new_weights)!r} into a file: there models "
                "are built without values, and what a checkpoint lacks is initialised by _init_weights"
            )
        if self.patcher.dropped_weights:
            yield "_keys_to_ignore_on_load_unexpected", list(self.patcher.dropped_weights)

    def _heads(self, registered: Iterable[str]) -> None:
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
        key = stock_key(model)
        stock = conversions_under(key)
        kept = list(select_conversions(stock, [self.patcher]).kept)
        entries: dict[str, None] = {}
        done = set[Any]()
        for path, listed in layouts.items():
            inner = path.removeprefix(at).removeprefix(".")
            prefix = re.sub(r"^.*\b\d+(\.|$)", "", inner)
            if (prefix, *listed) not in done:
                done.add((prefix, *listed))
                entries |= dict.fromkeys(self._entries(inner, prefix, listed, kept))
        lines = []
        if stock and [identity(each) for each in kept] == [identity(each) for each in stock]:
            self.described.add_import("transformers.conversion_mapping", names=["get_checkpoint_conversion_mapping"])
            lines.append(f'*get_checkpoint_conversion_mapping("{key}"),')
        elif any(type(each) not in (WeightRenaming, WeightConverter) for each in kept) and _renames(kept, stock):
            self.described.add_import("transformers.conversion_mapping", names=["get_checkpoint_conversion_mapping"])
            self.described.add_import("transformers.core_model_loading", names=["WeightRenaming"])
            stocks = f'get_checkpoint_conversion_mapping("{key}")'
            lines.append(f"*[each for each in {stocks} if isinstance(each, WeightRenaming)],")
        else:
            lines += [f"{self._render(each)}," for each in kept]
        lines += [f"{entry}," for entry in entries]
        lines += [f"{self._render(self._unanchored(each, at))}," for each in extra]
        return [f"        {line}" for each in lines for line in each.splitlines()]

    def _render(self, transform: WeightTransform) -> str:
        if type(transform) is WeightRenaming and len(source_patterns(transform)) == 1:
            return self._renaming(source_patterns(transform)[0], target_patterns(transform)[0])
        return Conversion(transform, self.dependencies).render()

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

    def _entries(self, inner: str, prefix: str, layouts: Sequence[Layout], kept: list[Any]) -> Iterable[str]:
        """The conversions of modules of one name, as texts; what transformers has for these is taken out of `kept`."""
        name = (f"{prefix}." if prefix else "").__add__
        partial = any(isinstance(each, Rows) and len(each.stock) == 1 and "." not in each.fused[0] for each in layouts)
        for layout in layouts:
            if type(layout) is Rows and len(layout.stock) > 1:
                if layout.stock[0].endswith(".bias") and not partial:
                    continue  # the pattern of the weights takes them as well
                parts, joined = list(layout.stock), layout.fused[0]
                if not partial:
                    parts = [each.removesuffix(".weight") for each in parts]
                    joined = joined.removesuffix(".weight")
                yield self._joined(list(map(name, parts)), name(joined), inner, kept)
            elif type(layout) is Rows:
                yield self._renaming(name(layout.stock[0]), name(layout.fused[0]))
            elif type(layout) is Flatten:
                self._untaken(inner, layout, kept)
                yield self._converter([name(layout.stock[0])], [name(layout.fused[0])], "FlattenKernel()")
            elif isinstance(layout, Matrices):
                yield from self._experts(name, inner, layout, kept)
            else:
                raise self.described.refusal(
                    f"{inner} has the layout {layout}, and a file that needs no patcher has operations for joined "
                    "rows, kernels and experts only"
                )

    def _joined(self, parts: list[str], joined: str, inner: str, kept: list[Any]) -> str:
        for each in list(kept):
            targets = [_plain(target) for target in target_patterns(each)]
            if not isinstance(each, WeightConverter) or not set(targets) & set(parts):
                continue
            if (
                targets == parts
                and [type(op) for op in each.operations] == [Chunk]
                and len(source_patterns(each)) == 1
            ):
                kept.remove(each)  # which takes apart what is joined here
                return self._renaming(source_patterns(each)[0], joined)
            raise self._composed(each, inner)
        return self._converter(parts, [joined], "JoinRows()")

    def _experts(self, name: Any, inner: str, layout: Matrices, kept: list[Any]) -> Iterable[str]:
        stack = f"{inner}.{layout.stock[0]}"
        taking: list[Any] = [
            each for each in kept if isinstance(each, WeightConverter) and _matches(target_patterns(each), stack)
        ]
        either = [vars(op) for each in taking for op in each.operations] == [CHECKED_TRANSPOSE]
        if either and not layout.transposed:
            kept.remove(taking.pop())
        if not taking:
            targets = [name(f"*.{layer}") for layer in layout.layers]
            source = name(layout.stock[0]) + ("" if layout.stock[0].endswith("_bias") else "(?!_)")
            options = {"transposed": layout.transposed, "interleaved": layout.interleaved, "either": either}
            flags = ", ".join(f"{each}=True" for each, chosen in options.items() if chosen)
            yield self._converter([source], targets, f"SeparateExperts({flags})", "ExpertsConverter")
            return
        converter = taking[0]
        kinds = [type(op) for op in converter.operations]
        sources, target = source_patterns(converter), target_patterns(converter)[0]
        plain = not layout.transposed and not layout.interleaved and len(sources) == layout.parts
        if len(taking) > 1 or kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or not plain:
            raise self._composed(converter, inner)
        kept.remove(converter)
        for source, layer in zip(sources, layout.layers, strict=True):
            stem = target.removesuffix(layout.stock[0])
            new = f"{stem}*.{layer}"
            if source != new:
                yield self._renaming(source.replace("*", r"(\d+)"), new.replace("*", r"\1"))

    def _untaken(self, inner: str, layout: Layout, kept: Iterable[Any]) -> None:
        for each in kept:
            if isinstance(each, WeightConverter) and _matches(target_patterns(each), f"{inner}.{layout.stock[0]}"):
                raise self._composed(each, inner)

    def _composed(self, converter: WeightTransform, path: str) -> CodegenError:
        return self.described.refusal(
            f"transformers has a conversion for parameters of {path}, {describe(converter)}, which a file can't write "
            "as one with the fusion"
        )

    def _renaming(self, source: str, target: str) -> str:
        self.described.add_import("transformers.core_model_loading", names=["WeightRenaming"])
        return f"WeightRenaming({text_of(source)}, {text_of(target)})"

    def _converter(self, sources: list[str], targets: list[str], operation: str, kind: str = "WeightConverter") -> str:
        for name in (operation.partition("(")[0], kind):
            if name == "WeightConverter":
                self.described.add_import("transformers.core_model_loading", names=[name])
            else:
                self.dependencies.helper(getattr(standing_alone, name))
        listed = [
            text_of(each[0]) if len(each) == 1 else f"[{', '.join(map(text_of, each))}]" for each in (sources, targets)
        ]
        line = f"{kind}({', '.join(listed)}, [{operation}])"
        return line if len(line) <= 108 else f"{kind}(\n    {listed[0]},\n    {listed[1]},\n    [{operation}],\n)"


def _renames(kept: Sequence[Any], stock: Sequence[Any]) -> bool:
    """Whether what is kept of conversions are all the renamings."""
    renaming = [each for each in stock if isinstance(each, WeightRenaming)]
    return [identity(each) for each in kept] == [identity(each) for each in renaming]


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").removeprefix("^")


def _matches(patterns: Iterable[str], key: str) -> bool:
    return any(re.search(rf"{pattern}(?!\w)", key) for pattern in patterns)


def _taken(model: Any, at: str, key: str) -> bool:
    """Whether conversions that transformers has for a model take a parameter."""
    own = key.removeprefix(at).removeprefix(".")
    converters = [each for each in conversions_under(stock_key(model)) if isinstance(each, WeightConverter)]
    return any(_matches([*target_patterns(each)], own) for each in converters)


def text_of(value: str) -> str:
    """A string as it would be written by hand: raw where it holds backslashes."""
    if "\\" in value and not value.endswith("\\") and '"' not in value and value.isprintable():
        return f'r"{value}"'
    return '"' + repr("'" + value)[2:-1].replace('"', '\\"') + '"' if "'" not in value else repr(value)


class Conversion:
    """One weight conversion as source text, checked by evaluating it again."""

    def __init__(self, transform: WeightTransform, dependencies: Dependencies) -> None:
        self.transform = transform
        self.dependencies = dependencies
        self.namespace: dict[str, Any] = {}

    def render(self) -> str:
        """The text; what it names is imported by the file."""
        transform, kind = self.transform, type(self.transform)
        if kind not in (WeightConverter, WeightRenaming):
            raise self._no_text(f"{kind.__name__} is a class of its own")
        self.dependencies.config.add_import("transformers.core_model_loading", names=[kind.__name__])
        self.namespace[kind.__name__] = kind
        lines = [f"{kind.__name__}("]
        lines += self._list("source_patterns", map(text_of, source_patterns(transform)))
        lines += self._list("target_patterns", map(text_of, target_patterns(transform)))
        if isinstance(transform, WeightConverter):
            lines.append(f"    operations=[{', '.join(map(self._operation, transform.operations))}],")
        text = "\n".join([*lines, ")"])
        try:
            made = eval(text, self.namespace)
        except Exception as error:
            raise self._no_text(f"its text would fail with {type(error).__name__}: {error}") from error
        if identity(made) != identity(transform):
            raise self._no_text("its text would make another one")
        return text

    def _list(self, name: str, items: Iterable[str]) -> list[str]:
        return [f"    {name}=[", *(f"        {item}," for item in items), "    ],"]

    def _operation(self, operation: Any) -> str:
        cls = type(operation)
        arguments = {}
        for name, parameter in inspect.signature(cls).parameters.items():
            value = getattr(operation, name, parameter.empty)
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if value is parameter.empty or not named:
                raise self._no_text(f"{cls.__name__} doesn't keep its argument {name!r}")
            if value != parameter.default:
                arguments[name] = value
        return self._call(cls, arguments)

    def _call(self, cls: type, arguments: dict[str, Any]) -> str:
        self.dependencies.operation(cls, f"from_patcher(), for {describe(self.transform)},")
        self.namespace[cls.__name__] = cls
        return f"{cls.__name__}({', '.join(f'{name}={self._value(value)}' for name, value in arguments.items())})"

    def _value(self, value: Any) -> str:
        if isinstance(value, ConversionOps):  # of one that runs others; they are given the model that the file builds
            return self._operation(value)
        if hasattr(value, "_asdict"):  # a named tuple
            return self._call(type(value), value._asdict())
        if type(value) in (tuple, list):
            items = ", ".join(map(self._value, value))
            return f"[{items}]" if type(value) is list else f"({items},)" if len(value) == 1 else f"({items})"
        return repr(value)

    def _no_text(self, reason: str) -> CodegenError:
        return self.dependencies.config.error(
            f"the conversion {describe(self.transform)} can't be written into the file: {reason}. "
            "Load with the patcher itself, or give the conversion operations that keep their arguments."
        )
