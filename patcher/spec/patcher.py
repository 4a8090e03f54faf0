"""The value `Patcher`: normalized, validated, combined and compared here, applied elsewhere."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Never, NoReturn, TypeVar, cast

from huggingface_hub import HfApi
from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns, target_patterns
from patcher.display import page
from patcher.display.parts import Table
from patcher.errors import InvalidPatcherError, NoSuchNameError, did_you_mean
from patcher.expressions import cut
from patcher.fusions.base import Fusion
from patcher.fusions.families import fusions_configured
from patcher.layouts.transforms import identity
from patcher.patterns import find_key
from patcher.spec import serialization as data_of
from patcher.spec.validation import FIELDS, groups_of, required_groups

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PretrainedConfig, PreTrainedModel

    from patcher.resolution.resolution import Resolution

Model = TypeVar("Model", bound="PreTrainedModel")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Patcher:
    r"""What to change in a model for one load: an immutable value.

    >>> from torch import nn
    >>> class Doubled(nn.Linear): ...
    >>> patcher = Patcher({"LlamaMLP": Doubled}, new_weights="adapter")
    >>> patcher
    Patcher(class_mapping={'LlamaMLP': Doubled}, new_weights=['adapter'])
    >>> patcher == patcher.replace(name="") and patcher.replace(strict=False).strict
    False

    Pass it to `from_pretrained(..., patcher=patcher)`, to `from_config`, or enter `with patcher.applied():`.

    *What changes*

    Args:
        class_mapping: class name -> the class to build in its place. A key that is a Python identifier is an exact
            name; any other key is a regular expression, searched in class names. An exact name wins.
        module_mapping: path -> the class to build in place of the modules there, with the arguments of theirs. Paths
            are those that reports print: `model.layers.{0..3}.mlp`, `*` for one segment, `**` for any number. It wins
            over the class mapping.
        function_mapping: `module:name`, or the bare name of a function that modeling code calls -> the function that
            this model calls instead.
        fusions: layout families, by name or as objects of `patcher.fusions.Fusion`. With `modules=` an object is
            applied at some paths only: `QKV(modules="model.layers.{0..3}.self_attn")`.

    Fused modules, and those that call replaced functions, run copies of the model's code as it is when it is loaded:
    what is bound to its classes and modules later has no effect on them.

    *Conversions of weights*

    Args:
        filtered_weight_conversion_patterns: expressions; a stock conversion is dropped if one of them is found in its
            source or target patterns.
        extra_weight_conversions: conversions that precede the remaining ones, in this order. A model can be saved in
            the original format if the `reverse_op` of each operation restores values exactly.

    *Expectations of a load, which otherwise raises*

    Args:
        new_weights: expressions; parameters of replaced modules that may be missing in the checkpoint, and keep the
            values of their `__init__`. Persistent buffers always may; those that are named are saved as new weights.
            Each expression has to be found in a name of the model.
        dropped_weights: expressions; checkpoint tensors under replaced modules that may stay unused. Each has to be
            found in a key, if the checkpoint is in the original layout, or in the name of a weight of the stock model.
        alternatives: groups of class keys of which a model needs to have only one, such as the names of one class in
            several architectures. Every key outside of them must match a class, and so must the key of a group of
            one.
        strict: whether to raise if a load doesn't do what the patcher says, rather than warn.

    *Pins, and a name*

    Args:
        transformers: a PEP 440 specifier of the releases that it was verified on. Another release warns.
        fingerprints: name of a class, or of a function (bare, or `module:name`) -> `patcher.fingerprint(...)` of the
            code that it was verified on, or several. Other code raises.
        name: for reports.

    Raises:
        InvalidPatcherError: if an argument is invalid; the message says what to write instead.
        PatchConflictError: if two conversions take the same tensors, or two expressions match one pinned class and
            have different replacements.
    """

    class_mapping: Mapping[str, type[nn.Module]]
    module_mapping: Mapping[str, type[nn.Module]]
    function_mapping: Mapping[str, Callable[..., Any]]
    filtered_weight_conversion_patterns: tuple[str, ...]
    fusions: tuple[str | Fusion, ...]
    new_weights: tuple[str, ...]
    dropped_weights: tuple[str, ...]
    strict: bool
    name: str
    transformers: str
    fingerprints: Mapping[str, tuple[str, ...]]
    alternatives: tuple[tuple[str, ...], ...]

    def __init__(
        self,
        /,
        class_mapping: Mapping[str, type[nn.Module]] = _NOTHING,
        filtered_weight_conversion_patterns: str | Iterable[str] = (),
        extra_weight_conversions: WeightTransform | Iterable[WeightTransform] = (),
        *,
        module_mapping: Mapping[str, type[nn.Module]] = _NOTHING,
        function_mapping: Mapping[str, Callable[..., Any]] = _NOTHING,
        fusions: str | Fusion | Iterable[str | Fusion] = (),
        new_weights: str | Iterable[str] = (),
        dropped_weights: str | Iterable[str] = (),
        strict: bool = True,
        name: str = "",
        transformers: str = "",
        fingerprints: Mapping[str, str | Iterable[str]] = _NOTHING,
        alternatives: Iterable[Iterable[str]] = (),
        **unknown: Never,
    ) -> None:
        for name in unknown:
            hint = did_you_mean(name, FIELDS, f"it has {', '.join(FIELDS)}.")
            raise InvalidPatcherError(f"a Patcher has no parameter {cut(name)!r}; {hint}")
        arguments = locals()
        vars(self).update({name: check(name, arguments[name]) for name, (check, _) in FIELDS.items()})
        vars(self)["alternatives"] = groups_of(self.class_mapping, self.alternatives)
        for name in self.fingerprints:  # classes that exist: a conflict of expressions is known here
            find_key(name, self.class_mapping)
        key = tuple(map(_comparable, vars(self).values()))
        # Not lazily: a cache would take a lock, which a fork may inherit.
        vars(self).update(_key=key, _hash=hash(key))

    @property
    def extra_weight_conversions(self) -> tuple[WeightTransform, ...]:
        """Copies, as a transform collects tensors while it runs."""
        return tuple(map(copy_transform, vars(self)["extra_weight_conversions"]))

    def __eq__(self, other: object) -> bool:
        return bool(vars(self)["_key"] == vars(other)["_key"]) if isinstance(other, Patcher) else NotImplemented

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise NoSuchNameError(f"a Patcher is immutable; use patcher.replace({name}=...) for a changed copy")

    __delattr__ = __setattr__

    def __deepcopy__(self, memo: object = None) -> Patcher:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        # By the constructor: hashes of strings differ between processes, and read-only mappings aren't picklable.
        arguments = self._arguments()
        arguments |= {key: dict(value) for key, value in arguments.items() if isinstance(value, Mapping)}
        return functools.partial(Patcher, **arguments), ()

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that aren't the default."""
        values = ((name, getattr(self, name), parameter.default) for name, parameter in _PARAMETERS.items())
        return {name: value for name, value, default in values if value != default}

    def __repr__(self) -> str:
        return f"Patcher({', '.join(f'{name}={_argument_repr(value)}' for name, value in self._arguments().items())})"

    def _repr_html_(self) -> str:
        """Render a row for each argument, or for each of its items, with pins folded."""
        arguments = self._arguments()
        pins = [(key, ", ".join(value)) for key, value in arguments.pop("fingerprints", {}).items()]
        rows: list[tuple[str, ...]] = []
        for name, value in arguments.items():
            values = value if isinstance(value, tuple) else (value,)
            items = value.items() if isinstance(value, Mapping) else [("", item) for item in values]
            rows += [(name, key, _item_repr(item)) for key, item in items]
        parts = [Table("", ("", "", "is"), rows), Table("Pinned code", ("class", "fingerprint"), pins, is_long=True)]
        return page.rendered(f"Patcher: {self.name}".removesuffix(": "), None, parts)

    def replace(self, **changes: Any) -> Patcher:
        """Return a copy with other values for some of the parameters.

        >>> Patcher(fusions="qkv", name="mine").replace(fusions=("qkv", "gate_up"))
        Patcher(fusions=['qkv', 'gate_up'], name='mine')
        """
        return Patcher(**{**self._arguments(), **changes})

    def __or__(self, other: Patcher) -> Patcher:
        """Combine two patchers.

        >>> Patcher(fusions="qkv", transformers=">=5.17") | Patcher(fusions="gate_up", transformers="<6")
        Patcher(fusions=['qkv', 'gate_up'], transformers='<6,>=5.17')

        Two expressions with different replacements that match one class raise when that class is built.

        Raises:
            PatchConflictError: if they replace one class by different classes, or convert the same tensors.
        """
        if not isinstance(other, Patcher):
            return NotImplemented
        joined = {name: join(name, getattr(self, name), getattr(other, name)) for name, (_, join) in FIELDS.items()}
        # A key that one requires stays required if the other has it in a group.
        groups = (required_groups(patcher.class_mapping, patcher.alternatives) for patcher in (self, other))
        return Patcher(**joined | {"alternatives": [group for side in groups for group in side]})

    @classmethod
    def from_fusion_config(cls, config: Mapping[str, Any]) -> Patcher:
        """Make a patcher from the mapping that `fusion_config=` of transformers takes.

        >>> Patcher.from_fusion_config({"qkv": True, "gate_up": False})
        Patcher(fusions=['qkv'])

        Args:
            config: name of a family -> True, False, or a mapping of the family's options.

        Raises:
            InvalidPatcherError: if a name or an option doesn't exist.
        """
        if not isinstance(config, Mapping):
            raise InvalidPatcherError(
                f"a fusion config maps names of fusions to True, False or options, found {config!r}; "
                'write {"qkv": True}.'
            )
        return cls(fusions=[fusion for name, value in config.items() for fusion in fusions_configured(name, value)])

    def to_dict(self) -> dict[str, Any]:
        """Return the patcher as data for JSON: names, expressions and numbers, no code.

        >>> Patcher(fusions="qkv", strict=False).to_dict()
        {'schema': 1, 'fusions': ['qkv'], 'strict': False}

        Classes and functions are written as `module:qualname`. What has no name raises: a class that can't be
        imported, a fusion of your own, or a conversion, which a class may carry instead.
        """
        return data_of.to_dict(self._arguments())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], allowed: data_of.Allowed = ()) -> Patcher:
        """Make a patcher from the data of `to_dict`, which needn't be trusted.

        >>> Patcher.from_dict({"schema": 1, "fusions": ["qkv"]})
        Patcher(fusions=['qkv'])

        Args:
            data: as `json.load` returns it.
            allowed: the classes and functions that it may use, themselves or as `module:qualname`. Nothing else is
                imported.

        Raises:
            InvalidPatcherError: if a schema, key, name or type is unknown, or a class isn't allowed.
        """
        return cls(**data_of.arguments_of(data, allowed))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the data of `to_dict` into a folder, as `patcher.json`.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(Patcher(fusions="qkv").save(folder).name, Patcher.load(folder))
        patcher.json Patcher(fusions=['qkv'])
        """
        return data_of.write(self.to_dict(), folder)

    @classmethod
    def load(cls, folder_or_repo: str | os.PathLike[str], allowed: data_of.Allowed = (), **places: Any) -> Patcher:
        """Load the patcher that `save` has written to a folder, or `push_to_hub` to a repo on the hub.

        >>> import tempfile
        >>> from torch.nn import Identity
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Patcher({"LlamaMLP": Identity}).save(folder)
        ...     Patcher.load(folder, allowed=[Identity])
        Patcher(class_mapping={'LlamaMLP': Identity})

        Args:
            folder_or_repo: a folder, or the name of a repo.
            allowed: as in `from_dict`: nothing else is imported.
            places: options of `hf_hub_download`: `revision`, `token`, `subfolder`, `cache_dir`, ...

        Raises:
            InvalidPatcherError: if there is no such file, or as in `from_dict`.
        """
        return cls.from_dict(data_of.read(folder_or_repo, places), allowed)

    def push_to_hub(
        self, repo_id: str, *, token: str | bool | None = None, private: bool | None = None, **options: Any
    ) -> str:
        """Upload the patcher to a repo on the hub, as `patcher.json`: `patcher.push_to_hub("me/my-patcher")`.

        The repo is created if needed. `options` are those of `HfApi.upload_file`: `revision`, `commit_message`.

        Returns:
            The URL of the commit.
        """
        text = json.dumps(self.to_dict(), indent=2).encode()  # before a repo is created
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return str(api.upload_file(path_or_fileobj=text, path_in_repo=data_of.FILE_NAME, repo_id=repo, **options))

    def applied(self) -> AbstractContextManager[Patcher]:
        """Patch what is built inside the block, in this thread or asyncio task only.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
        >>> with Patcher(fusions="gate_up").applied():
        ...     model = LlamaForCausalLM(config)
        >>> model.model.layers[0].mlp.gate_up_proj.weight.shape
        torch.Size([192, 64])

        A class key that replaced nothing in the block raises `UnmatchedPatchError` at its end.
        """
        from patcher.integrations import install
        from patcher.loading.applying import applied

        install()
        return applied(self)

    def apply(self, model: Model) -> Model:
        """Return a copy of a model in memory, patched by this patcher alone.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
        >>> patched = Patcher(fusions="gate_up").apply(LlamaForCausalLM(config))
        >>> patched.model.layers[0].mlp.gate_up_proj.weight.shape
        torch.Size([192, 64])
        >>> Patcher().apply(patched).model.layers[0].mlp.gate_proj.weight.shape
        torch.Size([96, 64])

        What the model has beyond its config is kept: hooks, `requires_grad`, ties, edited buffers and attributes,
        added layers, and the values of new weights that this patcher declares too. What a replaced module would lose
        raises, by name.

        The model itself isn't changed. Parameters that aren't converted share their storage with it, so an in-place
        update of one changes both: if the model goes on training, pass `copy.deepcopy(model)`.

        Raises:
            InvalidPatcherError: if the model can't be copied, as it is quantized, offloaded or split over processes,
                or has something that would be lost.
            PatchedWeightsError: if a weight can't be restored, or is missing for the replacement.
            UnmatchedPatchError: if something of the patcher matches nothing.
        """
        from patcher.integrations import install
        from patcher.loading.applying import apply

        install()
        return cast("Model", apply(self, model))  # of another class if the model itself is replaced

    def resolve(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> Resolution:
        """Resolve what this patcher does to a model, module by module, on meta.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
        >>> list(Patcher(fusions="gate_up").resolve(LlamaForCausalLM, config).fused)
        ['model.layers.0.mlp', 'model.layers.1.mlp']

        Raises:
            PatchConflictError: if two fusions claim one module, or a fusion claims a replaced one.
            PatchConstructionError: if a replacement can't be built.
        """
        from patcher.resolution.resolution import resolve

        return resolve(self, model_class, config)


_PARAMETERS = {name: value for name, value in inspect.signature(Patcher).parameters.items() if name in FIELDS}
Patcher.__signature__ = inspect.Signature([*_PARAMETERS.values()])  # type: ignore[attr-defined]


def _comparable(value: Any) -> Any:
    """Return a hashable value that is equal for equal arguments."""
    if isinstance(value, Mapping):
        return frozenset(value.items())
    is_transforms = isinstance(value, tuple) and value and isinstance(value[0], WeightTransform)
    return tuple(map(identity, value)) if is_transforms else value


def _argument_repr(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_item_repr(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(map(_item_repr, value))}]" if isinstance(value, tuple) else repr(value)


def _item_repr(item: Any) -> str:
    if isinstance(item, type | FunctionType):
        return item.__qualname__
    if not isinstance(item, WeightTransform):
        return repr(item)
    arguments = [source_patterns(item), target_patterns(item), list(getattr(item, "operations", ()))]
    return f"{type(item).__name__}({', '.join(map(repr, filter(None, arguments)))})"
