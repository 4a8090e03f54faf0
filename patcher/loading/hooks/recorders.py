"""Recorded outputs (`output_attentions`, `output_hidden_states`) of replaced modules.

transformers finds the modules to record by class. A replacement that isn't a subclass gets the same hook, on the
module itself; the class and its recorders are not changed, so other models aren't affected. All hooks of a patched
model can be pickled with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import mark_recorded, original_class, output_hook, output_recorders
from patcher.compat.seams import Stock, seam
from patcher.loading.record import record_of
from patcher.patterns import inside


class RecordOutput:
    """A forward hook that records one output of a module, and can be pickled with it."""

    def __init__(self, key: str, index: int, capture_initial_hidden_state: bool) -> None:
        self.settings = (key, index, capture_initial_hidden_state)
        self._hook = output_hook(*self.settings)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._hook(module, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return (RecordOutput, self.settings)


@seam("transformers.utils.output_capturing:install_all_output_capturing_hooks", "model", "prefix")
def install_output_hooks(stock: Stock, model: PreTrainedModel, prefix: str | None = None) -> None:
    """Install the hooks of a model that has patched modules; those of other models are transformers' own."""
    is_patched = record_of(model) is not None
    requested: dict[str, Any] = {} if is_patched else model.__dict__.get("_can_record_outputs", {})
    if not (is_patched or requested or any(original_class(part) is not None for part in model.modules())):
        stock(model, prefix)
        return
    recorders = output_recorders(model)
    replaced: set[tuple[str, str]] = set()
    for path, module in _modules_of(model, prefix or ""):
        if module is not model and isinstance(module, PreTrainedModel):
            install_output_hooks(stock, module, path)
            continue
        for key, recorder in recorders:
            if any(output == key and path.startswith(inside(outer)) for output, outer in replaced):
                continue  # a part of a replacement, which is recorded in place of the original
            target: type[nn.Module] | None = recorder.target_class  # None where the path decides
            name, layer = recorder.class_name, recorder.layer_name
            original = original_class(module)
            is_replaced = original is not None and target is not None and issubclass(original, target)
            if is_replaced:
                replaced.add((key, path))
            is_recorded = (
                is_replaced
                or (target is not None and isinstance(module, target))
                or (name is not None and path.endswith(name))
                or _is_requested(module, requested.get(key))
            )
            if is_recorded and (layer is None or f".{layer.strip('.')}." in f"{path}."):
                module.register_forward_hook(RecordOutput(key, recorder.index, recorder.capture_initial_hidden_state))
    mark_recorded(model)


def _is_requested(module: nn.Module, specs: Any) -> bool:
    """Whether the recorders on the instance, as `patch_output_recorders` sets them, name the module's class."""
    targets = (getattr(spec, "target_class", spec) for spec in (specs if isinstance(specs, list) else [specs]))
    return any(isinstance(target, type) and isinstance(module, target) for target in targets)


def _modules_of(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, and its sub-models without their modules, which have recorders of their own."""
    yield path, model
    for name, child in model.named_children():
        if isinstance(child, PreTrainedModel):
            yield f"{path}.{name}", child
        else:
            yield from _modules_of(child, f"{path}.{name}")
