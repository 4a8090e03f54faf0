"""The plan of a load, without reading a weight: `patcher.plan(model, patcher)`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from patcher.checkpoints.headers import VARIANT, Headers, headers_of
from patcher.checkpoints.model_classes import PLACES, config_of, model_class_of
from patcher.compat.models import state_tensors
from patcher.construction.in_force import in_force_for
from patcher.display.parts import Cell, Notes, Part, Table, Weights
from patcher.display.tree import alike_as_one
from patcher.errors import InvalidPatcherError, PatcherError
from patcher.fusions.config import with_fusion_names
from patcher.inspection.report import ORDER, Patched, added_conversions, fields_of_record, routes_of_fusions
from patcher.inspection.signatures import misfits
from patcher.integrations import install
from patcher.layouts.transforms import describe, has_known_operations
from patcher.loading.findings import Diagnostics, fold_names, sort_names
from patcher.loading.hooks.loads import dry_run
from patcher.loading.layout_on_disk import fusions_of_layout
from patcher.loading.load import Constructed, DryRun, Loaded, Request, Selected
from patcher.loading.record import PatchRecord
from patcher.loading.routes import Route, Routing
from patcher.patterns import compress, parents
from patcher.resolution.resolution import skeleton
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher


@dataclass(frozen=True, repr=False)
class Plan(Patched):
    """The plan of a load with a patcher: the fields of a report, and where its weights would come from.

    Attributes:
        checkpoint: where names and shapes were read; "" if there is only a config, so that no weight is checked.
        conversions_added: (conversion, the checkpoint keys that it takes) of those that precede transformers' own.
        conversions_kept: the same of the stock conversions that take keys.
        weights: (checkpoint keys, parameters, conversion) of every tensor; "" if it isn't converted.
        missing: the parameters that would not come from the checkpoint.
        left_over: the unused checkpoint keys, as the load renames them.
        wrong_shape: (parameter, found, expected).
        unseen: (what may be wrong, parameters) of weights that fit by shape and may still have other values.
        misfits: (replacement, where it is called, problem) of those that can't be called like the original.
        problems: the messages that the load would raise, in order, and a message for each misfit.
    """

    checkpoint: str = ""
    conversions_added: tuple[tuple[str, tuple[str, ...]], ...] = ()
    conversions_kept: tuple[tuple[str, tuple[str, ...]], ...] = ()
    weights: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = ()
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    wrong_shape: tuple[tuple[str, str, str], ...] = ()
    unseen: tuple[tuple[str, tuple[str, ...]], ...] = ()
    misfits: tuple[tuple[str, str, str], ...] = ()
    problems: tuple[str, ...] = ()

    _also = ("ok",)

    @property
    def ok(self) -> bool:
        """Whether the load would succeed, and the replacements can be called like the originals."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def _headline(self) -> str:
        text = f"{self.model}: {self._counted('would be replaced')}"
        if not self.checkpoint:
            text += "; no checkpoint was given, so conversions and weights are not checked"
        else:
            text += f"; names and shapes from {self.checkpoint}"
        return f"{text}. {'No problem was found.' if self.ok else 'There are problems.'}"

    def _verdict(self) -> Cell:
        return Cell("OK", "good") if self.ok else Cell("PROBLEMS", "bad")

    def _parts(self) -> Iterable[Part]:
        yield Notes("Problems", self.problems, "bad")
        used = [("added", text, ", ".join(keys) or "-") for text, keys in self.conversions_added]
        used += [("kept", text, ", ".join(keys)) for text, keys in self.conversions_kept]
        yield from self._patched_parts("takes", used)
        rows = [(doubt, ", ".join(names), "patcher.verify(model, patcher)") for doubt, names in self.unseen]
        yield Table("Not seen by a load", ("what", "parameters", "seen by"), rows)
        yield Table(
            "Checkpoint",
            ("checkpoint keys", "parameters"),
            [(", ".join(keys), ", ".join(names) if names != keys else "the same") for keys, names, _ in self.weights],
            is_long=True,
        )


def plan(
    model: str | os.PathLike[str] | PretrainedConfig,
    patcher: Patcher,
    *,
    model_class: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Plan:
    """Return what a load would do, without reading a weight.

    >>> import patcher, torch
    >>> from patcher import Patcher
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> plan = patcher.plan(config, Patcher(fusions="qkv"))  # or a repo, or a folder
    >>> plan.ok
    True
    >>> plan.fused[0]
    ('model.layers.0.self_attn', 'LlamaAttention', 'FusedLlamaAttention')
    >>> print(patcher.plan(config, Patcher({"LlamaMPL": torch.nn.Identity})).problems[0])
    These parts of the patcher have no effect in LlamaForCausalLM:
      class_mapping: no class of the model matches 'LlamaMPL'; nearest: LlamaMLP, LlamaModel, LlamaRMSNorm
    Correct or remove them; with strict=False this is a warning.

    The load itself is run on the meta device up to the read; the rest is decided by names and shapes. From a repo on
    the hub, only the config and the headers of the safetensors files are fetched.

    Args:
        model: a repo, a folder or a config.
        patcher: the patcher to load it with.
        model_class: the class or the Auto class to load, if not the one that the config names as its architecture.
        checkpoint: names and shapes from elsewhere: a folder, a file, an index or a repo.
        options: arguments of `from_pretrained`: `revision`, `token`, `trust_remote_code`, `key_mapping`, ...

    Raises:
        InvalidPatcherError: if the model, patcher or checkpoint can't be planned; for files, whatever is in them,
            nothing else is raised. Errors of the load about names and shapes are in `Plan.problems`.
        PatchedWeightsError: if the checkpoint is in a runtime layout that isn't named, or lies beside another one.
    """
    try:
        return planned_load(model, patcher, model_class, checkpoint, options)[0]
    except PatcherError:
        raise
    except Exception as error:  # malformed files raise errors of any kind
        name = type(model).__name__ if isinstance(model, PretrainedConfig) else model
        raise InvalidPatcherError(
            f"{name} can't be planned, and a load of it would fail as well: {type(error).__name__}: "
            f"{str(error)[:2000]}"
        ) from error


def planned_load(
    model: Any, patcher: Any, model_class: Any, checkpoint: Any, options: Mapping[str, Any]
) -> tuple[Plan, Request | None, PatcherError | None]:
    """Return a plan, the state that the load reached, and the error that it raises."""
    if not isinstance(patcher, Patcher):
        raise not_a_patcher("plan(model, {})", patcher)
    config = config_of(model, options)
    headers, layout = _headers(model, checkpoint, config, options)
    cls = model_class_of(config, model_class, model, options)
    run = DryRun(has_checkpoint=bool(headers.where), files=headers.files, runtime_layout=bool(layout))
    arguments = {name: value for name, value in options.items() if name not in PLACES}
    if layout:  # the layout of the weights decides
        fusion_config = options.get("fusion_config") or getattr(config, "fusion_config", None)
        arguments["fusion_config"] = with_fusion_names(fusion_config, layout)
    install()
    load, error = dry_run(cls, patcher, headers.tensors, run, config=config, **arguments)
    if isinstance(load, Constructed):
        built, record, diagnostics = load.model, load.record, load.diagnostics
        name = type(built).__name__
    else:  # construction failed
        in_force = load.in_force if load is not None else in_force_for(patcher)[0]
        built, diagnostics = skeleton(cls, config), Diagnostics()
        record, name = PatchRecord(type(built), in_force), cls.__name__
    if isinstance(load, Selected):
        record = replace(record, dropped=load.conversions.dropped)
    routing = load.routing if isinstance(load, Loaded) else Routing()
    info = load.info if isinstance(load, Loaded) else routing
    missing, left_over = sort_names(info.missing_keys), sort_names(info.unexpected_keys)
    mismatched = [(name, str(tuple(shape)), str(tuple(own))) for name, shape, own in sorted(info.mismatched_keys)]
    unfit = [Weights("missing", (), (name,)) for name in sort_names({*missing} - {*record.new_weights})]
    unfit += [Weights("left over", (key,)) for key in sort_names({*left_over} - {*record.dropped_weights})]
    unfit += [Weights("wrong shape", (), (name,), f"{shape}, not {expected}") for name, shape, expected in mismatched]
    wrong_calls = misfits(built, record.replaced)
    problems = [str(raised) for raised in (*diagnostics.errors, error) if raised is not None]
    problems = problems or _stock_errors(info, mismatched if not options.get("ignore_mismatched_sizes") else [])
    problems += [
        f"{name if ':' in name else f'{name}.forward'} doesn't fit a call of it, {where}: {problem}. Give it the "
        "parameters of what it replaces."
        for name, where, problem in wrong_calls
    ]
    keys_of: dict[str, list[str]] = {}
    for route in routing.routes:
        for text in {*(describe(conversion.transform) for conversion in route.added), route.text}:
            keys_of.setdefault(text, []).extend(route.keys)
    added = added_conversions(record, built)
    parameters = state_tensors(built)
    # Without those to a stack of transformers of which a fusion takes the parts.
    routes = [route for route in routing.routes if not parameters.keys().isdisjoint(route.parameters)]
    weights = alike_as_one(Weights("", route.keys, route.parameters, route.text) for route in routes)
    planned = Plan(
        **fields_of_record(name, built, record, routes or routes_of_fusions(built), unfit),
        checkpoint=headers.where,
        conversions_added=tuple((text, tuple(compress(keys_of.get(text, ())))) for text in added),
        conversions_kept=tuple(
            (text, tuple(compress(keys_of.get(text, ())))) for text in map(describe, routing.used) if text not in added
        ),
        weights=tuple((entry.keys, entry.parameters, entry.conversion) for entry in weights),
        missing=missing,
        left_over=left_over,
        wrong_shape=tuple(mismatched),
        unseen=_unseen(routing.routes, record, headers.tensors, parameters),
        misfits=wrong_calls,
        problems=tuple(problems),
        warnings=diagnostics.warnings,
    )
    return planned, load, error


def _stock_errors(info: Any, mismatched: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the error that transformers would raise about the weights, if any."""
    head = "Shapes differ, and transformers would raise a RuntimeError:"
    reasons = [f"{name}: found {shape}, expected {expected}" for name, shape, expected in mismatched]
    if info.conversion_errors:
        head = "Conversions fail, for which transformers would raise a RuntimeError:"
        reasons = [f"{name}: {text.strip().splitlines()[-1]}" for name, text in info.conversion_errors.items()]
    return ["\n  ".join([head, *reasons[:8]])] if reasons else []


def _headers(
    model: Any, checkpoint: Any, config: PretrainedConfig, options: Mapping[str, Any]
) -> tuple[Headers, list[str]]:
    """Return the headers of the checkpoint, empty if there is none, and the fusions of its runtime layout."""
    if options.get("gguf_file"):
        raise InvalidPatcherError("plan can't read GGUF files; load the model, save it, and plan that folder.")
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise InvalidPatcherError(
            f"checkpoint= is a {type(checkpoint).__name__}; pass a folder, a file, an index or a repo."
        )
    if checkpoint is None and isinstance(model, PretrainedConfig):
        return Headers("", {}), []
    places = {name: value for name, value in options.items() if name in PLACES}
    source = model if checkpoint is None else checkpoint
    layout = fusions_of_layout(source, places, places.get("variant"))
    if "use_safetensors" in options:
        places["use_safetensors"] = options["use_safetensors"]
    if checkpoint is None and not layout:
        places["named"] = getattr(config, "transformers_weights", None)
    return headers_of(source, **(places | {"variant": VARIANT} if layout else places)), layout


def _unseen(
    routes: Iterable[Route], record: PatchRecord, tensors: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the parameters whose values may be others than their module expects, with the same shape.

    Only replaced modules and conversions of a patcher are checked: fusions define the order of what they join. Tensors
    that the checkpoint doesn't have may have any shape.
    """
    square, custom = "whether a square weight is transposed", "the values of operations that transformers doesn't have"
    replaced = {module.path for module in record.replaced}
    ambiguous: dict[str, list[str]] = {ORDER: [], square: [], custom: []}
    for route in routes:
        names = route.parameters
        ancestors = (path for name in names for path in (*parents(name), name))
        if not route.added and replaced.isdisjoint(ancestors):
            continue
        if _have_equal_shapes(route.keys, tensors) or _have_equal_shapes(names, parameters):
            ambiguous[ORDER] += names
        if not all(has_known_operations(added.transform) for added in route.added):
            ambiguous[custom] += names
        shapes = ((name, tuple(parameters[name].shape)) for name in names if name in parameters)
        # matrices, or stacks of matrices
        ambiguous[square] += (name for name, shape in shapes if len(shape) in (2, 3) and shape[-1] == shape[-2] > 1)
    return tuple((what, tuple(fold_names(names))) for what, names in ambiguous.items() if names)


def _have_equal_shapes(names: tuple[str, ...], tensors: Mapping[str, Any]) -> bool:
    """Whether at least two of several tensors have the same shape."""
    shapes = [tuple(tensors[name].shape) if name in tensors else None for name in names]
    return len(set(shapes)) < len(shapes)
