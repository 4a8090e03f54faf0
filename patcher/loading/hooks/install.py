"""The hooks, put at their places: `from_pretrained` and `from_config` learn `patcher=`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from patcher.compat.conversions import follow_earlier_imports
from patcher.compat.hooks import FOLLOWED, HOOKED, HOOKED_LATE, Stock, check, check_seam, when_imported
from patcher.loading.hooks import accelerate, adapters, exporters, loads, making, pipelines, recorders, saves, trainer

_install_lock = threading.Lock()
_installed = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _install_lock._at_fork_reinit())  # type: ignore[attr-defined]


def install() -> None:
    """Teach `from_pretrained` and `from_config` the argument `patcher=`. Done once; using any public name does it.

    >>> import patcher
    >>> patcher.install()

    Raises:
        PatcherError: this release of transformers lacks a seam that the hook relies on.
    """
    global _installed
    with _install_lock:
        if _installed:
            return
        check()
        for place, (owner, name, _) in HOOKED.items():
            _hook(owner, name, HOOKS[place])
        follow_earlier_imports()
        for home in HOOKED_LATE:
            when_imported(home, _hook_late)
        _installed = True


def _hook(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    stock = inspect.getattr_static(owner, name)
    function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock
    wrapped = functools.wraps(function)(_bound(hook, function))
    setattr(owner, name, wrapped if function is stock else type(stock)(wrapped))


def _hook_late(module: ModuleType) -> None:
    for place, (path, parameters) in HOOKED_LATE[module.__name__].items():
        parents, _, name = path.rpartition(".")
        owner = getattr(module, parents) if parents else module
        check_seam(owner, name, parameters)
        stock = getattr(owner, name)
        _hook(owner, name, HOOKS[place])
        if place in FOLLOWED:
            for each in list(sys.modules.values()):
                if getattr(each, "__dict__", {}).get(name) is stock:
                    setattr(each, name, getattr(owner, name))


def _bound(hook: Callable[..., Any], stock: Stock) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(stock, *args, **kwargs)

    return hooked


# What stands at each place that `HOOKED` and `HOOKED_LATE` name.
HOOKS: dict[str, Callable[..., Any]] = {
    "load": loads.from_pretrained,
    "find weights": loads.find_weights,
    "fusion config": loads.register_fusions,
    "make": making.from_config,
    "construction contexts": loads.get_init_context,
    "construct": making.init,
    "constructed": making.post_init,
    "stands": making.stands,
    "quantize": loads.preprocess,
    "conversions": loads.conversion_mapping,
    "conversions of others": adapters.conversions_of,
    "conversions of adapters": adapters.conversions_of,
    "adapter, loaded by transformers": adapters.load_adapter,
    "adapter, injected": adapters.inject,
    "adapters, added up": adapters.add_weighted,
    "adapter, swapped": adapters.hotswap,
    "config of an adapter": adapters.convert_config,
    "weights of an adapter": adapters.convert_weights,
    "state of an adapter": adapters.state_of,
    "PeftModel, loaded": adapters.from_pretrained,
    "PeftModel, loaded into": adapters.load_into,
    "PeftModel, saved": adapters.save,
    "read GGUF": loads.read_gguf,
    "distribute": loads.distribute,
    "device map": loads.device_map,
    "read": loads.convert_and_load,
    "report keys": loads.report_keys,
    "finish": loads.finalize,
    "save": saves.save_pretrained,
    "save config": saves.save_config,
    "gather to save": saves.gather,
    "weights to save": saves.weights_to_save,
    "read offloaded weight": saves.read_offloaded_weight,
    "write weights": saves.write_weights,
    "upload": saves.upload,
    "read into a model": accelerate.read_checkpoint,
    "give back": saves.revert,
    "record outputs": recorders.install_output_hooks,
    "load for a pipeline": pipelines.load_model,
    "make a pipeline": pipelines.make_pipeline,
    "shards": trainer.load_shards,
    "shards of a trainer": trainer.load_shards,
    "optimizer of a trainer, saved": trainer.save_optimizer,
    "optimizer of a trainer, loaded": trainer.load_optimizer,
    "patches of exporters": exporters.patch_attributes,
}
