"""What conversions of a patcher have made, put on the modules that they have made it for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import key_renamer, with_model_prefix
from patcher.compat.models import named_modules, state_tensors
from patcher.layouts.converted_weights import Converted, converted_weights
from patcher.layouts.either_layout import carry_converted, modules_with_layouts
from patcher.layouts.layouts import Layout, Rows
from patcher.layouts.reversal import AppliedRenaming
from patcher.layouts.tracing import ConversionTrace, LayerTrace
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.saving import conversions_from_scratch
from patcher.patterns import inside


def carry_conversions(
    model: PreTrainedModel,
    record: PatchRecord,
    traces: Sequence[ConversionTrace],
    conversions: Iterable[ConversionTrace | WeightTransform],
) -> None:
    """Have each replaced module carry how its weights were made; the model itself, where they are of several modules.

    Args:
        traces: those of the patchers' conversions.
        conversions: all that ran, in their order.
    """
    if not traces:
        return
    parameters = state_tensors(model)
    names = _names_in_transformers(model, traces, list(conversions), parameters)
    layouts: list[Layout] = []
    for trace in traces:
        entries = [entry for entry in trace.entries if entry.produced]
        layouts += [_layout(trace, entry, names, model.config) for entry in entries if not trace.lost]
    made = {name for layout in layouts for name in (*layout.stock, *layout.fused)}
    layouts += [
        Rows((stock,), (name,), (tuple(parameters[name].shape),))
        for name, stock in names.items()
        if name in parameters and name not in made and name != stock
    ]
    replaced = sorted((item.path for item in record.replaced if item.path not in record.fused), key=len, reverse=True)
    by_module: dict[str, list[Layout]] = {}
    for layout in layouts:
        own = (*layout.stock, *layout.fused)
        path = next((path for path in replaced if all(name.startswith(inside(path)) for name in own)), "")
        by_module.setdefault(path, []).append(layout.below(inside(path)))
    for path, found in by_module.items():
        carry_converted(model.get_submodule(path), found)


def _layout(trace: ConversionTrace, entry: LayerTrace, names: dict[str, str], config: object) -> Converted:
    sources = [source for listed in entry.sources.values() for source in listed]
    return Converted(
        stock=tuple(names.get(key, key) for key, _ in sources),
        fused=tuple(entry.produced),
        stock_shapes=tuple(tuple(shape) for _, shape in sources),
        transform=trace.transform,
        done=entry,
        config=config,
    )


def _names_in_transformers(
    model: PreTrainedModel,
    traces: Iterable[ConversionTrace],
    conversions: list[ConversionTrace | WeightTransform],
    parameters: dict[str, Any],
) -> dict[str, str]:
    """A name after all renamings -> the one after those of transformers alone, where they differ."""
    renamed = [trace.renamed for trace in traces if isinstance(trace.transform, WeightRenaming)]
    if not any(renamed):
        return {}
    transforms = [AppliedRenaming(item) if isinstance(item, ConversionTrace) else item for item in conversions]
    by_all = key_renamer(each for each in transforms if isinstance(each, WeightRenaming))
    by_stock = key_renamer(each for each in conversions if isinstance(each, WeightRenaming))
    between = {after for table in renamed for after in table.values()}
    found: dict[str, str] = {}
    for key in (before for table in renamed for before in table if before not in between):
        name, stock = by_all(key)[0], by_stock(key)[0]
        longer = with_model_prefix(name, model, parameters)
        head = longer.removesuffix(name)
        found[longer] = f"{head}{stock}"
    return found


def layouts_in(model: nn.Module) -> list[tuple[str, nn.Module, tuple[Layout, ...]]]:
    """(path, module, its layouts) of each module of a model whose parameters are others than in transformers."""
    for _, part in named_modules(model):
        if isinstance(part, PreTrainedModel):
            _carry_untraced(part)
    return modules_with_layouts(model)


def _carry_untraced(model: PreTrainedModel) -> None:
    """Do it for a model that was made without a checkpoint, whose conversions haven't run, once that is asked for."""
    record = record_of(model)
    if record is None or record.read or any(converted_weights(module) for _, module in named_modules(model)):
        return
    if record.fusion_transforms or record.added:
        conversions = conversions_from_scratch(model, record)
        traces = [item for item in conversions if isinstance(item, ConversionTrace)]
        carry_conversions(model, record, traces, conversions)
