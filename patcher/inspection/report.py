"""The changes that a load made: `patcher.report(model)`; and what a report and a plan have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.conversions import dot_natural_key, source_patterns, used_conversions
from patcher.compat.modeling_code import REBOUND
from patcher.compat.models import named_modules, stock_class
from patcher.display.parts import ModuleNode, Notes, Part, Table, Weights
from patcher.display.shown import Displayable, pluralize
from patcher.display.tree import module_tree
from patcher.errors import InvalidPatcherError
from patcher.functions.graph import Hit
from patcher.functions.models import full_name, replaced_now
from patcher.layouts.carried import fused_modules
from patcher.layouts.conversion import Converted
from patcher.layouts.transforms import describe
from patcher.loading.record import PatchedModule, PatchRecord, patched_now
from patcher.loading.routes import Route
from patcher.patterns import in_state_dict, inside
from patcher.spec.forward_of import shown_name

#: What names and shapes don't show, even if they fit.
ORDER = "the order of tensors in conversions"


@dataclass(frozen=True, repr=False)
class Patched(Displayable):
    """The changes to the modules, the functions and the conversions of a model.

    Attributes:
        model: the class of the model.
        patchers: (patcher, where it was passed) of those that were in force when the model and its parts were
            constructed, the innermost first.
        replaced: (path, original class, replacement) of the modules that are replaced.
        fused: (path, original class, fused class) of the modules that are fused.
        refused: (path, reason) of the modules that a fusion leaves unchanged.
        functions: (function, replacement, the classes that call it) of the functions that are replaced.
        calling: how many modules call replaced functions.
        rules: (key of a mapping, the classes or functions that it matched).
        conversions_dropped: (conversion, filter) of the stock conversions that are dropped.
        new_weights: parameters that aren't in the checkpoint and that the patcher declares as new.
        dropped_weights: unused checkpoint tensors that the patcher declares as dropped.
        warnings: the warnings of the load.
        tree: the modules of the model and their changes, with identical layers folded; None if nothing is patched.
    """

    model: str
    patchers: tuple[tuple[str, str], ...] = ()
    replaced: tuple[tuple[str, str, str], ...] = ()
    fused: tuple[tuple[str, str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    functions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    calling: int = 0
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    conversions_dropped: tuple[tuple[str, str], ...] = ()
    new_weights: tuple[str, ...] = ()
    dropped_weights: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tree: ModuleNode | None = None

    def _counted(self, verb: str) -> str:
        """Count modules and functions: `2 modules and 1 function replaced (in calls of 4 modules)`."""
        modules, functions = len(self.replaced) + len(self.fused), len(self.functions)
        parts = [pluralize(modules, "module")] if modules or not functions else []
        parts += [pluralize(functions, "function")] if functions else []
        called = f" (in calls of {pluralize(self.calling, 'module')})" if functions else ""
        return f"{' and '.join(parts)} {verb}{called}"

    def _patched_parts(self, head: str, conversions: Iterable[tuple[str, str, str]]) -> Iterator[Part]:
        """Yield the parts that reports and plans show.

        Args:
            head: the head of the last column of conversions.
            conversions: (`added` or `kept`, conversion, last column) of the conversions that aren't dropped.
        """
        yield Notes("Warnings", self.warnings, "warning")
        if len(self.patchers) > 1:  # the first row takes precedence
            yield Table("Patchers", ("in force by", "patcher"), [(origin, text) for text, origin in self.patchers])
        shown: set[str] = set()
        if self.tree is not None:
            yield self.tree
            for node in self.tree.walk():
                shown.update(weights.conversion for weights in node.weights if weights.what == "converted")
        # Exact names and paths need no row, they match themselves.
        rules = [
            row
            for row in self.rules
            if "[like(" in row[0] or (row[0].startswith("class_mapping") and row[0] != f"class_mapping[{row[1][0]!r}]")
        ]
        yield Table("Rules", ("key", "matches"), [(rule, ", ".join(names)) for rule, names in rules])
        rows = [
            ("dropped", text, f"by {pattern!r}" if pattern else "an added one takes its tensors")
            for text, pattern in self.conversions_dropped
        ]
        rows += [row for row in conversions if row[0] != "added" or row[1] not in shown]
        yield Table("Conversions", ("", "conversion", head), rows)


def fields_of_record(
    model: str, built: nn.Module, record: PatchRecord, routes: Iterable[Route], problems: Iterable[Weights] = ()
) -> dict[str, Any]:
    """Return the fields of a report or a plan that follow from the record of a load.

    Args:
        model: the class of the model.
        built: the model, or its skeleton.
        problems: the weights that don't fit.
    """
    modules = [(in_state_dict(path), module) for path, module in named_modules(built)]
    hits = replaced_now(built)
    calls = {path: called for path, module in modules if (called := _calls_of(module, hits))}
    names = {item.original.__name__ for item in record.modules} | {hit.name for hit in hits}
    replaced, fused, refused = _rows(record.replaced), _rows(record.fused), tuple(record.refused.items())
    weights = list(problems)
    for route in routes:
        if route.text:
            is_stock = isinstance(route.layout, Converted) and not route.added
            weights.append(Weights("kept" if is_stock else "converted", route.keys, route.parameters, route.text))
    weights += [Weights("new", (), (name,)) for name in record.new_weights]
    weights += [Weights("dropped", (key,)) for key in record.dropped_weights]
    return {
        "model": model,
        "patchers": tuple((repr(entry.patcher), entry.origin) for entry in record.in_force),
        "replaced": replaced,
        "fused": fused,
        "refused": refused,
        "functions": tuple((hit.name, full_name(hit.replacement), hit.callers) for hit in hits),
        "calling": len(calls),
        "rules": tuple(rule for rule in record.rules if not names.isdisjoint(rule[1])),
        "conversions_dropped": tuple((describe(transform), text) for transform, text in record.dropped),
        "new_weights": record.new_weights,
        "dropped_weights": record.dropped_weights,
        "tree": module_tree(
            model,
            [(path, stock_class(module).__qualname__) for path, module in modules],
            changed=[*replaced, *fused],
            refused=refused,
            functions=calls,
            weights=weights,
        ),
    }


def _calls_of(module: nn.Module, hits: Iterable[Hit]) -> tuple[tuple[str, str], ...]:
    """Return (function, replacement) of the replaced functions that a module calls."""
    caller = getattr(type(module), REBOUND, None)  # a fused class inherits it
    return tuple((hit.name, full_name(hit.replacement)) for hit in hits if caller and caller.__name__ in hit.callers)


def added_conversions(record: PatchRecord, model: nn.Module) -> list[str]:
    """Return the conversions that precede those of transformers, including those of fusions."""
    added = [describe(transform) for transform in (*record.added, *record.fusion_transforms)]
    return list(dict.fromkeys([*added, *(route.text for route in routes_of_fusions(model))]))


def routes_of_fusions(model: nn.Module) -> Iterator[Route]:
    """Yield the routes from stock to fused parameters of every fused module."""
    for path, _, carried in fused_modules(model):
        for layout in carried.layouts:
            named = layout.named(inside(path).__add__)
            yield Route(tuple(named.stock), tuple(named.fused), layout)


def _rows(modules: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """Return (path, original, replacement) of modules, in the order of the layers."""
    ordered = sorted(modules, key=lambda module: dot_natural_key(module.path))
    return tuple((module.path, module.original.__qualname__, shown_name(module.replacement)) for module in ordered)


@dataclass(frozen=True, repr=False)
class Report(Patched):
    """The report of a patched model.

    Attributes:
        conversions_added: the conversions that preceded those of transformers.
        conversions_fired: (conversion, how many parameters it made or renamed) of the conversions that were used.
        unchecked: the added conversions that joined several tensors, in an order that only `verify` can check.
        seconds: (step, seconds) of construction, reading and the total.
    """

    conversions_added: tuple[str, ...] = ()
    conversions_fired: tuple[tuple[str, int], ...] = ()
    unchecked: tuple[str, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, strings and numbers, for JSON."""
        return super().to_dict() | {"seconds": dict(self.seconds)}

    def _parts(self) -> Iterable[Part]:
        fired = dict(self.conversions_fired)
        added = self.conversions_added
        used = [("added", text, f"{fired[text]} parameters" if text in fired else "-") for text in added]
        kept = [item for item in fired.items() if item[0] not in added]
        used += [("kept", text, f"{count} parameters" if count else "used") for text, count in kept]
        yield from self._patched_parts("effect", used)
        # Names and shapes fit even if sources of the same shape are swapped.
        order = (ORDER, "patcher.verify(model, patcher)")
        yield Table("Not seen by a load", ("what", "seen by"), [order] if self.unchecked else [])

    def _headline(self) -> str:
        if self.tree is None:
            return f"{self.model}: not patched"
        text = f"{self.model}: {self._counted('replaced')}"
        seconds = dict(self.seconds)
        if "total" in seconds:
            steps = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "total")
            text += f", loaded in {seconds['total']:.2f} s ({steps})"
        return text


def report(model: nn.Module) -> Report:
    """Return what was patched in a model.

    >>> import patcher
    >>> from patcher import Patcher
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> model = AutoModelForCausalLM.from_config(config, patcher=Patcher(fusions="qkv"))
    >>> print(patcher.report(model))
    LlamaForCausalLM: 2 modules replaced
    LlamaForCausalLM
    ├── model  LlamaModel
    │   ├── embed_tokens  Embedding
    │   ├── layers.{0..1}  LlamaDecoderLayer
    │   │   ├── self_attn  LlamaAttention -> FusedLlamaAttention
    │   │   │   └── q_proj.weight, k_proj.weight, v_proj.weight -> qkv_proj.weight  Rows
    │   │   ├── mlp  LlamaMLP
    ...

    The report of a stock model says so.

    Args:
        model: a model in memory, loaded, built from a config or by hand, or a wrapper of some, such as a `PeftModel`.

    Raises:
        InvalidPatcherError: if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidPatcherError(f"report takes a model, found {model!r}; write report(model).")
    if not isinstance(model, PreTrainedModel):
        # in wrappers, such as those of torch.compile, PEFT and DistributedDataParallel
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if models and {*models} <= {*models[0].modules()}:
            model = models[0]
    if (record := patched_now(model)) is None:
        return Report(type(model).__name__)
    parameters = Counter[str]()
    for route in record.routes:
        for text in {describe(conversion.transform) for conversion in route.added}:
            parameters[text] += len(route.parameters)
    kept = used_conversions(model) if record.read and isinstance(model, PreTrainedModel) else ()
    fired = [*parameters.items(), *((describe(transform), 0) for transform in kept)]
    fused = list(routes_of_fusions(model))
    fired += Counter(route.text for route in fused).items() if record.read else ()
    joining = {describe(transform) for transform in record.added if len(source_patterns(transform)) > 1}
    return Report(
        **fields_of_record(type(model).__name__, model, record, [*fused, *record.routes]),
        conversions_added=tuple(added_conversions(record, model)),
        conversions_fired=tuple(fired),
        unchecked=tuple(text for text, _ in fired if text in joining),
        seconds=tuple(record.seconds.items()),
        warnings=record.warnings,
    )
