"""`torch.compile`, `torch.export`, and the exporters of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._dynamo.testing import CompileCounter

from tests.compatibility.columns import column
from tests.compatibility.outcomes import ROUNDING, compared, worst
from tests.compatibility.rows import Row

SUBJECT = "Compilers and exporters"
NOR_STOCK = "not exported, nor is stock"


@column(SUBJECT, "`torch.compile`")
def compiled(row: Row, folder: Path) -> str:
    # Experts that are listed run in the model's eager loop, so that is what they stand beside.
    is_loop = "experts" in row.name
    stock = row.stock(**{"experts_implementation": "eager"} if is_loop else {})
    outputs, graphs = [], []
    for model in (row.patched(), stock):
        part, inputs = _part(model, row)
        torch._dynamo.reset()
        counter = CompileCounter()
        with torch.no_grad():
            outputs.append(_tensors(torch.compile(part, backend=counter)(**inputs)))
        graphs.append(counter.frame_count)
    torch._dynamo.reset()
    assert 0 < graphs[0] <= graphs[1], graphs
    how = "as many graphs as stock" if graphs[0] == graphs[1] else "fewer graphs than stock"
    how = "one graph" if graphs[0] == 1 else f"{how} with eager experts" if is_loop else how
    return f"{_rounded(*outputs)}; {how}"


@column(SUBJECT, "`torch.export`")
def exported(row: Row, folder: Path) -> str:
    inputs = row.inputs() | {"use_cache": False}
    if _error_of_exporting(stock := row.stock(), inputs):
        assert _error_of_exporting(row.patched(), inputs) == _error_of_exporting(stock, inputs)
        return NOR_STOCK
    with torch.no_grad():
        program = torch.export.export(row.patched(), (), inputs)
        return _rounded(program.module()(**inputs).logits, stock(**inputs).logits)


def _error_of_exporting(model: Any, inputs: dict[str, Any]) -> str:
    try:
        with torch.no_grad():
            torch.export.export(model, (), inputs)
    except Exception as error:
        return type(error).__name__
    return ""


@column(SUBJECT, "`DynamoExporter`")
def dynamo_exporter(row: Row, folder: Path) -> str:
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    model, inputs = _part(row.patched(), row)
    result = DynamoExporter().export(model, inputs, DynamoConfig())  # it adds inputs
    program = getattr(result, "program", result)  # before 5.20 the program itself
    with torch.no_grad():
        return _outputs_compared(program.module()(**inputs), row)


@column(SUBJECT, "`OnnxExporter`, ONNX Runtime", needs="onnxruntime")
def onnx_exporter(row: Row, folder: Path) -> str:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model, inputs = _part(row.patched(), row)
    program = OnnxExporter().export(model, inputs, OnnxConfig())
    outputs = program(**inputs)
    if isinstance(outputs, tuple):  # before 5.23 without their names
        outputs = dict(zip((output.name for output in program.model.graph.outputs), outputs, strict=True))
    return _outputs_compared(outputs, row)


def _part(model: Any, row: Row) -> tuple[Any, dict[str, Any]]:
    """What is run, and its arguments: of a model that sees images the tower, which exporters make a program of."""
    inputs = row.inputs()
    if not row.has_images:
        return model, inputs | {"use_cache": False}
    return model.model.visual, {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}


def _outputs_compared(found: Any, row: Row) -> str:
    model, inputs = _part(row.stock(), row)
    with torch.no_grad():
        return _rounded(_tensors(found), _tensors(model(**inputs)))


def _rounded(found: Any, expected: Any) -> str:
    """Never exact: whether sums of joined projections are, the CPU decides."""
    return worst(ROUNDING, compared(found, expected))


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    return {name: output[name] for name in ("logits", "last_hidden_state", "pooler_output") if name in output}
