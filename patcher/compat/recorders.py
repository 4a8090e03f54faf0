"""How transformers records the outputs of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing


def output_recorders(model: PreTrainedModel) -> list[tuple[str, output_capturing.OutputRecorder]]:
    """What the model's class records, as (output name, recorder) pairs."""
    if type(output_capturing._CAN_RECORD_REGISTRY) is dict:  # up to 5.17
        entries = dict.get(output_capturing._CAN_RECORD_REGISTRY, str(model.__class__)) or {}
    else:
        entries = output_capturing._CAN_RECORD_REGISTRY.get(model) or {}
    recorders = []
    for key, specs in entries.items():
        for spec in specs if isinstance(specs, list) else [specs]:
            if not isinstance(spec, output_capturing.OutputRecorder):
                is_name = isinstance(spec, str)
                spec = output_capturing.OutputRecorder(
                    target_class=None if is_name else spec,  # type: ignore[arg-type]
                    index=0 if "hidden_states" in key else 1,
                    class_name=spec if is_name else None,
                )
            recorders.append((key, spec))
    return recorders


def mark_recorded(model: PreTrainedModel) -> None:
    """Let transformers know that the hooks are installed."""
    model._output_capturing_hooks_installed = True  # type: ignore[assignment]


def output_hook(key: str, index: int, capture_initial_hidden_state: bool) -> Any:
    """The forward hook with which transformers records an output."""
    taken: list[Any] = []
    # No module: one that is made while `torch.compile` looks on would break its graph.
    bearer: Any = SimpleNamespace(register_forward_hook=taken.append)
    output_capturing.install_output_capuring_hook(bearer, key, index, capture_initial_hidden_state)
    return taken[0]


def record_replacements(model: nn.Module, replacement_of: Callable[[str], type[nn.Module] | None]) -> None:
    """Have the recorders of a model and its sub-models, on the instances, look for replacements of classes."""

    def changed(recorder: Any) -> Any:
        if isinstance(recorder, output_capturing.OutputRecorder):
            target: type[nn.Module] | None = recorder.target_class  # None where the path decides
            name = recorder.class_name if target is None else target.__name__
            replacement = replacement_of(name) if name else None
            return recorder if replacement is None else replace(recorder, target_class=replacement)
        return replacement_of(recorder if isinstance(recorder, str) else recorder.__name__) or recorder

    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None)
        if isinstance(recorders, dict):
            module.__dict__["_can_record_outputs"] = {
                output: [changed(item) for item in value] if isinstance(value, list) else changed(value)
                for output, value in recorders.items()
            }


def forget_recorded(module: nn.Module) -> None:
    """Take the hooks off that record the outputs of a module: they are installed anew when recording is requested."""
    for key, hook in list(module._forward_hooks.items()):
        if getattr(getattr(hook, "_hook", hook), "__module__", None) == output_capturing.__name__:
            del module._forward_hooks[key]
    module.__dict__.pop("_output_capturing_hooks_installed", None)
