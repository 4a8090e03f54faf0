"""Weight conversions that can be compared, that remember what they did, and that give it back exactly.

transformers reverses a conversion by pattern: it cuts what was concatenated into equal pieces, and it takes every key
that looks like a result. Here a conversion keeps a journal of one load: per target, which tensors of which shapes it
joined. On save exactly the recorded targets are taken apart, by the recorded sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patcher import seams
from patcher.errors import PatchedWeightsError
from patcher.matching import search
from patcher.seams import Concatenate, ConversionOps, WeightConverter, WeightRenaming, WeightTransform

__all__ = [
    "Journal",
    "describe",
    "filter_conversions",
    "identity",
    "simulate",
    "track",
    "undo",
]


# --- comparing -----------------------------------------------------------------------------------------------------


def identity(transform: WeightTransform) -> tuple[Any, ...]:
    """What two transforms that do the same have in common: weight transforms have no equality of their own."""
    return (type(transform), _frozen(seams.transform_settings(transform)))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _frozen(item)) for key, item in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_frozen(item) for item in value)
    if isinstance(value, ConversionOps):
        return (type(value), _frozen(vars(value)))
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().cpu().flatten().tolist().__repr__())
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def describe(transform: WeightTransform) -> str:
    """One line: `q_proj, k_proj, v_proj -> qkv_proj [Concatenate(dim=0)]`."""
    arrow = f"{', '.join(seams.source_patterns(transform))} -> {', '.join(seams.target_patterns(transform))}"
    operations = getattr(transform, "operations", None)
    return f"{arrow} [{', '.join(map(repr, operations))}]" if operations else f"{arrow} [rename]"


def filter_conversions(
    conversions: Iterable[WeightTransform], filters: Iterable[str]
) -> tuple[list[WeightTransform], list[tuple[WeightTransform, str]]]:
    """The conversions that no filter is found in, and the dropped ones with the filters that dropped them."""
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    expressions = list(filters)
    if not expressions:
        return list(conversions), []
    for conversion in conversions:
        patterns = seams.all_patterns(conversion)
        hits = [expression for expression in expressions if any(search(expression, text) for text in patterns)]
        if hits:
            dropped += [(conversion, hit) for hit in hits]
        else:
            kept.append(conversion)
    return kept, dropped


# --- remembering ---------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What one conversion did for one layer."""

    target: str
    #: source pattern -> (key, shape) of each tensor that it collected, in order
    sources: dict[str, list[tuple[str, torch.Size]]]
    #: parameter -> (the target pattern that made it, shape, dtype before any quantization)
    produced: dict[str, tuple[str, torch.Size, torch.dtype]]
    operations: list[ConversionOps]


@dataclass
class Journal:
    """What one conversion did in one load. Copies of a conversion, which a load makes per layer, share it."""

    transform: WeightTransform
    entries: list[Entry] = field(default_factory=list)
    #: for a renaming: the key before -> the key after
    renamed: dict[str, str] = field(default_factory=dict)
    current: tuple[str, str] = ("", "")
    #: the layers where it raised
    failed: list[str] = field(default_factory=list)

    #: a quantizer has put another conversion in its place
    lost: bool = False

    def had_effect(self, parameters: set[str], prefix: str) -> bool:
        """Whether something that it made or renamed is a parameter, or was taken further."""
        if self.lost or self.entries:
            return True
        if isinstance(self.transform, WeightConverter):
            return False
        names = parameters | {name.removeprefix(f"{prefix}.") for name in parameters}
        return any(name in names or f"{prefix}.{name}" in names for name in self.renamed.values()) or bool(
            self.renamed and not names.intersection(self.renamed)
        )

    def is_uneven(self) -> bool:
        """Whether it has joined parts of different sizes."""
        return any(
            len({size for _, size in operation.sizes}) > 1
            for entry in self.entries
            for operation in entry.operations
            if isinstance(operation, RememberingConcatenate)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Journal:
        # transformers copies a converter for each layer; `copy.deepcopy(model)` gets what only loading writes.
        return self


class _Tracked:
    """The part of a tracked transform that renaming and converting have in common."""

    __slots__ = ()
    journal: Journal

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        renamed, pattern = super().rename_source_key(source_key)  # type: ignore[misc]
        if pattern is not None:
            self.journal.current = (source_key, renamed)
            if renamed != source_key:
                self.journal.renamed[source_key] = renamed
        return renamed, pattern


class _TrackedConverter(_Tracked):
    __slots__ = ()
    collected: list[tuple[str, str]]
    if TYPE_CHECKING:
        operations: list[ConversionOps]

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        before, after = self.journal.current
        if target_key.endswith(f".{after}"):  # the load put the prefix of the base model in front
            before = target_key.removesuffix(after) + before
        elif after.endswith(f".{target_key}") and before.startswith(after.removesuffix(target_key)):
            before = before.removeprefix(after.removesuffix(target_key))
        self.collected.append((source_pattern, before))
        super().add_tensor(target_key, source_key, source_pattern, future)  # type: ignore[misc]

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        first, middle, last = _Witness(), list(self.operations), _Witness()
        self.operations = [first, *middle, last]  # type: ignore[misc]
        if self.quantization_operation is not None:  # type: ignore[has-type]
            self.quantization_operation = _QuantizeEach(kwargs["hf_quantizer"])  # type: ignore[misc]
        try:
            result = super().convert(layer_name, *args, **kwargs)  # type: ignore[misc]
        except Exception:  # the load goes on and reports at its end
            self.journal.failed.append(layer_name)
            raise
        sources: dict[str, list[tuple[str, torch.Size]]] = {}
        shapes = {pattern: list(seen) for pattern, seen in first.seen.items()}
        for pattern, key in self.collected:
            sources.setdefault(pattern, []).append((key, shapes[pattern].pop(0)))
        produced = {
            _full_name(layer_name, pattern, list(last.seen)): (pattern, seen[0], last.dtypes[pattern])
            for pattern, seen in last.seen.items()
        }
        self.journal.entries.append(Entry(layer_name, sources, produced, middle))
        return result


class _Witness(ConversionOps):
    """An operation that changes nothing and remembers the shapes that pass."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Size]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        for pattern, tensors in input_dict.items():
            listed = tensors if isinstance(tensors, list) else [tensors]
            self.seen[pattern] = [tensor.shape for tensor in listed]
            self.dtypes[pattern] = listed[0].dtype
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _Witness()


class _QuantizeEach(ConversionOps):
    """Quantize whatever a conversion makes; transformers' own operations take one parameter, the first."""

    def __init__(self, quantizer: Any) -> None:
        self._quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            if self._quantizer.param_needs_quantization(model, name):
                operation = self._quantizer.get_quantize_ops()
                result.update(operation.convert({name: value}, full_layer_name=name, model=model, **kwargs))
            else:
                result[name] = value
        return result


def _full_name(layer_name: str, pattern: str, patterns: list[str]) -> str:
    """The name of the parameter that a target pattern makes, where `layer_name` is what the first one makes."""
    full = layer_name.replace("*.", "0.")
    for other in patterns:
        if other in full:
            head, _, tail = full.partition(other)
            return head + pattern + tail
    return pattern


_GROUP = re.compile(r"\\\d")


class RememberingConcatenate(Concatenate):
    """A `Concatenate` whose reverse cuts at the sizes that it joined, not into equal pieces."""

    sizes: tuple[tuple[str, int], ...] = ()

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        sizes = []
        for pattern in source_patterns:
            tensors = input_dict.get(pattern, [])
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                sizes.append((pattern, tensor.shape[self.dim]))
        self.sizes = tuple(sizes)
        join: Any = super().convert
        joined: dict[str, torch.Tensor] = join(
            input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
        )
        if len(joined) == 1 and _GROUP.search(next(iter(joined))):
            # Anchored, `^(layers\.\d+\.)q$ -> \1qkv`: transformers expands a group in the name of the layer alone.
            (tensor,) = joined.values()
            return {kwargs["full_layer_name"]: tensor}
        return joined

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitBySizes(self.dim, self.sizes)


class SplitBySizes(ConversionOps):
    """Cut a tensor at given sizes. The reverse of `RememberingConcatenate`."""

    def __init__(self, dim: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.dim = dim
        self.sizes = sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        pieces = torch.split(tensor, [size for _, size in self.sizes], dim=self.dim)
        # The tensors were joined under their source patterns; those are this direction's target patterns.
        result: dict[str, list[torch.Tensor]] = {}
        for (pattern, _), piece in zip(self.sizes, pieces, strict=True):
            result.setdefault(pattern, []).append(piece.contiguous())
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(self.dim)


@cache
def _tracked_class(cls: type[WeightTransform]) -> type[WeightTransform]:
    if issubclass(cls, WeightConverter):
        bases: tuple[type, ...] = (_TrackedConverter, cls)
        slots: tuple[str, ...] = ("journal", "collected")
    else:
        bases, slots = (_Tracked, cls), ("journal",)
    return type(f"Tracked{cls.__name__}", bases, {"__slots__": slots, "__module__": __name__})


def track(transform: WeightTransform) -> Any:
    """A copy for one load, with a journal of its own."""
    copy = seams.copy_transform(transform, _tracked_class(type(transform)))  # type: ignore[arg-type]
    copy.journal = Journal(transform)
    if isinstance(copy, WeightConverter):
        copy.collected = []
        copy.operations = [_remembering(operation) for operation in copy.operations]
    return copy


def _remembering(operation: ConversionOps) -> ConversionOps:
    if type(operation) is Concatenate:
        remembering = RememberingConcatenate.__new__(RememberingConcatenate)
        remembering.__dict__.update(operation.__dict__)
        return remembering
    return operation


def joins(transform: WeightTransform) -> bool:
    """Whether the transform is a converter that concatenates."""
    return any(type(operation) is Concatenate for operation in getattr(transform, "operations", ()))


def journal_of(transform: WeightTransform) -> Journal | None:
    """The journal of a tracked transform."""
    return getattr(transform, "journal", None)


# --- giving back ---------------------------------------------------------------------------------------------------


def undo(
    journals: Iterable[Journal], state_dict: Mapping[str, torch.Tensor], model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take apart what the journals say was joined.

    Returns:
        The tensors under the names that they had before the conversions, and the rest of the state dict, untouched.

    Raises:
        PatchedWeightsError: an operation has no reverse, a tensor is missing or has changed its shape.
    """
    rest = dict(state_dict)
    restored: dict[str, torch.Tensor] = {}
    for journal in journals:
        if journal.lost:
            raise PatchedWeightsError(
                f"The weights can't be saved in the original format: the quantizer has rewritten "
                f"{describe(journal.transform)}, and that can't be reversed."
            )
        for entry in journal.entries:
            if not any(name in state_dict for name in entry.produced):
                continue  # a state dict of a part of the model
            restored.update(_undo_entry(journal, entry, rest, model))
    return restored, rest


def _undo_entry(
    journal: Journal, entry: Entry, state_dict: dict[str, torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    def fail(reason: str, cause: Exception | None = None) -> PatchedWeightsError:
        error = PatchedWeightsError(
            f"{', '.join(entry.produced)} can't be saved in the original format: {reason}.\n"
            f"It was made by {describe(journal.transform)}.\n"
            "Give its operations a `reverse_op` that inverts them, or save the runtime layout yourself with "
            "`safetensors.torch.save_model(model, ...)`."
        )
        error.__cause__ = cause
        return error

    collected: dict[str, Any] = {}
    targets = journal.transform.target_patterns
    for name, (pattern, shape, dtype) in entry.produced.items():
        tensor = state_dict.pop(name, None)
        if tensor is None:
            raise fail(f"{name} is missing in the state dict")
        if type(tensor) not in (torch.Tensor, nn.Parameter) or (tensor.dtype != dtype and tensor.dtype.itemsize == 1):
            raise fail(
                f"{name} is quantized ({type(tensor).__name__} of {tensor.dtype}), its companions can't be split"
            )
        if tensor.shape != shape:
            raise fail(f"{name} had the shape {tuple(shape)} after the load, it has {tuple(tensor.shape)} now")
        # One target pattern with a star makes many parameters, `experts.0.w`, `experts.1.w`: together again.
        family = next((target for target in targets if _expands(target, pattern)), pattern)
        collected.setdefault(family, []).append(tensor)
    try:
        reverses = [operation.reverse_op for operation in reversed(entry.operations)]
        with torch.no_grad():
            for operation in reverses:
                collected = operation.convert(
                    collected,
                    source_patterns=[target for target in targets if target in collected] or list(collected),
                    # In the order in which they were written, as on the way in: the checkpoint's order is another.
                    target_patterns=[name for name in journal.transform.source_patterns if name in entry.sources],
                    full_layer_name=entry.target,
                    model=model,
                    config=getattr(model, "config", None),
                    missing_keys=None,
                )
    except NotImplementedError as error:
        names = ", ".join(type(operation).__name__ for operation in entry.operations)
        raise fail(f"one of its operations ({names}) has no reverse", error) from error
    except Exception as error:
        raise fail(f"taking it apart failed with {type(error).__name__}: {error}", error) from error

    restored: dict[str, torch.Tensor] = {}
    # Pieces that stock cuts from one tensor, with the operations that stock has, are saved into one shard there too.
    as_stock = all(getattr(operation, "reverses_as_stock", False) for operation in entry.operations)
    for pattern, sources in entry.sources.items():
        tensors = _tensors_of(pattern, collected)
        if len(tensors) != len(sources):
            raise fail(f"the reverse gives {len(tensors)} tensors for {pattern!r}, the checkpoint had {len(sources)}")
        for (key, shape), tensor in zip(sources, tensors, strict=True):
            if tensor.shape != shape:
                raise fail(
                    f"the reverse gives {key} the shape {tuple(tensor.shape)}, the checkpoint had {tuple(shape)}"
                )
            restored[key] = tensor if as_stock else _by_itself(tensor.contiguous())
    return restored


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a storage of its own, in the same memory.

    Pieces of one tensor share its storage, and what shares a storage is saved into one shard.
    """
    if tensor.device.type == "meta" or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(tensor.detach())
    except (BufferError, RuntimeError, TypeError):  # a device or a type that can't be exchanged
        return tensor.clone()


def _expands(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, or `pattern` with a number in place of its star."""
    return name == pattern or (
        "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
    )


def _tensors_of(pattern: str, collected: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that operations left for a pattern: under it, or numbered in place of its star."""
    tensors: list[torch.Tensor] = []
    for name in sorted(collected, key=seams.dot_natural_key):
        if _expands(pattern, name):
            value = collected[name]
            tensors += value if isinstance(value, list) else [value]
    return tensors


class Renamed:
    """A renaming that was applied in a load, as saving meets it: reversed by what it did, not by its pattern."""

    def __init__(self, journal: Journal, base_model_prefix: str) -> None:
        self.journal = journal
        self.base_model_prefix = base_model_prefix

    def reverse_transform(self) -> WeightRenaming:
        reverse = _TableRenaming(source_patterns=["unused"], target_patterns=["unused"])
        reverse.table = {after: before for before, after in self.journal.renamed.items()}
        reverse.prefix = f"{self.base_model_prefix}." if self.base_model_prefix else ""
        return reverse


class _TableRenaming(WeightRenaming):
    __slots__ = ("prefix", "table")
    table: dict[str, str]
    prefix: str

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.table:
            return self.table[source_key], source_key
        bare = source_key.removeprefix(self.prefix)
        if bare in self.table:  # the load put the prefix of the base model in front
            return self.prefix + self.table[bare], source_key
        longer = self.prefix + source_key
        if longer in self.table:  # or took it away
            return self.table[longer].removeprefix(self.prefix), source_key
        return source_key, None


# --- without reading -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a load would do, by names and shapes."""

    loaded: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)


def simulate(
    model: seams.PreTrainedModel, conversions: list[WeightTransform], checkpoint: Mapping[str, torch.Tensor]
) -> Outcome:
    """Load a checkpoint of meta tensors into a model on meta, by name and shape; tracked conversions keep journal."""
    parameters = model.state_dict()
    outcome = Outcome()
    converters: dict[str, WeightTransform] = {}
    shapes: dict[str, torch.Size] = {}
    for key in sorted(checkpoint, key=seams.dot_natural_key):
        renamed, taker, pattern = seams.rename_key(key, conversions, model, parameters)
        if renamed not in parameters:
            outcome.unexpected.add(renamed)
        elif taker is None:
            shapes[renamed] = checkpoint[key].shape
        else:
            converter = converters.get(renamed)
            if converter is None:
                converter = converters[renamed] = deepcopy(taker)
            converter.add_tensor(renamed, key, pattern or "", checkpoint[key])  # type: ignore[arg-type]
    for first, converter in converters.items():
        made = converter.convert(first, model=model, config=model.config)  # type: ignore[attr-defined]
        for name, tensor in made.items():
            shapes[name] = (tensor[0] if isinstance(tensor, list) else tensor).shape
    for name, shape in shapes.items():
        if name not in parameters:
            outcome.unexpected.add(name)
        elif shape != parameters[name].shape:
            outcome.mismatched.add(name)
        else:
            outcome.loaded.add(name)
    outcome.missing = set(parameters) - set(shapes)
    return outcome
