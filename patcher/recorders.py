"""Recorded outputs (`output_attentions`, `output_hidden_states`) of replaced modules.

transformers finds the modules to record by class. A replacement that is no subclass gets the same hook, put on the
module itself; the class and its recorders are never touched, so no other model notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher import seams
from patcher.scope import original_class

__all__ = ["RecordOutput", "install_output_hooks"]


class RecordOutput:
    """A forward hook that records one output of a module, and that can be pickled with it."""

    def __init__(self, key: str, index: int, capture_initial_hidden_state: bool) -> None:
        self.settings = (key, index, capture_initial_hidden_state)
        self._hook: Callable[..., Any] | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._hook is None:
            self._hook = seams.output_hook(*self.settings)
        return self._hook(module, args, output)

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "_hook": None}


def install_output_hooks(stock: Callable[..., Any], model: PreTrainedModel, prefix: str | None = None) -> None:
    """Install transformers' hooks, then those of the replaced modules that it passed by."""
    stock(model, prefix)
    recorders = seams.output_recorders(model)
    if not recorders:
        return
    asked: dict[str, Any] = model.__dict__.get("_can_record_outputs", {})
    for path, module in _modules_of(model, prefix or ""):
        original = original_class(module)
        for key, recorder in recorders:
            target: type[nn.Module] | None = recorder.target_class  # None where the path decides
            if target is None or isinstance(module, target):
                continue
            replaced = original is not None and issubclass(original, target)
            if not (replaced or _asked_for(module, asked.get(key))):
                continue
            if recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f"{path}.":
                module.register_forward_hook(RecordOutput(key, recorder.index, recorder.capture_initial_hidden_state))


def _asked_for(module: nn.Module, specs: Any) -> bool:
    """Whether the recorders on the instance, as `patch_output_recorders` sets them, name the module's class."""
    for spec in specs if isinstance(specs, list) else [specs]:
        target = getattr(spec, "target_class", spec)
        if isinstance(target, type) and isinstance(module, target):
            return True
    return False


def _modules_of(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model without those of its sub-models, which have recorders of their own."""
    yield path, model
    for name, child in model.named_children():
        if not isinstance(child, PreTrainedModel):
            yield from _modules_of(child, f"{path}.{name}")
