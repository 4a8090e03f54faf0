"""The value: what to change in a model. Normalised, validated, combined and compared here; applied elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from packaging.specifiers import SpecifierSet
from torch import nn

from patcher import arguments, matching, seams
from patcher.conversions import identity
from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.fusions.base import Fusion, fusion_named, fusions_configured
from patcher.seams import WeightTransform

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PretrainedConfig, PreTrainedModel

    from patcher.resolution.resolution import Resolution

__all__ = ["Patcher"]

_FIELDS = (
    "class_mapping",
    "filtered_weight_conversion_patterns",
    "extra_weight_conversions",
    "fusions",
    "new_weights",
    "dropped_weights",
    "strict",
    "name",
    "transformers",
    "fingerprints",
    "any_of",
)


class Patcher:
    """What to change in a model for one load: an immutable value.

    >>> from torch import nn
    >>> class Doubled(nn.Linear): ...
    >>> patcher = Patcher({"LlamaMLP": Doubled}, new_weights="adapter")
    >>> patcher == patcher.replace(name="") and patcher.replace(strict=False).strict
    False

    Pass it to `from_pretrained(..., patcher=patcher)`, to `from_config`, or enter `with patcher.applied():`.

    Args:
        class_mapping: class name -> the class to build in its place. A key that is a Python identifier is an exact
            name; any other key is a regular expression, searched in class names. An exact name wins.
        filtered_weight_conversion_patterns: expressions; a stock conversion in whose source or target patterns one of
            them is found is dropped.
        extra_weight_conversions: conversions that are put in front of the remaining ones, in this order.
        fusions: layout families, by name or as objects of `patcher.fusions.Fusion`.
        new_weights: expressions; parameters of replaced modules that may be missing in the checkpoint. They keep what
            their `__init__` gave them.
        dropped_weights: expressions; checkpoint tensors under replaced modules that may stay unused.
        strict: raise when a load doesn't do what is said here; otherwise warn.
        name: for reports.
        transformers: a PEP 440 specifier of the releases that it was verified on.
        fingerprints: class name -> fingerprint, or several, of the code that it was verified on.
        any_of: groups of class keys of which a model needs to have only one, such as the classes of one modeling file:
            no model has all of them.

    Raises:
        InvalidPatcherError: something here can't mean anything.
        PatchConflictError: two conversions take the same tensors.
    """

    __slots__ = (*(f"_{name}" for name in _FIELDS), "_key", "__weakref__")

    def __init__(
        self,
        class_mapping: Mapping[str, type[nn.Module]] = MappingProxyType({}),
        filtered_weight_conversion_patterns: str | Iterable[str] = (),
        extra_weight_conversions: WeightTransform | Iterable[WeightTransform] = (),
        *,
        fusions: str | Fusion | Iterable[str | Fusion] = (),
        new_weights: str | Iterable[str] = (),
        dropped_weights: str | Iterable[str] = (),
        strict: bool = True,
        name: str = "",
        transformers: str = "",
        fingerprints: Mapping[str, str | Iterable[str]] = MappingProxyType({}),
        any_of: Iterable[Iterable[str]] = (),
    ) -> None:
        values: dict[str, Any] = {
            "class_mapping": MappingProxyType(arguments.class_mapping(class_mapping)),
            "filtered_weight_conversion_patterns": arguments.expressions(
                "filtered_weight_conversion_patterns", filtered_weight_conversion_patterns
            ),
            "extra_weight_conversions": arguments.transforms(extra_weight_conversions),
            "fusions": arguments.fusions(fusions),
            "new_weights": arguments.expressions("new_weights", new_weights),
            "dropped_weights": arguments.expressions("dropped_weights", dropped_weights),
            "strict": arguments.typed("strict", strict, bool),
            "name": arguments.typed("name", name, str),
            "transformers": arguments.specifier(transformers),
            "fingerprints": MappingProxyType(arguments.fingerprints(fingerprints)),
            "any_of": arguments.groups(any_of, class_mapping),
        }
        for field, value in values.items():
            object.__setattr__(self, f"_{field}", value)
        key = (
            frozenset(values["class_mapping"].items()),
            values["filtered_weight_conversion_patterns"],
            tuple(identity(transform) for transform in values["extra_weight_conversions"]),
            tuple(fusion_named(fusion) for fusion in values["fusions"]),
            values["new_weights"],
            values["dropped_weights"],
            values["strict"],
            values["name"],
            SpecifierSet(values["transformers"]),
            frozenset(values["fingerprints"].items()),
            frozenset(values["any_of"]),
        )
        object.__setattr__(self, "_key", key)

    # --- the value ---------------------------------------------------------------------------------------------

    @property
    def class_mapping(self) -> Mapping[str, type[nn.Module]]:
        return self._class_mapping  # type: ignore[attr-defined, no-any-return]

    @property
    def filtered_weight_conversion_patterns(self) -> tuple[str, ...]:
        return self._filtered_weight_conversion_patterns  # type: ignore[attr-defined, no-any-return]

    @property
    def extra_weight_conversions(self) -> tuple[WeightTransform, ...]:
        # Copies: a transform that somebody runs collects tensors, and this value must not.
        return tuple(seams.copy_transform(item) for item in self._extra_weight_conversions)  # type: ignore[attr-defined]

    @property
    def fusions(self) -> tuple[str | Fusion, ...]:
        return self._fusions  # type: ignore[attr-defined, no-any-return]

    @property
    def new_weights(self) -> tuple[str, ...]:
        return self._new_weights  # type: ignore[attr-defined, no-any-return]

    @property
    def dropped_weights(self) -> tuple[str, ...]:
        return self._dropped_weights  # type: ignore[attr-defined, no-any-return]

    @property
    def strict(self) -> bool:
        return self._strict  # type: ignore[attr-defined, no-any-return]

    @property
    def name(self) -> str:
        return self._name  # type: ignore[attr-defined, no-any-return]

    @property
    def transformers(self) -> str:
        return self._transformers  # type: ignore[attr-defined, no-any-return]

    @property
    def fingerprints(self) -> Mapping[str, tuple[str, ...]]:
        return self._fingerprints  # type: ignore[attr-defined, no-any-return]

    @property
    def any_of(self) -> tuple[tuple[str, ...], ...]:
        return self._any_of  # type: ignore[attr-defined, no-any-return]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Patcher is immutable; use patcher.replace({name}=...) for a changed copy")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Patcher is immutable; use patcher.replace({name}=...) for a changed copy")

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Patcher) else NotImplemented  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._key)  # type: ignore[attr-defined]

    @property
    def _extra(self) -> tuple[WeightTransform, ...]:
        return self._extra_weight_conversions  # type: ignore[attr-defined, no-any-return]

    def _settings(self) -> dict[str, Any]:
        return {field: getattr(self, f"_{field}") for field in _FIELDS}

    def __copy__(self) -> Patcher:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Patcher:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._settings()
        settings["class_mapping"] = dict(settings["class_mapping"])
        settings["fingerprints"] = dict(settings["fingerprints"])
        return (_rebuild, (settings,))

    def __repr__(self) -> str:
        parts = []
        if self.class_mapping:
            items = ", ".join(f"{key!r}: {cls.__qualname__}" for key, cls in self.class_mapping.items())
            parts.append(f"class_mapping={{{items}}}")
        for field in ("filtered_weight_conversion_patterns", "fusions", "new_weights", "dropped_weights"):
            if value := getattr(self, field):
                parts.append(f"{field}={list(value)!r}")
        if self._extra:
            parts.append(f"extra_weight_conversions=[{', '.join(map(_transform_repr, self._extra))}]")
        if not self.strict:
            parts.append("strict=False")
        for field in ("name", "transformers"):
            if value := getattr(self, field):
                parts.append(f"{field}={value!r}")
        if self.fingerprints:
            parts.append(f"fingerprints={dict(self.fingerprints)!r}")
        if self.any_of:
            parts.append(f"any_of={list(self.any_of)!r}")
        return f"Patcher({', '.join(parts)})"

    def replace(self, **changes: Any) -> Patcher:
        """A copy with other values for some of the parameters.

        Raises:
            InvalidPatcherError: a name that is no parameter of `Patcher`, or a value that it doesn't take.
        """
        for name in changes:
            if name not in _FIELDS:
                close = matching.nearest(name, _FIELDS)
                hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(_FIELDS)}."
                raise InvalidPatcherError(f"a Patcher has no parameter {name!r}; {hint}")
        return Patcher(**{**self._settings(), **changes})

    def __or__(self, other: Patcher) -> Patcher:
        """Both patchers in one.

        Raises:
            PatchConflictError: they want different things of one class, or take the same tensors.
        """
        if not isinstance(other, Patcher):
            return NotImplemented
        mapping = dict(self.class_mapping)
        for key, cls in other.class_mapping.items():
            if mapping.setdefault(key, cls) is not cls:
                raise PatchConflictError(
                    f"Both patchers replace {key!r}, by {mapping[key].__qualname__} and by {cls.__qualname__}. "
                    f"Combine after taking one away: patcher.replace(class_mapping={{...}})."
                )
        for cls in matching.module_subclasses():  # two expressions that hit one class
            matching.find_key(cls.__name__, mapping)
        extras = list(self._extra)
        extras += [item for item in other._extra if identity(item) not in {identity(mine) for mine in extras}]
        fingerprints = {key: list(values) for key, values in self.fingerprints.items()}
        for key, values in other.fingerprints.items():
            fingerprints[key] = [*fingerprints.get(key, []), *values]
        return Patcher(
            mapping,
            _united(self.filtered_weight_conversion_patterns, other.filtered_weight_conversion_patterns),
            extras,
            fusions=_united(self.fusions, other.fusions),
            new_weights=_united(self.new_weights, other.new_weights),
            dropped_weights=_united(self.dropped_weights, other.dropped_weights),
            strict=self.strict or other.strict,
            name=" | ".join(_united((self.name,), (other.name,)))
            if self.name and other.name
            else self.name or other.name,
            transformers=str(SpecifierSet(self.transformers) & SpecifierSet(other.transformers)),
            fingerprints=fingerprints,
            any_of=_united(self.any_of, other.any_of),
        )

    @classmethod
    def from_fusion_config(cls, config: Mapping[str, Any]) -> Patcher:
        """A patcher from the mapping that `fusion_config=` of transformers takes.

        >>> Patcher.from_fusion_config({"qkv": True, "gate_up": False})
        Patcher(fusions=['qkv'])

        Args:
            config: name of a family -> True, False, or a mapping of the family's options.

        Raises:
            InvalidPatcherError: a name or an option that there isn't, or a value of another kind.
        """
        if not isinstance(config, Mapping):
            raise InvalidPatcherError(
                f"a fusion config maps names of fusions to True, False or options, found {config!r}; "
                'write {"qkv": True}.'
            )
        return cls(fusions=[fusion for name, value in config.items() for fusion in fusions_configured(name, value)])

    def to_dict(self) -> dict[str, Any]:
        """The patcher as data for JSON: names, expressions and numbers, no code.

        >>> Patcher(fusions="qkv", strict=False).to_dict()
        {'schema': 1, 'fusions': ['qkv'], 'strict': False}

        Classes are said as `module:qualname`. `Patcher.from_dict(p.to_dict(), allowed=...) == p`.

        Raises:
            InvalidPatcherError: something of it has no name: a class that can't be imported, a fusion of your own, a
                conversion that isn't made of transformers' own operations.
        """
        from patcher.serializing import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], allowed: str | type | Iterable[str | type] = ()) -> Patcher:
        """The patcher that `to_dict` has written, from data that anyone may have written.

        >>> Patcher.from_dict({"schema": 1, "fusions": ["qkv"]})
        Patcher(fusions=['qkv'])

        Args:
            data: what `json.load` gives.
            allowed: the classes that it may use, themselves or as `module:qualname`. Nothing else is imported.

        Raises:
            InvalidPatcherError: a schema, key, name or type that isn't known, or a class that isn't allowed.
            PatchConflictError: two conversions take the same tensors.
        """
        from patcher.serializing import from_dict

        return from_dict(data, allowed)

    # --- using it ----------------------------------------------------------------------------------------------

    def applied(self) -> AbstractContextManager[Patcher]:
        """Patch what is built inside the block, in this thread or asyncio task only.

        ```python
        with patcher.applied():
            model = LlamaForCausalLM(config)
        ```

        Raises:
            UnmatchedPatchError: on leaving the block, if a class key replaced nothing in it.
        """
        from patcher.loading.hooks import applied

        return applied(self)

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """A new model with the weights of a loaded one, patched by this patcher alone.

        ```python
        patched = patcher.apply(model)
        stock = Patcher().apply(patched)
        ```

        Storage is shared where no conversion runs. The given model stays as it is.

        Raises:
            InvalidPatcherError: the model is quantized or its weights are offloaded.
            PatchedWeightsError: a weight can't be given back, or is missing for the replacement.
        """
        from patcher.loading.applying import apply

        return apply(self, model)

    def resolve(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> Resolution:
        """What this patcher does to a model, module by module, without building it for real.

        ```python
        print(patcher.resolve(LlamaForCausalLM, config))
        ```

        Raises:
            PatchConflictError: two fusions claim one module, or a fusion claims a replaced one.
            PatchConstructionError: a replacement can't be built.
        """
        from patcher.resolution.resolution import resolve

        return resolve(self, model_class, config)


def _rebuild(settings: dict[str, Any]) -> Patcher:
    return Patcher(**settings)


def _united(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _transform_repr(transform: WeightTransform) -> str:
    arguments = [repr(seams.source_patterns(transform)), repr(seams.target_patterns(transform))]
    if operations := getattr(transform, "operations", None):
        arguments.append(repr(list(operations)))
    return f"{type(transform).__name__}({', '.join(arguments)})"
