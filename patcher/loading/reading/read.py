"""The fourth step of a load: names and shapes are checked, the weights are read, and what was done is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from patcher.compat.conversions import set_used_conversions, unmark_by
from patcher.compat.models import named_parameters
from patcher.compat.quantizers import is_prequantized
from patcher.layouts.sources import shape_of
from patcher.layouts.tracing import ConversionTrace
from patcher.loading.load import Loaded, Selected
from patcher.loading.reading.fused_sources import FusedReading
from patcher.loading.reading.read_weights import check_read
from patcher.loading.reading.simulated_reading import dry_run_reading, fused_reading, simulate_reading
from patcher.loading.reading.whole_conversions import in_order, is_split, with_whole_conversions


def read(
    selected: Selected,
    checkpoint: Mapping[str, Any],
    load_config: Any,
    read_weights: Callable[[Mapping[str, Any], Any], tuple[Any, Any]],
) -> tuple[Loaded, Any, Any]:
    """Check the names and shapes of a checkpoint, then have its weights read.

    Args:
        read_weights: reads what it is given as the checkpoint, by this configuration of a load; gives what
            transformers knows of the load then, and its index of the disk.

    Returns:
        The result, and what `read_weights` gave.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    mapping = load_config.weight_mapping or []
    if selected.dry_run is not None:
        expected = dry_run_reading(selected, load_config, checkpoint, selected.dry_run)
        return expected, expected.info, None
    quantizer = load_config.hf_quantizer
    reading = fused_reading(selected, checkpoint, mapping, quantizer)
    # Names and shapes don't say what comes of the parts of weights that are quantized.
    if not is_prequantized(quantizer) and (reading.problem is not None or not _fits_as_it_is(selected, reading)):
        # Raises what is wrong before anything is read.
        selected, completed, _ = simulate_reading(selected, load_config, checkpoint)
        if completed is not checkpoint:
            checkpoint = completed
            reading = fused_reading(selected, checkpoint, mapping, quantizer)
    if reading.problem is not None:
        raise reading.problem
    running = list(mapping)
    if split := load_config.device_mesh is not None and is_split(selected.model):
        reading, running = with_whole_conversions(selected.model, reading, mapping, selected.followed, load_config)
    weights, conversions = reading.for_load(running)
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    if reading.sources:
        unmark_by(weights.keys() - reading.rest.keys(), running, checkpoint)
    if split:
        in_order(mapping)
    loaded = check_read(selected, mapping, checkpoint, reading, info, disk_index)
    # What it reverses by itself; the traces of ours are reversed by what they did.
    own = [item for item in loaded.record.conversions if not isinstance(item, ConversionTrace)]
    set_used_conversions(selected.model, own)
    return loaded, info, disk_index


def _fits_as_it_is(selected: Selected, reading: FusedReading) -> bool:
    """Whether what is read has every tensor of the replaced modules, by name and shape, and no other, as usual.

    A renaming of stock may still take one elsewhere: what was read is checked in any case.
    """
    filters = (entry.patcher.filtered_weight_conversion_patterns for entry in selected.in_force)
    if selected.traced or "" in dict(selected.outermost) or any(filters):
        return False
    under = tuple(f"{path}." for path, _ in selected.outermost)
    own = (named_parameters(built.module, path) for path, built in selected.outermost)
    expected = {key: parameter.shape for named in own for key, parameter in named}
    found = {key: shape_of(value) for key, value in reading.rest.items() if key.startswith(under)}
    return expected == {**found, **{key: shape for key, shape in reading.shapes.items() if key.startswith(under)}}
